"""IncrementalAlterConfigs: set, delete, append to or subtract from single configs.

Operations: 0 set, 1 delete, 2 append, 3 subtract.

Source: Kafka protocol guide, "IncrementalAlterConfigs".
"""

from __future__ import annotations

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.fields import (
    BOOLEAN,
    INT8,
    INT32,
    STRING,
    Struct,
    array,
    field,
)
from mpbroker.protocol.message import Message
from mpbroker.protocol.messages.alter_configs import AlterConfigsResourceResponse


class AlterableConfig(Struct):
    name: str = field(STRING)
    config_operation: int = field(INT8)
    value: str | None = field(STRING, nullable="0+")


class AlterConfigsResource(Struct):
    resource_type: int = field(INT8)
    resource_name: str = field(STRING)
    configs: list[AlterableConfig] = array(AlterableConfig)


class IncrementalAlterConfigsRequest(
    Message, api_key=ApiKey.INCREMENTAL_ALTER_CONFIGS, versions=(0, 1), flexible_from=1
):
    resources: list[AlterConfigsResource] = array(AlterConfigsResource)
    validate_only: bool = field(BOOLEAN)


class IncrementalAlterConfigsResponse(
    Message, api_key=ApiKey.INCREMENTAL_ALTER_CONFIGS, versions=(0, 1), flexible_from=1
):
    throttle_time_ms: int = field(INT32)
    responses: list[AlterConfigsResourceResponse] = array(AlterConfigsResourceResponse)
