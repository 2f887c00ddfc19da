"""The metrics of a real broker, as Prometheus gets them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from prometheus_client.parser import text_string_to_metric_families

from mpbroker import AcknowledgeType, ShareConsumer
from mpbroker.cli.ctl.ctl_connection import ControlClient
from mpbroker.exporter.http_server import MAX_CONNECTIONS
from tests.broker.load import api_versions, dial
from tests.client.test_share_consumer import begin_at_the_start, errors, poll
from tests.exporter.asking import (
    METRICS,
    get,
    pids_of,
    samples,
    told,
    url_of,
    wait_until,
)
from tests.server.core_cache.handler_stage import produce_request
from tests.support.broker import Broker
from tests.support.fetch_clients import prometheus_tool


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    directory = tmp_path_factory.mktemp("metrics")
    config = {
        **METRICS,
        "num.io.threads": "1",
        "metrics.kafka.names.enable": "true",
        "request.log.path": str(directory / "requests.log"),
    }
    with Broker(directory / "data", config) as made:
        producer = Producer({"bootstrap.servers": made.bootstrap})
        for number in range(10):
            producer.produce("flights", f"record {number}".encode(), partition=0)
        assert not producer.flush(30)
        consumer = Consumer(
            {"bootstrap.servers": made.bootstrap, "group.id": "departures"}
        )
        consumer.commit(offsets=[TopicPartition("flights", 0, 4)], asynchronous=False)
        consumer.close()
        yield made


def metrics(broker):
    status, text = get(broker)
    assert status == 200
    return samples(text)


def test_requests_are_counted_by_api_with_their_stages(broker):
    now = metrics(broker)
    assert now['mpbroker_requests_total{api="Produce"}'] >= 1
    count = 'mpbroker_request_stage_seconds_count{api="Produce",stage="total"}'
    assert now[count] == now['mpbroker_requests_total{api="Produce"}']
    assert now['mpbroker_request_bytes_total{api="Produce"}'] > 100


def test_requests_are_counted_by_version_under_kafkas_name_too(broker):
    now = metrics(broker)
    total = now['mpbroker_requests_total{api="Produce"}']
    for name, label in (
        ("mpbroker_requests_by_version_total", "api"),
        ("kafka_network_requestmetrics_requests_total", "request"),
    ):
        start = f'{name}{{{label}="Produce",version="'
        versions = {
            int(key.removeprefix(start).rstrip('"}')): count
            for key, count in now.items()
            if key.startswith(start)
        }
        assert sum(versions.values()) == total
        assert set(versions) <= set(range(3, 14))


def test_who_waits_for_the_members_of_a_group_is_not_at_work(broker):
    consumer = Consumer({"bootstrap.servers": broker.bootstrap, "group.id": "late"})
    consumer.subscribe(["flights"])  # and three seconds for others to come
    wait_until(lambda: consumer.poll(0.1) is None and consumer.assignment())
    consumer.close()
    now = metrics(broker)
    local, remote = (
        now[f'mpbroker_request_stage_seconds_sum{{api="JoinGroup",stage="{stage}"}}']
        for stage in ("local", "remote")
    )
    assert remote > local


def test_logs_and_the_lag_of_groups_are_shown(broker):
    place = 'topic="flights",partition="0"'

    def is_shown():
        now = metrics(broker)
        return now.get(f'mpbroker_group_lag{{group="departures",{place}}}') == 6

    wait_until(is_shown)
    now = metrics(broker)
    assert now[f"mpbroker_log_end_offset{{{place}}}"] == 10
    assert now[f"mpbroker_log_size_bytes{{{place}}}"] > 100
    lag = 'kafka_consumergroup_lag{consumergroup="departures",topic="flights"'
    assert now[lag + ',partition="0"}'] == 6
    assert now[f"kafka_topic_partition_current_offset{{{place}}}"] == 10


def test_share_groups_are_counted_with_what_they_acknowledge(broker):
    begin_at_the_start(broker.bootstrap, "jobs")
    kinds = AcknowledgeType
    with ShareConsumer(
        bootstrap_servers=broker.bootstrap,
        group_id="jobs",
        share_acknowledgement_mode="explicit",
        share_acquire_mode="record_limit",
        max_poll_records=6,
    ) as consumer:
        consumer.subscribe(["flights"])
        records = poll(consumer, 6)
        for record, kind in zip(
            records,
            [kinds.ACCEPT] * 3 + [kinds.REJECT] + [kinds.RELEASE] * 2,
            strict=True,
        ):
            consumer.acknowledge(record, kind)
        assert errors(consumer.commit_sync()) == [None]
        state = "kafka_server_group_coordinator_metrics_share_group_count"
        wait_until(lambda: metrics(broker).get(f'{state}{{state="Stable"}}') == 1)
        # Counted once a second: the group may have been stable before the first fetch.
        sessions = "kafka_server_sharesessioncache_sharesessionscount"
        wait_until(lambda: metrics(broker)[sessions] == 1)
        now = metrics(broker)
        protocol = "kafka_server_group_coordinator_metrics_group_count"
        assert now[f'{protocol}{{protocol="share"}}'] == 1
    name = "kafka_server_sharegroupmetrics_recordacknowledgements_total"
    assert {
        kind: now[f'{name}{{ackType="{kind}"}}']
        for kind in ("Accept", "Release", "Reject", "Renew")
    } == {"Accept": 3, "Release": 2, "Reject": 1, "Renew": 0}
    topics = "kafka_server_brokertopicmetrics_total"
    assert now[topics + "sharefetchrequests_total"] >= 1
    assert now[topics + "shareacknowledgementrequests_total"] >= 1
    wait_until(lambda: metrics(broker).get(f'{state}{{state="Empty"}}') == 1)


PLACE = '{topic="flights",partition="0"}'
GROUP = '{consumergroup="departures",topic="flights"}'


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # kafka_exporter's dashboard
        ("kafka_brokers", 1),
        ('kafka_topic_partitions{topic="flights"}', 1),
        ("kafka_topic_partition_current_offset" + PLACE, 10),
        ("kafka_topic_partition_oldest_offset" + PLACE, 0),
        ("kafka_topic_partition_leader" + PLACE, 1),
        ("kafka_topic_partition_replicas" + PLACE, 1),
        ("kafka_topic_partition_in_sync_replica" + PLACE, 1),
        ("kafka_topic_partition_leader_is_preferred" + PLACE, 1),
        ("kafka_topic_partition_under_replicated_partition" + PLACE, 0),
        ("kafka_consumergroup_current_offset_sum" + GROUP, 4),
        ("kafka_consumergroup_lag_sum" + GROUP, 6),
        # those over the JMX exporter
        ('kafka_server_brokertopicmetrics_messagesin_total{topic="flights"}', 10),
        ("kafka_log_log_logendoffset" + PLACE, 10),
        ("kafka_log_log_logstartoffset" + PLACE, 0),
        ("kafka_controller_kafkacontroller_activecontrollercount", 1),
        ("kafka_controller_kafkacontroller_offlinepartitionscount", 0),
        ("kafka_coordinator_group_groupmetadatamanager_numgroupsdead", 0),
        ("kafka_server_brokertopicmetrics_failedfetchrequests_total", 0),
        ("kafka_server_replicamanager_underreplicatedpartitions", 0),
        ("kafka_server_replicamanager_underminisrpartitioncount", 0),
        ("kafka_server_replicamanager_offlinereplicacount", 0),
    ],
)
def test_dashboards_for_kafka_find_what_they_ask_for(broker, name, expected):
    assert wait_until(lambda: metrics(broker).get(name, -1) == expected)


def test_dashboards_for_kafka_find_sums_and_shares(broker):
    idle = {
        "kafka_network_socketserver_networkprocessoravgidle_percent",
        "kafka_server_kafkarequesthandlerpool_requesthandleravgidle_percent",
    }
    now = wait_until(lambda: (found := metrics(broker)).keys() >= idle and found)
    assert all(0 <= now[name] <= 1 for name in idle)
    partitions = now["kafka_server_replicamanager_partitioncount"]
    assert partitions == now["kafka_server_replicamanager_leadercount"]
    assert partitions >= now['kafka_topic_partitions{topic="__consumer_offsets"}']
    assert now["kafka_network_requestchannel_responsequeuesize"] >= 0
    assert now["kafka_network_socketserver_memorypoolavailable"] > 100_000_000
    assert now["kafka_network_socketserver_memorypoolused"] >= 0


def test_requests_have_percentiles_under_kafkas_names(broker):
    now = metrics(broker)
    produces = now["kafka_server_brokertopicmetrics_totalproducerequests_total"]
    assert produces >= 1
    name = "kafka_network_requestmetrics_totaltimems"
    assert now[name + '_count{request="Produce"}'] == produces
    median, high = (
        now[f'{name}{{request="Produce",quantile="{quantile}"}}']
        for quantile in ("0.50", "0.99")
    )
    assert 0 < median <= high
    empty = "kafka_coordinator_group_groupmetadatamanager_numgroupsempty"
    wait_until(lambda: metrics(broker)[empty] >= 1)
    blocked = "kafka_network_acceptor_acceptorblocked_percent"
    wait_until(lambda: metrics(broker).get(blocked + '{listener="PLAINTEXT"}') == 0)


def test_fetches_that_wait_are_in_their_purgatory(broker):
    name = "kafka_server_delayedoperationpurgatory_purgatorysize"
    waiting = name + '{delayedOperation="Fetch"}'
    client = Consumer(
        {
            "bootstrap.servers": broker.bootstrap,
            "group.id": "waits",
            "fetch.wait.max.ms": 10_000,
        }
    )
    client.assign([TopicPartition("flights", 0, 10)])
    client.poll(0)
    now = wait_until(lambda: (found := metrics(broker)).get(waiting, 0) >= 1 and found)
    assert now[name + '{delayedOperation="Produce"}'] == 0
    client.close()
    wait_until(lambda: metrics(broker)[waiting] == 0)


def test_bytes_are_shown_by_topic_and_of_all_under_kafkas_names_too(broker):
    client = Consumer({"bootstrap.servers": broker.bootstrap, "group.id": "reader"})
    client.assign([TopicPartition("flights", 0, 0)])
    records = wait_until(lambda: client.consume(1, 1))
    client.close()
    assert records[0].error() is None
    # A page may be half a second old.
    fetched = 'mpbroker_topic_fetched_bytes_total{topic="flights"}'
    now = wait_until(lambda: (found := metrics(broker))[fetched] and found)
    for kind, name in (("produced", "bytesin"), ("fetched", "bytesout")):
        ours = now[f'mpbroker_topic_{kind}_bytes_total{{topic="flights"}}']
        assert now[f"mpbroker_{kind}_bytes_total"] >= ours > 100
        theirs = f"kafka_server_brokertopicmetrics_{name}_total"
        assert now[f'{theirs}{{topic="flights"}}'] == ours
        assert now[theirs] >= ours
    theirs = "kafka_network_requestmetrics_requests_total"
    fetches, consumers = (
        sum(v for k, v in now.items() if k.startswith(f'{theirs}{{request="{request}"'))
        for request in ("Fetch", "FetchConsumer")
    )
    assert fetches == consumers > 0
    in_file = now['mpbroker_log_size_bytes{topic="flights",partition="0"}']
    assert now['mpbroker_topic_produced_bytes_total{topic="flights"}'] == in_file


def test_syncs_are_counted_of_whoever_makes_them(broker):
    def syncs():  # of the records, and of what the group has committed
        now = metrics(broker)
        return [
            now[f'mpbroker_log_syncs_total{{handler="{name}"}}']
            for name in ("0", "coordinator")
        ]

    wait_until(lambda: all(syncs()))


def test_processors_are_shown_as_kafkas_selectors(broker):
    prefix = "kafka_server_socket_server_metrics_"
    labels = '{listener="PLAINTEXT",network_processor="0"}'
    # Shares and rates are there after two looks.
    ratio = f"{prefix}io_ratio{labels}"
    now = wait_until(lambda: ratio in (found := metrics(broker)) and found)
    waiting, working = (
        now[f"{prefix}{name}_ratio{labels}"] for name in ("io_wait", "io")
    )
    assert 0 <= waiting <= 1 and waiting + working == pytest.approx(1)
    assert now[f"{prefix}select_total{labels}"] > 1
    assert now[f"{prefix}connection_creation_total{labels}"] > 1
    assert now[f"{prefix}request_size_avg{labels}"] > 8
    assert now[f"{prefix}select_rate{labels}"] >= 0
    assert now[f"{prefix}reauthentication_latency_max{labels}"] == 0
    polls = 'mpbroker_processor_polls_total{processor="0"}'
    assert now[polls] >= 1
    assert now['mpbroker_processor_empty_polls_total{processor="0"}'] <= now[polls]


def test_a_topic_that_is_deleted_is_shown_no_more(broker):
    producer = Producer({"bootstrap.servers": broker.bootstrap})
    producer.produce("brief", b"x", partition=0)
    assert not producer.flush(30)

    def shown():
        return {key for key in metrics(broker) if 'topic="brief"' in key}

    wait_until(lambda: "mpbroker_log_end_offset" in " ".join(shown()))
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    admin.delete_topics(["brief"])["brief"].result(60)
    wait_until(lambda: not shown())
    assert metrics(broker)['mpbroker_log_end_offset{topic="flights",partition="0"}']


def test_connections_are_shown_by_listener_and_by_software(broker):
    client = Consumer({"bootstrap.servers": broker.bootstrap, "group.id": "seen"})
    client.list_topics(timeout=60)
    now = metrics(broker)
    assert now['mpbroker_connections{listener="PLAINTEXT"}'] >= 1
    named = [key for key in now if "client_connections" in key and "librdkafka" in key]
    client.close()
    assert named or [key for key in now if "confluent-kafka-python" in key]


def test_idle_ratios_are_shares(broker):
    def ratios():
        return [v for k, v in metrics(broker).items() if k.startswith("mpbroker_idle")]

    assert all(0 <= ratio <= 1 for ratio in wait_until(ratios))


def test_promtool_and_the_official_parser_find_nothing_wrong(broker):
    _, text = get(broker)
    promtool = prometheus_tool("promtool")
    families = list(text_string_to_metric_families(text))
    assert len(families) > 30
    if promtool is None:
        pytest.skip("promtool is not installed: the official parser alone has looked")
    done = subprocess.run(
        [promtool, "check", "metrics"],
        input=text,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    # Names of other people's dashboards are as they are.
    complaints = [x for x in done.stderr.splitlines() if x.startswith("mpbroker_")]
    assert not complaints and "error while linting" not in done.stderr


def test_no_counter_runs_backwards_when_processes_die(broker):
    def counters():
        _, text = get(broker)
        types = dict(
            line.split()[2:4] for line in text.splitlines() if line.startswith("# TYPE")
        )
        now = samples(text)
        return {
            key: value
            for key, value in now.items()
            if types.get(key.partition("{")[0]) == "counter"
        }

    before = counters()
    for pid in pids_of(broker, "handler", "processor", "exporter"):
        os.kill(pid, signal.SIGKILL)
    deaths = 'mpbroker_process_deaths_total{role="exporter"}'

    def is_back():
        try:
            return (
                counters()[deaths] > before[deaths] and get(broker, "ready")[0] == 200
            )
        except OSError:
            return False

    wait_until(is_back)
    after = counters()
    assert {key for key in before if after.get(key, -1) < before[key]} == set()


def test_the_request_log_has_all_stages_of_each_request(broker):
    path = broker.config["request.log.path"]
    get(broker, "health")  # it serves, so it counts what comes after
    producer = Producer({"bootstrap.servers": broker.bootstrap, "client.id": "tower 7"})
    producer.produce("landings", b"seen")
    assert not producer.flush(30)

    def lines():
        file = Path(str(path))
        text = file.read_bytes() if file.exists() else b""
        found = [json.loads(line) for line in text.splitlines()]
        return [
            line
            for line in found
            if line.get("api") == "Produce" and line["client_id"] == "tower 7"
        ]

    line = wait_until(lines)[0]
    assert line["received_ns"] <= line["dequeued_ns"] <= line["completed_ns"]
    assert line["completed_ns"] <= line["taken_ns"] <= line["sent_ns"]
    assert line["total_ms"] > 0 and line["request_bytes"] > 20
    assert line["principal"] == "User:ANONYMOUS"
    assert line["listener"] == "PLAINTEXT"
    assert line["topic"] == "landings"
    assert line["error"] is None
    assert line["throttle_time_ms"] == 0


def test_the_request_log_says_which_partitions_grew_and_which_errors_there_were(broker):
    get(broker, "health")  # it serves, so it counts what comes after
    producer = Producer(
        {"bootstrap.servers": broker.bootstrap, "message.max.bytes": 3_000_000}
    )
    for number in range(3):
        producer.produce("arrivals", b"%d" % number, partition=0)
    assert not producer.flush(30)
    producer.produce("arrivals", b"x" * 2_000_000, partition=0)  # is refused
    assert not producer.flush(30)

    def said(kind, **wanted):
        file = Path(str(broker.config["request.log.path"]))  # the exporter's first line
        lines = file.read_text().splitlines() if file.exists() else []  # makes it
        entries = [
            each for line in map(json.loads, lines) for each in line.get(kind, [])
        ]
        return [each for each in entries if wanted.items() <= each.items()]

    wait_until(lambda: said("appended", topic="arrivals", partition=0, records=3))
    wait_until(lambda: said("errors", api="Produce", error="MESSAGE_TOO_LARGE"))
    text = Path(str(broker.config["request.log.path"])).read_text()
    lines = map(json.loads, text.splitlines())
    refused = [line for line in lines if line.get("error") == "MESSAGE_TOO_LARGE"]
    assert {(line["api"], line["topic"]) for line in refused} == {
        ("Produce", "arrivals")
    }


@pytest.mark.parametrize("pure", ["", "1"], ids=["compiled", "python"])
def test_slow_requests_have_a_log_of_their_own_beside_that_of_all(tmp_path, pure):
    everything, slow = tmp_path / "all", tmp_path / "slow"
    config = {
        "request.log.path": str(everything),
        "slow.request.log.path": str(slow),
        "slow.request.log.threshold.ms": "400",
    }

    def lines(path):
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines()]

    environ = {"MPBROKER_PURE_PYTHON": pure}
    with Broker(tmp_path / "data", config, environ=environ) as made:
        producer = Producer({"bootstrap.servers": made.bootstrap})
        producer.produce("flights", b"seen", partition=0)
        assert not producer.flush(30)
        client = Consumer(
            {
                "bootstrap.servers": made.bootstrap,
                "group.id": "waits",
                "fetch.wait.max.ms": 500,
            }
        )
        client.assign([TopicPartition("flights", 0, 1)])
        wait_until(lambda: client.poll(0.1) or lines(slow))
        client.close()
        found = wait_until(lambda: [x for x in lines(slow) if x["api"] == "Fetch"])
        assert found[0]["topic"] == "flights"
        assert min(line["total_ms"] for line in found) >= 400
        assert all(line["total_ms"] >= 400 for line in lines(slow))
        # Fast ones, too; counts lie between the lines of requests.
        wait_until(lambda: min(x.get("total_ms", 400) for x in lines(everything)) < 400)


def test_a_request_log_that_is_full_makes_way_for_the_next(tmp_path):
    path = tmp_path / "requests"
    config = {
        **METRICS,
        "request.log.path": str(path),
        "request.log.max.bytes": "1",
    }
    with Broker(tmp_path / "data", config) as made, dial(made) as sock:
        old = tmp_path / "requests.1"

        def is_moved():
            assert api_versions(sock)
            return old.exists() and "ApiVersions" in old.read_text()

        wait_until(is_moved)


def test_a_request_log_that_is_a_pipe_holds_up_no_page(tmp_path):
    pipe = tmp_path / "requests"
    os.mkfifo(pipe)
    config = {**METRICS, "request.log.path": str(pipe)}
    with Broker(tmp_path / "data", config) as made, dial(made) as sock:
        for _ in range(3):  # nobody reads what is logged of it
            assert api_versions(sock)
            assert get(made, "health")[0] == 200
        reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        found = b""

        def is_told():
            nonlocal found
            assert api_versions(sock)
            with contextlib.suppress(BlockingIOError):
                found += os.read(reader, 1 << 16)
            return b'"api":"ApiVersions"' in found

        wait_until(is_told)
        os.close(reader)


def test_health_readiness_and_paths_that_are_not_there(broker):
    assert get(broker, "health") == (200, "alive\n")
    wait_until(lambda: get(broker, "ready") == (200, "ready\n"))
    assert get(broker, "nothing")[0] == 404


def test_the_status_document_has_what_the_page_shows(broker):
    status = json.loads(get(broker, "api/status")[1])
    assert {each["role"] for each in status["processes"]} >= {"processor", "handler"}
    [topic] = [each for each in status["topics"] if each["topic"] == "flights"]
    assert topic["produced_bytes"] == topic["bytes"] > 0 <= topic["fetched_bytes"]
    assert status["totals"]["requests"] > 0 and status["tls"] == []


def test_whoever_says_nothing_does_not_keep_others_out(broker):
    where = urlsplit(url_of(broker))
    silent = [
        socket.create_connection((where.hostname, where.port))
        for _ in range(MAX_CONNECTIONS - 1)
    ]
    try:
        silent[0].sendall(b"GET /metrics HT")
        assert get(broker, "health")[0] == 200
    finally:
        for each in silent:
            each.close()


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (b"POST / HTTP/1.1\r\n\r\n", b"405"),
        (b"nonsense\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 4000, b"431"),
        (b"\xff\x00\n\n", b"400"),
    ],
)
def test_what_is_no_request_for_us_gets_an_error(broker, sent, expected):
    where = urlsplit(url_of(broker))
    with socket.create_connection((where.hostname, where.port)) as sock:
        sock.settimeout(90)
        sock.sendall(sent)
        assert sock.recv(100).split(b" ")[1] == expected


def test_without_the_setting_there_is_no_exporter(tmp_path):
    with Broker(tmp_path / "data") as made:
        assert pids_of(made, "exporter") == [] != pids_of(made, "handler")
        assert "metrics" not in told(made)


def test_an_upgrade_keeps_the_address_and_all_counts(tmp_path):
    with Broker(tmp_path / "data", METRICS) as made:
        producer = Producer({"bootstrap.servers": made.bootstrap})
        producer.produce("flights", b"before")
        assert not producer.flush(30)
        address, before = url_of(made), pids_of(made, "exporter")
        # Names for others' dashboards are there only where they are asked for.
        assert not [key for key in metrics(made) if key.startswith("kafka_")]
        produced = 'mpbroker_requests_total{api="Produce"}'
        # Counted behind its answer, which the client has already.
        count = wait_until(lambda: metrics(made).get(produced))
        with ControlClient(str(made.data_dir / "control.sock"), 90.0) as client:
            client.request("upgrade", argv=None)
        wait_until(lambda: str(told(made).get("upgrade", "")).startswith("done"))
        assert url_of(made) == address
        # The new supervisor forks it after the processes that clients wait for.
        wait_until(lambda: pids_of(made, "exporter") not in ([], before))

        def is_back():
            try:
                return metrics(made)
            except OSError:
                return None

        assert wait_until(is_back)[produced] >= count


def test_errors_are_counted_by_api_and_code(broker):
    with socket.create_connection(broker.bootstrap.rsplit(":", 1)) as sock:
        sock.settimeout(90)
        frame = produce_request("no-such-topic", 0, b"")
        sock.sendall(len(frame).to_bytes(4, "big") + frame)
        assert sock.recv(100)
    name = 'mpbroker_request_errors_total{api="Produce",error='
    assert wait_until(
        lambda: metrics(broker).get(name + '"UNKNOWN_TOPIC_OR_PARTITION"}')
    )
