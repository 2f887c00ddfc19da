"""ConsumerRecord: what `Consumer.poll` returns, made from fetched batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from mpbroker.client.consumer.fetcher import FetchedBatch
from mpbroker.protocol.records.record_batch import iter_records


class ConsumerRecord(NamedTuple):
    """A record and its place.

    Attributes:
        timestamp: in ms since 1970.
        timestamp_type: 0: the producer's time (CreateTime); 1: the broker's
            (LogAppendTime).
    """

    topic: str
    partition: int
    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes | None]] = ()
    timestamp_type: int = 0


def records_of(batch: FetchedBatch) -> Iterator[ConsumerRecord]:
    """Yield the records of a batch, without those before its ``first_offset``."""
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
