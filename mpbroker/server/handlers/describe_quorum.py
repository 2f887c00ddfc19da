"""DescribeQuorum: describe the metadata log, whose only voter is this node.

Source: Kafka protocol guide, "DescribeQuorum"; KIP-595, KIP-836, KIP-853;
KafkaRaftClient.handleDescribeQuorumRequest.
"""

from __future__ import annotations

from mpbroker.metadata.topic_names import CLUSTER_METADATA_TOPIC
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages.describe_quorum import (
    DescribedPartition,
    DescribedTopic,
    DescribeQuorumRequest,
    DescribeQuorumResponse,
    Node,
    ReplicaState,
)
from mpbroker.server.handler_context import HandlerContext


def handle_describe_quorum(
    request: DescribeQuorumRequest, context: HandlerContext
) -> DescribeQuorumResponse:
    """Answer with this node as leader and voter, and the end of its metadata log.

    The answer has no endpoints of the node, since it has no listener for controllers.
    """
    wanted = [
        (topic.topic_name, [each.partition_index for each in topic.partitions])
        for topic in request.topics
    ]
    if wanted != [(CLUSTER_METADATA_TOPIC, [0])]:
        return _refusal(request)
    node_id, registry = context.broker.node_id, context.broker.registry
    now_ms, end = registry.now_ms(), registry.metadata_end()
    voter = ReplicaState(
        replica_id=node_id,
        log_end_offset=end.offset,
        last_fetch_timestamp=now_ms,
        last_caught_up_timestamp=now_ms,
    )
    if context.version >= 2:
        voter.replica_directory_id = end.directory_id
    partition = DescribedPartition(
        partition_index=0,
        error_code=ErrorCode.NONE,
        error_message=None,
        leader_id=node_id,
        leader_epoch=end.epoch,
        high_watermark=end.offset,
        current_voters=[voter],
    )
    response = DescribeQuorumResponse(
        error_code=ErrorCode.NONE,
        error_message=None,
        topics=[
            DescribedTopic(topic_name=CLUSTER_METADATA_TOPIC, partitions=[partition])
        ],
    )
    if context.version >= 2:
        response.nodes = [Node(node_id=node_id)]
    return response


def _refusal(request: DescribeQuorumRequest) -> DescribeQuorumResponse:
    """Return the answer to a request that is not about the metadata log alone.

    Each partition of the request gets UNKNOWN_TOPIC_OR_PARTITION.
    """
    code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    return DescribeQuorumResponse(
        error_code=ErrorCode.NONE,
        error_message=None,
        topics=[
            DescribedTopic(
                topic_name=topic.topic_name,
                partitions=[
                    DescribedPartition(
                        partition_index=each.partition_index,
                        error_code=code,
                        error_message=None,
                    )
                    for each in topic.partitions
                ],
            )
            for topic in request.topics
        ],
    )
