"""What kafka-dump-log checks of a partition's files, done again here.

Source: Kafka's DumpLogSegments: every offset index entry names the last offset of the
batch at its position; every time index entry names the last offset of a batch and the
largest timestamp of its records, and timestamps rise; offsets in the log rise.
"""

import struct
from pathlib import Path

from mpbroker.protocol.records.record_batch import (
    BatchHeader,
    compute_crc,
    iter_records,
    parse_batch_header,
)


def check_directory(directory: str) -> None:
    """Raise AssertionError where kafka-dump-log would complain."""
    logs = sorted(Path(directory).glob("*.log"))
    assert logs
    last = -1
    for log in logs:
        batches = _batches(log.read_bytes())
        for header, _ in batches.values():
            assert header.base_offset > last, log
            last = header.last_offset
        base = int(log.stem)
        assert all(header.base_offset >= base for header, _ in batches.values())
        _check_offset_index(log.with_suffix(".index"), base, batches)
        _check_time_index(log.with_suffix(".timeindex"), base, batches)


def _batches(content: bytes) -> dict[int, tuple[BatchHeader, bytes]]:
    found, at = {}, 0
    while at < len(content):
        header = parse_batch_header(content, at)
        body = content[at : at + header.size_in_bytes]
        assert len(body) == header.size_in_bytes
        assert compute_crc(body) == header.crc
        found[at] = header, body
        at += header.size_in_bytes
    return found


def _check_offset_index(
    path: Path, base: int, batches: dict[int, tuple[BatchHeader, bytes]]
) -> None:
    content = path.read_bytes()
    assert len(content) % 8 == 0
    previous = -1
    for relative, position in struct.iter_unpack(">ii", content):
        assert batches[position][0].last_offset == base + relative
        assert relative > previous
        previous = relative


def _check_time_index(
    path: Path, base: int, batches: dict[int, tuple[BatchHeader, bytes]]
) -> None:
    content = path.read_bytes()
    assert len(content) % 12 == 0
    by_last = {header.last_offset: body for header, body in batches.values()}
    previous = -1
    for timestamp, relative in struct.iter_unpack(">qi", content):
        body = by_last[base + relative]
        assert max(record.timestamp for record in iter_records(body)) == timestamp
        assert timestamp > previous
        previous = timestamp
