"""What a broker's writes are compared with are the same writes."""

from __future__ import annotations

import os

from tests.bench.bare_writes import INDEX_INTERVAL_BYTES, BareWrites


def test_each_partition_is_written_to_as_often_and_indexed_as_an_append_is(tmp_path):
    record = bytes(1000)
    appends_an_entry = INDEX_INTERVAL_BYTES // len(record) + 1
    open_before = len(os.listdir("/proc/self/fd"))
    with BareWrites(tmp_path, 3, record) as writes:
        writes.write(30)
        assert writes.cpu_us(per_s=1e9, seconds=0.01) > 0
    assert len(os.listdir("/proc/self/fd")) == open_before
    sizes = [each.stat().st_size for each in sorted(tmp_path.glob("*/0.log"))]
    assert len(sizes) == 3
    assert max(sizes) - min(sizes) <= len(record)
    for size, index in zip(sizes, sorted(tmp_path.glob("*/0.index")), strict=True):
        due = size / len(record) / appends_an_entry
        assert abs(index.stat().st_size / 8 - due) <= 1
