"""Groups of a cluster: spread over its nodes, of which any may die."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from mpbroker.metadata.cluster_nodes import GROUP_SHARD_COUNT
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages.find_coordinator import (
    FindCoordinatorRequest,
    FindCoordinatorResponse,
)
from mpbroker.protocol.messages.offset_fetch import (
    OffsetFetchRequest,
    OffsetFetchResponse,
)
from mpbroker.protocol.messages.share_group_heartbeat import (
    ShareGroupHeartbeatRequest,
    ShareGroupHeartbeatResponse,
)
from tests.broker.load import ask, dial
from tests.broker.test_shared_topics import (  # noqa: F401 - a fixture
    create,
    knows,
    new_cluster,
    settings,
)
from tests.cluster.conftest import (  # noqa: F401 - fixtures
    cluster_template,
    empty_url,
    execute,
    own_server,
    shared_server,
)
from tests.compat.members import Group
from tests.exporter.asking import get
from tests.support.broker import Broker
from tests.support.children import wait_until
from tests.support.ports import reusable_port

PATIENCE_S = 60
TOPIC = "shared"
PARTITIONS = 4
# Longer than a takeover takes on a loaded machine.
SESSION_MS = 60_000
GROUPS = [f"group-{number}" for number in range(8)]


@pytest.fixture
def nodes(tmp_path, settings):  # noqa: F811
    own = {
        **settings,
        "num.io.threads": "1",
        "group.initial.rebalance.delay.ms": "0",
        "metrics.listeners": "HTTP://127.0.0.1:0",
    }
    # A node comes back where it was: clients that live on look for it there.
    brokers = [
        Broker(
            tmp_path / f"node{number}",
            {
                **own,
                "node.id": str(number),
                "listeners": f"PLAINTEXT://127.0.0.1:{reusable_port()}",
            },
        )
        for number in (1, 2, 3)
    ]
    with contextlib.ExitStack() as running:
        for each in brokers:
            running.enter_context(each)
        create(brokers[0], TOPIC, PARTITIONS)
        for each in brokers:
            wait_until(lambda each=each: knows(each, TOPIC))
        yield brokers


def bootstrap(brokers: Sequence[Broker]) -> str:
    return ",".join(each.bootstrap for each in brokers if each.is_running)


def coordinator_id(asked: Broker, group_id: str) -> int:
    """Ask a node for a group's coordinator; return its id, -1 if there is none."""
    with dial(asked) as sock:
        request = FindCoordinatorRequest(key=group_id, key_type=0).encode(2)
        answer = ask(sock, ApiKey.FIND_COORDINATOR, 2, request)
    found = FindCoordinatorResponse.decode(2, answer)
    if found.error_code == ErrorCode.COORDINATOR_NOT_AVAILABLE:
        return -1
    assert found.error_code == ErrorCode.NONE, found.error_message
    return found.node_id


def coordinator(brokers: Sequence[Broker], group_id: str) -> Broker:
    """Return the node that coordinates a group, when all nodes agree."""

    def agreed() -> int:
        told = {coordinator_id(each, group_id) for each in brokers}
        return told.pop() if len(told) == 1 else -1

    number = wait_until(lambda: max(agreed(), 0))
    return brokers[number - 1]


def owners(url: str) -> dict[int, int]:
    """Return the live node of each shard that has one."""
    rows = execute(url, "SELECT id, shards FROM mpbroker.live_nodes_v1('group')")
    return {shard: node for node, shards in rows for shard in shards}


def produce(brokers: Sequence[Broker], first: int, last: int) -> None:
    """Produce values to each partition."""
    producer = Producer({"bootstrap.servers": bootstrap(brokers)})
    for number in range(first, last):
        for partition in range(PARTITIONS):
            producer.produce(TOPIC, b"%d" % number, partition=partition)
    assert producer.flush(PATIENCE_S) == 0


def places() -> list[TopicPartition]:
    return [TopicPartition(TOPIC, number) for number in range(PARTITIONS)]


class Committed:
    """What a group has committed, which never goes back."""

    def __init__(self, brokers: Sequence[Broker], group_id: str) -> None:
        self._brokers = brokers
        self._group_id = group_id
        self.last = [-1] * PARTITIONS

    def read(self) -> list[int]:
        """Return each partition's offset; those known before if none can be told."""
        consumer = Consumer(
            {
                "bootstrap.servers": bootstrap(self._brokers),
                "group.id": self._group_id,
            }
        )
        try:
            found = consumer.committed(places(), 5)
        except KafkaException:
            return self.last  # there is no coordinator now
        finally:
            consumer.close()
        now = [max(each.offset, -1) for each in found]
        assert all(map(lambda a, b: a >= b, now, self.last)), (self.last, now)
        self.last = now
        return now


@pytest.mark.parametrize(
    ("library", "protocol"),
    [
        ("confluent-kafka", "classic"),
        ("confluent-kafka", "consumer"),
        ("aiokafka", "classic"),
    ],
)
def test_members_go_on_when_the_node_that_coordinates_them_dies(
    nodes, library, protocol
):
    committed = Committed(nodes, "team")
    with Group(bootstrap(nodes), "team", TOPIC) as group:
        members = [
            group.add(library, protocol=protocol, session_ms=SESSION_MS)
            for _ in range(2)
        ]
        group.wait_for_shares(members, PARTITIONS)
        produce(nodes, 0, 10)
        group.wait_until(lambda: committed.read() == [10] * PARTITIONS, "a commit")
        assignments = [each.assignments[-1:] for each in members]
        dead = coordinator(nodes, "team")
        dead.kill()
        live = [each for each in nodes if each is not dead]
        produce(live, 10, 20)
        group.wait_until(lambda: committed.read() == [20] * PARTITIONS, "a commit")
        everything = {number: set(range(20)) for number in range(PARTITIONS)}
        group.wait_until(lambda: group.positions() == everything, "all records")
        # The successor knows them, and their generation or epochs.
        assert [each.assignments[-1:] for each in members] == assignments
        dead.start()
        produce(nodes, 20, 30)
        group.wait_until(lambda: committed.read() == [30] * PARTITIONS, "a commit")
        for each in members:
            each.leave()
    for each in nodes:
        each.stop()
    for each in nodes:
        each.start()
    wait_until(lambda: committed.read() == [30] * PARTITIONS)


def commit(brokers: Sequence[Broker], group_id: str, offset: int) -> None:
    """Commit an offset of all partitions, as often as it takes."""
    consumer = Consumer({"bootstrap.servers": bootstrap(brokers), "group.id": group_id})

    def has_committed() -> bool:
        offsets = [TopicPartition(TOPIC, n, offset) for n in range(PARTITIONS)]
        try:
            done = consumer.commit(offsets=offsets, asynchronous=False)
        except KafkaException:
            return False
        return all(each.error is None for each in done)

    try:
        wait_until(has_committed)
    finally:
        consumer.close()


def listed(broker: Broker) -> set[str]:
    """Return the groups that a command names, which asks one node first."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "mpbroker", "group", "list"),
            *("--bootstrap-server", broker.bootstrap),
        ],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    return set(done.stdout.split()) if done.returncode == 0 else set()


def listed_by_librdkafka(broker: Broker) -> set[str]:
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    try:
        found = admin.list_consumer_groups().result(PATIENCE_S)
    except KafkaException:
        return set()
    return {each.group_id for each in found.valid}


def test_groups_are_spread_over_the_nodes_and_any_node_tells_of_all(nodes, settings):  # noqa: F811
    url = settings["cluster.database.url"]
    wait_until(lambda: sorted(_shares(url)) == [16, 17, 17])
    assert not [each for each in nodes if "__consumer_offsets" in topics_of(each)]
    for number, group_id in enumerate(GROUPS):
        commit(nodes, group_id, number)
    named = {coordinator(nodes, group_id) for group_id in GROUPS}
    assert len(named) > 1
    for each in nodes:
        wait_until(lambda each=each: listed(each) == set(GROUPS))
        wait_until(lambda each=each: listed_by_librdkafka(each) == set(GROUPS))
    # A stop gives the shards away; what was committed is there.
    nodes[0].stop()
    wait_until(lambda: sorted(_shares(url)) == [25, 25])
    for number, group_id in enumerate(GROUPS):
        committed = Committed(nodes, group_id)
        wait_until(lambda c=committed, n=number: c.read() == [n] * PARTITIONS)
    wait_until(lambda: listed(nodes[1]) == set(GROUPS))


def lags(brokers: Sequence[Broker]) -> list[tuple[str, str, int]]:
    """Return what the nodes show of groups: each group, partition and lag, sorted."""
    sample = re.compile(
        r'^mpbroker_group_lag\{group="(.*)",topic="(.*)",partition="(.*)"\} (\d+)$',
        re.MULTILINE,
    )
    found = [
        row
        for each in brokers
        if each.is_running
        for row in sample.findall(get(each)[1])
    ]
    return sorted((group, f"{topic}-{n}", int(lag)) for group, topic, n, lag in found)


def test_each_group_s_lag_is_shown_by_one_node(nodes):
    produce(nodes, 0, 10)
    for number, group_id in enumerate(GROUPS):
        commit(nodes, group_id, number)
    expected = [
        (group_id, f"{TOPIC}-{partition}", 10 - number)
        for number, group_id in enumerate(GROUPS)
        for partition in range(PARTITIONS)
    ]
    wait_until(lambda: lags(nodes) == expected)
    coordinator(nodes, GROUPS[0]).kill()
    wait_until(lambda: lags(nodes) == expected)
    commit(nodes, GROUPS[0], 10)
    for each in range(PARTITIONS):
        expected[each] = (GROUPS[0], f"{TOPIC}-{each}", 0)
    wait_until(lambda: lags(nodes) == expected)


def _shares(url: str) -> list[int]:
    numbers = list(owners(url).values())
    return [numbers.count(node) for node in sorted(set(numbers))]


def topics_of(broker: Broker) -> set[str]:
    return set(
        AdminClient({"bootstrap.servers": broker.bootstrap})
        .list_topics(timeout=PATIENCE_S)
        .topics
    )


def processes(broker: Broker, title: str) -> list[int]:
    found = []
    for each in psutil.Process(broker.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if title in " ".join(each.cmdline()):
                found.append(each.pid)
    return found


@pytest.mark.parametrize("victim", ["group-coordinator", "cluster-node"])
def test_a_killed_process_of_a_node_loses_no_commit(nodes, settings, victim):  # noqa: F811
    home = coordinator(nodes, "team")
    committed = Committed(nodes, "team")
    for number in range(3):
        commit(nodes, "team", 2 * number)
        (pid,) = wait_until(lambda: processes(home, victim))
        os.kill(pid, signal.SIGKILL)
        commit(nodes, "team", 2 * number + 1)
        wait_until(lambda n=number: committed.read() == [2 * n + 1] * PARTITIONS)
        wait_until(lambda pid=pid: processes(home, victim) not in ([], [pid]))
    url = settings["cluster.database.url"]
    wait_until(lambda: len(owners(url)) == GROUP_SHARD_COUNT)


def test_commits_wait_for_a_database_that_is_away(
    own_server,  # noqa: F811
    tmp_path,
):
    url = own_server.url("postgres")
    (tmp_path / "store").mkdir()
    given = new_cluster(url, f"file://{tmp_path / 'store'}")
    with Broker(tmp_path / "node", given) as broker:
        create(broker, TOPIC, PARTITIONS)
        commit([broker], "team", 1)
        committed = Committed([broker], "team")
        coordinators = processes(broker, "group-coordinator")
        own_server.stop()
        with ThreadPoolExecutor() as thread:
            waiting = thread.submit(commit, [broker], "team", 2)
            own_server.start()
            waiting.result(2 * PATIENCE_S)
        assert committed.read() == [2] * PARTITIONS
        # After some seconds another node might have the group.
        own_server.stop()
        wait_until(lambda: fetch_code(broker, "team") == ErrorCode.NOT_COORDINATOR)
        own_server.start()
        wait_until(lambda: committed.read() == [2] * PARTITIONS)
        commit([broker], "team", 3)
        assert committed.read() == [3] * PARTITIONS
        assert processes(broker, "group-coordinator") == coordinators


def fetch_code(broker: Broker, group_id: str) -> int:
    """Ask a node for a group's offsets; return the error code."""
    with dial(broker) as sock:
        request = OffsetFetchRequest(group_id=group_id, topics=None).encode(5)
        answer = ask(sock, ApiKey.OFFSET_FETCH, 5, request)
    return OffsetFetchResponse.decode(5, answer).error_code


def test_a_node_refuses_the_groups_of_others(nodes):
    home = coordinator(nodes, "team")
    for each in nodes:
        # Clients ask for the coordinator again. It is no error to them.
        expected = ErrorCode.NONE if each is home else ErrorCode.NOT_COORDINATOR
        wait_until(lambda each=each, code=expected: fetch_code(each, "team") == code)


def test_what_a_cluster_s_groups_cannot_do_is_refused(nodes):
    request = ShareGroupHeartbeatRequest(
        group_id="share",
        member_id="m",
        member_epoch=0,
        subscribed_topic_names=[TOPIC],
    )
    with dial(coordinator(nodes, "share")) as sock:
        answer = ask(sock, ApiKey.SHARE_GROUP_HEARTBEAT, 1, request.encode(1))
    refused = ShareGroupHeartbeatResponse.decode(1, answer)
    assert refused.error_code == ErrorCode.UNSUPPORTED_VERSION
