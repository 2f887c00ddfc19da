"""The same figures under the names that dashboards for Kafka ask for.

Source: danielqsj/kafka_exporter (kafka_topic_*, kafka_consumergroup_*); the JMX
exporter's usual rules for Kafka 2 and later (kafka_server_*, kafka_network_*).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mpbroker.supervisor.metrics.exposition import Family, counter, gauge

_FROM_KAFKA_EXPORTER = {
    "mpbroker_log_end_offset": (
        "kafka_topic_partition_current_offset",
        "Current offset of a partition.",
    ),
    "mpbroker_log_start_offset": (
        "kafka_topic_partition_oldest_offset",
        "Oldest offset of a partition.",
    ),
    "mpbroker_group_committed_offset": (
        "kafka_consumergroup_current_offset",
        "Current offset of a group.",
    ),
    "mpbroker_group_lag": ("kafka_consumergroup_lag", "Lag of a group."),
    "mpbroker_log_size_bytes": ("kafka_log_log_size", "Bytes of a partition's log."),
}
_TOTALS = {
    "mpbroker_received_bytes_total": "kafka_server_brokertopicmetrics_bytesin_total",
    "mpbroker_sent_bytes_total": "kafka_server_brokertopicmetrics_bytesout_total",
}


def kafka_families(families: Sequence[Family]) -> Iterable[Family]:
    """Further families, out of those there are."""
    by_name = {family.name: family for family in families}
    for source, (name, text) in _FROM_KAFKA_EXPORTER.items():
        family = gauge(name, text)
        for _, labels, value in by_name[source].samples:
            renamed = {
                "consumergroup" if key == "group" else key: label
                for key, label in labels
            }
            family.add(value, **renamed)
        yield family
    for source, name in _TOTALS.items():
        family = counter(name, "Of all topics.")
        for _, _, value in by_name[source].samples:
            family.add(value)
        yield family
    yield _by_request(
        "kafka_network_requestmetrics_requests_total",
        by_name["mpbroker_requests_by_version_total"],
    )
    yield _partitions(by_name["mpbroker_log_end_offset"])
    brokers = gauge("kafka_brokers", "Brokers of the cluster.")
    brokers.add(1)
    yield brokers
    connections = gauge("kafka_server_socketservermetrics_connection_count", "Open.")
    connections.add(
        sum(value for _, _, value in by_name["mpbroker_connections"].samples)
    )
    yield connections
    size = gauge("kafka_network_requestchannel_requestqueuesize", "Waiting requests.")
    for _, labels, value in by_name["mpbroker_queue_size"].samples:
        if dict(labels)["queue"] == "request":
            size.add(value)
    yield size


def _by_request(name: str, source: Family) -> Family:
    family = counter(name, "Requests by API and version.")
    for _, labels, value in source.samples:
        of = dict(labels)
        family.add(value, request=of["api"], version=of["version"])
    return family


def _partitions(ends: Family) -> Family:
    family = gauge("kafka_topic_partitions", "Partitions of a topic.")
    counts: dict[object, int] = {}
    for _, labels, _ in ends.samples:
        topic = dict(labels)["topic"]
        counts[topic] = counts.get(topic, 0) + 1
    for topic, count in counts.items():
        family.add(count, topic=topic)
    return family
