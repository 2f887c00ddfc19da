"""FindCoordinator: name the broker that coordinates a group or a transactional id.

It is always this broker, since there is no other.

Source: Kafka protocol guide, "FindCoordinator"; KIP-699 for several keys at once.
"""

from __future__ import annotations

from typing import Final

from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages.find_coordinator import (
    Coordinator,
    FindCoordinatorRequest,
    FindCoordinatorResponse,
)
from mpbroker.server.handler_context import HandlerContext

GROUP: Final = 0
TRANSACTION: Final = 1
_BATCHED_SINCE: Final = 4
_NO_NODE: Final = -1


def handle_find_coordinator(
    request: FindCoordinatorRequest, context: HandlerContext
) -> FindCoordinatorResponse:
    """Answer each key with this broker; refuse types other than group and transaction.

    From version 4 on a request has several keys.
    """
    node_id, (host, port) = context.broker.node_id, context.endpoint
    code, message = ErrorCode.NONE, None
    if request.key_type not in (GROUP, TRANSACTION):
        code = ErrorCode.INVALID_REQUEST
        message = f"Unknown coordinator type {request.key_type}"
    if code:
        node_id, host, port = _NO_NODE, "", _NO_NODE
    if context.version < _BATCHED_SINCE:
        return FindCoordinatorResponse(
            error_code=code,
            error_message=message,
            node_id=node_id,
            host=host,
            port=port,
        )
    return FindCoordinatorResponse(
        coordinators=[
            Coordinator(
                key=key,
                node_id=node_id,
                host=host,
                port=port,
                error_code=code,
                error_message=message,
            )
            for key in request.coordinator_keys
        ]
    )
