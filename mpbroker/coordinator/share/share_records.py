"""Encode and decode the records of __share_group_state.

    key version  record                                               value is null
    0            the whole state of a share-partition (snapshot)      it is deleted
    1            what has changed since its snapshot (update)         -

Source: Kafka's share-coordinator/src/main/resources/common/message, field by field;
SharePartitionKey for the partition of the topic that has a share-partition's records.
"""

from __future__ import annotations

from base64 import urlsafe_b64encode
from collections.abc import Iterable
from functools import lru_cache
from struct import Struct as Packing
from typing import Final

from mpbroker.base.java_hash import java_hash
from mpbroker.base.named_tuple import NamedTuple
from mpbroker.coordinator.share.share_partition import StateBatch
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.errors import ProtocolError
from mpbroker.protocol.fields import (
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
from mpbroker.protocol.primitives import Buffer

# Message needs an API key. Records belong to no API, and nothing reads it.
_NO_API: Final = ApiKey.WRITE_SHARE_GROUP_STATE
_VERSION: Final = Packing(">h")
_SNAPSHOT: Final = 0
_UPDATE: Final = 1

KeyValue = tuple[bytes, bytes | None]


class ShareKey(NamedTuple):
    """Names a share-partition: a partition of a topic, as a share group reads it."""

    group_id: str
    topic_id: bytes
    partition: int


class ShareSnapshotKey(Message, api_key=_NO_API, versions=(0, 1), flexible_from=None):
    group_id: str = field(STRING)
    topic_id: bytes = field(UUID)
    partition: int = field(INT32)


class RecordStateBatch(Struct):
    first_offset: int = field(INT64)
    last_offset: int = field(INT64)
    delivery_state: int = field(INT8)
    delivery_count: int = field(INT16)


class ShareSnapshotValue(Message, api_key=_NO_API, versions=(0, 0), flexible_from=0):
    snapshot_epoch: int = field(INT32)
    state_epoch: int = field(INT32)
    leader_epoch: int = field(INT32)
    start_offset: int = field(INT64)
    delivery_complete_count: int = field(INT32, default=-1, tag=0)
    create_timestamp: int = field(INT64)
    write_timestamp: int = field(INT64)
    state_batches: list[RecordStateBatch] = array(RecordStateBatch)


class ShareUpdateValue(Message, api_key=_NO_API, versions=(0, 0), flexible_from=0):
    snapshot_epoch: int = field(INT32)
    leader_epoch: int = field(INT32)
    start_offset: int = field(INT64)
    delivery_complete_count: int = field(INT32, default=-1, tag=0)
    state_batches: list[RecordStateBatch] = array(RecordStateBatch)


@lru_cache(maxsize=16384)
def state_partition(key: ShareKey, num_partitions: int) -> int:
    """Return the partition of __share_group_state for a share-partition's records.

    A share-partition is a partition of a topic, as a share group reads it.
    """
    topic = urlsafe_b64encode(key.topic_id).rstrip(b"=").decode()
    return java_hash(f"{key.group_id}:{topic}:{key.partition}") % num_partitions


@lru_cache(maxsize=16384)
def _key(key: ShareKey, kind: int) -> bytes:
    message = ShareSnapshotKey(
        group_id=key.group_id, topic_id=key.topic_id, partition=key.partition
    )
    return _VERSION.pack(kind) + message.encode(kind)


def snapshot_record(key: ShareKey, value: ShareSnapshotValue | None) -> KeyValue:
    """Return the record of a share-partition's whole state; value None deletes it."""
    if value is None:
        return _key(key, _SNAPSHOT), None
    return _key(key, _SNAPSHOT), _VERSION.pack(0) + value.encode(0)


def update_record(key: ShareKey, value: ShareUpdateValue) -> KeyValue:
    return _key(key, _UPDATE), _VERSION.pack(0) + value.encode(0)


def rows_of(batches: Iterable[StateBatch]) -> list[RecordStateBatch]:
    return [
        RecordStateBatch(
            first_offset=each.first,
            last_offset=each.last,
            delivery_state=each.state,
            delivery_count=each.delivery_count,
        )
        for each in batches
    ]


def batches_of(rows: Iterable[RecordStateBatch]) -> list[StateBatch]:
    return [
        StateBatch(
            row.first_offset, row.last_offset, row.delivery_state, row.delivery_count
        )
        for row in rows
    ]


def read_share_record(
    key: Buffer, value: Buffer | None
) -> tuple[ShareKey, ShareSnapshotValue | ShareUpdateValue | None] | None:
    """Decode a record of __share_group_state; its value is None if it deletes a state.

    Return None if the kind of the record is unknown here.

    Raises:
        ProtocolError: the bytes do not match their versions.
    """
    if len(key) < _VERSION.size:
        raise ProtocolError(f"a key of {len(key)} bytes has no version")
    (kind,) = _VERSION.unpack_from(key)
    if kind not in (_SNAPSHOT, _UPDATE):
        return None
    read = ShareSnapshotKey.decode(kind, key, _VERSION.size)
    found = ShareKey(read.group_id, bytes(read.topic_id), read.partition)
    if value is None:
        return found, None
    if len(value) < _VERSION.size:
        raise ProtocolError(f"a value of {len(value)} bytes has no version")
    (version,) = _VERSION.unpack_from(value)
    if kind == _SNAPSHOT:
        return found, ShareSnapshotValue.decode(version, value, _VERSION.size)
    return found, ShareUpdateValue.decode(version, value, _VERSION.size)
