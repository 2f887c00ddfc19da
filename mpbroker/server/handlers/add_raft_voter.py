"""AddRaftVoter: refuse to add a voter, because this node stays the only one.

Source: Kafka protocol guide, "AddRaftVoter"; KIP-853; AddVoterHandler.
"""

from __future__ import annotations

from mpbroker.protocol.messages.add_raft_voter import (
    AddRaftVoterRequest,
    AddRaftVoterResponse,
)
from mpbroker.server.errors import voter_refusal
from mpbroker.server.handler_context import HandlerContext


def handle_add_raft_voter(
    request: AddRaftVoterRequest, context: HandlerContext
) -> AddRaftVoterResponse:
    """Refuse the request, with UNSUPPORTED_VERSION or INCONSISTENT_CLUSTER_ID."""
    code, message = voter_refusal(
        request.cluster_id, context.broker.cluster_id, "adding voter"
    )
    return AddRaftVoterResponse(error_code=code, error_message=message)
