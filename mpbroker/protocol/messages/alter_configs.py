"""AlterConfigs: replace all configs of a resource; reset those that are not named.

Source: Kafka protocol guide, "AlterConfigs".
"""

from __future__ import annotations

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.fields import (
    BOOLEAN,
    INT8,
    INT16,
    INT32,
    STRING,
    Struct,
    array,
    field,
)
from mpbroker.protocol.message import Message


class AlterableConfig(Struct):
    name: str = field(STRING)
    value: str | None = field(STRING, nullable="0+")


class AlterConfigsResource(Struct):
    resource_type: int = field(INT8)
    resource_name: str = field(STRING)
    configs: list[AlterableConfig] = array(AlterableConfig)


class AlterConfigsRequest(
    Message, api_key=ApiKey.ALTER_CONFIGS, versions=(0, 2), flexible_from=2
):
    resources: list[AlterConfigsResource] = array(AlterConfigsResource)
    validate_only: bool = field(BOOLEAN)


class AlterConfigsResourceResponse(Struct):
    error_code: int = field(INT16)
    error_message: str | None = field(STRING, nullable="0+")
    resource_type: int = field(INT8)
    resource_name: str = field(STRING)


class AlterConfigsResponse(
    Message, api_key=ApiKey.ALTER_CONFIGS, versions=(0, 2), flexible_from=2
):
    throttle_time_ms: int = field(INT32)
    responses: list[AlterConfigsResourceResponse] = array(AlterConfigsResourceResponse)
