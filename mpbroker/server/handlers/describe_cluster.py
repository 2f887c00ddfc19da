"""DescribeCluster: the one broker there is, which is also the controller.

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
from mpbroker.server.handlers.metadata import CLUSTER_OPERATIONS

BROKERS: Final = 1
CONTROLLERS: Final = 2


def handle_describe_cluster(
    request: DescribeClusterRequest,
    *,
    node_id: int,
    rack: str | None,
    cluster_id: str,
    host: str,
    port: int,
) -> DescribeClusterResponse:
    """Answer with this broker at ``host`` and ``port``."""
    if request.endpoint_type != BROKERS:
        return _refusal(request.endpoint_type)
    response = DescribeClusterResponse(
        error_code=ErrorCode.NONE,
        cluster_id=cluster_id,
        controller_id=node_id,
        brokers=[
            DescribeClusterBroker(broker_id=node_id, host=host, port=port, rack=rack)
        ],
    )
    if request.include_cluster_authorized_operations:
        response.cluster_authorized_operations = CLUSTER_OPERATIONS
    return response


def _refusal(endpoint_type: int) -> DescribeClusterResponse:
    """Say that this is a broker. Only version 1 and newer can ask for another."""
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
