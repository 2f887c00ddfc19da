"""Metadata: brokers, topics, and the leaders of their partitions.

Null topics stand for all topics, and so does an empty list in version 0. Topic ids are
in the response from version 10, and may replace names in the request from version 12.

Source: Kafka protocol guide, "Metadata"; KIP-516 for topic ids.
"""

from __future__ import annotations

from typing import Final

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.fields import (
    BOOLEAN,
    INT16,
    INT32,
    STRING,
    UUID,
    Struct,
    array,
    field,
)
from mpbroker.protocol.message import Message

_NO_ID: Final = bytes(16)


class MetadataRequestTopic(Struct):
    topic_id: bytes = field(UUID, "10+", ignorable=True)
    name: str | None = field(STRING, nullable="10+")

    @property
    def asked_name(self) -> str | None:
        """The name of the topic; None: the topic is named by its id, not its name."""
        # Java's consumer with a SubscriptionPattern sends the id and an empty name.
        return self.name if self.topic_id == _NO_ID else None


class MetadataRequest(
    Message,
    api_key=ApiKey.METADATA,
    versions=(0, 13),
    flexible_from=9,
):
    topics: list[MetadataRequestTopic] | None = array(
        MetadataRequestTopic, nullable="1+"
    )
    allow_auto_topic_creation: bool = field(BOOLEAN, "4+", default=True)
    include_cluster_authorized_operations: bool = field(BOOLEAN, "8-10")
    include_topic_authorized_operations: bool = field(BOOLEAN, "8+")


class MetadataResponseBroker(Struct):
    node_id: int = field(INT32)
    host: str = field(STRING)
    port: int = field(INT32)
    rack: str | None = field(STRING, "1+", nullable="0+", default=None, ignorable=True)


class MetadataResponsePartition(Struct):
    error_code: int = field(INT16)
    partition_index: int = field(INT32)
    leader_id: int = field(INT32)
    leader_epoch: int = field(INT32, "7+", default=-1, ignorable=True)
    replica_nodes: list[int] = array(INT32)
    isr_nodes: list[int] = array(INT32)
    offline_replicas: list[int] = array(INT32, "5+", ignorable=True)


class MetadataResponseTopic(Struct):
    error_code: int = field(INT16)
    name: str | None = field(STRING, nullable="12+")
    topic_id: bytes = field(UUID, "10+", ignorable=True)
    is_internal: bool = field(BOOLEAN, "1+", ignorable=True)
    partitions: list[MetadataResponsePartition] = array(MetadataResponsePartition)
    topic_authorized_operations: int = field(INT32, "8+", default=-2147483648)


class MetadataResponse(
    Message, api_key=ApiKey.METADATA, versions=(0, 13), flexible_from=9
):
    throttle_time_ms: int = field(INT32, "3+", ignorable=True)
    brokers: list[MetadataResponseBroker] = array(MetadataResponseBroker)
    cluster_id: str | None = field(
        STRING, "2+", nullable="0+", default=None, ignorable=True
    )
    controller_id: int = field(INT32, "1+", default=-1, ignorable=True)
    topics: list[MetadataResponseTopic] = array(MetadataResponseTopic)
    cluster_authorized_operations: int = field(INT32, "8-10", default=-2147483648)
    error_code: int = field(INT16, "13+", ignorable=True)
