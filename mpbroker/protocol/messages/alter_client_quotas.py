"""AlterClientQuotas: set or remove quota values of entities.

The protocol has the name EntryData for an entry of the request and for one of the
response; here the response's is EntryResult.

Source: Kafka protocol guide, "AlterClientQuotas".
"""

from __future__ import annotations

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.fields import (
    BOOLEAN,
    FLOAT64,
    INT16,
    INT32,
    STRING,
    Struct,
    array,
    field,
)
from mpbroker.protocol.message import MAX_REQUEST_NAMES, Message


class EntityData(Struct):
    entity_type: str = field(STRING)
    entity_name: str | None = field(STRING, nullable="0+")


class OpData(Struct):
    key: str = field(STRING)
    value: float = field(FLOAT64)
    remove: bool = field(BOOLEAN)


class EntryData(Struct):
    entity: list[EntityData] = array(EntityData)
    ops: list[OpData] = array(OpData)


class AlterClientQuotasRequest(
    Message,
    api_key=ApiKey.ALTER_CLIENT_QUOTAS,
    versions=(0, 1),
    flexible_from=1,
    max_elements=MAX_REQUEST_NAMES,
):
    entries: list[EntryData] = array(EntryData)
    validate_only: bool = field(BOOLEAN)


class EntryResult(Struct):
    error_code: int = field(INT16)
    error_message: str | None = field(STRING, nullable="0+")
    entity: list[EntityData] = array(EntityData)


class AlterClientQuotasResponse(
    Message, api_key=ApiKey.ALTER_CLIENT_QUOTAS, versions=(0, 1), flexible_from=1
):
    throttle_time_ms: int = field(INT32)
    entries: list[EntryResult] = array(EntryResult)
