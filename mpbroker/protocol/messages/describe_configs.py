"""DescribeConfigs: the configs of brokers, topics and others, and where they were set.

If the configuration keys are null, all configs are returned.

Source: Kafka protocol guide, "DescribeConfigs".
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
from mpbroker.protocol.message import MAX_REQUEST_NAMES, Message


class DescribeConfigsResource(Struct):
    resource_type: int = field(INT8)
    resource_name: str = field(STRING)
    configuration_keys: list[str] | None = array(STRING, nullable="0+")


class DescribeConfigsRequest(
    Message,
    api_key=ApiKey.DESCRIBE_CONFIGS,
    versions=(1, 4),
    flexible_from=4,
    max_elements=MAX_REQUEST_NAMES,
):
    resources: list[DescribeConfigsResource] = array(DescribeConfigsResource)
    include_synonyms: bool = field(BOOLEAN)
    include_documentation: bool = field(BOOLEAN, "3+")


class DescribeConfigsSynonym(Struct):
    name: str = field(STRING)
    value: str | None = field(STRING, nullable="0+")
    source: int = field(INT8)


class DescribeConfigsResourceResult(Struct):
    name: str = field(STRING)
    value: str | None = field(STRING, nullable="0+")
    read_only: bool = field(BOOLEAN)
    config_source: int = field(INT8, default=-1)
    is_sensitive: bool = field(BOOLEAN)
    synonyms: list[DescribeConfigsSynonym] = array(DescribeConfigsSynonym)
    config_type: int = field(INT8, "3+", ignorable=True)
    documentation: str | None = field(STRING, "3+", nullable="0+", ignorable=True)


class DescribeConfigsResult(Struct):
    error_code: int = field(INT16)
    error_message: str | None = field(STRING, nullable="0+")
    resource_type: int = field(INT8)
    resource_name: str = field(STRING)
    configs: list[DescribeConfigsResourceResult] = array(DescribeConfigsResourceResult)


class DescribeConfigsResponse(
    Message, api_key=ApiKey.DESCRIBE_CONFIGS, versions=(1, 4), flexible_from=4
):
    throttle_time_ms: int = field(INT32)
    results: list[DescribeConfigsResult] = array(DescribeConfigsResult)
