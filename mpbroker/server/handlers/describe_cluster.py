"""DescribeCluster: describe the live nodes, with this node as the controller.

Source: Kafka protocol guide, "DescribeCluster"; KIP-700, KIP-919, KIP-1073.
"""

from __future__ import annotations

from typing import Final

from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages.describe_cluster import (
    DescribeClusterBroker,
    DescribeClusterRequest,
    DescribeClusterResponse,
)
from mpbroker.server.handler_context import HandlerContext
from mpbroker.server.handlers.metadata import CLUSTER_OPERATIONS

BROKERS: Final = 1
CONTROLLERS: Final = 2


def handle_describe_cluster(
    request: DescribeClusterRequest, context: HandlerContext
) -> DescribeClusterResponse:
    """Answer with the live nodes and their addresses for the client.

    Refuse a request for controllers.
    """
    broker = context.broker
    if request.endpoint_type != BROKERS:
        return _refusal(request.endpoint_type)
    host, port = context.endpoint
    response = DescribeClusterResponse(
        error_code=ErrorCode.NONE,
        cluster_id=broker.cluster_id,
        controller_id=broker.node_id,
        brokers=[
            DescribeClusterBroker(
                broker_id=broker.node_id, host=host, port=port, rack=broker.rack
            ),
            *(
                DescribeClusterBroker(
                    broker_id=each.node_id,
                    host=each.host,
                    port=each.port,
                    rack=each.rack,
                )
                for each in context.other_nodes
            ),
        ],
    )
    if request.include_cluster_authorized_operations:
        response.cluster_authorized_operations = CLUSTER_OPERATIONS
    return response


def _refusal(endpoint_type: int) -> DescribeClusterResponse:
    """Return the error for a request that wants other endpoints than brokers.

    Such requests exist from version 1 on.
    """
    if endpoint_type == CONTROLLERS:
        return DescribeClusterResponse(
            error_code=ErrorCode.MISMATCHED_ENDPOINT_TYPE,
            error_message="The request was sent to an endpoint of type BROKER, but we"
            " wanted an endpoint of type CONTROLLER",
        )
    return DescribeClusterResponse(
        error_code=ErrorCode.UNSUPPORTED_ENDPOINT_TYPE,
        error_message=f"Unsupported endpoint type {endpoint_type}",
    )
