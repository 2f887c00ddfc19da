"""ListPartitionReassignments: answer that no partition moves to another broker.

Source: Kafka protocol guide, "ListPartitionReassignments"; KIP-455.
"""

from __future__ import annotations

from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages.list_partition_reassignments import (
    ListPartitionReassignmentsRequest,
    ListPartitionReassignmentsResponse,
)
from mpbroker.server.handler_context import HandlerContext


def handle_list_partition_reassignments(
    request: ListPartitionReassignmentsRequest, context: HandlerContext
) -> ListPartitionReassignmentsResponse:
    """Answer with an empty list of reassignments."""
    return ListPartitionReassignmentsResponse(
        error_code=ErrorCode.NONE, error_message=None
    )
