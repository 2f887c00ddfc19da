"""ConsumerRecord: the records that `Consumer.poll` returns, made of fetched batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from mpbroker.client.cluster import TopicPartition
from mpbroker.client.consumer.fetcher import FetchedBatch
from mpbroker.client.errors import ClientError
from mpbroker.client.serialization import Deserializer, arguments_hint
from mpbroker.protocol.records.record_read import RecordShape, read_records


class ConsumerRecord(NamedTuple):
    """A record that a consumer has read, and its place.

    Attributes:
        timestamp: the record's time, in ms since 1970.
        key: bytes, or the result of the consumer's deserializer; None: null.
        value: bytes, or the result of the consumer's deserializer; None: null.
        timestamp_type: 0: the producer's time (CreateTime); 1: the broker's
            (LogAppendTime).
        delivery_count: how often a share group has delivered the record, this time
            included; None for records of a `Consumer`.
    """

    topic: str
    partition: int
    offset: int
    timestamp: int
    key: Any
    value: Any
    headers: Sequence[tuple[str, bytes | None]] = ()
    timestamp_type: int = 0
    delivery_count: int | None = None


class RecordDeserializationError(ClientError):
    """A deserializer refused a record; seek() to the offset after it to go on.

    Attributes:
        partition: the record's partition.
        offset: the record's offset.
    """

    def __init__(self, record: ConsumerRecord, what: str, error: Exception) -> None:
        self.partition = TopicPartition(record.topic, record.partition)
        self.offset = record.offset
        super().__init__(
            f"the deserializer refused the {what} of record {record.offset} of"
            f" {self.partition}: {error}{arguments_hint(error, 'bytes')}"
        )


class Deserializers(NamedTuple):
    """The deserializers of a consumer; where one is None, bytes stay bytes."""

    key: Deserializer | None = None
    value: Deserializer | None = None

    def apply(self, record: ConsumerRecord) -> ConsumerRecord:
        """Return a record with its key and value deserialized.

        Raises:
            RecordDeserializationError: a deserializer raised an error.
        """
        found = {}
        for what, deserializer in self._asdict().items():
            data = getattr(record, what)
            if deserializer is None or data is None:
                continue
            try:
                found[what] = deserializer(record.topic, data)
            except Exception as error:
                raise RecordDeserializationError(record, what, error) from error
        return record._replace(**found)


class FetchedRecords:
    """Batches that were fetched; each is decoded when its first record is taken.

    So a record lives from then until the caller drops it: to decode all that a Fetch
    has brought, megabytes of it, would make a hundred thousand objects wait.
    """

    def __init__(self, deserializers: Deserializers) -> None:
        self._deserializers = deserializers if any(deserializers) else None
        self._batches: deque[FetchedBatch] = deque()
        # The records of the batch that was opened last, and how many of them are taken.
        self._where = TopicPartition("", -1)
        self._records: list[ConsumerRecord] = []
        self._taken = 0

    def __bool__(self) -> bool:
        """Return whether there is something that was not taken yet."""
        return bool(self._batches) or self._taken < len(self._records)

    def add(self, batches: Iterable[FetchedBatch]) -> None:
        """Add batches behind those that are there."""
        self._batches += batches

    def keep(self, is_kept: Callable[[TopicPartition], bool]) -> None:
        """Drop the records of partitions that are not kept."""
        self._batches = deque(b for b in self._batches if is_kept(b.partition))
        if not is_kept(self._where):
            self._records, self._taken = [], 0

    def take(self, limit: int) -> dict[TopicPartition, list[ConsumerRecord]]:
        """Take up to ``limit`` records, by partition; fewer only if these are all.

        A batch that cannot be decoded, or a record that a deserializer refuses, stays
        the next one to take: those before it are returned first, and the next call
        raises the error.

        Raises:
            RecordBatchError: a length or count in a batch is wrong.
            DecompressionError: see `compression.decompress`.
            RecordDeserializationError: a deserializer refused a record.
        """
        found: dict[TopicPartition, list[ConsumerRecord]] = {}
        try:
            while limit > 0 and self._open():
                records = self._next(limit)
                limit -= len(records)
                found.setdefault(self._where, []).extend(records)
        except Exception:
            if not found:
                raise
        return found

    def take_one(self) -> tuple[TopicPartition, ConsumerRecord] | None:
        """Take one record, and return it with its partition; raise as `take` does."""
        # Few calls: this is what iteration costs.
        if self._taken == len(self._records) and not self._open():
            return None
        record = self._records[self._taken]
        if self._deserializers is not None:
            record = self._deserializers.apply(record)
        self._taken += 1
        return self._where, record

    def _open(self) -> bool:
        """Decode the next batch if all records of this one are taken.

        Return whether there is a record to take.
        """
        while self._taken == len(self._records):
            if not self._batches:
                self._records, self._taken = [], 0
                return False
            records = records_of(self._batches[0])
            self._where = self._batches.popleft().partition
            self._records, self._taken = records, 0
        return True

    def _next(self, limit: int) -> list[ConsumerRecord]:
        """Take some records of the batch that is open, one or more."""
        records = self._records[self._taken : self._taken + limit]
        if self._deserializers is not None:
            records = self._deserialized(self._deserializers, records)
        self._taken += len(records)
        return records

    def _deserialized(
        self, deserializers: Deserializers, records: list[ConsumerRecord]
    ) -> list[ConsumerRecord]:
        done: list[ConsumerRecord] = []
        try:
            for record in records:
                done.append(deserializers.apply(record))
        except RecordDeserializationError:
            if not done:
                raise
        return done


def records_of(batch: FetchedBatch) -> list[ConsumerRecord]:
    """Return the records of a batch, without those before its ``first_offset``.

    Raises:
        RecordBatchError: a length or count in the batch is wrong.
        DecompressionError: see `compression.decompress`.
    """
    after = batch.header.timestamp_type, None  # the delivery count
    shape = RecordShape(ConsumerRecord, tuple(batch.partition), after)
    return read_records(batch.header, batch.data, batch.first_offset, shape)
