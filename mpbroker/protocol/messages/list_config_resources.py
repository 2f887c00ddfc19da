"""ListConfigResources: list the resources that have configs (KIP-1142).

Version 0 lists only the resources of client metrics.

Source: Kafka protocol guide, "ListConfigResources".
"""

from __future__ import annotations

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.fields import INT8, INT16, INT32, STRING, Struct, array, field
from mpbroker.protocol.message import Message

_CLIENT_METRICS = 16


class ListConfigResourcesRequest(
    Message, api_key=ApiKey.LIST_CONFIG_RESOURCES, versions=(0, 1), flexible_from=0
):
    resource_types: list[int] = array(INT8, "1+")


class ConfigResource(Struct):
    resource_name: str = field(STRING)
    resource_type: int = field(INT8, "1+", ignorable=True, default=_CLIENT_METRICS)


class ListConfigResourcesResponse(
    Message, api_key=ApiKey.LIST_CONFIG_RESOURCES, versions=(0, 1), flexible_from=0
):
    throttle_time_ms: int = field(INT32)
    error_code: int = field(INT16)
    config_resources: list[ConfigResource] = array(ConfigResource)
