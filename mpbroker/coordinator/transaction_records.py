"""The records of __transaction_state: one for each transactional id.

The key names the id; the value is all that is known of its transaction. A record
without a value deletes. Version 1 is flexible, and written since KIP-890.

Source: Kafka's TransactionLogKey.json and TransactionLogValue.json, field by field.
"""

from __future__ import annotations

from struct import Struct as Packing
from typing import Final

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.errors import ProtocolError
from mpbroker.protocol.message import (
    INT8,
    INT16,
    INT32,
    INT64,
    STRING,
    Message,
    Struct,
    array,
    field,
)
from mpbroker.protocol.primitives import Buffer

# A message wants the API it belongs to; records have none, and nothing asks for it.
_NO_API: Final = ApiKey.INIT_PRODUCER_ID
_VERSION: Final = Packing(">h")
_KEY_VERSION: Final = 0
VALUE_VERSION: Final = 1


class TransactionLogKey(Message, api_key=_NO_API, versions=(0, 0), flexible_from=None):
    transactional_id: str = field(STRING)


class PartitionsSchema(Struct):
    topic: str = field(STRING)
    partition_ids: list[int] = array(INT32)


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


def transaction_key(transactional_id: str) -> bytes:
    key = TransactionLogKey(transactional_id=transactional_id)
    return _VERSION.pack(_KEY_VERSION) + key.encode(_KEY_VERSION)


def transaction_value(
    value: TransactionLogValue, version: int = VALUE_VERSION
) -> bytes:
    return _VERSION.pack(version) + value.encode(version)


def read_transaction(
    key: Buffer, value: Buffer | None
) -> tuple[str, TransactionLogValue | None] | None:
    """Read a record of the log; None for a kind that is newer than we are.

    Raises:
        ProtocolError: the bytes are not what their versions say.
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
