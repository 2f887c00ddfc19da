"""Consumer groups of confluent-kafka, kafka-python and aiokafka.

Members are processes that join, leave and die; records are those of a topic with
several partitions, and must all have come to somebody.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import pytest
from confluent_kafka import (
    Consumer,
    ConsumerGroupState,
    ConsumerGroupTopicPartitions,
    KafkaException,
    Producer,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, NewTopic

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.message import Message
from mpbroker.protocol.messages.delete_groups import DeleteGroupsRequest
from mpbroker.protocol.messages.find_coordinator import FindCoordinatorRequest
from mpbroker.protocol.messages.join_group import (
    JoinGroupRequest,
    JoinGroupRequestProtocol,
    JoinGroupResponse,
)
from mpbroker.protocol.messages.leave_group import LeaveGroupRequest, MemberIdentity
from mpbroker.protocol.messages.list_groups import ListGroupsRequest
from mpbroker.server.api_messages import response_class
from tests.bench import wire
from tests.compat.members import LIBRARIES, Group
from tests.compat.test_other_languages import needs_kafkajs
from tests.conftest import BOOTSTRAP_VARIABLE, OtherBroker
from tests.support.broker import Broker
from tests.support.children import wait_until
from tests.support.patience import LONGEST_S
from tests.support.ports import reusable_port

# Members are processes: they take seconds to start where cores are busy.

PARTITIONS = 6
CONFIG: dict[str, object] = {
    "group.initial.rebalance.delay.ms": 0,
    "group.min.session.timeout.ms": 500,
    "group.consumer.heartbeat.interval.ms": 100,
    "group.consumer.session.timeout.ms": 1500,
    "offsets.topic.num.partitions": 5,
    "num.io.threads": 2,
}
AnyBroker = Broker | OtherBroker
MakeBroker = Callable[..., Broker]

needs_our_processes = pytest.mark.skipif(
    BOOTSTRAP_VARIABLE in os.environ, reason="it kills processes of mpbroker's"
)


@pytest.fixture(scope="module")
def group_broker(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[AnyBroker]:
    """One of ours with short timeouts, or the one that is to be tested instead."""
    if bootstrap := os.environ.get(BOOTSTRAP_VARIABLE):
        yield OtherBroker(bootstrap)
        return
    with Broker(tmp_path_factory.mktemp("groups") / "data", CONFIG) as broker:
        yield broker


@pytest.fixture
def topic(group_broker: AnyBroker, topic_name: str) -> str:
    make_topic(group_broker, topic_name)
    return topic_name


@pytest.fixture
def group(group_broker: AnyBroker, topic: str) -> Iterator[Group]:
    with Group(group_broker.bootstrap, f"group-of-{topic}", topic) as made:
        yield made


def make_topic(broker: AnyBroker, name: str) -> None:
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    admin.create_topics([NewTopic(name, PARTITIONS)])[name].result()


def produce(broker: AnyBroker, topic: str, count: int) -> None:
    """So many records to each partition."""
    producer = Producer({"bootstrap.servers": broker.bootstrap, "linger.ms": 5})
    for number in range(count):
        for partition in range(PARTITIONS):
            producer.produce(topic, str(number).encode(), partition=partition)
    assert producer.flush(30) == 0


def committed(broker: AnyBroker, group_id: str, topic: str) -> dict[int, int]:
    consumer = Consumer({"bootstrap.servers": broker.bootstrap, "group.id": group_id})
    try:
        asked = [TopicPartition(topic, number) for number in range(PARTITIONS)]
        rows = consumer.committed(asked, timeout=60)
        return {row.partition: row.offset for row in rows}
    finally:
        consumer.close()


def wait_for_commits(broker: AnyBroker, group: Group, topic: str, count: int) -> None:
    """Wait until they have committed so many records of each partition.

    They say that they have read them before they commit; and if a rebalance was faster,
    or they were killed, somebody has to read once more.
    """
    wanted = dict.fromkeys(range(PARTITIONS), count)

    def are_there() -> bool:
        return committed(broker, group.group_id, topic) == wanted

    group.wait_until(are_there, f"{count} of each partition are committed")


def coordinator_of(broker: Broker) -> int:
    """The coordinator's process id; waits for one that is being started."""
    deadline = time.monotonic() + LONGEST_S
    while time.monotonic() < deadline:
        for pid in broker.processes():
            try:
                title = Path(f"/proc/{pid}/cmdline").read_bytes()
            except OSError:
                continue
            if b"group-coordinator" in title:
                return pid
        time.sleep(0.01)
    raise AssertionError(f"no coordinator among {broker.processes()}")


def has_everything(group: Group, count: int) -> Callable[[], bool]:
    wanted = {number: set(range(count)) for number in range(PARTITIONS)}
    return lambda: group.positions() == wanted


MEMBERS = [
    *((library, {}) for library in LIBRARIES),
    ("confluent-kafka", {"strategy": "cooperative-sticky"}),
    ("confluent-kafka", {"protocol": "consumer"}),
    ("confluent-kafka", {"protocol": "consumer", "strategy": "range"}),
    pytest.param("kafkajs", {}, marks=needs_kafkajs),
]


@pytest.mark.parametrize(
    ("library", "options"), MEMBERS, ids=lambda value: str(value) or "range"
)
def test_members_join_leave_and_die_and_every_record_is_read(
    group_broker: AnyBroker,
    group: Group,
    topic: str,
    library: str,
    options: dict,
) -> None:
    produce(group_broker, topic, 50)
    one = group.add(library, **options)
    group.wait_for_shares([one], PARTITIONS)
    two, three = group.add(library, **options), group.add(library, **options)
    group.wait_for_shares([one, two, three], PARTITIONS)
    two.leave()
    group.wait_for_shares([one, three], PARTITIONS)
    produce(group_broker, topic, 50)
    one.kill()
    group.wait_for_shares([three], PARTITIONS)
    group.wait_until(has_everything(group, 100), "all records are read")
    wait_for_commits(group_broker, group, topic, 100)
    three.leave()
    assert committed(group_broker, group.group_id, topic) == dict.fromkeys(
        range(PARTITIONS), 100
    )


def test_members_of_all_libraries_share_one_group(
    group_broker: AnyBroker, group: Group, topic: str
) -> None:
    members = [group.add(library) for library in LIBRARIES]
    group.wait_for_shares(members, PARTITIONS)
    produce(group_broker, topic, 30)
    group.wait_until(has_everything(group, 30), "all records are read")


@pytest.mark.parametrize("strategy", ["range", "cooperative-sticky"])
def test_members_of_both_protocols_take_over_from_each_other(
    group_broker: AnyBroker, group: Group, topic: str, strategy: str
) -> None:
    """A rolling change to the consumer protocol, and back."""
    classic = {"strategy": strategy}
    consumer = {"protocol": "consumer"}
    expected = 0
    sharing = [group.add("confluent-kafka", **classic)]
    group.wait_for_shares(sharing, PARTITIONS)
    changes = [(consumer, None), (consumer, 0), (classic, 1), (classic, 0)]
    for options, leaver in changes:
        produce(group_broker, topic, 20)
        expected += 20
        sharing.append(group.add("confluent-kafka", **options))
        group.wait_for_shares(sharing, PARTITIONS)
        if leaver is not None:
            sharing.pop(leaver).leave()
            group.wait_for_shares(sharing, PARTITIONS)
        done = has_everything(group, expected)
        group.wait_until(done, f"all {expected} records of each partition")
    wait_for_commits(group_broker, group, topic, expected)
    for member in sharing:
        member.leave()
    assert committed(group_broker, group.group_id, topic) == dict.fromkeys(
        range(PARTITIONS), expected
    )


@needs_our_processes
@pytest.mark.parametrize("first", ["classic", "consumer"])
def test_members_of_both_protocols_take_over_from_the_dead(
    group_broker: Broker, group: Group, topic: str, first: str
) -> None:
    kinds = [{}, {"protocol": "consumer"}]
    if first == "consumer":
        kinds.reverse()
    produce(group_broker, topic, 20)
    one = group.add("confluent-kafka", **kinds[0])
    group.wait_for_shares([one], PARTITIONS)
    two = group.add("confluent-kafka", **kinds[1])
    group.wait_for_shares([one, two], PARTITIONS)
    one.kill()
    os.kill(coordinator_of(group_broker), signal.SIGKILL)
    group.wait_for_shares([two], PARTITIONS)
    produce(group_broker, topic, 20)
    group.wait_until(has_everything(group, 40), "all records are read")
    three = group.add("confluent-kafka", **kinds[0])
    group.wait_for_shares([two, three], PARTITIONS)
    two.leave()
    group.wait_for_shares([three], PARTITIONS)
    wait_for_commits(group_broker, group, topic, 40)
    three.leave()
    assert committed(group_broker, group.group_id, topic) == dict.fromkeys(
        range(PARTITIONS), 40
    )


@pytest.mark.parametrize("library", ["confluent-kafka", "aiokafka"])
def test_a_static_member_that_comes_back_disturbs_nobody(
    group: Group, library: str
) -> None:
    one = group.add(library, instance="one", session_ms=60_000)
    two = group.add(library, instance="two", session_ms=60_000)
    group.wait_for_shares([one, two], PARTITIONS)
    share, changes = two.assigned, len(one.assignments)
    two.kill()
    again = group.add(library, instance="two", session_ms=60_000)
    group.wait_until(lambda: again.assigned == share, "the same share again")
    assert len(one.assignments) == changes


@needs_our_processes
@pytest.mark.parametrize(
    "library",
    [
        "confluent-kafka",
        "kafka-python",
        pytest.param("kafkajs", marks=needs_kafkajs),
    ],
)
def test_a_group_goes_on_when_the_coordinator_is_killed_under_load(
    group_broker: Broker, group: Group, topic: str, library: str
) -> None:
    members = [group.add(library), group.add(library)]
    group.wait_for_shares(members, PARTITIONS)
    for round_number in range(1, 4):
        produce(group_broker, topic, 20)
        os.kill(coordinator_of(group_broker), signal.SIGKILL)
        done = has_everything(group, 20 * round_number)
        group.wait_until(done, f"all records of round {round_number}")
    group.wait_for_shares(members, PARTITIONS)
    wait_for_commits(group_broker, group, topic, 60)
    for member in members:
        member.leave()
    assert committed(group_broker, group.group_id, topic) == dict.fromkeys(
        range(PARTITIONS), 60
    )


@needs_our_processes
def test_who_waits_for_a_group_or_its_coordinator_slows_no_produce_and_no_fetch(
    group_broker: Broker, group: Group, topic: str
) -> None:
    """The coordinator is stopped, with members in the middle of a rebalance."""
    produce(group_broker, topic, 5)
    group.wait_for_shares([group.add("confluent-kafka")], PARTITIONS)
    pid = coordinator_of(group_broker)
    # Not while it works: it might hold a lock that others need, and would be replaced.
    wait_until(lambda: b") S " in Path(f"/proc/{pid}/stat").read_bytes())
    os.kill(pid, signal.SIGSTOP)
    try:
        group.add("confluent-kafka")
        group.add("aiokafka")
        produce(group_broker, topic, 20)
        consumer = Consumer(
            {"bootstrap.servers": group_broker.bootstrap, "group.id": "unused"}
        )
        consumer.assign([TopicPartition(topic, 0, 0)])
        found = []
        while len(found) < 25:
            found += [m for m in consumer.consume(25, 10) if m.error() is None]
        consumer.close()
    finally:
        with suppress(ProcessLookupError):  # replaced: the supervisor looks for such
            os.kill(pid, signal.SIGCONT)
    group.wait_for_shares(group.members, PARTITIONS)
    group.wait_until(has_everything(group, 25), "all records are read")


def test_offsets_and_groups_outlive_the_whole_broker(
    make_broker: MakeBroker, topic_name: str
) -> None:
    broker = make_broker(
        {**CONFIG, "listeners": f"PLAINTEXT://127.0.0.1:{reusable_port()}"}
    )
    make_topic(broker, topic_name)
    produce(broker, topic_name, 10)
    with Group(broker.bootstrap, "g", topic_name) as group:
        members = [group.add("confluent-kafka"), group.add("kafka-python")]
        group.wait_for_shares(members, PARTITIONS)
        group.wait_until(has_everything(group, 10), "all records are read")
        wait_for_commits(broker, group, topic_name, 10)
        broker.kill()
        broker.start()
        assert committed(broker, "g", topic_name) == dict.fromkeys(
            range(PARTITIONS), 10
        )
        produce(broker, topic_name, 10)
        group.wait_until(has_everything(group, 20), "the members go on")


def test_a_member_subscribes_by_a_pattern_in_the_syntax_of_re2(
    group_broker: AnyBroker, topic: str
) -> None:
    names = "|".join(f"a-name-of-24-letters-{n:03d}" for n in range(40))
    config = {
        "bootstrap.servers": group_broker.bootstrap,
        "group.id": f"group-of-{topic}",
        "group.protocol": "consumer",
    }
    consumer = Consumer(config)
    try:
        # The ^ makes librdkafka send it to the broker as a pattern.
        consumer.subscribe([rf"^{names}|\Q{topic}\E\b"])

        def has_all() -> bool:
            message = consumer.poll(0.1)
            assert message is None or message.error() is None
            found = {(row.topic, row.partition) for row in consumer.assignment()}
            return found == {(topic, number) for number in range(PARTITIONS)}

        wait_until(has_all)
    finally:
        consumer.close()


def test_an_admin_sees_changes_and_deletes_groups(
    group_broker: AnyBroker, group: Group, topic: str
) -> None:
    admin = AdminClient({"bootstrap.servers": group_broker.bootstrap})
    group_id = group.group_id
    produce(group_broker, topic, 5)
    members = [group.add("confluent-kafka", session_ms=60_000) for _ in range(2)]
    group.wait_for_shares(members, PARTITIONS)
    wait_for_commits(group_broker, group, topic, 5)

    described = admin.describe_consumer_groups([group_id])[group_id].result()
    assert described.state is ConsumerGroupState.STABLE
    assert described.partition_assignor == "range"
    shares = [
        {row.partition for row in member.assignment.topic_partitions}
        for member in described.members
    ]
    assert sorted(map(len, shares)) == [3, 3]
    stable = admin.list_consumer_groups(states={ConsumerGroupState.STABLE}).result()
    assert group_id in {row.group_id for row in stable.valid}
    empty = admin.list_consumer_groups(states={ConsumerGroupState.EMPTY}).result()
    assert group_id not in {row.group_id for row in empty.valid}

    with pytest.raises(KafkaException, match="NON_EMPTY_GROUP"):
        admin.delete_consumer_groups([group_id])[group_id].result()
    for member in members:
        member.leave()

    asked = [ConsumerGroupTopicPartitions(group_id, [TopicPartition(topic, 0, 3)])]
    altered = admin.alter_consumer_group_offsets(asked)[group_id].result()
    assert altered.topic_partitions[0].error is None
    everything = [ConsumerGroupTopicPartitions(group_id)]
    listed = admin.list_consumer_group_offsets(everything)[group_id].result()
    offsets = {row.partition: row.offset for row in listed.topic_partitions}
    assert offsets == {0: 3, **dict.fromkeys(range(1, PARTITIONS), 5)}
    admin.delete_consumer_groups([group_id])[group_id].result()
    assert set(committed(group_broker, group_id, topic).values()) == {-1001}


def test_kafka_pythons_admin_sees_the_same(
    group_broker: AnyBroker, group: Group, topic: str
) -> None:
    from kafka import KafkaAdminClient

    produce(group_broker, topic, 5)
    member = group.add("kafka-python", session_ms=60_000)
    wait_for_commits(group_broker, group, topic, 5)
    admin = KafkaAdminClient(bootstrap_servers=group_broker.bootstrap)
    try:
        found = admin.describe_groups([group.group_id])
        assert group.group_id in str(found)
        assert "Stable" in str(found)
        assert group.group_id in str(admin.list_groups())
        member.leave()
        offsets = admin.list_group_offsets([group.group_id])
        assert str(offsets).count("offset=5") == PARTITIONS
    finally:
        admin.close()


def test_the_offsets_topic_is_read_like_any_other(
    group_broker: AnyBroker, group: Group, topic: str
) -> None:
    from kafka import KafkaConsumer

    produce(group_broker, topic, 5)
    member = group.add("aiokafka")
    wait_for_commits(group_broker, group, topic, 5)
    member.leave()
    consumer = KafkaConsumer(
        "__consumer_offsets",
        bootstrap_servers=group_broker.bootstrap,
        auto_offset_reset="earliest",
        exclude_internal_topics=False,
    )
    group_id = group.group_id.encode()
    prefix = (
        b"\0\x01"
        + len(group_id).to_bytes(2, "big")
        + group_id
        + len(topic).to_bytes(2, "big")
        + topic.encode()
    )
    found = {}

    def have_come() -> bool:
        for records in consumer.poll(timeout_ms=500).values():
            for record in records:
                if record.key.startswith(prefix):
                    # From 4.1 on, Apache Kafka writes version 4: the same, with a
                    # tagged topic id. Its tools read both.
                    assert record.value[:2] in (b"\0\x03", b"\0\x04")
                    partition = int.from_bytes(record.key[len(prefix) :], "big")
                    found[partition] = int.from_bytes(record.value[2:10], "big")
        return found == dict.fromkeys(range(PARTITIONS), 5)

    try:
        wait_until(have_come)
    finally:
        consumer.close()


class ManyGroups:
    """One connection whose client is the only member of each of its groups."""

    def __init__(self, bootstrap: str, names: list[str]) -> None:
        host, port = bootstrap.split(":")
        self._connection = wire.Connection((host, int(port)))
        self.member_ids = dict.fromkeys(names, "")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._connection.close()

    def ask(self, api_key: ApiKey, version: int, message: Message) -> Any:
        framed = wire.request((api_key, version), message.encode(version))
        payload = self._connection.ask(framed)
        return response_class(api_key).decode(version, payload[5:])

    def join(self, name: str) -> JoinGroupResponse:
        request = JoinGroupRequest(
            group_id=name,
            session_timeout_ms=300_000,
            rebalance_timeout_ms=300_000,
            member_id=self.member_ids[name],
            protocol_type="consumer",
            protocols=[JoinGroupRequestProtocol(name="range", metadata=b"m")],
        )
        answer: JoinGroupResponse = self.ask(ApiKey.JOIN_GROUP, 6, request)
        self.member_ids[name] = answer.member_id
        return answer


def test_a_thousand_groups_of_one_client_are_in_nobodys_way(
    group_broker: AnyBroker, group: Group, topic: str
) -> None:
    names = [f"{topic}-{number}" for number in range(1000)]
    member = group.add("confluent-kafka")
    group.wait_for_shares([member], PARTITIONS)  # the coordinator is there
    with ManyGroups(group_broker.bootstrap, names) as many:
        keys = FindCoordinatorRequest(key_type=0, coordinator_keys=names)
        found = many.ask(ApiKey.FIND_COORDINATOR, 4, keys).coordinators
        assert [(row.key, row.error_code, row.node_id) for row in found] == [
            (name, 0, 1) for name in names
        ]
        for name in names:
            assert many.join(name).error_code == 79  # MEMBER_ID_REQUIRED
            answer = many.join(name)
            assert (answer.error_code, answer.generation_id) == (0, 1)
        waiting = ListGroupsRequest(states_filter=["CompletingRebalance"])

        def are_listed() -> bool:
            listed = many.ask(ApiKey.LIST_GROUPS, 4, waiting).groups
            return {row.group_id for row in listed} >= set(names)

        # Apache Kafka lists what its log has: the newest groups a moment later.
        wait_until(are_listed)
        # The others go on: records, commits, and a rebalance.
        produce(group_broker, topic, 10)
        group.wait_for_shares([member, group.add("aiokafka")], PARTITIONS)
        group.wait_until(has_everything(group, 10), "all records are read")
        busy = DeleteGroupsRequest(groups_names=names)
        results = many.ask(ApiKey.DELETE_GROUPS, 2, busy).results
        assert {row.error_code for row in results} == {68}  # NON_EMPTY_GROUP
        for name in names:
            leaver = MemberIdentity(member_id=many.member_ids[name])
            leaving = LeaveGroupRequest(group_id=name, members=[leaver])
            assert many.ask(ApiKey.LEAVE_GROUP, 5, leaving).members[0].error_code == 0
        results = many.ask(ApiKey.DELETE_GROUPS, 2, busy).results
        assert {row.error_code for row in results} == {0}

        def are_gone() -> bool:
            listed = many.ask(ApiKey.LIST_GROUPS, 4, ListGroupsRequest()).groups
            return not {row.group_id for row in listed} & set(names)

        wait_until(are_gone)


def test_nobody_else_writes_to_the_offsets_topic(
    group_broker: AnyBroker, group: Group, topic: str
) -> None:
    produce(group_broker, topic, 1)
    member = group.add("confluent-kafka")
    group.wait_until(has_everything(group, 1), "all records are read")
    member.leave()
    codes = []
    producer = Producer({"bootstrap.servers": group_broker.bootstrap})
    producer.produce(
        "__consumer_offsets",
        b"lie",
        partition=0,
        on_delivery=lambda error, _: codes.append(error.name()),
    )
    assert producer.flush(30) == 0
    assert codes == ["TOPIC_EXCEPTION"]
