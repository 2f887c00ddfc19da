"""The walk over the headers of a segment file's batches."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mpbroker.base.storage_errors import CorruptLogError
from mpbroker.storage.files.batch_scan import scan_batches
from tests.storage.batches import batch

# In bytes: several in a page, longer than a page, longer than the longest read.
_SIZES = st.one_of(
    st.integers(1, 300), st.integers(3_900, 5_000), st.integers(60_000, 140_000)
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=st.lists(_SIZES, max_size=40))
def test_every_batch_is_found_whatever_its_neighbours_sizes(
    tmp_path: Path, values: list[int]
) -> None:
    batches = [bytes(batch(bytes(size)).data) for size in values]
    path = tmp_path / "segment"
    path.write_bytes(b"".join(batches))
    fd = os.open(path, os.O_RDONLY)
    try:
        found = list(scan_batches(fd, 0, path.stat().st_size))
        assert [header.size_in_bytes for _, header in found] == [*map(len, batches)]
        assert [position for position, _ in found] == [
            sum(map(len, batches[:number])) for number in range(len(batches))
        ]
        if values:
            with pytest.raises(CorruptLogError):
                list(scan_batches(fd, 0, path.stat().st_size - 1))
    finally:
        os.close(fd)
