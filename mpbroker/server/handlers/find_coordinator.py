"""FindCoordinator: name the node that coordinates a group or transactional id.

A key may also be a share-partition, whose state a node keeps.

Outside of a cluster the coordinator is always this broker. If the partition with the
key's records is offline, there is none, until its log directory is back.

In a cluster, groups are spread over the live nodes, and a file of this node says which
one has a group. All transactional ids have one coordinator: the first node that is
asked for it creates the topic of their records. There is no coordinator of
share-partitions.

Source: Kafka protocol guide, "FindCoordinator"; KIP-699 for several keys at once,
KIP-932 and SharePartitionKey for the keys of share-partitions.
"""

from __future__ import annotations

from typing import Final

from mpbroker.base.java_hash import java_hash
from mpbroker.metadata.meta_properties import uuid_of_text
from mpbroker.metadata.topic_names import (
    OFFSETS_TOPIC,
    SHARE_STATE_TOPIC,
    TRANSACTION_TOPIC,
)
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages.find_coordinator import (
    Coordinator,
    FindCoordinatorRequest,
    FindCoordinatorResponse,
)
from mpbroker.server.handler_context import Broker, HandlerContext

GROUP: Final = 0
TRANSACTION: Final = 1
SHARE: Final = 2
# The topics with what is coordinated, by key type.
_TOPICS: Final = {
    GROUP: OFFSETS_TOPIC,
    TRANSACTION: TRANSACTION_TOPIC,
    SHARE: SHARE_STATE_TOPIC,
}
_BATCHED_SINCE: Final = 4
_SHARE_SINCE: Final = 6
_NO_NODE: Final = -1
_NOT_AVAILABLE: Final = ErrorCode.COORDINATOR_NOT_AVAILABLE


def handle_find_coordinator(
    request: FindCoordinatorRequest, context: HandlerContext
) -> FindCoordinatorResponse:
    """Answer each key with its node, or with an error.

    A request before version 4 has only one key. A key that comes twice is answered
    once. Key types other than group, transaction and share-partition are refused.
    """
    is_batched = context.version >= _BATCHED_SINCE
    keys = request.coordinator_keys if is_batched else [request.key]
    found = [
        _coordinator_of(key, request.key_type, context) for key in dict.fromkeys(keys)
    ]
    if context.broker.nodes is None and not any(each.error_code for each in found):
        context.repeatable = ()
    if not is_batched:
        (only,) = found
        return FindCoordinatorResponse(
            error_code=only.error_code,
            error_message=only.error_message,
            node_id=only.node_id,
            host=only.host,
            port=only.port,
        )
    return FindCoordinatorResponse(coordinators=found)


def _coordinator_of(key: str, key_type: int, context: HandlerContext) -> Coordinator:
    if message := _refusal(key, key_type, context.version):
        return _no_coordinator(key, ErrorCode.INVALID_REQUEST, message)
    nodes = context.broker.nodes
    if nodes is not None:
        if key_type == GROUP:
            return _node(key, nodes.coordinator(key), context)
        if key_type == TRANSACTION:
            return _coordinator_of_transactions(key, context)
        message = "a cluster has no share groups"
        return _no_coordinator(key, ErrorCode.UNSUPPORTED_VERSION, message)
    if _is_offline(key, key_type, context.broker):
        message = "the log directory with its records is not there"
        return _no_coordinator(key, _NOT_AVAILABLE, message)
    host, port = context.endpoint
    return Coordinator(key=key, node_id=context.broker.node_id, host=host, port=port)


def _is_offline(key: str, key_type: int, broker: Broker) -> bool:
    """Return whether the partition with a key's records is offline."""
    topic = broker.registry.topic(_TOPICS[key_type])
    if topic is None:
        return False  # it is made when it is needed
    return broker.logs.is_offline(topic, java_hash(key) % len(topic.partitions))


def _node(key: str, node_id: int | None, context: HandlerContext) -> Coordinator:
    """Return a live node as coordinator, or an error if it is not there."""
    if node_id is None:
        return _no_coordinator(key, _NOT_AVAILABLE, "no node has it now")
    if node_id == context.broker.node_id:
        host, port = context.endpoint
        return Coordinator(key=key, node_id=node_id, host=host, port=port)
    for each in context.other_nodes:
        if each.node_id == node_id:
            return Coordinator(key=key, node_id=node_id, host=each.host, port=each.port)
    return _no_coordinator(key, _NOT_AVAILABLE, f"node {node_id} is not there")


def _coordinator_of_transactions(key: str, context: HandlerContext) -> Coordinator:
    """Return the node that coordinates all transactional ids.

    Make the topic of their records if there is none; another node may be faster.
    """
    registry = context.broker.registry
    if registry.topic(TRANSACTION_TOPIC) is None:
        wanted = context.broker.internal_topics[TRANSACTION_TOPIC]
        (made,) = registry.create_topics([wanted])
        if registry.topic(TRANSACTION_TOPIC) is None:
            return _no_coordinator(key, _NOT_AVAILABLE, str(made))
    topic = registry.topic(TRANSACTION_TOPIC)
    return _node(key, None if topic is None else topic.leader, context)


def _no_coordinator(key: str, code: ErrorCode, message: str) -> Coordinator:
    return Coordinator(
        key=key,
        node_id=_NO_NODE,
        host="",
        port=_NO_NODE,
        error_code=code,
        error_message=message,
    )


def _refusal(key: str, key_type: int, version: int) -> str:
    """Return why no broker can coordinate a key; "" if a broker can."""
    if key_type in (GROUP, TRANSACTION):
        return ""
    if key_type != SHARE or version < _SHARE_SINCE:
        return f"Unknown coordinator type {key_type} in version {version}"
    group_id, *rest = key.split(":")
    try:
        topic_id, partition = rest
        uuid_of_text(topic_id)
        int(partition)
    except ValueError:
        return f"Invalid key {key}: expected groupId:topicId:partition"
    return "" if group_id.strip() else f"Invalid key {key}: it names no group"
