"""ConsumerRecord: the records that `Consumer.poll` returns, made of fetched batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise, repeat
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mpbroker.client.cluster import TopicPartition
from mpbroker.client.consumer.fetcher import FetchedBatch
from mpbroker.client.errors import ClientError
from mpbroker.client.serialization import Deserializer, arguments_hint
from mpbroker.protocol.records import record_columns
from mpbroker.protocol.records.record_batch import iter_records

if TYPE_CHECKING:
    from mpbroker.protocol.records.record_columns import BinaryColumn, HeaderColumns

_INT32_BYTES: Final = 4


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


def records_of(batch: FetchedBatch) -> Iterable[ConsumerRecord]:
    """Return the records of a batch, without those before its ``first_offset``.

    Raises:
        RecordBatchError: a length or count in the batch is wrong.
        DecompressionError: see `compression.decompress`.
        OverflowError: all keys, or all values, have 2 GiB or more.
    """
    if not record_columns.IS_COMPILED:
        return _records_in_python(batch)
    columns = record_columns.read_columns(
        batch.header, batch.data, batch.first_offset, with_headers=True
    )
    assert columns.headers is not None
    topic, partition = batch.partition
    # A tuple for each record, made by loops in C. ConsumerRecord() would be called once
    # for each, which takes longer than all the rest.
    rows = zip(
        repeat(topic, columns.rows),
        repeat(partition),
        memoryview(columns.offsets).cast("q"),
        memoryview(columns.timestamps).cast("q"),
        _fields(columns.keys),
        _fields(columns.values),
        _headers(columns.headers),
        repeat(batch.header.timestamp_type),
        repeat(None),  # delivery_count
        strict=False,
    )
    return map(tuple.__new__, repeat(ConsumerRecord), rows)


def _fields(column: BinaryColumn) -> Iterable[bytes | None]:
    """Return the keys, or the values, of a batch's records; None for null."""
    validity, ends, data = column
    if not data and validity is not None and not any(validity):
        return repeat(None)  # as the keys of most topics without keys
    found = [data[start:end] for start, end in pairwise(memoryview(ends).cast("i"))]
    if validity is None:
        return found
    return [
        field if validity[index >> 3] >> (index & 7) & 1 else None
        for index, field in enumerate(found)
    ]


def _headers(
    headers: HeaderColumns,
) -> Iterable[Sequence[tuple[str, bytes | None]]]:
    """Return the headers of each record."""
    ends, names, values = headers
    if not names[2] and len(names[1]) == _INT32_BYTES:
        return repeat(())  # there is not one header
    decoded = [
        name.decode("utf-8", "surrogateescape")
        for name in _fields(names)
        if name is not None
    ]
    pairs = list(zip(decoded, _fields(values), strict=False))
    return [
        pairs[start:end] or () for start, end in pairwise(memoryview(ends).cast("i"))
    ]


def _records_in_python(batch: FetchedBatch) -> Iterator[ConsumerRecord]:
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
