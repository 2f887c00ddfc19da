"""What `Consumer.poll` returns, out of what was fetched."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from mpbroker.client.consumer.fetcher import FetchedBatch
from mpbroker.protocol.records.record_batch import iter_records


class ConsumerRecord(NamedTuple):
    """A record, and where it is."""

    topic: str
    partition: int
    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes | None]] = ()
    timestamp_type: int = 0  # 1: the broker's time (LogAppendTime)


def records_of(batch: FetchedBatch) -> Iterator[ConsumerRecord]:
    """Yield a batch's records, without those before the position."""
    topic, partition = batch.partition
    timestamp_type = batch.header.timestamp_type
    for record in iter_records(batch.data):
        if record.offset >= batch.first_offset:
            offset, timestamp, key, value, headers = record
            yield ConsumerRecord(
                topic,
                partition,
                offset,
                timestamp,
                key,
                value,
                headers,
                timestamp_type,
            )
