"""The same figures under the names that dashboards for Kafka ask for.

One broker is the leader and the only replica of every partition, and its own
controller: what dashboards watch of replicas is true, and never a reason to worry.

Source: danielqsj/kafka_exporter (kafka_topic_*, kafka_consumergroup_*); the JMX
exporter's usual rules for Kafka 2 and later (kafka_server_*, kafka_network_*,
kafka_log_*, kafka_controller_*).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from mpbroker.exporter.exposition import Family, counter, gauge
from mpbroker.exporter.request_memory import NAME as REQUEST_MEMORY
from mpbroker.exporter.topic_traffic import (
    FETCHED,
    PRODUCED,
    TOPIC_FETCHED,
    TOPIC_PRODUCED,
)

Labels = dict[str, object]
Families = Mapping[str, Family]

_RENAMED = {
    "mpbroker_log_end_offset": (
        ("kafka_topic_partition_current_offset", "Current offset of a partition."),
        ("kafka_log_log_logendoffset", "Offset after the last record."),
    ),
    "mpbroker_log_start_offset": (
        ("kafka_topic_partition_oldest_offset", "Oldest offset of a partition."),
        ("kafka_log_log_logstartoffset", "First offset of a partition."),
    ),
    "mpbroker_group_committed_offset": (
        ("kafka_consumergroup_current_offset", "Current offset of a group."),
    ),
    "mpbroker_group_lag": (("kafka_consumergroup_lag", "Lag of a group."),),
    "mpbroker_log_size_bytes": (("kafka_log_log_size", "Bytes of a partition's log."),),
}
_SUMS = {
    "mpbroker_group_committed_offset": "kafka_consumergroup_current_offset_sum",
    "mpbroker_group_lag": "kafka_consumergroup_lag_sum",
}
# Of all topics, and by topic.
_TOTALS = {
    "kafka_server_brokertopicmetrics_bytesin_total": (PRODUCED, TOPIC_PRODUCED),
    "kafka_server_brokertopicmetrics_bytesout_total": (FETCHED, TOPIC_FETCHED),
}
_CONNECTIONS = {
    "mpbroker_client_connections": "software",
    "mpbroker_tls_connections": "tls_info",
}
_IDLE = {
    "processor": "kafka_network_socketserver_networkprocessoravgidle_percent",
    "handler": "kafka_server_kafkarequesthandlerpool_requesthandleravgidle_percent",
}
# Of each partition, where the only broker is its leader and has the only replica.
_OF_A_PARTITION = {
    "kafka_topic_partition_replicas": 1,
    "kafka_topic_partition_in_sync_replica": 1,
    "kafka_topic_partition_leader_is_preferred": 1,
    "kafka_topic_partition_under_replicated_partition": 0,
}
_LEADER = "kafka_topic_partition_leader"
# Likewise of the broker.
_OF_THE_BROKER = {
    "kafka_brokers": 1,
    "kafka_controller_kafkacontroller_activecontrollercount": 1,
    "kafka_server_replicamanager_underreplicatedpartitions": 0,
    "kafka_server_replicamanager_underminisrpartitioncount": 0,
}


def kafka_families(families: Sequence[Family], node_id: int) -> Iterable[Family]:
    """Further families, out of those there are."""
    by_name = {family.name: family for family in families}
    for source, names in _RENAMED.items():
        for name, text in names:
            yield _renamed(name, text, by_name[source])
    for source, name in _SUMS.items():
        yield _sum(name, by_name[source], ("group", "topic"))
    for name, sources in _TOTALS.items():
        family = counter(name, "Of all topics; and by topic.")
        for source in sources:
            for _, labels, value in by_name[source].samples:
                family.add(value, **dict(labels))
        yield family
    for source, what in _CONNECTIONS.items():
        name = f"kafka_server_socket_server_metrics_connections_{what}"
        yield _renamed(name, "Connections of all processors.", by_name[source])
    yield from _requests(by_name)
    yield from _partitions(by_name, node_id)
    yield from _broker(by_name)


def _requests(by_name: Families) -> Iterable[Family]:
    requests = counter(
        "kafka_network_requestmetrics_requests_total", "Requests by API and version."
    )
    for _, labels, value in by_name["mpbroker_requests_by_version_total"].samples:
        of = dict(labels)
        requests.add(value, request=of["api"], version=of["version"])
        if of["api"] == "Fetch":  # Kafka counts them twice: nobody follows us
            requests.add(value, request="FetchConsumer", version=of["version"])
    errors = counter(
        "kafka_network_requestmetrics_errors_total", "Answers with errors."
    )
    for _, labels, value in by_name["mpbroker_request_errors_total"].samples:
        of = dict(labels)
        errors.add(value, request=of["api"], error=of["error"])
    return requests, errors


def _partitions(by_name: Families, node_id: int) -> Iterable[Family]:
    ends = by_name["mpbroker_log_end_offset"]
    for name, value in (*_OF_A_PARTITION.items(), (_LEADER, node_id)):
        family = gauge(name, "With one broker.")
        for _, labels, _ in ends.samples:
            family.add(value, **dict(labels))
        yield family
    yield _sum("kafka_topic_partitions", ends, ("topic",), lambda _: 1)
    records = _sum("kafka_server_brokertopicmetrics_messagesin_total", ends, ("topic",))
    # By topic alone: a sum over all would run backwards when a topic is deleted.
    records.kind = "counter"
    yield records


def _broker(by_name: Families) -> Iterable[Family]:
    for name, value in _OF_THE_BROKER.items():
        yield _one(name, value)
    offline = _total(by_name["mpbroker_partitions_offline"])
    for name in (
        "kafka_controller_kafkacontroller_offlinepartitionscount",
        "kafka_server_replicamanager_offlinereplicacount",
    ):
        yield _one(name, offline)
    count = len(by_name["mpbroker_log_end_offset"].samples) + sum(
        _total(by_name[f"mpbroker_partitions_{kind}"])
        for kind in ("unloaded", "not_shown")
    )
    for name in (
        "kafka_server_replicamanager_partitioncount",
        "kafka_server_replicamanager_leadercount",
    ):
        yield _one(name, count)
    yield _one(
        "kafka_server_socketservermetrics_connection_count",
        _total(by_name["mpbroker_connections"]),
    )
    queues = {
        str(dict(labels)["queue"]): value
        for _, labels, value in by_name["mpbroker_queue_size"].samples
    }
    yield _one("kafka_network_requestchannel_requestqueuesize", queues["request"])
    yield _one(
        "kafka_network_requestchannel_responsequeuesize",
        sum(size for name, size in queues.items() if name.startswith("response")),
    )
    for _, labels, size in by_name[REQUEST_MEMORY].samples:
        use = dict(labels)["state"]
        yield _one(f"kafka_network_socketserver_memorypool{use}", size)
    for role, name in _IDLE.items():
        ratios = [
            value
            for _, labels, value in by_name["mpbroker_idle_ratio"].samples
            if dict(labels)["role"] == role
        ]
        if ratios:
            yield _one(name, sum(ratios) / len(ratios))


def _one(name: str, value: float) -> Family:
    family = gauge(name, "Of the broker.")
    family.add(value)
    return family


def _total(source: Family) -> float:
    return sum(value for _, _, value in source.samples)


def _theirs(labels: Iterable[tuple[str, object]]) -> Labels:
    return {"consumergroup" if key == "group" else key: label for key, label in labels}


def _renamed(name: str, text: str, source: Family) -> Family:
    family = gauge(name, text)
    for _, labels, value in source.samples:
        family.add(value, **_theirs(labels))
    return family


def _sum(
    name: str,
    source: Family,
    kept: Sequence[str],
    weigh: Callable[[float], float] = float,
) -> Family:
    """Add samples up that differ in other labels."""
    sums: dict[tuple[tuple[str, object], ...], float] = {}
    for _, labels, value in source.samples:
        place = tuple((key, label) for key, label in labels if key in kept)
        sums[place] = sums.get(place, 0) + weigh(value)
    family = gauge(name, "Of all its partitions.")
    for place, value in sums.items():
        family.add(int(value), **_theirs(place))
    return family
