"""RemoveRaftVoter: refuse to remove a voter, because this node is the only one.

Source: Kafka protocol guide, "RemoveRaftVoter"; KIP-853; RemoveVoterHandler.
"""

from __future__ import annotations

from mpbroker.protocol.messages.remove_raft_voter import (
    RemoveRaftVoterRequest,
    RemoveRaftVoterResponse,
)
from mpbroker.server.errors import voter_refusal
from mpbroker.server.handler_context import HandlerContext


def handle_remove_raft_voter(
    request: RemoveRaftVoterRequest, context: HandlerContext
) -> RemoveRaftVoterResponse:
    """Refuse the request, with UNSUPPORTED_VERSION or INCONSISTENT_CLUSTER_ID."""
    code, message = voter_refusal(
        request.cluster_id, context.broker.cluster_id, "removing voter"
    )
    return RemoveRaftVoterResponse(error_code=code, error_message=message)
