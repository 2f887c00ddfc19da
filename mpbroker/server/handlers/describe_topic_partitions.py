"""DescribeTopicPartitions: describe topics and their partitions in pages.

Topics are in the order of their names. If a page is full, its cursor names the
partition with which the next page begins.

Source: Kafka protocol guide, "DescribeTopicPartitions"; KIP-966;
DescribeTopicPartitionsRequestHandler.
"""

from __future__ import annotations

from typing import Final

from mpbroker.metadata.topic_names import is_legal_topic_name
from mpbroker.metadata.topics import Topic
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages.describe_topic_partitions import (
    Cursor,
    DescribeTopicPartitionsRequest,
    DescribeTopicPartitionsResponse,
    DescribeTopicPartitionsResponsePartition,
    DescribeTopicPartitionsResponseTopic,
)
from mpbroker.server.handler_context import HandlerContext
from mpbroker.server.handlers.metadata import TOPIC_OPERATIONS
from mpbroker.server.leaders import Leaders

# Kafka's default of max.request.partition.size.limit.
MAX_PARTITIONS_PER_PAGE: Final = 2000


def handle_describe_topic_partitions(
    request: DescribeTopicPartitionsRequest, context: HandlerContext
) -> DescribeTopicPartitionsResponse:
    """Answer with a page that begins at the request's cursor.

    The page has at most ``response_partition_limit`` partitions, and never more than
    2000.
    """
    registry = context.broker.registry
    leaders = Leaders(context.broker, context.other_nodes)
    cursor = request.cursor
    first_name = cursor.topic_name if cursor is not None else ""
    wanted = {topic.name for topic in request.topics}
    if cursor is not None and (
        cursor.partition_index < 0 or (wanted and first_name not in wanted)
    ):
        return _refusal(request)
    names = wanted or {topic.name for topic in registry.topics()}
    left = max(1, min(request.response_partition_limit, MAX_PARTITIONS_PER_PAGE))
    response = DescribeTopicPartitionsResponse()
    for name in sorted(name for name in names if name >= first_name):
        if not left:
            response.next_cursor = Cursor(topic_name=name, partition_index=0)
            break
        topic = registry.topic(name)
        if topic is None:
            response.topics.append(_unknown(name))
            continue
        is_first = cursor is not None and name == first_name
        start = cursor.partition_index if cursor is not None and is_first else 0
        end = min(len(topic.partitions), start + left)
        response.topics.append(_describe(topic, range(start, end), leaders))
        if end < len(topic.partitions):
            response.next_cursor = Cursor(topic_name=name, partition_index=end)
            break
        left -= max(0, end - start)
    return response


def _describe(
    topic: Topic, indexes: range, leaders: Leaders
) -> DescribeTopicPartitionsResponseTopic:
    known = leaders.partitions(topic)
    return DescribeTopicPartitionsResponseTopic(
        error_code=ErrorCode.NONE,
        name=topic.name,
        topic_id=topic.topic_id,
        is_internal=topic.is_internal,
        partitions=[
            DescribeTopicPartitionsResponsePartition(
                error_code=ErrorCode.NONE,  # also if it has no leader
                partition_index=each.partition_index,
                leader_id=each.leader_id,
                leader_epoch=each.leader_epoch,
                replica_nodes=each.replica_nodes,
                isr_nodes=each.isr_nodes,
                offline_replicas=each.offline_replicas,
                eligible_leader_replicas=[],
                last_known_elr=each.offline_replicas,
            )
            for each in known[indexes.start : indexes.stop]
        ],
        topic_authorized_operations=TOPIC_OPERATIONS,
    )


def _unknown(name: str) -> DescribeTopicPartitionsResponseTopic:
    error = (
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        if is_legal_topic_name(name)
        else ErrorCode.INVALID_TOPIC_EXCEPTION
    )
    return DescribeTopicPartitionsResponseTopic(
        error_code=error, name=name, topic_authorized_operations=TOPIC_OPERATIONS
    )


def _refusal(
    request: DescribeTopicPartitionsRequest,
) -> DescribeTopicPartitionsResponse:
    """Return the answer to a cursor that is not at one of the wanted topics.

    The API has no error code for the whole answer, so each topic of the request gets
    INVALID_REQUEST. If the request names no topics, the answer is empty.
    """
    return DescribeTopicPartitionsResponse(
        topics=[
            DescribeTopicPartitionsResponseTopic(
                error_code=ErrorCode.INVALID_REQUEST, name=topic.name
            )
            for topic in request.topics
        ]
    )
