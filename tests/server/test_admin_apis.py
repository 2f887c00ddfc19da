"""The admin APIs as a table: each answers in every version that is advertised."""

import importlib

import pytest

from mpbroker.config import BROKER_CONFIG_DEF
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.headers import RequestHeader
from mpbroker.protocol.messages import elect_leaders as elect
from mpbroker.server.admin_apis import AdminApis
from mpbroker.server.apis import SERVED
from mpbroker.server.handlers.elect_leaders import handle_elect_leaders
from mpbroker.server.request import Request
from tests.support.metadata import start

ADMIN_APIS = [
    ApiKey.FIND_COORDINATOR,
    ApiKey.DELETE_RECORDS,
    ApiKey.DESCRIBE_CONFIGS,
    ApiKey.ALTER_CONFIGS,
    ApiKey.DESCRIBE_LOG_DIRS,
    ApiKey.CREATE_PARTITIONS,
    ApiKey.ELECT_LEADERS,
    ApiKey.INCREMENTAL_ALTER_CONFIGS,
    ApiKey.LIST_PARTITION_REASSIGNMENTS,
    ApiKey.DESCRIBE_CLUSTER,
    ApiKey.DESCRIBE_TOPIC_PARTITIONS,
    ApiKey.LIST_CONFIG_RESOURCES,
]
CASES = [
    (key, version)
    for key in ADMIN_APIS
    for version in range(SERVED[key][0], SERVED[key][1] + 1)
]


class FakeLogs:
    """Every partition is in one directory."""

    def __init__(self, log_dir):
        self._log_dir = log_dir

    def log(self, topic, partition):
        raise AssertionError("no test asks for a log")

    def place_and_size(self, topic, partition):
        return str(self._log_dir), 5

    def leader_epoch(self, topic, partition):
        return 0


@pytest.fixture
def registry(tmp_path):
    registry = start(tmp_path)
    registry.create_topic("t", 2)
    return registry


@pytest.fixture
def apis(registry, tmp_path):
    return AdminApis(
        definition=BROKER_CONFIG_DEF,
        config_texts={},
        node_id=1,
        rack="r",
        cluster_id="cluster",
        log_dirs=[str(tmp_path), str(tmp_path / "gone")],
        registry=registry,
        logs=FakeLogs(tmp_path),
        endpoint=lambda request: ("host", 9092),
    )


def message_class(key, suffix):
    module = importlib.import_module(f"mpbroker.protocol.messages.{key.name.lower()}")
    name = "".join(word.title() for word in key.name.split("_"))
    return getattr(module, name + suffix)


def ask(apis, message, version):
    key = type(message).api_key
    request = Request(
        0,
        0,
        0,
        RequestHeader(key, version, 1, None, 0),
        memoryview(message.encode(version)),
        flexible_response=False,
    )
    body = apis.handlers()[key](request)
    return message_class(key, "Response").decode(version, body)


def test_what_is_handled_is_what_is_listed(apis):
    assert set(apis.handlers()) == set(ADMIN_APIS)


@pytest.mark.parametrize(("key", "version"), CASES)
def test_an_empty_request_is_answered_in_every_version(apis, key, version):
    ask(apis, message_class(key, "Request")(), version)


@pytest.mark.parametrize("version", range(1, 5))
def test_log_directories_are_told_with_their_volumes(apis, tmp_path, version):
    message = message_class(ApiKey.DESCRIBE_LOG_DIRS, "Request")(topics=None)
    here, gone = ask(apis, message, version).results
    assert (here.log_dir, here.error_code) == (str(tmp_path), ErrorCode.NONE)
    assert [
        (topic.name, partition.partition_index, partition.partition_size)
        for topic in here.topics
        for partition in topic.partitions
    ] == [("t", 0, 5), ("t", 1, 5)]
    assert gone.error_code == ErrorCode.KAFKA_STORAGE_ERROR
    if version >= 4:
        assert here.total_bytes >= here.usable_bytes > 0
        assert gone.total_bytes == -1


def test_nothing_is_ever_moved_to_another_broker(apis):
    message = message_class(ApiKey.LIST_PARTITION_REASSIGNMENTS, "Request")(topics=None)
    response = ask(apis, message, 0)
    assert (response.error_code, response.topics) == (ErrorCode.NONE, [])


# -- ElectLeaders ---------------------------------------------------------------------


def elect_leaders(registry, partitions, election_type=0):
    request = elect.ElectLeadersRequest(
        election_type=election_type,
        topic_partitions=None
        if partitions is None
        else [
            elect.TopicPartitions(topic=name, partitions=indexes)
            for name, indexes in partitions
        ],
    )
    response = handle_elect_leaders(request, registry)
    decoded = elect.ElectLeadersResponse.decode(2, response.encode(2))
    return decoded.error_code, {
        (result.topic, each.partition_id): each.error_code
        for result in decoded.replica_election_results
        for each in result.partition_result
    }


@pytest.mark.parametrize("election_type", [0, 1])
def test_the_only_replica_leads_already(registry, election_type):
    asked = [("t", [1, 2, -1]), ("none", [0])]
    assert elect_leaders(registry, asked, election_type) == (
        ErrorCode.NONE,
        {
            ("t", 1): ErrorCode.ELECTION_NOT_NEEDED,
            ("t", 2): ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
            ("t", -1): ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
            ("none", 0): ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        },
    )


def test_of_all_partitions_none_elects(registry):
    assert elect_leaders(registry, None) == (ErrorCode.NONE, {})


def test_an_unknown_way_to_elect_is_refused(registry):
    assert elect_leaders(registry, None, 2)[0] == ErrorCode.INVALID_REQUEST
