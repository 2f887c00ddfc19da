"""ConsumerGroupDescribe: groups of the consumer protocol, their members and epochs.

Source: Kafka protocol guide, "ConsumerGroupDescribe"; KIP-848.
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
from mpbroker.protocol.message import MAX_REQUEST_NAMES, Message


class ConsumerGroupDescribeRequest(
    Message,
    api_key=ApiKey.CONSUMER_GROUP_DESCRIBE,
    versions=(0, 1),
    flexible_from=0,
    max_elements=MAX_REQUEST_NAMES,
):
    group_ids: list[str] = array(STRING)
    include_authorized_operations: bool = field(BOOLEAN)


class TopicPartitions(Struct):
    topic_id: bytes = field(UUID)
    topic_name: str = field(STRING)
    partitions: list[int] = array(INT32)


class Assignment(Struct):
    topic_partitions: list[TopicPartitions] = array(TopicPartitions)


class Member(Struct):
    member_id: str = field(STRING)
    instance_id: str | None = field(STRING, nullable="0+", default=None)
    rack_id: str | None = field(STRING, nullable="0+", default=None)
    member_epoch: int = field(INT32)
    client_id: str = field(STRING)
    client_host: str = field(STRING)
    subscribed_topic_names: list[str] = array(STRING)
    subscribed_topic_regex: str | None = field(STRING, nullable="0+", default=None)
    assignment: Assignment = field(Assignment)
    target_assignment: Assignment = field(Assignment)
    member_type: int = field(INT8, "1+", default=-1, ignorable=True)


class DescribedGroup(Struct):
    error_code: int = field(INT16)
    error_message: str | None = field(STRING, nullable="0+", default=None)
    group_id: str = field(STRING)
    group_state: str = field(STRING)
    group_epoch: int = field(INT32)
    assignment_epoch: int = field(INT32)
    assignor_name: str = field(STRING)
    members: list[Member] = array(Member)
    authorized_operations: int = field(INT32, default=-2147483648)


class ConsumerGroupDescribeResponse(
    Message,
    api_key=ApiKey.CONSUMER_GROUP_DESCRIBE,
    versions=(0, 1),
    flexible_from=0,
):
    throttle_time_ms: int = field(INT32)
    groups: list[DescribedGroup] = array(DescribedGroup)
