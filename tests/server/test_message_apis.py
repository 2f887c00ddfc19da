"""The APIs of a handler process, from the bytes of a request to those of the answer."""

from __future__ import annotations

import errno
import os
from types import SimpleNamespace

import pytest

from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.headers import encode_request_header
from mpbroker.protocol.messages import elect_leaders as elect
from mpbroker.protocol.messages.describe_log_dirs import DescribeLogDirsRequest
from mpbroker.protocol.messages.init_producer_id import InitProducerIdRequest
from mpbroker.protocol.messages.list_partition_reassignments import (
    ListPartitionReassignmentsRequest,
)
from mpbroker.protocol.messages.sasl_authenticate import SaslAuthenticateRequest
from mpbroker.protocol.messages.sasl_handshake import SaslHandshakeRequest
from mpbroker.server.api_messages import error_answer, request_class, response_class
from mpbroker.server.apis import APIS, Forwarded
from mpbroker.server.message_apis import served_apis
from mpbroker.server.request import FORWARDED, parse_request
from tests.server.contexts import broker_of, fake_logs
from tests.support.metadata import registry, start

MESSAGE_APIS = [
    api
    for api in APIS.values()
    if api.forwarded is not Forwarded.ALWAYS
    and not api.in_bytes
    and not api.needs_receiver
]
ALL_CASES = [
    (api.key, version)
    for api in MESSAGE_APIS
    if api.forwarded is Forwarded.NEVER
    for version in range(api.versions[0], api.versions[1] + 1)
]
# Those that only clients may use who have authenticated.
REFUSED = [case for case in ALL_CASES if case[0].name.endswith("DELEGATION_TOKEN")]
CASES = [case for case in ALL_CASES if case not in REFUSED]


class Stage:
    """The APIs whose handlers take messages, over a registry with a topic."""

    def __init__(self, tmp_path):
        registry = start(tmp_path)
        registry.create_topic("t", 2)
        self.registry = registry
        self.forwarded = []
        self.logs = fake_logs(place_and_size=lambda *_: (str(tmp_path), 5))
        broker = broker_of(
            registry,
            log_dirs=[str(tmp_path), str(tmp_path / "gone")],
            logs=self.logs,
        )
        self.apis = served_apis(MESSAGE_APIS, broker, {}, self.forwarded.append)

    def execute(self, message, version):
        key = type(message).api_key
        frame = encode_request_header(key, version, 1, None) + message.encode(version)
        return self.apis[key].handle(parse_request(3, 0, memoryview(frame), 0))

    def ask(self, message, version):
        answer = self.execute(message, version)
        return response_class(type(message).api_key).decode(version, memoryview(answer))


@pytest.fixture
def stage(tmp_path):
    return Stage(tmp_path)


@pytest.mark.parametrize(("key", "version"), CASES)
def test_an_empty_request_is_answered_in_every_version(stage, key, version):
    stage.ask(request_class(key)(), version)


@pytest.mark.parametrize(("key", "version"), REFUSED)
def test_who_has_not_authenticated_is_refused_in_every_version(stage, key, version):
    with pytest.raises(ApiError) as caught:
        stage.ask(request_class(key)(), version)
    code = ErrorCode.DELEGATION_TOKEN_REQUEST_NOT_ALLOWED
    assert caught.value.error_code == code
    request = SimpleNamespace(api_key=key, api_version=version)
    answer = memoryview(error_answer(request, code))
    assert response_class(key).decode(version, answer).error_code == code


@pytest.mark.parametrize("version", range(1, 6))
def test_log_directories_are_told_with_their_volumes(stage, tmp_path, version):
    here, gone = stage.ask(DescribeLogDirsRequest(topics=None), version).results
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


def test_nothing_is_ever_moved_to_another_broker(stage):
    response = stage.ask(ListPartitionReassignmentsRequest(topics=None), 0)
    assert (response.error_code, response.topics) == (ErrorCode.NONE, [])


@pytest.mark.parametrize("version", range(6))
def test_a_transactional_producer_is_the_coordinators(stage, version):
    asked = InitProducerIdRequest(transactional_id="x")
    assert stage.execute(asked, version) is FORWARDED
    assert stage.forwarded == [3]
    response = stage.ask(InitProducerIdRequest(transactional_id=None), version)
    assert response.producer_id >= 0
    assert stage.forwarded == [3]


def test_a_metadata_log_that_cannot_be_read_is_no_bug_but_a_failed_disk(
    stage, tmp_path, monkeypatch, caplog
):
    other = registry(tmp_path, stage.registry._log._cell)
    other.create_topic("news", 1)

    def fail(*_: object) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pread", fail)
    with pytest.raises(ApiError) as raised:
        stage.ask(ListPartitionReassignmentsRequest(topics=None), 0)
    assert raised.value.error_code == ErrorCode.KAFKA_STORAGE_ERROR
    assert "the metadata log cannot be read" in caplog.text
    monkeypatch.undo()
    stage.ask(ListPartitionReassignmentsRequest(topics=None), 0)
    assert stage.registry.topic("news") is not None


# -- SASL's own requests where a handler gets them: out of place, that is --------------


@pytest.mark.parametrize("version", [0, 1])
def test_an_authenticated_client_may_not_authenticate_again(stage, version):
    answer = stage.ask(SaslHandshakeRequest(mechanism="PLAIN"), version)
    assert answer.error_code == ErrorCode.ILLEGAL_SASL_STATE
    assert list(answer.mechanisms) == []


@pytest.mark.parametrize("version", [0, 1, 2])
def test_a_token_of_an_authenticated_client_is_ignored(stage, version):
    asked = SaslAuthenticateRequest(auth_bytes=b"\0alice\0wonder")
    answer = stage.ask(asked, version)
    assert answer.error_code == ErrorCode.ILLEGAL_SASL_STATE
    assert "wonder" not in answer.error_message
    assert bytes(answer.auth_bytes) == b""


# -- ElectLeaders ----------------------------------------------------------------------


def elect_leaders(stage, partitions, election_type=0):
    request = elect.ElectLeadersRequest(
        election_type=election_type,
        topic_partitions=None
        if partitions is None
        else [
            elect.TopicPartitions(topic=name, partitions=indexes)
            for name, indexes in partitions
        ],
    )
    response = stage.ask(request, 2)
    return response.error_code, {
        (result.topic, each.partition_id): each.error_code
        for result in response.replica_election_results
        for each in result.partition_result
    }


@pytest.mark.parametrize("election_type", [0, 1])
def test_the_only_replica_leads_already(stage, election_type):
    asked = [("t", [1, 2, -1]), ("none", [0])]
    assert elect_leaders(stage, asked, election_type) == (
        ErrorCode.NONE,
        {
            ("t", 1): ErrorCode.ELECTION_NOT_NEEDED,
            ("t", 2): ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
            ("t", -1): ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
            ("none", 0): ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        },
    )


def test_of_all_partitions_none_elects(stage):
    assert elect_leaders(stage, None) == (ErrorCode.NONE, {})


@pytest.mark.parametrize(
    ("election_type", "code"),
    [
        (0, ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE),
        (1, ErrorCode.ELIGIBLE_LEADERS_NOT_AVAILABLE),
    ],
)
def test_nobody_can_lead_a_partition_that_is_offline(stage, election_type, code):
    stage.logs.is_offline = lambda topic, partition: partition == 1
    found = {("t", 0): ErrorCode.ELECTION_NOT_NEEDED, ("t", 1): code}
    assert elect_leaders(stage, [("t", [0, 1])], election_type)[1] == found
    assert elect_leaders(stage, None, election_type)[1] == {("t", 1): code}


def test_an_unknown_way_to_elect_is_refused(stage):
    assert elect_leaders(stage, None, 2)[0] == ErrorCode.INVALID_REQUEST
