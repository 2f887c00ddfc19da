"""Batches for tests, made with the project's own builder."""

from typing import NamedTuple

from mpbroker.base.file_id import file_id
from mpbroker.protocol.records.record_batch import (
    BatchHeader,
    Codec,
    RecordBatchBuilder,
    iter_batches,
    iter_records,
    parse_batch_header,
)
from mpbroker.storage.log.partition_log import PartitionLog


class Validated(NamedTuple):
    """What the log validator hands to the log."""

    header: BatchHeader
    offset_of_max_timestamp: int
    max_timestamp: int
    record_count: int
    last_offset_delta: int
    data: memoryview
    log_append_time_ms: int = -1


def batch(
    *values: bytes | tuple[bytes | None, bytes | None],
    timestamp: int = 1_000,
    producer: tuple[int, int, int] | None = None,
    transactional: bool = False,
    codec: Codec = Codec.NONE,
) -> Validated:
    """A batch of records: values, or (key, value) pairs. One ms between records."""
    producer_id, epoch, sequence = producer or (-1, -1, -1)
    builder = RecordBatchBuilder(
        codec=codec,
        producer_id=producer_id,
        producer_epoch=epoch,
        base_sequence=sequence,
        transactional=transactional,
    )
    for number, value in enumerate(values):
        key, content = value if isinstance(value, tuple) else (None, value)
        builder.append(timestamp + number, key, content)
    return validated(builder.build())


def validated(data: bytes) -> Validated:
    header = parse_batch_header(data)
    return Validated(
        header,
        header.last_offset_delta,
        header.max_timestamp,
        header.record_count,
        header.last_offset_delta,
        memoryview(bytearray(data)),
    )


def read_bytes(log: PartitionLog, offset: int, max_bytes: int = 1 << 30) -> bytes:
    """Read one region as a connection would."""
    import os

    found = log.reader.read(offset, max_bytes, min_one_batch=True)
    fd = os.open(found.segment_path, os.O_RDONLY)
    try:
        assert file_id(fd) == found.segment_id
        return os.pread(fd, found.length, found.position)
    finally:
        os.close(fd)


def read_all(log: PartitionLog, offset: int | None = None) -> list[tuple[int, bytes]]:
    """Return (offset, value) of every record from an offset to the end, by reading."""
    position = log.lookup.earliest() if offset is None else offset
    records: list[tuple[int, bytes]] = []
    while position < log.lookup.latest():
        content = read_bytes(log, position)
        if not content:
            break
        for header, body in batches_in(content):
            for record in iter_records(body):
                if record.offset >= position and not header.is_control:
                    records.append((record.offset, bytes(record.value or b"")))
            position = header.next_offset
    return records


def batches_in(content: bytes) -> list[tuple[BatchHeader, bytes]]:
    found, at = [], 0
    while at + 61 <= len(content):
        header = parse_batch_header(content, at)
        if at + header.size_in_bytes > len(content):
            break
        found.append((header, content[at : at + header.size_in_bytes]))
        at += header.size_in_bytes
    return found


__all__ = ["Validated", "batch", "iter_batches", "read_all", "read_bytes", "validated"]
