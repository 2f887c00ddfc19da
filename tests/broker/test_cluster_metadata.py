"""Brokers of one cluster have one metadata: what one changes, all of them have."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

import mpbroker
from mpbroker.base.storage_errors import CorruptLogError
from mpbroker.metadata.metadata_batches import MetadataBatches
from mpbroker.metadata.metadata_files import MetadataFiles
from mpbroker.metadata.metadata_image import MetadataRecord
from mpbroker.metadata.metadata_log import metadata_log_path
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages.create_topics import (
    CreatableTopic,
    CreatableTopicResult,
    CreateTopicsRequest,
    CreateTopicsResponse,
)
from mpbroker.protocol.messages.describe_acls import (
    DescribeAclsRequest,
    DescribeAclsResponse,
)
from mpbroker.protocol.messages.describe_cluster import (
    DescribeClusterRequest,
    DescribeClusterResponse,
)
from mpbroker.protocol.messages.describe_topic_partitions import (
    DescribeTopicPartitionsRequest,
    DescribeTopicPartitionsResponse,
    TopicRequest,
)
from mpbroker.protocol.messages.elect_leaders import (
    ElectLeadersRequest,
    ElectLeadersResponse,
    TopicPartitions,
)
from mpbroker.protocol.messages.fetch import (
    FetchPartition,
    FetchRequest,
    FetchResponse,
    FetchTopic,
)
from mpbroker.protocol.messages.list_offsets import (
    ListOffsetsPartition,
    ListOffsetsRequest,
    ListOffsetsResponse,
    ListOffsetsTopic,
)
from mpbroker.protocol.messages.metadata import (
    MetadataRequest,
    MetadataRequestTopic,
    MetadataResponse,
)
from mpbroker.protocol.messages.produce import (
    PartitionProduceData,
    ProduceRequest,
    ProduceResponse,
    TopicProduceData,
)
from mpbroker.protocol.records.record_batch import RecordBatchBuilder
from tests.broker.load import ask, dial, kill, metadata_of
from tests.broker.test_cluster_node import (  # noqa: F401 - fixtures
    keepers,
    make_cluster,
    read_nodes_of,
    settings,
    store,
)
from tests.cluster.conftest import (  # noqa: F401 - fixtures
    cluster_template,
    empty_url,
    execute,
    own_server,
    shared_server,
)
from tests.cluster.test_metadata_replica import in_database
from tests.supervisor.upgrade.test_upgrade import newcomer, upgrade, wait_for_end
from tests.support.broker import Broker, BrokerFailedError
from tests.support.children import wait_until
from tests.support.dead_disk import kill_disk, revive_disk
from tests.support.patience import LONGEST_S
from tests.support.ports import reusable_port

CREATED = (ErrorCode.NONE, ErrorCode.TOPIC_ALREADY_EXISTS)
STANDARD_AUTHORIZER = "org.apache.kafka.metadata.authorizer.StandardAuthorizer"
ALL_BROKERS = mpbroker.ConfigResource(mpbroker.ConfigResourceType.BROKER, "")
ACL = mpbroker.AclBinding(
    mpbroker.ResourceType.TOPIC,
    "orders",
    mpbroker.PatternType.LITERAL,
    "User:alice",
    "*",
    mpbroker.AclOperation.READ,
    mpbroker.AclPermissionType.ALLOW,
)
FORGET_NEWEST = (
    "DELETE FROM mpbroker.migration"
    " WHERE version = (SELECT max(version) FROM mpbroker.migration)"
)
NOT_LEADER = ErrorCode.NOT_LEADER_OR_FOLLOWER


@pytest.fixture
def node(tmp_path, settings, request):  # noqa: F811
    """Return a function that starts a node of the cluster."""
    with contextlib.ExitStack() as running:

        def start(number: int, more: dict[str, str] | None = None) -> Broker:
            own = {**settings, "node.id": str(number), **(more or {})}
            return running.enter_context(Broker(tmp_path / f"node{number}", own))

        yield start


def admin(broker: Broker) -> AdminClient:
    return AdminClient({"bootstrap.servers": broker.bootstrap})


def create(broker: Broker, name: str, **options: object) -> None:
    client = admin(broker)  # its end ends what it was asked for
    (done,) = client.create_topics([NewTopic(name, **options)]).values()
    done.result(LONGEST_S)


def topics(broker: Broker) -> dict[str, int]:
    """Return the topics that a broker tells of, and their partitions."""
    return {str(each.name): len(each.partitions) for each in metadata_of(broker).topics}


def test_each_node_tells_of_all_and_leads_the_topics_that_it_has_made(node):
    first = node(1, {"broker.rack": "a"})
    second = node(2, {"broker.rack": "b"})
    brokers = [first, second]
    create(first, "orders", num_partitions=2)
    create(second, "payments", num_partitions=1)
    places = {1: first.bootstrap, 2: second.bootstrap}
    for each in brokers:
        wait_until(lambda each=each: nodes(each) == places)
        wait_until(lambda each=each: set(leaders(each)) == {"orders", "payments"})
        assert leaders(each) == {"orders": {1}, "payments": {2}}
        with dial(each) as sock:
            request = DescribeClusterRequest().encode(0)
            answer = ask(sock, ApiKey.DESCRIBE_CLUSTER, 0, request)
            told = DescribeClusterResponse.decode(0, answer).brokers
        assert {n.broker_id: n.rack for n in told} == {1: "a", 2: "b"}
        assert {n.broker_id: f"{n.host}:{n.port}" for n in told} == places


def test_a_client_of_one_node_writes_and_reads_topics_of_the_other(node):
    first, second = node(1), node(2)
    create(first, "orders", num_partitions=2)
    wait_until(lambda: "orders" in topics(second))
    wait_until(lambda: len(nodes(second)) == 2)
    producer = Producer({"bootstrap.servers": second.bootstrap})
    for number in range(10):
        producer.produce("orders", str(number), partition=number % 2)
    assert producer.flush(LONGEST_S) == 0
    consumer = Consumer({"bootstrap.servers": second.bootstrap, "group.id": "none"})
    consumer.assign([TopicPartition("orders", index, 0) for index in (0, 1)])
    read = consumer.consume(10, LONGEST_S)
    assert sorted(int(message.value()) for message in read) == list(range(10))
    consumer.close()
    # It is on the node that has made the topic, and there only.
    assert (first.data_dir / "orders-0").exists()
    assert not list(second.data_dir.glob("orders-*"))
    # A client that does not ask for the leader is told that this is not it.
    with dial(second) as sock:
        asked = ListOffsetsTopic(
            name="orders",
            partitions=[ListOffsetsPartition(partition_index=0, timestamp=-1)],
        )
        request = ListOffsetsRequest(replica_id=-1, topics=[asked])
        answer = ask(sock, ApiKey.LIST_OFFSETS, 5, request.encode(5))
        (topic,) = ListOffsetsResponse.decode(5, answer).topics
        assert [each.error_code for each in topic.partitions] == [NOT_LEADER]
        sent = ProduceRequest(
            acks=1,
            timeout_ms=1000,
            topic_data=[
                TopicProduceData(
                    name="orders",
                    partition_data=[PartitionProduceData(index=0, records=record())],
                )
            ],
        )
        partition = FetchPartition(
            partition=0, fetch_offset=0, partition_max_bytes=1000
        )
        fetch = FetchRequest(
            max_wait_ms=0,
            min_bytes=0,
            isolation_level=0,
            session_epoch=-1,
            topics=[FetchTopic(topic="orders", partitions=[partition])],
        )
        answer = ask(sock, ApiKey.FETCH, 11, fetch.encode(11))
        (fetched,) = FetchResponse.decode(11, answer).responses
        assert [each.error_code for each in fetched.partitions] == [NOT_LEADER]
        answer = ask(sock, ApiKey.PRODUCE, 8, sent.encode(8))
        (produced,) = ProduceResponse.decode(8, answer).responses
        assert [e.error_code for e in produced.partition_responses] == [NOT_LEADER]
    assert not list(second.data_dir.glob("orders-*"))


def test_topics_of_a_node_that_is_gone_have_no_leader_until_it_is_back(node):
    first, second = node(1), node(2)
    create(first, "orders", num_partitions=1)
    wait_until(lambda: leaders(second).get("orders") == {1})
    first.stop()
    wait_until(lambda: leaders(second).get("orders") == {-1})
    assert nodes(second) == {2: second.bootstrap}
    first.start()
    wait_until(lambda: leaders(second).get("orders") == {1})


def test_partitions_of_a_lost_directory_have_no_leader_at_any_node(node, tmp_path):
    other = tmp_path / "other"
    first = node(1, {"log.dirs": f"{tmp_path}/node1,{other}"})
    second = node(2)
    create(first, "orders", num_partitions=4)
    producer = Producer({"bootstrap.servers": first.bootstrap})
    for number in range(4):  # which makes the partitions' directories
        producer.produce("orders", b"x", partition=number)
    assert producer.flush(LONGEST_S) == 0
    lost = {int(path.name[-1]) for path in other.glob("orders-*")}
    assert 0 < len(lost) < 4
    wait_until(lambda: without_leader(second, "orders") == set())
    kill_disk(other)
    for each in (first, second):
        wait_until(lambda each=each: without_leader(each, "orders") == lost)
    first.stop()
    wait_until(lambda: without_leader(second, "orders") == {0, 1, 2, 3})
    first.start()
    for each in (first, second):
        wait_until(lambda each=each: without_leader(each, "orders") == lost)
    create(first, "payments", num_partitions=4)  # all in the other directory
    wait_until(lambda: "payments" in topics(second))
    assert without_leader(second, "payments") == set()
    first.stop()
    revive_disk(other)
    first.start()
    wait_until(lambda: without_leader(second, "orders") == set())


def without_leader(broker: Broker, topic: str) -> set[int]:
    """Return the topic's partitions that have no leader; other APIs say the same."""
    with dial(broker) as sock:
        request = MetadataRequest(topics=[MetadataRequestTopic(name=topic)])
        answer = ask(sock, ApiKey.METADATA, 8, request.encode(8))
        (found,) = MetadataResponse.decode(8, answer).topics
        rows = {each.partition_index: each for each in found.partitions}
        codes = {number: each.error_code for number, each in rows.items()}
        offline = {number for number, each in rows.items() if each.offline_replicas}
        asked = DescribeTopicPartitionsRequest(topics=[TopicRequest(name=topic)])
        answer = ask(sock, ApiKey.DESCRIBE_TOPIC_PARTITIONS, 0, asked.encode(0))
        (told,) = DescribeTopicPartitionsResponse.decode(0, answer).topics
        elect = ElectLeadersRequest(
            election_type=0,
            topic_partitions=[TopicPartitions(topic=topic, partitions=[*rows])],
            timeout_ms=10_000,
        )
        answer = ask(sock, ApiKey.ELECT_LEADERS, 2, elect.encode(2))
        (elected,) = ElectLeadersResponse.decode(2, answer).replica_election_results
    no_leader, not_needed = (
        ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE,
        ErrorCode.ELECTION_NOT_NEEDED,
    )
    results = {each.partition_id: each.error_code for each in elected.partition_result}
    described = {each.partition_index: each.leader_id for each in told.partitions}
    found_without = {number for number, each in rows.items() if each.leader_id == -1}
    seen = [
        found_without,
        offline,
        {n for n, code in codes.items() if code == ErrorCode.LEADER_NOT_AVAILABLE},
        {number for number, leader in described.items() if leader == -1},
        {number for number, code in results.items() if code == no_leader},
    ]
    # Between two answers the node may have learnt of something.
    if any(each != found_without for each in seen):
        return {-1}
    assert {codes[n] for n in rows.keys() - found_without} <= {ErrorCode.NONE}
    assert {results[n] for n in rows.keys() - found_without} <= {not_needed}
    return found_without


def test_a_node_that_was_away_has_the_changes_in_its_first_answers(node):
    port = reusable_port()
    security = {
        "authorizer.class.name": STANDARD_AUTHORIZER,
        "super.users": "User:ANONYMOUS",
    }
    first = node(1, security)
    second = node(2, {"listeners": f"PLAINTEXT://127.0.0.1:{port}", **security})
    for name in ("orders", "gone"):
        create(second, name, num_partitions=1)
    with mpbroker.AdminClient(bootstrap_servers=second.bootstrap) as client:
        client.create_acls([ACL])
    wait_until(lambda: len(topics(first)) == 2)
    second.stop()
    create(first, "made", num_partitions=1)
    with mpbroker.AdminClient(bootstrap_servers=first.bootstrap) as client:
        client.delete_topic("gone")
        client.create_partitions("orders", 2)
        client.delete_acls(mpbroker.AclFilter())
        client.create_acls([ACL._replace(resource_name="made")])
    with ThreadPoolExecutor() as threads:
        answers = threads.submit(first_answers, port)
        second.start()  # not in a thread: it would die with that
        told, acls = answers.result(LONGEST_S)
    counts = {str(each.name): len(each.partitions) for each in told.topics}
    assert counts == {"orders": 2, "made": 1}
    assert [each.resource_name for each in acls.resources] == ["made"]
    wait_until(lambda: not list(second.data_dir.glob("gone-*")))
    producer = Producer({"bootstrap.servers": second.bootstrap})
    producer.produce("orders", b"x", partition=1)
    assert producer.flush(LONGEST_S) == 0


def first_answers(port: int) -> tuple[MetadataResponse, DescribeAclsResponse]:
    """Ask a broker for topics and ACLs when its port accepts: before it serves."""

    def connected() -> socket.socket | None:
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection(("127.0.0.1", port), LONGEST_S)
        return None

    any_acl = DescribeAclsRequest(
        resource_type_filter=mpbroker.ResourceType.ANY,
        resource_name_filter=None,
        pattern_type_filter=mpbroker.PatternType.ANY,
        principal_filter=None,
        host_filter=None,
        operation=mpbroker.AclOperation.ANY,
        permission_type=mpbroker.AclPermissionType.ANY,
    )
    with wait_until(connected) as sock:
        asked = MetadataRequest(topics=None).encode(8)
        topics = MetadataResponse.decode(8, ask(sock, ApiKey.METADATA, 8, asked))
        answer = ask(sock, ApiKey.DESCRIBE_ACLS, 1, any_acl.encode(1))
        return topics, DescribeAclsResponse.decode(1, answer)


def test_without_the_database_changes_are_refused_and_the_rest_is_served(
    own_server,  # noqa: F811
    store,  # noqa: F811
    tmp_path,
):
    url = own_server.url("postgres")
    make_cluster(url, store)
    own = {
        "cluster.database.url": url,
        "diskless.storage.url": store,
        "num.io.threads": "1",
    }
    with Broker(tmp_path / "node", own) as broker:
        create(broker, "before", num_partitions=1)
        own_server.stop()
        with dial(broker) as sock:
            # The first one finds out that the database is away; then all know.
            assert create_code(sock, "without") == ErrorCode.REQUEST_TIMED_OUT
            refused = creation(sock, "without")
        assert refused.error_code == ErrorCode.REQUEST_TIMED_OUT
        assert refused.error_message.endswith("database gives no answer; try again")
        producer = Producer({"bootstrap.servers": broker.bootstrap})
        producer.produce("before", b"served")
        assert producer.flush(LONGEST_S) == 0
        assert topics(broker) == {"before": 1}
        (keeper,) = keepers(broker)
        os.kill(keeper, signal.SIGKILL)
        wait_until(lambda: keepers(broker) not in ([], [keeper]))
        with dial(broker) as sock:
            assert create_code(sock, "without") == ErrorCode.REQUEST_TIMED_OUT
            own_server.start()
            wait_until(lambda: create_code(sock, "again") in CREATED)
        assert topics(broker).keys() >= {"before", "again"}
        wait_until(lambda: read_nodes_of(url)[0].is_live)


def test_settings_users_acls_and_quotas_are_those_of_all_nodes(node, settings):  # noqa: F811
    security = {
        "authorizer.class.name": STANDARD_AUTHORIZER,
        "super.users": "User:ANONYMOUS",
    }
    first, second = node(1, security), node(2, security)
    create(first, "orders", num_partitions=1)
    create(first, "gone", num_partitions=1)
    wait_until(lambda: len(topics(second)) == 2)
    with mpbroker.AdminClient(bootstrap_servers=second.bootstrap) as client:
        orders = mpbroker.ConfigResource(mpbroker.ConfigResourceType.TOPIC, "orders")
        client.alter_configs(orders, {"retention.ms": "60000"})
        client.alter_configs(ALL_BROKERS, {"log.retention.ms": "70000"})
        client.set_scram_password("alice", "SCRAM-SHA-256", "secret")
        client.alter_quotas({"user": "alice"}, {"producer_byte_rate": 1000.0})
        client.create_acls([ACL])
        client.create_partitions("orders", 2)
        client.delete_topic("gone")
    url = settings["cluster.database.url"]
    for each in (first, second):
        wait_until(lambda each=each: copied(each) == in_database(url))
        assert topics(each) == {"orders": 2}
        assert leaders(each) == {"orders": {1}}  # more partitions, where the others are
    kinds = {each["type"] for each in in_database(url)}
    assert kinds >= {
        "ConfigRecord",
        "UserScramCredentialRecord",
        "ClientQuotaRecord",
        "AccessControlEntryRecord",
        "RemoveTopicRecord",
    }
    # Its node removes the topic's directory, although another one was asked.
    wait_until(lambda: not (first.data_dir / "gone-0").exists())


def test_nodes_that_are_killed_while_topics_are_created_have_the_same(node, settings):  # noqa: F811
    first, second = brokers = node(1), node(2)
    url = settings["cluster.database.url"]
    made = []
    with ThreadPoolExecutor() as threads:
        for number, victim in enumerate([first, second, first]):
            names = [f"t{number}-{index}" for index in range(5)]
            other = second if victim is first else first
            work = [
                threads.submit(create_patiently, each, names[index::2])
                for index, each in enumerate(brokers)
            ]
            if number == 0:
                (keeper,) = wait_until(lambda victim=victim: keepers(victim))
                os.kill(keeper, signal.SIGKILL)
            elif number == 1:
                kill(victim, "handler")
            else:
                victim.kill()
                victim.start()
            for each in work:
                each.result(LONGEST_S)
            made += names
            told = set(made)
            wait_until(lambda other=other, told=told: topics(other).keys() >= told)
    wanted = in_database(url)
    named = [each["name"] for each in wanted if each["type"] == "TopicRecord"]
    assert sorted(named) == sorted(made)
    for each in brokers:
        wait_until(lambda each=each: copied(each) == wanted)


def test_a_node_that_is_upgraded_goes_on_as_a_node(node, settings):  # noqa: F811
    first, second = node(1), node(2)
    create(first, "before", num_partitions=1)
    upgrade(first, newcomer(first, fault="layout"))
    assert wait_for_end(first, "done", "failed").startswith("done")
    create_patiently(first, ["after"])
    url = settings["cluster.database.url"]
    wait_until(lambda: copied(first) == copied(second) == in_database(url))
    assert topics(second).keys() == {"before", "after"}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (FORGET_NEWEST, "run 'mpbroker cluster migrate'"),
        ("UPDATE mpbroker.cluster SET usable_from = 99", "upgrade mpbroker"),
    ],
)
def test_a_program_for_another_schema_does_not_take_over(
    node,
    settings,  # noqa: F811
    change,
    says,
):
    broker = node(1)
    execute(settings["cluster.database.url"], change)
    upgrade(broker, newcomer(broker))
    said = wait_for_end(broker, "done", "failed")
    assert said.startswith("failed, and nothing has changed") and says in said
    create(broker, "after", num_partitions=1)


def create_patiently(broker: Broker, names: list[str]) -> None:
    """Create topics; ask again as long as the broker or its answer is missing."""
    for name in names:
        code = -1
        while code not in CREATED:
            with contextlib.suppress(OSError, ValueError), dial(broker) as sock:
                code = create_code(sock, name)


def copied(broker: Broker) -> list[MetadataRecord]:
    """Return the records of a node's copy, without what is this node's only."""
    path = metadata_log_path(str(broker.data_dir))
    log = MetadataBatches(MetadataFiles(None, ()))
    try:
        records = log.decode(Path(path).read_bytes(), path, 0)
    except CorruptLogError:
        return []  # a batch that is being written
    for each in records:
        each.pop("row", None)
    return records


def test_a_broker_is_taken_into_a_cluster_with_its_topics(
    empty_url,  # noqa: F811
    store,  # noqa: F811
    tmp_path,
):
    one = tmp_path / "one"
    alone = Broker(one, {"node.id": "1", "num.io.threads": "1"})
    with alone:
        create(alone, "orders", num_partitions=1)
        producer = Producer({"bootstrap.servers": alone.bootstrap})
        producer.produce("orders", b"from before")
        assert producer.flush(LONGEST_S) == 0
        commit(alone, 1)
    told = ["--database", empty_url, "--storage", store, "--from-broker", str(one)]
    subprocess.run(
        [sys.executable, "-m", "mpbroker", "cluster", "init", *told],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    place = {
        "cluster.database.url": empty_url,
        "diskless.storage.url": store,
        "num.io.threads": "1",
    }
    with (
        Broker(one, {**place, "node.id": "1"}) as first,
        Broker(tmp_path / "two", {**place, "node.id": "2"}) as second,
    ):
        wait_until(lambda: leaders(second).get("orders") == {1})
        assert leaders(first)["orders"] == {1}
        consumer = Consumer({"bootstrap.servers": second.bootstrap, "group.id": "g"})
        consumer.assign([TopicPartition("orders", 0, 0)])
        (message,) = consumer.consume(1, LONGEST_S)
        assert message.value() == b"from before"
        consumer.close()
        assert committed(second) == 1
        commit(second, 2)
    with Broker(one, {**place, "node.id": "1"}) as first:
        assert committed(first) == 2  # it is not copied a second time
    # It does not go back to be a broker of its own, which would change its copy.
    with pytest.raises(BrokerFailedError, match=r"set cluster\.database\.url"):
        alone.start()


def commit(broker: Broker, offset: int) -> None:
    client = {"bootstrap.servers": broker.bootstrap, "group.id": "team"}
    consumer = Consumer(client)
    place = TopicPartition("orders", 0, offset)

    def has_committed() -> bool:
        with contextlib.suppress(KafkaException):
            (done,) = consumer.commit(offsets=[place], asynchronous=False)
            return done.error is None
        return False

    wait_until(has_committed)
    consumer.close()


def committed(broker: Broker) -> int:
    client = {"bootstrap.servers": broker.bootstrap, "group.id": "team"}
    consumer = Consumer(client)

    def told() -> list[TopicPartition]:
        with contextlib.suppress(KafkaException):
            return consumer.committed([TopicPartition("orders", 0)], LONGEST_S)
        return []

    (found,) = wait_until(told)
    consumer.close()
    return found.offset


def create_code(sock: socket.socket, name: str) -> int:
    return creation(sock, name).error_code


def creation(sock: socket.socket, name: str) -> CreatableTopicResult:
    asked = CreatableTopic(name=name, num_partitions=1, replication_factor=1)
    request = CreateTopicsRequest(topics=[asked], timeout_ms=1000)
    answer = ask(sock, ApiKey.CREATE_TOPICS, 5, request.encode(5))
    (result,) = CreateTopicsResponse.decode(5, answer).topics
    return result


def record() -> bytes:
    builder = RecordBatchBuilder()
    builder.append(0, None, b"x")
    return bytes(builder.build())


def nodes(broker: Broker) -> dict[int, str]:
    told = metadata_of(broker).brokers
    return {each.node_id: f"{each.host}:{each.port}" for each in told}


def leaders(broker: Broker) -> dict[str, set[int]]:
    return {
        str(topic.name): {partition.leader_id for partition in topic.partitions}
        for topic in metadata_of(broker).topics
    }


def test_groups_of_all_nodes_read_topics_of_all_nodes(node):
    first, second = node(1), node(2)
    create(first, "orders", num_partitions=2)
    create(second, "payments", num_partitions=2)
    for each in (first, second):
        wait_until(lambda each=each: len(nodes(each)) == 2)
    producer = Producer({"bootstrap.servers": first.bootstrap})
    for number in range(20):
        name = ("orders", "payments")[number % 2]
        producer.produce(name, str(number), partition=number // 2 % 2)
    assert producer.flush(LONGEST_S) == 0
    members = [member(each) for each in (first, second)]

    def has_read_half(consumer: Consumer) -> bool:
        consumer.consume(20, 0.1)
        ends = [each.offset for each in consumer.position(consumer.assignment())]
        return ends == [5, 5]

    wait_until(lambda: [has_read_half(each) for each in members] == [True, True])
    assigned = [
        (each.topic, each.partition) for own in members for each in own.assignment()
    ]
    assert len(set(assigned)) == 4
    for each in members:
        each.commit(asynchronous=False)
        each.close()
    # What was committed through one node is known at the other.
    other = member(second)
    committed = other.committed(
        [TopicPartition(name, n) for name in ("orders", "payments") for n in (0, 1)],
        LONGEST_S,
    )
    assert [each.offset for each in committed] == [5, 5, 5, 5]
    other.close()


def member(broker: Broker) -> Consumer:
    consumer = Consumer(
        {
            "bootstrap.servers": broker.bootstrap,
            "group.id": "all",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "partition.assignment.strategy": "roundrobin",
        }
    )
    consumer.subscribe(["orders", "payments"])
    return consumer


def test_a_transaction_takes_no_topic_of_another_node(node):
    first, second = node(1), node(2)
    create(first, "t1", num_partitions=1)
    create(second, "t2", num_partitions=1)
    for each in (first, second):
        wait_until(lambda each=each: len(nodes(each)) == len(topics(each)) == 2)
    producers = [transactional(each) for each in (first, second)]
    # One node coordinates all transactions: the one that was asked first.
    told = {}

    def is_told():
        # Its client may ask either node, and one may be half a second behind.
        told.update(leaders(first))
        return "__transaction_state" in told

    wait_until(is_told)
    (home,) = told["__transaction_state"]
    assert "__consumer_offsets" not in told  # groups are in the database
    for each in (first, second):
        wait_until(lambda each=each: {"t1", "t2"} <= topics(each).keys())
    for producer in producers:
        producer.begin_transaction()
        producer.produce(f"t{home}", b"taken")
        producer.commit_transaction(LONGEST_S)
        producer.begin_transaction()
        producer.produce(f"t{3 - home}", b"refused")
        with pytest.raises(KafkaException, match="olicy"):
            producer.commit_transaction(LONGEST_S)


def transactional(broker: Broker) -> Producer:
    producer = Producer(
        {
            "bootstrap.servers": broker.bootstrap,
            "transactional.id": broker.data_dir.name,
        }
    )
    producer.init_transactions(LONGEST_S)
    return producer
