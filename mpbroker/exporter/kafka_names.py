"""The same figures under the names that dashboards for Kafka ask for.

A table: each row makes samples of one family of theirs out of families of ours. One
broker is the leader and the only replica of every partition, and its own controller:
so what dashboards watch of replicas is a constant, and true.

Source: danielqsj/kafka_exporter (kafka_topic_*, kafka_consumergroup_*); the JMX
exporter's usual rules for Kafka 2 and later (kafka_server_*, kafka_network_*,
kafka_log_*, kafka_controller_*).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Final, NamedTuple

from mpbroker.exporter.exposition import Family, Labels
from mpbroker.exporter.request_memory import NAME as REQUEST_MEMORY
from mpbroker.exporter.topic_traffic import (
    FETCHED,
    PRODUCED,
    TOPIC_FETCHED,
    TOPIC_PRODUCED,
)


class Row(NamedTuple):
    """How samples of ours become samples of theirs.

    Attributes:
        name: of their family. Rows of the same name make one family, and add up.
        text: what it means.
        sources: names of our families.
        labels: our labels that are kept, and what they call them. Samples that differ
            in other labels alone are added up.
        where: a label of ours and a pattern: the samples that count; None: all.
        fixed: further labels of theirs.
        each: counts for each sample in place of its value.
        is_mean: the mean of the samples and not their sum.
        kind: counter or gauge.
    """

    name: str
    text: str
    sources: tuple[str, ...]
    labels: Mapping[str, str]
    where: tuple[str, str] | None = None
    fixed: Labels = ()
    each: int | None = None
    is_mean: bool = False
    kind: str = "gauge"


_ENDS: Final = ("mpbroker_log_end_offset",)
_STARTS: Final = ("mpbroker_log_start_offset",)
_SIZES: Final = ("mpbroker_log_size_bytes",)
_COMMITTED: Final = ("mpbroker_group_committed_offset",)
_LAG: Final = ("mpbroker_group_lag",)
_OFFLINE: Final = ("mpbroker_partitions_offline",)
_NOT_LISTED: Final = ("mpbroker_partitions_unloaded", "mpbroker_partitions_not_shown")
_QUEUES: Final = ("mpbroker_queue_size",)
_IDLE: Final = ("mpbroker_idle_ratio",)
_VERSIONS: Final = ("mpbroker_requests_by_version_total",)
_ERRORS: Final = ("mpbroker_request_errors_total",)

_BROKER: Final[Mapping[str, str]] = {}
_TOPIC: Final = {"topic": "topic"}
_PARTITION: Final = {"topic": "topic", "partition": "partition"}
_GROUP: Final = {"group": "consumergroup", "topic": "topic"}
_POSITION: Final = {**_GROUP, "partition": "partition"}
_SOFTWARE: Final = {
    each: each for each in ("client_software_name", "client_software_version")
}
_CIPHER: Final = {"cipher": "cipher", "protocol": "protocol"}

_SERVER: Final = "kafka_server_"
_NETWORK: Final = "kafka_network_"
_CONTROLLER: Final = "kafka_controller_kafkacontroller_"
_REPLICAS: Final = "kafka_server_replicamanager_"
_REQUESTS: Final = "kafka_network_requestmetrics_requests_total"
_BY_VERSION: Final = "Requests by API and version."
_WHOLE: Final = "A figure of the whole broker."

# fmt: off
ROWS: Final = (
    # Partitions.
    Row("kafka_topic_partition_current_offset", "Current offset of a partition.",
        _ENDS, _PARTITION),
    Row("kafka_topic_partition_oldest_offset", "Oldest offset of a partition.",
        _STARTS, _PARTITION),
    Row("kafka_log_log_logendoffset", "Offset after the last record.",
        _ENDS, _PARTITION),
    Row("kafka_log_log_logstartoffset", "First offset of a partition.",
        _STARTS, _PARTITION),
    Row("kafka_log_log_size", "Bytes of a partition's log.", _SIZES, _PARTITION),
    Row("kafka_topic_partition_replicas", "Constant with one broker.",
        _ENDS, _PARTITION, each=1),
    Row("kafka_topic_partition_in_sync_replica", "Constant with one broker.",
        _ENDS, _PARTITION, each=1),
    Row("kafka_topic_partition_leader_is_preferred", "Constant with one broker.",
        _ENDS, _PARTITION, each=1),
    Row("kafka_topic_partition_under_replicated_partition", "Constant with one broker.",
        _ENDS, _PARTITION, each=0),
    # Topics.
    Row("kafka_topic_partitions", "Sum over the partitions.", _ENDS, _TOPIC, each=1),
    # Not over all topics: that sum would run backwards when a topic is deleted.
    Row(_SERVER + "brokertopicmetrics_messagesin_total", "Sum over the partitions.",
        _ENDS, _TOPIC, kind="counter"),
    # The families of all topics have no label "topic", so theirs has both sums.
    Row(_SERVER + "brokertopicmetrics_bytesin_total", "Over all topics, and by topic.",
        (PRODUCED, TOPIC_PRODUCED), _TOPIC, kind="counter"),
    Row(_SERVER + "brokertopicmetrics_bytesout_total", "Over all topics, and by topic.",
        (FETCHED, TOPIC_FETCHED), _TOPIC, kind="counter"),
    # Groups.
    Row("kafka_consumergroup_current_offset", "Current offset of a group.",
        _COMMITTED, _POSITION),
    Row("kafka_consumergroup_lag", "Lag of a group.", _LAG, _POSITION),
    Row("kafka_consumergroup_current_offset_sum", "Sum over the partitions.",
        _COMMITTED, _GROUP),
    Row("kafka_consumergroup_lag_sum", "Sum over the partitions.", _LAG, _GROUP),
    # Connections.
    Row(_SERVER + "socket_server_metrics_connections_software",
        "Connections of all processors.",
        ("mpbroker_client_connections",), _SOFTWARE),
    Row(_SERVER + "socket_server_metrics_connections_tls_info",
        "Connections of all processors.", ("mpbroker_tls_connections",), _CIPHER),
    Row(_SERVER + "socketservermetrics_connection_count", _WHOLE,
        ("mpbroker_connections",), _BROKER),
    # Requests.
    Row(_REQUESTS, _BY_VERSION, _VERSIONS, {"api": "request", "version": "version"},
        kind="counter"),
    # Kafka counts a Fetch twice, the second time by its sender: no broker follows us.
    Row(_REQUESTS, _BY_VERSION, _VERSIONS, {"version": "version"},
        where=("api", "Fetch"), fixed=(("request", "FetchConsumer"),), kind="counter"),
    Row(_NETWORK + "requestmetrics_errors_total", "Answers with errors.",
        _ERRORS, {"api": "request", "error": "error"}, kind="counter"),
    Row(_NETWORK + "requestchannel_requestqueuesize", _WHOLE,
        _QUEUES, _BROKER, where=("queue", "request")),
    Row(_NETWORK + "requestchannel_responsequeuesize", _WHOLE,
        _QUEUES, _BROKER, where=("queue", "response-*")),
    Row(_NETWORK + "socketserver_memorypoolused", _WHOLE,
        (REQUEST_MEMORY,), _BROKER, where=("state", "used")),
    Row(_NETWORK + "socketserver_memorypoolavailable", _WHOLE,
        (REQUEST_MEMORY,), _BROKER, where=("state", "available")),
    Row(_NETWORK + "socketserver_networkprocessoravgidle_percent", _WHOLE,
        _IDLE, _BROKER, where=("role", "processor"), is_mean=True),
    Row(_SERVER + "kafkarequesthandlerpool_requesthandleravgidle_percent",
        _WHOLE, _IDLE, _BROKER, where=("role", "handler"), is_mean=True),
    # The broker. Without sources a row is one sample.
    Row("kafka_brokers", _WHOLE, (), _BROKER, each=1),
    Row(_CONTROLLER + "activecontrollercount", _WHOLE, (), _BROKER, each=1),
    Row(_CONTROLLER + "offlinepartitionscount", _WHOLE, _OFFLINE, _BROKER),
    Row(_REPLICAS + "offlinereplicacount", _WHOLE, _OFFLINE, _BROKER),
    Row(_REPLICAS + "underreplicatedpartitions", _WHOLE,
        (), _BROKER, each=0),
    Row(_REPLICAS + "underminisrpartitioncount", _WHOLE,
        (), _BROKER, each=0),
    Row(_REPLICAS + "partitioncount", _WHOLE, _ENDS, _BROKER, each=1),
    Row(_REPLICAS + "partitioncount", _WHOLE, _NOT_LISTED, _BROKER),
    Row(_REPLICAS + "leadercount", _WHOLE, _ENDS, _BROKER, each=1),
    Row(_REPLICAS + "leadercount", _WHOLE, _NOT_LISTED, _BROKER),
)
# fmt: on


def kafka_families(families: Sequence[Family], node_id: int) -> Iterable[Family]:
    """Return their families, made of ours."""
    by_name = {family.name: family for family in families}
    leader = Row(
        "kafka_topic_partition_leader",
        "Constant with one broker.",
        _ENDS,
        _PARTITION,
        each=node_id,
    )
    made: dict[str, Family] = {}
    sums: dict[str, dict[Labels, float]] = {}
    for row in (*ROWS, leader):
        made.setdefault(row.name, Family(row.name, row.kind, row.text))
        _add(row, by_name, sums.setdefault(row.name, {}))
    for name, family in made.items():
        family.samples = [("", labels, value) for labels, value in sums[name].items()]
    return made.values()


def _add(row: Row, by_name: Mapping[str, Family], sums: dict[Labels, float]) -> None:
    """Add what a row makes to the samples of its family."""
    samples = [
        (labels, value)
        for source in row.sources
        for _, labels, value in by_name[source].samples
        if row.where is None or _matches(labels, *row.where)
    ]
    if not row.labels and not row.is_mean:
        sums.setdefault((), 0)  # a sum of nothing is shown, too
    if not row.sources and row.each is not None:
        samples = [((), row.each)]
    share = 1 / len(samples) if samples and row.is_mean else 1
    kept, fixed, each = row.labels, row.fixed, row.each
    for labels, value in samples:
        theirs = tuple((kept[key], label) for key, label in labels if key in kept)
        place = (*fixed, *theirs)
        sums[place] = sums.get(place, 0) + (value if each is None else each) * share


def _matches(labels: Labels, name: str, pattern: str) -> bool:
    return any(
        key == name and fnmatchcase(str(label), pattern) for key, label in labels
    )
