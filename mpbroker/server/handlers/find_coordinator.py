"""FindCoordinator: who coordinates a group or a transactional id.

There are no coordinators yet. Clients are told to ask again, which they do until one
is there, or until they give up by themselves.

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

GROUP: Final = 0
TRANSACTION: Final = 1
_BATCHED_SINCE: Final = 4
_NO_NODE: Final = -1


def handle_find_coordinator(
    request: FindCoordinatorRequest, version: int
) -> FindCoordinatorResponse:
    """Answer every key that nobody coordinates it at the moment."""
    if request.key_type in (GROUP, TRANSACTION):
        code = ErrorCode.COORDINATOR_NOT_AVAILABLE
        message = "The coordinator is not available."
    else:
        code = ErrorCode.INVALID_REQUEST
        message = f"Unknown coordinator type {request.key_type}"
    if version < _BATCHED_SINCE:
        return FindCoordinatorResponse(
            error_code=code,
            error_message=message,
            node_id=_NO_NODE,
            host="",
            port=_NO_NODE,
        )
    return FindCoordinatorResponse(
        coordinators=[
            Coordinator(
                key=key,
                node_id=_NO_NODE,
                host="",
                port=_NO_NODE,
                error_code=code,
                error_message=message,
            )
            for key in request.coordinator_keys
        ]
    )
