"""DescribeCluster: cluster id, controller and brokers.

From version 1 a request has an endpoint type: 1 brokers, 2 controllers. From version 2
it may ask for fenced brokers, too.

Source: Kafka protocol guide, "DescribeCluster".
"""

from __future__ import annotations

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.fields import (
    BOOLEAN,
    INT8,
    INT16,
    INT32,
    STRING,
    Struct,
    array,
    field,
)
from mpbroker.protocol.message import Message


class DescribeClusterRequest(
    Message, api_key=ApiKey.DESCRIBE_CLUSTER, versions=(0, 2), flexible_from=0
):
    include_cluster_authorized_operations: bool = field(BOOLEAN)
    endpoint_type: int = field(INT8, "1+", default=1)
    include_fenced_brokers: bool = field(BOOLEAN, "2+")


class DescribeClusterBroker(Struct):
    broker_id: int = field(INT32)
    host: str = field(STRING)
    port: int = field(INT32)
    rack: str | None = field(STRING, nullable="0+", default=None)
    is_fenced: bool = field(BOOLEAN, "2+")


class DescribeClusterResponse(
    Message, api_key=ApiKey.DESCRIBE_CLUSTER, versions=(0, 2), flexible_from=0
):
    throttle_time_ms: int = field(INT32)
    error_code: int = field(INT16)
    error_message: str | None = field(STRING, nullable="0+", default=None)
    endpoint_type: int = field(INT8, "1+", default=1)
    cluster_id: str = field(STRING)
    controller_id: int = field(INT32, default=-1)
    brokers: list[DescribeClusterBroker] = array(DescribeClusterBroker)
    cluster_authorized_operations: int = field(INT32, default=-2147483648)
