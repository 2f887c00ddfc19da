"""The log directories of brokers, and the features of a cluster."""

from __future__ import annotations

from typing import NamedTuple

from mpbroker import __version__
from mpbroker.client.cluster import Cluster, TopicPartition
from mpbroker.client.connection import SOFTWARE_NAME
from mpbroker.client.errors import check_error, error_code_of
from mpbroker.protocol.messages.api_versions import (
    ApiVersionsRequest,
    ApiVersionsResponse,
)
from mpbroker.protocol.messages.describe_log_dirs import (
    DescribeLogDirsRequest,
    DescribeLogDirsResponse,
    DescribeLogDirsResult,
)


class LogDirDescription(NamedTuple):
    """A log directory of a broker.

    Attributes:
        broker: the broker's id.
        path: the directory's path.
        error: the name of the error for which it cannot be used; None if it can.
        total_bytes: the size of its volume; None if the broker does not tell it.
        usable_bytes: the free bytes of the volume; None if the broker does not tell it.
        partitions: the size in bytes of each partition in the directory.
        copies: by partition that moves here from another log directory, how many
            offsets its copy lags behind.
    """

    broker: int
    path: str
    error: str | None
    total_bytes: int | None
    usable_bytes: int | None
    partitions: dict[TopicPartition, int]
    copies: dict[TopicPartition, int]


class FeatureDescription(NamedTuple):
    """A feature of a cluster, such as transaction.version.

    Attributes:
        level: the finalized version level; None: the feature is off.
        supported: the lowest and the highest level that the broker supports; None if it
            did not tell.
    """

    level: int | None
    supported: tuple[int, int] | None


def describe_log_dirs(cluster: Cluster, brokers: list[int]) -> list[LogDirDescription]:
    """Return the log directories of some brokers.

    Raises:
        ApiError: CLUSTER_AUTHORIZATION_FAILED, or another refusal.
    """
    found = []
    for number in brokers:
        response = cluster.broker(number).request(
            DescribeLogDirsRequest(topics=None), DescribeLogDirsResponse
        )
        check_error(response.error_code, f"log directories of broker {number}")
        found += [_described(number, result) for result in response.results]
    return found


def _described(broker: int, result: DescribeLogDirsResult) -> LogDirDescription:
    total, usable = result.total_bytes, result.usable_bytes
    code = error_code_of(result.error_code)
    return LogDirDescription(
        broker,
        result.log_dir,
        code.name if code else None,
        total if total >= 0 else None,
        usable if usable >= 0 else None,
        {
            TopicPartition(topic.name, entry.partition_index): entry.partition_size
            for topic in result.topics
            for entry in topic.partitions
            if not entry.is_future_key
        },
        {
            TopicPartition(topic.name, entry.partition_index): entry.offset_lag
            for topic in result.topics
            for entry in topic.partitions
            if entry.is_future_key
        },
    )


def describe_features(cluster: Cluster) -> dict[str, FeatureDescription]:
    """Return the cluster's features by name, as one of its brokers lists them."""
    request = ApiVersionsRequest(
        client_software_name=SOFTWARE_NAME, client_software_version=__version__
    )
    response = cluster.request(request, ApiVersionsResponse)
    check_error(response.error_code, "features")
    levels = {each.name: each.max_version_level for each in response.finalized_features}
    supported = {
        each.name: (each.min_version, each.max_version)
        for each in response.supported_features
    }
    return {
        name: FeatureDescription(levels.get(name), supported.get(name))
        for name in sorted(levels.keys() | supported.keys())
    }
