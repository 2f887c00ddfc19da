"""Show topics in the console: names, partitions, offsets, sizes and configs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from mpbroker.client.admin.config_admin import ConfigResource, ConfigResourceType
from mpbroker.client.admin.topic_admin import (
    EARLIEST,
    EARLIEST_LOCAL,
    LATEST,
    LATEST_TIERED,
    OffsetAndTimestamp,
    list_offsets,
)
from mpbroker.client.cluster import Cluster, TopicPartition, only
from mpbroker.client.errors import check_error
from mpbroker.console.sessions import Session
from mpbroker.protocol.config_source import ConfigSource
from mpbroker.protocol.messages.describe_configs import (
    DescribeConfigsRequest,
    DescribeConfigsResource,
    DescribeConfigsResponse,
)
from mpbroker.protocol.messages.describe_log_dirs import (
    DescribableLogDirTopic,
    DescribeLogDirsRequest,
    DescribeLogDirsResponse,
)

PAGE_ROWS: Final = 100


def list_topics(
    session: Session, match: str, start: int, *, is_fresh: bool = False
) -> dict[str, Any]:
    """Return a page of the topics that the user may see, sorted by name.

    Args:
        session: the user's session.
        match: a part of the names; case does not count.
        start: the number of topics before the page.
        is_fresh: whether to ask the broker, even if the cached list is recent.
    """

    def ask(cluster: Cluster) -> list[dict[str, Any]]:
        rows = [
            {
                "name": each.name or "",
                "partitions": len(each.partitions),
                "internal": each.is_internal,
            }
            for each in cluster.metadata(None).topics
        ]
        return sorted(rows, key=lambda row: str(row["name"]))

    part = match.casefold()
    found = [
        each
        for each in session.remembered("topics", ask, is_fresh=is_fresh)
        if part in each["name"].casefold()
    ]
    page = found[start : start + PAGE_ROWS]
    return {"total": len(found), "start": start, "rows": page}


def describe_topic(cluster: Cluster, name: str, start: int) -> dict[str, Any]:
    """Return a topic, and a page of its partitions with offsets and sizes.

    A size counts the bytes on the local disk; it is None if the user may not know it.
    ``remote_end`` is the offset after the last record in the remote store; it is None
    if the partition has no records there.

    Args:
        cluster: the brokers.
        name: the topic.
        start: the number of partitions before the page.
    """
    topic = cluster.topic(name, wait=False)
    rows = sorted(topic.partitions, key=lambda each: each.partition_index)
    page = rows[start : start + PAGE_ROWS]
    led = {
        TopicPartition(name, each.partition_index): each.leader_id
        for each in page
        if each.leader_id >= 0
    }
    first = list_offsets(cluster, dict.fromkeys(led, EARLIEST), led)
    last = list_offsets(cluster, dict.fromkeys(led, LATEST), led)
    local = list_offsets(cluster, dict.fromkeys(led, EARLIEST_LOCAL), led)
    tiered = list_offsets(cluster, dict.fromkeys(led, LATEST_TIERED), led)
    sizes = _sizes(cluster, name, [each.partition_index for each in page])
    partitions = []
    for each in page:
        where = TopicPartition(name, each.partition_index)
        partitions.append(
            {
                "partition": each.partition_index,
                "leader": each.leader_id if each.leader_id >= 0 else None,
                "replicas": list(each.replica_nodes),
                "in_sync": list(each.isr_nodes),
                "start": first[where].offset if where in first else None,
                "end": last[where].offset if where in last else None,
                "bytes": sizes.get(each.partition_index),
                "local_start": local[where].offset if where in local else None,
                "remote_end": _behind(tiered.get(where)),
            }
        )
    return {
        "name": name,
        "internal": topic.is_internal,
        "total": len(rows),
        "start": start,
        "partitions": partitions,
    }


def _behind(last: OffsetAndTimestamp | None) -> int | None:
    """Return the offset after the last record in the remote store, or None."""
    return None if last is None or last.offset < 0 else last.offset + 1


def _sizes(cluster: Cluster, name: str, partitions: list[int]) -> Mapping[int, int]:
    wanted = [DescribableLogDirTopic(topic=name, partitions=partitions)]
    found: dict[int, int] = {}
    for node in cluster.metadata([]).brokers:
        answer = cluster.broker(node.node_id).request(
            DescribeLogDirsRequest(topics=wanted), DescribeLogDirsResponse
        )
        for directory in answer.results:
            for topic in directory.topics:
                for each in topic.partitions:
                    size = max(found.get(each.partition_index, 0), each.partition_size)
                    found[each.partition_index] = size
    return found


def describe_configs(cluster: Cluster, name: str) -> dict[str, Any]:
    """Return a topic's configs: values, sources and documentation, sorted by name."""
    resource = ConfigResource(ConfigResourceType.TOPIC, name)
    wanted = DescribeConfigsResource(
        resource_type=resource.type, resource_name=name, configuration_keys=None
    )
    request = DescribeConfigsRequest(resources=[wanted], include_documentation=True)
    broker = cluster.controller()
    answer = broker.request(request, DescribeConfigsResponse)
    result = only(answer.results, broker.address)
    check_error(result.error_code, str(resource), result.error_message)
    rows = [
        {
            "name": each.name,
            "value": None if each.is_sensitive else each.value,
            "source": _source(each.config_source),
            "read_only": each.read_only,
            "own": each.config_source == ConfigSource.TOPIC_CONFIG,
            "documentation": each.documentation,
        }
        for each in result.configs
    ]
    return {"rows": sorted(rows, key=lambda each: str(each["name"]))}


def _source(number: int) -> str:
    try:
        return ConfigSource(number).name.lower().replace("_", " ")
    except ValueError:
        return "unknown"
