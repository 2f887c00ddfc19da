"""Compare topics of two clusters: the number of records, and a checksum over them.

The checksum covers offsets, timestamps, codec and the bytes of all records. Batches are
compared as they are stored, without decompression, because a copy does not change them.
If the two sides differ, and the topic is compacted, one side may have been compacted
since it was copied: then the last record of each key is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from struct import Struct
from typing import Final, NamedTuple

from mpbroker.client.cluster import Cluster, TopicPartition
from mpbroker.client.consumer.fetcher import FetchedBatch, Fetcher, FetchSettings
from mpbroker.protocol.records.batch_header import (
    BATCH_HEADER_SIZE,
    TRANSACTIONAL_FLAG,
)
from mpbroker.protocol.records.crc32c import crc32c
from mpbroker.protocol.records.record_batch import iter_records

_FETCH: Final = FetchSettings(fetch_max_bytes=16 << 20, fetch_max_wait_ms=200)
# Base offset, last offset delta, attributes, base and max timestamp, record count.
_FIELDS: Final = Struct(">qihqqi")


class Range(NamedTuple):
    """Offsets of a partition, from ``start`` up to ``end``, which is left out."""

    start: int
    end: int


class Digest(NamedTuple):
    """The number of a partition's records, and their checksum."""

    records: int = 0
    checksum: int = 0

    def add(self, batch: FetchedBatch) -> Digest:
        """Return the digest of these records and those of one more batch."""
        header = batch.header
        fields = _FIELDS.pack(
            header.base_offset,
            header.last_offset_delta,
            header.attributes & ~TRANSACTIONAL_FLAG,
            header.base_timestamp,
            header.max_timestamp,
            header.record_count,
        )
        checksum = crc32c(fields, self.checksum)
        records = batch.data[BATCH_HEADER_SIZE:]
        return Digest(self.records + header.record_count, crc32c(records, checksum))


def digests(
    cluster: Cluster,
    ranges: Mapping[TopicPartition, Range],
    leaders: Mapping[TopicPartition, int],
    step: Callable[[int], None],
) -> dict[TopicPartition, Digest]:
    """Return the digest of each partition.

    Args:
        cluster: the brokers.
        ranges: the offsets to read, by partition.
        leaders: the leader's node id, by partition.
        step: called after each fetch with the number of bytes that were read.

    Raises:
        OffsetOutOfRangeError: retention has deleted records meanwhile.
        MpbrokerError: see `Fetcher.fetch`.
    """
    found = dict.fromkeys(ranges, Digest())

    def take(batch: FetchedBatch) -> None:
        found[batch.partition] = found[batch.partition].add(batch)

    _read(cluster, ranges, leaders, take, step)
    return found


def last_records(
    cluster: Cluster,
    where: TopicPartition,
    offsets: Range,
    leaders: Mapping[TopicPartition, int],
    step: Callable[[int], None],
) -> dict[bytes, tuple[int, int, int]]:
    """Return the last record of each key in a partition, by key.

    It has the record's offset, its timestamp in ms, and the checksum of its value.

    Keys whose last record has no value are left out: compaction removes them.
    """
    found: dict[bytes, tuple[int, int, int]] = {}

    def take(batch: FetchedBatch) -> None:
        for record in iter_records(batch.data):
            key = bytes(record.key or b"")
            found.pop(key, None)
            if record.value is not None:
                value = crc32c(record.value)
                found[key] = record.offset, record.timestamp, value

    _read(cluster, {where: offsets}, leaders, take, step)
    return found


def _read(
    cluster: Cluster,
    ranges: Mapping[TopicPartition, Range],
    leaders: Mapping[TopicPartition, int],
    take: Callable[[FetchedBatch], None],
    step: Callable[[int], None],
) -> None:
    starts = {where: at.start for where, at in ranges.items() if at.start < at.end}
    fetcher = Fetcher(cluster, starts, leaders, _FETCH)
    while fetcher.positions:
        batches = fetcher.fetch()
        for batch in batches:
            # Empty batches are those of a copy, or what a compaction has left.
            if (
                batch.header.base_offset < ranges[batch.partition].end
                and batch.header.record_count
            ):
                take(batch)
        for where, position in list(fetcher.positions.items()):
            if position >= ranges[where].end:
                del fetcher.positions[where]
        step(sum(len(batch.data) for batch in batches))
