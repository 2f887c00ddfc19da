"""Make mpbroker's figures under the names that dashboards for Kafka ask for.

ROWS is a table: each row makes samples of one such metric out of mpbroker's metrics.
One broker is the leader and the only replica of every partition, and its own
controller: so the figures about replicas that dashboards watch are constants, and true.

Source: danielqsj/kafka_exporter (kafka_topic_*, kafka_consumergroup_*); the JMX
exporter's usual rules for Kafka 2 and later (kafka_server_*, kafka_network_*,
kafka_log_*, kafka_controller_*).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Final

from mpbroker.base.named_tuple import NamedTuple
from mpbroker.exporter.collector import PARKED_REQUESTS
from mpbroker.exporter.exposition import Family, Labels
from mpbroker.exporter.group_numbers import (
    ACKNOWLEDGEMENTS,
    CLASSIC_GROUPS,
    CONSUMER_GROUPS,
    GROUPS,
    LOCK_TIMEOUTS,
    SHARE_GROUPS,
    SHARE_SESSIONS,
    STREAMS_GROUPS,
)
from mpbroker.exporter.idle import BLOCKED_RATIO
from mpbroker.exporter.limits import REQUEST_MEMORY
from mpbroker.exporter.topic_traffic import (
    FETCHED,
    PRODUCED,
    TOPIC_FETCHED,
    TOPIC_PARTITIONS,
    TOPIC_PRODUCED,
)


class Row(NamedTuple):
    """A rule that makes samples of a Kafka exporter's metric from our metrics.

    Attributes:
        name: the name of the metric that is made. The samples of rows with one name
            are added up.
        text: the metric's help text.
        sources: the names of our metrics.
        labels: our labels that are kept, with the names that they get. Samples that
            differ in other labels alone are added up.
        where: a label of ours and a pattern that it must match; None: take all samples.
        fixed: further labels with fixed values.
        each: a number to count for each sample in place of its value; None: the value.
        is_mean: whether to take the samples' mean and not their sum.
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
_OFFLINE_DIRECTORIES: Final = ("mpbroker_log_directory_offline",)
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
_GROUP_MANAGER: Final = "kafka_coordinator_group_groupmetadatamanager_"
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
    Row("kafka_topic_partitions", "Of each topic.", (TOPIC_PARTITIONS,), _TOPIC),
    # Not over all topics: that sum would run backwards when a topic is deleted.
    Row(_SERVER + "brokertopicmetrics_messagesin_total", "Sum over the partitions.",
        _ENDS, _TOPIC, kind="counter"),
    # The families of all topics have no label "topic", so theirs has both sums.
    Row(_SERVER + "brokertopicmetrics_bytesin_total", "Over all topics, and by topic.",
        (PRODUCED, TOPIC_PRODUCED), _TOPIC, kind="counter"),
    Row(_SERVER + "brokertopicmetrics_bytesout_total", "Over all topics, and by topic.",
        (FETCHED, TOPIC_FETCHED), _TOPIC, kind="counter"),
    # Tiered storage, where there is one.
    Row(_SERVER + "brokertopicmetrics_remotecopybytes_total", _WHOLE,
        ("mpbroker_remote_copied_bytes_total",), _BROKER, kind="counter"),
    Row(_SERVER + "brokertopicmetrics_remotecopyrequests_total", _WHOLE,
        ("mpbroker_remote_copied_segments_total",), _BROKER, kind="counter"),
    Row(_SERVER + "brokertopicmetrics_remotefetchrequests_total", _WHOLE,
        ("mpbroker_remote_fetched_chunks_total",), _BROKER, kind="counter"),
    Row(_SERVER + "brokertopicmetrics_remotelogsizebytes", _WHOLE,
        ("mpbroker_remote_stored_bytes",), _BROKER),
    Row(_SERVER + "brokertopicmetrics_remotelogmetadatacount", _WHOLE,
        ("mpbroker_remote_stored_segments",), _BROKER),
    Row(_SERVER + "brokertopicmetrics_remotecopyerrors_total", _WHOLE,
        ("mpbroker_remote_copy_errors_total",), _BROKER, kind="counter"),
    Row(_SERVER + "brokertopicmetrics_remotecopylagbytes", _WHOLE,
        ("mpbroker_remote_lag_bytes",), _BROKER),
    Row(_SERVER + "brokertopicmetrics_remotecopylagsegments", _WHOLE,
        ("mpbroker_remote_lag_segments",), _BROKER),
    Row(_SERVER + "brokertopicmetrics_remotefetchbytes_total", _WHOLE,
        ("mpbroker_remote_fetched_bytes_total",), _BROKER, kind="counter"),
    Row(_SERVER + "brokertopicmetrics_remotefetcherrors_total", _WHOLE,
        ("mpbroker_remote_fetch_errors_total",), _BROKER, kind="counter"),
    # Groups.
    Row("kafka_consumergroup_current_offset", "Current offset of a group.",
        _COMMITTED, _POSITION),
    Row("kafka_consumergroup_lag", "Lag of a group.", _LAG, _POSITION),
    Row("kafka_consumergroup_current_offset_sum", "Sum over the partitions.",
        _COMMITTED, _GROUP),
    Row("kafka_consumergroup_lag_sum", "Sum over the partitions.", _LAG, _GROUP),
    Row(_GROUP_MANAGER + "numgroups", _WHOLE,
        (GROUPS,), _BROKER, where=("type", "classic")),
    *(Row(_GROUP_MANAGER + "numgroups" + state.lower(), _WHOLE,
          (CLASSIC_GROUPS,), _BROKER, where=("state", state))
      for state in ("Empty", "PreparingRebalance", "CompletingRebalance", "Stable",
                    "Dead")),
    Row(_SERVER + "group_coordinator_metrics_consumer_group_count", _WHOLE,
        (CONSUMER_GROUPS,), {"state": "state"}),
    Row(_SERVER + "group_coordinator_metrics_group_count", _WHOLE,
        (GROUPS,), {"type": "protocol"}),
    Row(_SERVER + "group_coordinator_metrics_streams_group_count", _WHOLE,
        (STREAMS_GROUPS,), {"state": "state"}),
    # Share groups.
    Row(_SERVER + "group_coordinator_metrics_share_group_count", _WHOLE,
        (SHARE_GROUPS,), {"state": "state"}),
    Row(_SERVER + "sharesessioncache_sharesessionscount", _WHOLE,
        (SHARE_SESSIONS,), _BROKER),
    Row(_SERVER + "sharegroupmetrics_recordacknowledgements_total", _WHOLE,
        (ACKNOWLEDGEMENTS,), {"type": "ackType"}, kind="counter"),
    Row(_SERVER + "sharepartitionmetrics_acquisitionlocktimeout_total",
        "Sum over all groups and partitions.",
        (LOCK_TIMEOUTS,), _BROKER, kind="counter"),
    Row(_SERVER + "brokertopicmetrics_totalsharefetchrequests_total", _WHOLE,
        _VERSIONS, _BROKER, where=("api", "ShareFetch"), kind="counter"),
    Row(_SERVER + "brokertopicmetrics_failedsharefetchrequests_total", _WHOLE,
        _ERRORS, _BROKER, where=("api", "ShareFetch"), kind="counter"),
    Row(_SERVER + "brokertopicmetrics_totalshareacknowledgementrequests_total", _WHOLE,
        _VERSIONS, _BROKER, where=("api", "ShareAcknowledge"), kind="counter"),
    Row(_SERVER + "brokertopicmetrics_failedshareacknowledgementrequests_total",
        _WHOLE, _ERRORS, _BROKER, where=("api", "ShareAcknowledge"), kind="counter"),
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
    # Kafka counts partitions of requests here, and gives them by topic as well.
    *(Row(f"{_SERVER}brokertopicmetrics_{counted}{api.lower()}requests_total",
          "Requests, and not their partitions.",
          families, _BROKER, where=("api", api), kind="counter")
      for api in ("Produce", "Fetch")
      for counted, families in (("total", _VERSIONS), ("failed", _ERRORS))),
    Row(_SERVER + "delayedoperationpurgatory_purgatorysize", _WHOLE,
        (PARKED_REQUESTS,), {"api": "delayedOperation"}),
    Row(_SERVER + "delayedoperationpurgatory_numdelayedoperations", _WHOLE,
        (PARKED_REQUESTS,), {"api": "delayedOperation"}),
    Row(_NETWORK + "acceptor_acceptorblocked_percent", "Share of time, 0 to 1.",
        (BLOCKED_RATIO,), {"listener": "listener"}),
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
    Row("kafka_log_logmanager_offlinelogdirectorycount", _WHOLE,
        _OFFLINE_DIRECTORIES, _BROKER),
    Row("kafka_log_logmanager_logdirectoryoffline", "1: it is offline.",
        _OFFLINE_DIRECTORIES, {"log_dir": "logdirectory"}),
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
    """Make the metrics with Kafka's names from mpbroker's metrics."""
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
        if not by_name.keys() >= set(row.sources):
            continue  # a metric of tiered storage, and there is no remote store
        made.setdefault(row.name, Family(row.name, row.kind, row.text))
        _add(row, by_name, sums.setdefault(row.name, {}))
    for name, family in made.items():
        family.samples = [("", labels, value) for labels, value in sums[name].items()]
    return made.values()


def _add(row: Row, by_name: Mapping[str, Family], sums: dict[Labels, float]) -> None:
    """Add the samples that one Row of the table makes to the sums of its metric.

    Args:
        row: the row.
        by_name: mpbroker's metrics, by name.
        sums: the sums so far, by the samples' labels; they are changed.
    """
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
