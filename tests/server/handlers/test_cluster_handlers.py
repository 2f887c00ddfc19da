"""Metadata and the other descriptions of the cluster, as clients see them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpbroker.base.java_hash import java_hash
from mpbroker.metadata.cluster_nodes import NodeAddress
from mpbroker.metadata.topic_names import (
    OFFSETS_TOPIC,
    SHARE_STATE_TOPIC,
    TRANSACTION_TOPIC,
)
from mpbroker.metadata.topics import MorePartitions
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.messages import describe_cluster as cluster
from mpbroker.protocol.messages import describe_log_dirs as dirs
from mpbroker.protocol.messages import describe_topic_partitions as pages
from mpbroker.protocol.messages import find_coordinator as coordinator
from mpbroker.protocol.messages import metadata
from mpbroker.server.handler_context import Volume
from mpbroker.server.handlers.describe_cluster import handle_describe_cluster
from mpbroker.server.handlers.describe_log_dirs import handle_describe_log_dirs
from mpbroker.server.handlers.describe_topic_partitions import (
    handle_describe_topic_partitions,
)
from mpbroker.server.handlers.find_coordinator import handle_find_coordinator
from mpbroker.server.handlers.metadata import handle_metadata
from tests.server.contexts import context, fake_logs
from tests.support.metadata import start

NO_ID = bytes(16)
NOT_ASKED = -2147483648


@pytest.fixture
def registry(tmp_path):
    registry = start(tmp_path)
    registry.create_topic("a", 2)
    registry.create_topic("b", 1)
    return registry


def ask(registry, version, topics, *, creates=False, **options):
    request = metadata.MetadataRequest(
        topics=None
        if topics is None
        else [
            metadata.MetadataRequestTopic(name=name, topic_id=topic_id)
            for name, topic_id in topics
        ],
        **options,
    )
    response = handle_metadata(
        request,
        context(registry, version=version, rack="r", auto_create_topics=creates),
    )
    return metadata.MetadataResponse.decode(version, response.encode(version))


def named(*names):
    return [(name, NO_ID) for name in names]


# -- Metadata -------------------------------------------------------------------------


@pytest.mark.parametrize("version", metadata.MetadataRequest.valid_versions)
def test_every_version_tells_broker_topics_and_leaders(registry, version):
    response = ask(registry, version, named("a"))
    (broker,) = response.brokers
    assert (broker.node_id, broker.host, broker.port) == (1, "host", 9092)
    (topic,) = response.topics
    assert (topic.name, topic.error_code, topic.is_internal) == ("a", 0, False)
    assert [
        (each.partition_index, each.leader_id, each.replica_nodes, each.isr_nodes)
        for each in topic.partitions
    ] == [(0, 1, [1], [1]), (1, 1, [1], [1])]
    assert all(each.offline_replicas == [] for each in topic.partitions)
    if version >= 1:
        assert (broker.rack, response.controller_id) == ("r", 1)
    if version >= 2:
        assert response.cluster_id == "cluster"
    if version >= 7:
        assert topic.partitions[0].leader_epoch == 0
    if version >= 10:
        assert topic.topic_id == registry.topic("a").topic_id


@pytest.mark.parametrize("version", metadata.MetadataRequest.valid_versions)
def test_a_partition_that_is_offline_has_no_leader_until_it_is_back(registry, version):
    offline = {("a", 1)}
    logs = fake_logs(
        is_offline=lambda topic, number: (topic.name, number) in offline,
        offline_version=lambda: len(offline),
    )
    asked = context(registry, version=version, logs=logs)
    request = metadata.MetadataRequest(
        topics=[metadata.MetadataRequestTopic(name=name) for name in ("a", "b")]
    )
    for _ in range(2):
        response = handle_metadata(request, asked)
        response = metadata.MetadataResponse.decode(version, response.encode(version))
        (first, second), (other,) = (each.partitions for each in response.topics)
        assert [first.leader_id, other.leader_id] == [1, 1]
        assert second.error_code == ErrorCode.LEADER_NOT_AVAILABLE
        assert (second.leader_id, second.leader_epoch) == (-1, -1)
        assert (second.replica_nodes, second.isr_nodes) == ([1], [])
        if version >= 5:
            assert second.offline_replicas == [1]
        assert asked.repeatable is None
    offline.clear()
    response = handle_metadata(request, asked)
    assert [each.leader_id for each in response.topics[0].partitions] == [1, 1]
    assert asked.repeatable == ()


@pytest.mark.parametrize(
    ("version", "topics", "expected"),
    [(0, [], ["a", "b"]), (1, [], []), (1, None, ["a", "b"]), (13, None, ["a", "b"])],
)
def test_all_topics_are_null_and_in_version_0_none(registry, version, topics, expected):
    response = ask(registry, version, topics)
    assert [topic.name for topic in response.topics] == expected


@pytest.mark.parametrize("version", [12, 13])
def test_topics_are_found_by_id(registry, version):
    topic_id = registry.topic("a").topic_id
    found, unknown = ask(
        registry, version, [(None, topic_id), (None, b"x" * 16)]
    ).topics
    assert (found.name, found.error_code, len(found.partitions)) == ("a", 0, 2)
    assert (unknown.name, unknown.error_code) == (None, ErrorCode.UNKNOWN_TOPIC_ID)
    assert unknown.topic_id == b"x" * 16


def test_unknown_and_illegal_names_are_told_apart(registry):
    unknown, illegal = ask(registry, 12, named("none", "sp ace")).topics
    assert unknown.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert illegal.error_code == ErrorCode.INVALID_TOPIC_EXCEPTION
    assert (unknown.name, unknown.partitions) == ("none", [])


@pytest.mark.parametrize(
    ("version", "allowed", "created"),
    [(3, False, True), (4, True, True), (4, False, False)],
)
def test_an_unknown_topic_is_created_if_broker_and_client_allow_it(
    registry, version, allowed, created
):
    options = {"allow_auto_topic_creation": allowed} if version >= 4 else {}
    response = ask(
        registry,
        version,
        named("new"),
        creates=True,
        **options,
    )
    (topic,) = response.topics
    expected = (0, 5) if created else (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, 0)
    assert (topic.error_code, len(topic.partitions)) == expected


def test_one_request_creates_10_000_partitions_with_one_write_and_no_more(
    tmp_path, monkeypatch
):
    """One that names 131,072 topics would otherwise take every partition there is."""
    registry = start(tmp_path, capacity=30_000)
    registry.create_topic("a", 2)
    commits = []
    commit = type(registry)._commit
    monkeypatch.setattr(
        type(registry),
        "_commit",
        lambda self, records: commits.append(len(records)) or commit(self, records),
    )
    names = [f"new-{number}" for number in range(2100)]  # with 5 partitions each
    topics = ask(registry, 12, named("a", *names, "sp ace"), creates=True).topics
    codes = {topic.name: topic.error_code for topic in topics}
    assert codes.pop("a") == ErrorCode.NONE
    assert codes.pop("sp ace") == ErrorCode.INVALID_TOPIC_EXCEPTION
    assert [codes[name] for name in names] == (
        [ErrorCode.NONE] * 2000 + [ErrorCode.LEADER_NOT_AVAILABLE] * 100
    )
    assert len(commits) == 1
    again = ask(registry, 12, named(*names), creates=True).topics
    assert {topic.error_code for topic in again} == {ErrorCode.NONE}


def test_a_name_that_cannot_be_created_says_why(registry):
    (topic,) = ask(
        registry,
        12,
        named("sp ace"),
        creates=True,
    ).topics
    assert topic.error_code == ErrorCode.INVALID_TOPIC_EXCEPTION


def test_a_topic_that_another_process_created_meanwhile_is_answered(
    registry, monkeypatch
):
    create_topics = registry.create_topics

    def created_meanwhile(wanted, spare):
        create_topics([new._replace(num_partitions=1) for new in wanted])
        return create_topics(wanted, spare=spare)

    monkeypatch.setattr(registry, "create_topics", created_meanwhile)
    (topic,) = ask(registry, 12, named("new"), creates=True).topics
    assert (topic.error_code, len(topic.partitions)) == (0, 1)


def test_authorized_operations_come_only_if_the_request_wants_them(registry):
    response = ask(registry, 8, named("a"))
    assert response.cluster_authorized_operations == NOT_ASKED
    assert response.topics[0].topic_authorized_operations == NOT_ASKED
    response = ask(
        registry,
        8,
        named("a"),
        include_cluster_authorized_operations=True,
        include_topic_authorized_operations=True,
    )
    # READ, WRITE, CREATE, DELETE, ALTER, DESCRIBE, DESCRIBE_CONFIGS, ALTER_CONFIGS
    assert response.topics[0].topic_authorized_operations == 0b1101_1111_1000
    # CREATE, ALTER, DESCRIBE, CLUSTER_ACTION, ..._CONFIGS, IDEMPOTENT_WRITE
    assert response.cluster_authorized_operations == 0b1_1111_1010_0000


def test_metadata_follows_partitions_that_are_added(registry):
    assert len(ask(registry, 12, named("a")).topics[0].partitions) == 2
    registry.create_partitions([MorePartitions("a", 4)])
    assert len(ask(registry, 12, named("a")).topics[0].partitions) == 4


# -- DescribeCluster ------------------------------------------------------------------


def describe_cluster(**options):
    response = handle_describe_cluster(
        cluster.DescribeClusterRequest(**options), context()
    )
    return cluster.DescribeClusterResponse.decode(2, response.encode(2))


def test_the_cluster_is_this_broker():
    response = describe_cluster()
    (broker,) = response.brokers
    assert (broker.broker_id, broker.host, broker.port) == (1, "host", 9092)
    assert (response.cluster_id, response.controller_id) == ("cluster", 1)
    assert response.cluster_authorized_operations == NOT_ASKED
    asked = describe_cluster(include_cluster_authorized_operations=True)
    assert asked.cluster_authorized_operations > 0


@pytest.mark.parametrize(
    ("endpoint_type", "code"),
    [
        (2, ErrorCode.MISMATCHED_ENDPOINT_TYPE),
        (3, ErrorCode.UNSUPPORTED_ENDPOINT_TYPE),
    ],
)
def test_a_controller_is_not_to_be_found_here(endpoint_type, code):
    response = describe_cluster(endpoint_type=endpoint_type)
    assert (response.error_code, response.brokers) == (code, [])
    assert response.error_message


# -- DescribeTopicPartitions ----------------------------------------------------------


def page(registry, names=(), limit=2000, cursor=None):
    response = handle_describe_topic_partitions(
        pages.DescribeTopicPartitionsRequest(
            topics=[pages.TopicRequest(name=name) for name in names],
            response_partition_limit=limit,
            cursor=cursor,
        ),
        context(registry),
    )
    return pages.DescribeTopicPartitionsResponse.decode(0, response.encode(0))


@given(
    counts=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    limit=st.integers(-1, 7),
)
def test_pages_of_any_size_tell_every_partition_once(tmp_path_factory, counts, limit):
    registry = start(tmp_path_factory.mktemp("log"))
    for number, count in enumerate(counts):
        registry.create_topic(f"t{number}", count)
    seen, cursor = [], None
    while True:
        response = page(registry, limit=limit, cursor=cursor)
        told = [
            (topic.name, partition.partition_index)
            for topic in response.topics
            for partition in topic.partitions
        ]
        assert 1 <= len(told) <= max(1, limit)
        seen += told
        cursor = response.next_cursor
        if cursor is None:
            break
    assert seen == [
        (f"t{number}", index)
        for number, count in enumerate(counts)
        for index in range(count)
    ]


def test_topics_come_in_order_with_the_unknown_among_them(registry):
    response = page(registry, ["b", "sp ace", "none", "a"])
    assert [(topic.name, topic.error_code) for topic in response.topics] == [
        ("a", 0),
        ("b", 0),
        ("none", ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
        ("sp ace", ErrorCode.INVALID_TOPIC_EXCEPTION),
    ]
    assert response.topics[0].topic_id == registry.topic("a").topic_id


def test_a_cursor_into_nowhere_is_refused_or_goes_on_behind_it(registry):
    negative = pages.Cursor(topic_name="a", partition_index=-1)
    (refused,) = page(registry, ["a"], cursor=negative).topics
    assert refused.error_code == ErrorCode.INVALID_REQUEST
    beyond = pages.Cursor(topic_name="a", partition_index=9)
    told = page(registry, cursor=beyond).topics
    assert [(topic.name, len(topic.partitions)) for topic in told] == [
        ("a", 0),
        ("b", 1),
    ]


# -- DescribeLogDirs ------------------------------------------------------------------


VOLUMES = {"/d0": Volume(1000, 400), "/d1": Volume(10, 4)}


def describe_dirs(registry, topics=None, volumes=VOLUMES):
    def place_and_size(topic, index):
        if topic.name == "b":
            raise ApiError(ErrorCode.KAFKA_STORAGE_ERROR, "offline")
        return f"/d{index}", 100 + index

    request = dirs.DescribeLogDirsRequest(
        topics=None
        if topics is None
        else [
            dirs.DescribableLogDirTopic(topic=name, partitions=partitions)
            for name, partitions in topics
        ]
    )
    response = handle_describe_log_dirs(
        request,
        context(
            registry,
            logs=fake_logs(place_and_size=place_and_size),
            log_dirs=list(volumes),
            volume=volumes.get,
        ),
    )
    decoded = dirs.DescribeLogDirsResponse.decode(4, response.encode(4))
    return {
        result.log_dir: (
            result.error_code,
            [
                (topic.name, each.partition_index, each.partition_size)
                for topic in result.topics
                for each in topic.partitions
            ],
            result.total_bytes,
            result.usable_bytes,
        )
        for result in decoded.results
    }


def test_every_directory_tells_its_partitions_and_its_volume(registry):
    assert describe_dirs(registry) == {
        "/d0": (0, [("a", 0, 100)], 1000, 400),
        "/d1": (0, [("a", 1, 101)], 10, 4),
    }


def test_only_wanted_partitions_that_exist_are_described(registry):
    asked = [("a", [1, 7, -1]), ("none", [0]), ("a", [1])]
    assert describe_dirs(registry, asked) == {
        "/d0": (0, [], 1000, 400),
        "/d1": (0, [("a", 1, 101)], 10, 4),
    }


def test_a_directory_that_cannot_be_asked_says_so(registry):
    volumes = {**VOLUMES, "/d0": None}
    assert describe_dirs(registry, volumes=volumes)["/d0"] == (
        ErrorCode.KAFKA_STORAGE_ERROR,
        [],
        -1,
        -1,
    )


# -- FindCoordinator ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "key_type"),
    [(0, 0), *((version, kind) for version in range(1, 7) for kind in range(3))],
)
def test_groups_and_transactions_are_coordinated_here(registry, version, key_type):
    keys = {"key": "g"} if version < 4 else {"coordinator_keys": ["g", "h"]}
    request = coordinator.FindCoordinatorRequest(key_type=key_type, **keys)
    response = handle_find_coordinator(
        request,
        context(registry, version=version, node_id=7, advertised=[("here", 9092)]),
    )
    decoded = coordinator.FindCoordinatorResponse.decode(
        version, response.encode(version)
    )
    answers = decoded.coordinators if version >= 4 else [decoded]
    expected = {
        0: (ErrorCode.NONE, 7, "here", 9092),
        1: (ErrorCode.NONE, 7, "here", 9092),
        2: (ErrorCode.INVALID_REQUEST, -1, "", -1),
    }[key_type]
    assert [
        (each.error_code, each.node_id, each.host, each.port) for each in answers
    ] == [expected] * len(answers)
    if version >= 4:
        assert [each.key for each in answers] == ["g", "h"]


@pytest.mark.parametrize(
    ("key", "version", "code"),
    [
        ("g:AAAAAAAAAAAAAAAAAAAAAg:0", 6, ErrorCode.NONE),
        ("g:AAAAAAAAAAAAAAAAAAAAAg:0", 5, ErrorCode.INVALID_REQUEST),
        ("g:AAAAAAAAAAAAAAAAAAAAAg", 6, ErrorCode.INVALID_REQUEST),
        ("g:AAAAAAAAAAAAAAAAAAAAAg:0:1", 6, ErrorCode.INVALID_REQUEST),
        ("g:AAAAAAAAAAAAAAAAAAAAAg:x", 6, ErrorCode.INVALID_REQUEST),
        ("g:topic:0", 6, ErrorCode.INVALID_REQUEST),
        (" :AAAAAAAAAAAAAAAAAAAAAg:0", 6, ErrorCode.INVALID_REQUEST),
    ],
)
def test_the_state_of_a_share_partition_is_coordinated_here(
    registry, key, version, code
):
    request = coordinator.FindCoordinatorRequest(key_type=2, coordinator_keys=[key])
    (answer,) = handle_find_coordinator(
        request,
        context(registry, version=version, node_id=7, advertised=[("here", 9092)]),
    ).coordinators
    assert answer.error_code == code
    assert answer.node_id == (7 if code == ErrorCode.NONE else -1)


@pytest.mark.parametrize(
    ("key_type", "topic", "keys"),
    [
        (0, OFFSETS_TOPIC, ["a", "b"]),
        (1, TRANSACTION_TOPIC, ["a", "b"]),
        (2, SHARE_STATE_TOPIC, [f"g:AAAAAAAAAAAAAAAAAAAAAg:{n}" for n in (0, 1)]),
    ],
)
def test_a_partition_that_is_offline_has_no_coordinator(
    registry, key_type, topic, keys
):
    """Its successor, on the same broker, will have the records again."""
    registry.create_topic(topic, 2)
    lost = java_hash(keys[0]) % 2
    assert java_hash(keys[1]) % 2 != lost
    logs = fake_logs(is_offline=lambda of, number: (of.name, number) == (topic, lost))
    asked = context(registry, version=6, logs=logs)
    request = coordinator.FindCoordinatorRequest(
        key_type=key_type, coordinator_keys=keys
    )
    first, second = handle_find_coordinator(request, asked).coordinators
    assert first.error_code == ErrorCode.COORDINATOR_NOT_AVAILABLE
    assert (first.node_id, first.host, first.port) == (-1, "", -1)
    assert (second.error_code, second.node_id) == (ErrorCode.NONE, 1)
    assert asked.repeatable is None
    request.coordinator_keys = keys[1:]
    handle_find_coordinator(request, asked)
    assert asked.repeatable == ()


class FakeNodes:
    """The nodes 1 (this one) and 2, and who has which group."""

    coordinators = {"here": 1, "there": 2, "nowhere": 3}  # noqa: RUF012

    def coordinator(self, group_id):
        return self.coordinators.get(group_id)

    def others(self, listener):
        return [NodeAddress(2, "two", 9093, None)]


@pytest.mark.parametrize(
    ("group_id", "node", "code"),
    [
        ("here", (1, "host", 9092), ErrorCode.NONE),
        ("there", (2, "two", 9093), ErrorCode.NONE),
        ("nowhere", (-1, "", -1), ErrorCode.COORDINATOR_NOT_AVAILABLE),
        ("unknown", (-1, "", -1), ErrorCode.COORDINATOR_NOT_AVAILABLE),
    ],
)
def test_in_a_cluster_the_node_with_the_group_is_its_coordinator(group_id, node, code):
    request = coordinator.FindCoordinatorRequest(
        key_type=0, coordinator_keys=[group_id]
    )
    found = handle_find_coordinator(request, context(version=4, nodes=FakeNodes()))
    (answer,) = found.coordinators
    assert (answer.node_id, answer.host, answer.port) == node
    assert answer.error_code == code


def test_a_cluster_has_no_coordinator_of_share_partitions():
    key = "g:AAAAAAAAAAAAAAAAAAAAAA:0"
    request = coordinator.FindCoordinatorRequest(key_type=2, coordinator_keys=[key])
    found = handle_find_coordinator(request, context(version=6, nodes=FakeNodes()))
    (answer,) = found.coordinators
    assert answer.error_code == ErrorCode.UNSUPPORTED_VERSION
