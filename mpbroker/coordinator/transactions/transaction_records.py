"""Encode and decode the records of __transaction_state.

The key is the id, the value the state of its transaction. A record without a value
deletes the id. Values are written in version 1, which is flexible (KIP-890).

Source: Kafka's TransactionLogKey.json and TransactionLogValue.json, field by field.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import groupby
from operator import itemgetter
from struct import Struct as Packing
from typing import TYPE_CHECKING, Final

from mpbroker.base.named_tuple import NamedTuple
from mpbroker.coordinator.outbox import AppendedMarker
from mpbroker.metadata.topic_names import TopicPartition
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.errors import ProtocolError
from mpbroker.protocol.fields import (
    BOOLEAN,
    INT8,
    INT16,
    INT32,
    INT64,
    STRING,
    UUID,
    Struct,
    array,
    field,
)
from mpbroker.protocol.message import Message
from mpbroker.protocol.primitives import Buffer, write_unsigned_varint

if TYPE_CHECKING:
    from mpbroker.coordinator.coordinator_topic import LoadedRecord

# Message needs an API key. Records belong to no API, and nothing reads it.
_NO_API: Final = ApiKey.INIT_PRODUCER_ID
_VERSION: Final = Packing(">h")
# Tags of our own, far from those that Kafka may use one day. It ignores unknown tags.
UNSYNCED_TAG: Final = 28_016
EXPECTED_TAG: Final = 28_017
_KEY_VERSION: Final = 0
VALUE_VERSION: Final = 1

# A value of version 1 around its partitions, and its tagged fields: see state_value.
_FRONT: Final = Packing(">hqhib")
_EPOCH: Final = slice(10, 12)
_VERSIONS: Final = frozenset((b"\0\0", b"\0\1"))
_TIMES: Final = Packing(">qq")
_TAGGED_ID: Final = Packing(">bbq")
_TAGGED_VERSION: Final = Packing(">bbh")
_MARKED_BY: Final = Packing(">qh?")
_PLACE: Final = Packing(">iqb")  # and the number of tagged fields: none
_NO_ID: Final = -1
_NO_PARTITIONS: Final = b"\0"


class TransactionLogKey(Message, api_key=_NO_API, versions=(0, 0), flexible_from=None):
    transactional_id: str = field(STRING)


class PartitionsSchema(Struct):
    topic: str = field(STRING)
    partition_ids: list[int] = array(INT32)


class MarkedPartition(Struct):
    partition: int = field(INT32)
    offset: int = field(INT64)


class MarkedTopic(Struct):
    topic: str = field(STRING)
    topic_id: bytes = field(UUID)
    partitions: list[MarkedPartition] = array(MarkedPartition)


class UnsyncedMarkers(Struct):
    """The markers that end one transaction, as a field of a record.

    Only mpbroker has this field; Kafka ignores it.
    """

    producer_id: int = field(INT64)
    producer_epoch: int = field(INT16)
    committed: bool = field(BOOLEAN)
    topics: list[MarkedTopic] = array(MarkedTopic)


class TransactionLogValue(Message, api_key=_NO_API, versions=(0, 1), flexible_from=1):
    producer_id: int = field(INT64)
    previous_producer_id: int = field(INT64, "1+", default=-1, tag=0, ignorable=True)
    next_producer_id: int = field(INT64, "1+", default=-1, tag=1, ignorable=True)
    producer_epoch: int = field(INT16)
    next_producer_epoch: int = field(INT16, "1+", default=-1, tag=3, ignorable=True)
    transaction_timeout_ms: int = field(INT32)
    transaction_status: int = field(INT8)
    transaction_partitions: list[PartitionsSchema] | None = array(
        PartitionsSchema, nullable="0+"
    )
    transaction_last_update_timestamp_ms: int = field(INT64)
    transaction_start_timestamp_ms: int = field(INT64)
    client_transaction_version: int = field(INT16, "1+", tag=2, ignorable=True)
    unsynced_markers: list[UnsyncedMarkers] = array(
        UnsyncedMarkers, "1+", tag=UNSYNCED_TAG, ignorable=True
    )
    # In a Prepare state: the transaction's own markers, each with the lowest offset
    # that it can get.
    expected_markers: list[UnsyncedMarkers] = array(
        UnsyncedMarkers, "1+", tag=EXPECTED_TAG, ignorable=True
    )


def transaction_key(transactional_id: str) -> bytes:
    key = TransactionLogKey(transactional_id=transactional_id)
    return _VERSION.pack(_KEY_VERSION) + key.encode(_KEY_VERSION)


def transaction_value(
    value: TransactionLogValue, version: int = VALUE_VERSION
) -> bytes:
    return _VERSION.pack(version) + value.encode(version)


class TransactionSnapshot(NamedTuple):
    """Holds the values of one record of __transaction_state.

    ``partitions`` is None if the record has no list of them. ``unsynced`` are markers
    of earlier transactions that may not be on disk. ``expected`` are this transaction's
    own markers, each with the lowest offset that it can get.
    """

    producer_id: int
    previous_producer_id: int
    next_producer_id: int
    producer_epoch: int
    timeout_ms: int
    status: int
    partitions: Iterable[TopicPartition] | None
    update_ms: int
    start_ms: int
    client_version: int
    unsynced: tuple[AppendedMarker, ...] = ()
    expected: tuple[AppendedMarker, ...] = ()


def state_value(state: TransactionSnapshot) -> bytes:
    """Encode the value of a record like ``transaction_value``, but faster.

    Each transaction writes three records.
    """
    tags = b""
    count = 0
    if state.previous_producer_id != _NO_ID:
        tags += _TAGGED_ID.pack(0, 8, state.previous_producer_id)
        count += 1
    if state.next_producer_id != _NO_ID:
        tags += _TAGGED_ID.pack(1, 8, state.next_producer_id)
        count += 1
    if state.client_version:
        tags += _TAGGED_VERSION.pack(2, 2, state.client_version)
        count += 1
    if state.unsynced:
        tags += _markers(UNSYNCED_TAG, state.unsynced)
        count += 1
    if state.expected:
        tags += _markers(EXPECTED_TAG, state.expected)
        count += 1
    partitions = _NO_PARTITIONS
    if state.partitions is not None:
        partitions = _partitions(frozenset(state.partitions))
    return b"".join(
        (
            _FRONT.pack(
                VALUE_VERSION,
                state.producer_id,
                state.producer_epoch,
                state.timeout_ms,
                state.status,
            ),
            partitions,
            _TIMES.pack(state.update_ms, state.start_ms),
            bytes((count,)),
            tags,
        )
    )


@lru_cache(maxsize=256)  # written twice a transaction, and often again by the next one
def _partitions(partitions: frozenset[TopicPartition]) -> bytes:
    topics: dict[str, list[int]] = {}
    for topic, partition in sorted(partitions):
        topics.setdefault(topic, []).append(partition)
    parts = [write_unsigned_varint(len(topics) + 1)]
    for topic, numbers in topics.items():
        name = topic.encode()
        parts += (write_unsigned_varint(len(name) + 1), name)
        parts.append(write_unsigned_varint(len(numbers) + 1))
        parts.append(Packing(f">{len(numbers)}i").pack(*numbers))
        parts.append(b"\0")
    return b"".join(parts)


@lru_cache(maxsize=64)  # written in Complete, and in Ongoing of the next transaction
def _markers(tag: int, markers: tuple[AppendedMarker, ...]) -> bytes:
    """Encode a tagged field with a list of UnsyncedMarkers."""
    ends = [list(each) for _, each in groupby(markers, itemgetter(0, 1, 2))]
    content = [write_unsigned_varint(len(ends) + 1)]
    for end in ends:
        topics = [list(each) for _, each in groupby(end, itemgetter(3, 4))]
        content.append(_MARKED_BY.pack(*end[0][:3]))
        content.append(write_unsigned_varint(len(topics) + 1))
        for places in topics:
            content.append(_marked_topic(*places[0][3:5]))
            content.append(write_unsigned_varint(len(places) + 1))
            content += [_PLACE.pack(each[5], each[6], 0) for each in places]
            content.append(b"\0")
        content.append(b"\0")
    field_of_tag = b"".join(content)
    head = write_unsigned_varint(tag) + write_unsigned_varint(len(field_of_tag))
    return head + field_of_tag


@lru_cache(maxsize=64)
def _marked_topic(topic: str, topic_id: bytes) -> bytes:
    name = topic.encode()
    return write_unsigned_varint(len(name) + 1) + name + topic_id


def read_markers(rows: Iterable[UnsyncedMarkers]) -> tuple[AppendedMarker, ...]:
    """Decode the markers in a record: those not yet on disk, or those expected."""
    return tuple(
        AppendedMarker(
            row.producer_id,
            row.producer_epoch,
            row.committed,
            topic.topic,
            bytes(topic.topic_id),
            place.partition,
            place.offset,
        )
        for row in rows
        for topic in row.topics
        for place in topic.partitions
    )


def what_counts(records: Sequence[LoadedRecord]) -> Sequence[LoadedRecord]:
    """Leave out records that later records of the same transactional id replace.

    For each id two records stay: the newest, and the last record before it with another
    producer epoch, which the newest does not have (TransactionMetadata.of_record).
    """
    by_key: dict[bytes, tuple[LoadedRecord | None, LoadedRecord]] = {}
    for record in records:
        value = record.value
        if value is not None and value[:2] not in _VERSIONS:
            return records  # a version not known here: leave out nothing
        before = by_key.get(record.key)
        if before is None:
            by_key[record.key] = None, record
            continue
        other, last = before
        if last.value is None or value is None or last.value[_EPOCH] != value[_EPOCH]:
            other = last
        by_key[record.key] = other, record
    return [each for pair in by_key.values() for each in pair if each is not None]


def read_transaction(
    key: Buffer, value: Buffer | None
) -> tuple[str, TransactionLogValue | None] | None:
    """Decode a record of __transaction_state; its value is None if it deletes the id.

    Return None if the kind of the record is unknown here.

    Raises:
        ProtocolError: the bytes do not match their versions.
    """
    if len(key) < _VERSION.size:
        raise ProtocolError(f"a key of {len(key)} bytes has no version")
    if _VERSION.unpack_from(key)[0] != _KEY_VERSION:
        return None
    name = TransactionLogKey.decode(_KEY_VERSION, key, _VERSION.size).transactional_id
    if value is None:
        return name, None
    if len(value) < _VERSION.size:
        raise ProtocolError(f"a value of {len(value)} bytes has no version")
    (version,) = _VERSION.unpack_from(value)
    return name, TransactionLogValue.decode(version, value, _VERSION.size)
