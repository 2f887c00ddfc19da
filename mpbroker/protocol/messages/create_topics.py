"""CreateTopics: create topics with their partitions, replicas and configs.

From version 4, a number of partitions or a replication factor of -1 stands for the
broker's default. The response has the topic's configs from version 5, and its id from
version 7.

Source: Kafka protocol guide, "CreateTopics".
"""

from __future__ import annotations

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.fields import (
    BOOLEAN,
    INT8,
    INT16,
    INT32,
    STRING,
    UUID,
    Struct,
    array,
    field,
)
from mpbroker.protocol.message import Message


class CreatableReplicaAssignment(Struct):
    partition_index: int = field(INT32)
    broker_ids: list[int] = array(INT32)


class CreatableTopicConfig(Struct):
    name: str = field(STRING)
    value: str | None = field(STRING, nullable="0+")


class CreatableTopic(Struct):
    name: str = field(STRING)
    num_partitions: int = field(INT32)
    replication_factor: int = field(INT16)
    assignments: list[CreatableReplicaAssignment] = array(CreatableReplicaAssignment)
    configs: list[CreatableTopicConfig] = array(CreatableTopicConfig)


class CreateTopicsRequest(
    Message, api_key=ApiKey.CREATE_TOPICS, versions=(2, 7), flexible_from=5
):
    topics: list[CreatableTopic] = array(CreatableTopic)
    timeout_ms: int = field(INT32, default=60000)
    validate_only: bool = field(BOOLEAN)


class CreatableTopicConfigs(Struct):
    name: str = field(STRING)
    value: str | None = field(STRING, nullable="0+")
    read_only: bool = field(BOOLEAN)
    config_source: int = field(INT8, default=-1)
    is_sensitive: bool = field(BOOLEAN)


class CreatableTopicResult(Struct):
    name: str = field(STRING)
    topic_id: bytes = field(UUID, "7+", ignorable=True)
    error_code: int = field(INT16)
    error_message: str | None = field(STRING, nullable="0+")
    topic_config_error_code: int = field(INT16, "5+", tag=0, ignorable=True)
    num_partitions: int = field(INT32, "5+", default=-1, ignorable=True)
    replication_factor: int = field(INT16, "5+", default=-1, ignorable=True)
    configs: list[CreatableTopicConfigs] | None = array(
        CreatableTopicConfigs, "5+", nullable="0+", ignorable=True
    )


class CreateTopicsResponse(
    Message, api_key=ApiKey.CREATE_TOPICS, versions=(2, 7), flexible_from=5
):
    throttle_time_ms: int = field(INT32)
    topics: list[CreatableTopicResult] = array(CreatableTopicResult)
