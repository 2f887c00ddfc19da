"""What answers say, field by field: ours, or those at $MPBROKER_TEST_BOOTSTRAP.

tests/compat/test_reference.py runs these against Apache Kafka, too.
"""

from __future__ import annotations

import os
import socket
import time
from base64 import urlsafe_b64encode
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from select import select
from typing import Any, TypeVar

import pytest

from mpbroker.cli.api_table import KAFKA_VERSIONS, our_versions
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.config_source import ConfigSource
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.headers import response_header_version
from mpbroker.protocol.message import Message
from mpbroker.protocol.messages.alter_partition_reassignments import (
    AlterPartitionReassignmentsRequest,
    AlterPartitionReassignmentsResponse,
    ReassignablePartition,
    ReassignableTopic,
)
from mpbroker.protocol.messages.api_versions import (
    ApiVersionsRequest,
    ApiVersionsResponse,
)
from mpbroker.protocol.messages.consumer_group_heartbeat import (
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
)
from mpbroker.protocol.messages.create_partitions import (
    CreatePartitionsRequest,
    CreatePartitionsResponse,
    CreatePartitionsTopic,
)
from mpbroker.protocol.messages.create_topics import (
    CreatableTopic,
    CreatableTopicConfig,
    CreateTopicsRequest,
    CreateTopicsResponse,
)
from mpbroker.protocol.messages.delete_topics import (
    DeleteTopicsRequest,
    DeleteTopicsResponse,
    DeleteTopicState,
)
from mpbroker.protocol.messages.describe_configs import (
    DescribeConfigsRequest,
    DescribeConfigsResource,
    DescribeConfigsResponse,
)
from mpbroker.protocol.messages.fetch import (
    FetchPartition,
    FetchRequest,
    FetchResponse,
    FetchTopic,
    ForgottenTopic,
)
from mpbroker.protocol.messages.find_coordinator import (
    FindCoordinatorRequest,
    FindCoordinatorResponse,
)
from mpbroker.protocol.messages.incremental_alter_configs import (
    AlterableConfig,
    AlterConfigsResource,
    IncrementalAlterConfigsRequest,
    IncrementalAlterConfigsResponse,
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
    MetadataResponseTopic,
)
from mpbroker.protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
    OffsetCommitResponse,
)
from mpbroker.protocol.messages.offset_fetch import (
    OffsetFetchRequest,
    OffsetFetchRequestTopic,
    OffsetFetchResponse,
)
from mpbroker.protocol.messages.produce import (
    PartitionProduceData,
    PartitionProduceResponse,
    ProduceRequest,
    ProduceResponse,
    TopicProduceData,
)
from mpbroker.protocol.messages.share_group_heartbeat import (
    ShareGroupHeartbeatRequest,
    ShareGroupHeartbeatResponse,
)
from mpbroker.protocol.messages.update_features import (
    FeatureUpdateKey,
    UpdateFeaturesRequest,
    UpdateFeaturesResponse,
)
from mpbroker.protocol.messages.write_share_group_state import StateBatch
from mpbroker.protocol.records.compression import Codec
from mpbroker.protocol.records.record_batch import RecordBatchBuilder
from tests.broker.load import ask, frame, receive_frame
from tests.support.apache_kafka import BOOTSTRAP_VARIABLE
from tests.support.children import wait_until

TOPIC, BROKER = 2, 4  # types of resources

Answer = TypeVar("Answer", bound=Message)


def now_ms() -> int:
    return int(time.time() * 1000)


class Wire:
    """A connection to the broker."""

    def __init__(self, bootstrap: str) -> None:
        host, _, port = bootstrap.rpartition(":")
        self.sock = socket.create_connection((host, int(port)), timeout=30)

    def ask(self, request: Message, version: int, response: type[Answer]) -> Answer:
        body = ask(self.sock, request.api_key, version, request.encode(version))
        return response.decode(version, body)

    def ask_bent(
        self,
        request: Message,
        version: int,
        response: type[Answer],
        bent: Mapping[bytes, bytes],
    ) -> Answer:
        """Ask with other bytes in the frame, as many as they take the place of."""
        sent = frame(request.api_key, version, request.encode(version))
        for before, after in bent.items():
            assert sent.count(before) == 1 and len(before) == len(after)
            sent = sent.replace(before, after)
        return self.ask_raw(request, version, response, sent)

    def ask_raw(
        self, request: Message, version: int, response: type[Answer], sent: bytes
    ) -> Answer:
        """Send a whole frame; return the answer, which must come."""
        self.sock.sendall(sent)
        answer = memoryview(receive_frame(self.sock))
        assert answer, "closed instead of answered"
        head = 4 + response_header_version(request.api_key, version)
        return response.decode(version, answer[head:])

    def create(self, name: str, partitions: int = 1, **configs: str) -> bytes:
        """Create a topic; return its id when all its partitions are served."""
        topic = CreatableTopic(
            name=name,
            num_partitions=partitions,
            replication_factor=1,
            configs=[
                CreatableTopicConfig(name=key.replace("_", "."), value=value)
                for key, value in configs.items()
            ],
        )
        request = CreateTopicsRequest(topics=[topic], timeout_ms=10_000)
        (created,) = self.ask(request, 7, CreateTopicsResponse).topics
        assert created.error_code == ErrorCode.NONE, created

        def leads() -> bool:
            (found,) = self.describe(MetadataRequestTopic(name=name))
            leaders = [each.leader_id for each in found.partitions]
            return len(leaders) == partitions and min(leaders) >= 0

        wait_until(leads)
        # Kafka's metadata names a leader a moment before it is one.
        wait_until(lambda: self._serves(name, partitions))
        return created.topic_id

    def _serves(self, name: str, partitions: int) -> bool:
        rows = [
            ListOffsetsPartition(partition_index=number, timestamp=-1)
            for number in range(partitions)
        ]
        topic = ListOffsetsTopic(name=name, partitions=rows)
        request = ListOffsetsRequest(replica_id=-1, topics=[topic])
        (found,) = self.ask(request, 5, ListOffsetsResponse).topics
        return not any(each.error_code for each in found.partitions)

    def delete(self, name: str) -> None:
        """Delete a topic; return when the broker has no such topic any more."""
        request = DeleteTopicsRequest(
            topics=[DeleteTopicState(name=name)], timeout_ms=10_000
        )
        (deleted,) = self.ask(request, 6, DeleteTopicsResponse).responses
        assert deleted.error_code == ErrorCode.NONE, deleted
        unknown = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        topic = MetadataRequestTopic(name=name)
        wait_until(lambda: self.describe(topic)[0].error_code == unknown)

    def describe(
        self, *topics: MetadataRequestTopic, version: int = 12
    ) -> list[MetadataResponseTopic]:
        request = MetadataRequest(topics=list(topics), allow_auto_topic_creation=False)
        return self.ask(request, version, MetadataResponse).topics

    def produce(self, topic_id: bytes, records: bytes) -> PartitionProduceResponse:
        data = PartitionProduceData(index=0, records=records)
        topic = TopicProduceData(topic_id=topic_id, partition_data=[data])
        request = ProduceRequest(acks=1, timeout_ms=10_000, topic_data=[topic])
        answer = self.ask(request, 13, ProduceResponse)
        (found,) = answer.responses[0].partition_responses
        return found


@pytest.fixture
def wire(bootstrap: str) -> Iterator[Wire]:
    made = Wire(bootstrap)
    yield made
    made.sock.close()


def batch(*records: tuple[int, bytes | None], codec: Codec = Codec.NONE) -> bytes:
    """A batch of records, each with its timestamp in ms and its key."""
    builder = RecordBatchBuilder(codec)
    for timestamp, key in records:
        builder.append(timestamp, key, b"value")
    return bytes(builder.build())


# -- bytes as few clients send them ----------------------------------------------------

REPLACED = "f\ufffdr"  # what f\xfcr is, ISO 8859-1, if it is read as UTF-8


@pytest.mark.parametrize("version", [8, 12])
def test_a_client_id_and_a_topic_that_are_not_utf_8_are_answered(wire, version):
    request = MetadataRequest(
        topics=[MetadataRequestTopic(name="name")], allow_auto_topic_creation=False
    )
    bent = {b"load": b"f\xfcr!", b"name": b"f\xfcr\xfc"}
    answer = wire.ask_bent(request, version, MetadataResponse, bent)
    (found,) = answer.topics
    assert found.name == REPLACED + "\ufffd"
    assert found.error_code == ErrorCode.INVALID_TOPIC_EXCEPTION


def test_a_group_and_metadata_of_a_commit_that_are_not_utf_8_are_stored(
    wire, topic_name
):
    wire.create(topic_name)
    commit = OffsetCommitRequest(
        group_id="gggg",
        topics=[
            OffsetCommitRequestTopic(
                name=topic_name,
                partitions=[
                    OffsetCommitRequestPartition(
                        partition_index=0,
                        committed_offset=7,
                        committed_metadata="mmmm",
                    )
                ],
            )
        ],
    )
    bent = {b"gggg": b"f\xfcr", b"mmmm": b"\xffm"}
    bent = {key: value.ljust(4, b"!") for key, value in bent.items()}

    def committed() -> bool:
        answer = wire.ask_bent(commit, 8, OffsetCommitResponse, bent)
        return answer.topics[0].partitions[0].error_code == ErrorCode.NONE

    wire.ask(
        FindCoordinatorRequest(key_type=0, coordinator_keys=[REPLACED + "!"]),
        6,
        FindCoordinatorResponse,
    )
    wait_until(committed)
    fetch = OffsetFetchRequest(
        group_id=REPLACED + "!",
        topics=[OffsetFetchRequestTopic(name=topic_name, partition_indexes=[0])],
    )
    (found,) = wire.ask(fetch, 7, OffsetFetchResponse).topics[0].partitions
    assert (found.committed_offset, found.metadata) == (7, "\ufffdm!!")


@pytest.mark.parametrize(
    ("version", "body"),
    [
        (4, b"\0\0\0\1\0\4none\0" + b"rest"),
        (12, b"\2" + bytes(16) + b"\5none\0" + b"\0\0\0" + b"rest"),
        (12, b"\2" + bytes(16) + b"\5none" + b"\2\x63\1x\x62\0" + b"\0\0\0"),
        (12, b"\2" + bytes(16) + b"\5none\0" + b"\0\0" + b"\2\x63\1x\x63\0"),
    ],
    ids=["rest", "rest of a flexible one", "unsorted tags", "a tag twice"],
)
def test_what_is_more_than_a_request_needs_is_ignored(wire, version, body):
    request = MetadataRequest()
    sent = frame(request.api_key, version, body)
    answer = wire.ask_raw(request, version, MetadataResponse, sent)
    assert [each.name for each in answer.topics] == ["none"]


def test_bytes_behind_any_request_are_ignored(wire, topic_name):
    topic_id = wire.create(topic_name)
    data = PartitionProduceData(index=0, records=batch((now_ms(), b"k")))
    topic = TopicProduceData(topic_id=topic_id, partition_data=[data])
    requests = [
        (ApiVersionsRequest(client_software_name="t", client_software_version="1"), 4),
        (ProduceRequest(acks=1, timeout_ms=10_000, topic_data=[topic]), 13),
        (ListOffsetsRequest(replica_id=-1), 7),
        (FindCoordinatorRequest(key_type=0, coordinator_keys=["g"]), 6),
        (OffsetFetchRequest(group_id="g", topics=[]), 7),
        (DescribeConfigsRequest(resources=[]), 4),
    ]
    for request, version in requests:
        sent = frame(request.api_key, version, request.encode(version) + b"rest")
        wire.sock.sendall(sent)
        assert receive_frame(wire.sock), request


@pytest.mark.parametrize("count", [-1, -2])
def test_a_negative_number_of_topics_asks_for_all(wire, topic_name, count):
    wire.create(topic_name)
    request = MetadataRequest()
    sent = frame(request.api_key, 4, count.to_bytes(4, "big", signed=True) + b"\0")
    answer = wire.ask_raw(request, 4, MetadataResponse, sent)
    assert topic_name in [each.name for each in answer.topics]


# -- ApiVersions -----------------------------------------------------------------------


def test_the_versions_are_those_of_the_table(wire):
    request = ApiVersionsRequest(
        client_software_name="tests", client_software_version="1"
    )
    answer = wire.ask(request, 4, ApiVersionsResponse)
    told = {
        each.api_key: (each.min_version, each.max_version) for each in answer.api_keys
    }
    if BOOTSTRAP_VARIABLE in os.environ:
        assert told == KAFKA_VERSIONS
    else:  # a broker without a receiver of clients' metrics does not serve them
        assert told == {
            key: versions
            for key, versions in our_versions().items()
            if key not in (ApiKey.GET_TELEMETRY_SUBSCRIPTIONS, ApiKey.PUSH_TELEMETRY)
        }


@pytest.mark.parametrize(
    ("feature", "request_class", "response_class", "version"),
    [
        (
            "group.version",
            ConsumerGroupHeartbeatRequest,
            ConsumerGroupHeartbeatResponse,
            0,
        ),
        ("share.version", ShareGroupHeartbeatRequest, ShareGroupHeartbeatResponse, 1),
    ],
)
def test_a_protocol_is_refused_while_its_feature_is_off(
    wire, feature, request_class, response_class, version
):
    def beat() -> int:
        # Without a group it is refused in any case, and makes no member.
        request = request_class(group_id="", member_id="m")
        return wire.ask(request, version, response_class).error_code

    def set_level(level: int, upgrade_type: int) -> None:
        update = FeatureUpdateKey(
            feature=feature, max_version_level=level, upgrade_type=upgrade_type
        )
        request = UpdateFeaturesRequest(feature_updates=[update])
        answer = wire.ask(request, 2, UpdateFeaturesResponse)
        assert answer.error_code == ErrorCode.NONE, answer

    assert beat() == ErrorCode.INVALID_REQUEST
    set_level(0, 2)
    try:
        wait_until(lambda: beat() == ErrorCode.UNSUPPORTED_VERSION)
    finally:
        set_level(1, 1)
    wait_until(lambda: beat() == ErrorCode.INVALID_REQUEST)


# -- Metadata --------------------------------------------------------------------------


# What they say of a partition that does not exist.
STATE_APIS = {
    "initialize_share_group_state": ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
    "read_share_group_state": ErrorCode.INVALID_REQUEST,  # it is not initialized
    "write_share_group_state": ErrorCode.INVALID_REQUEST,
    "delete_share_group_state": ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
    "read_share_group_state_summary": ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
}


def state_rows(wire: Wire, name: str, topic_id: bytes, **row: Any) -> Any:
    """Send one of the requests about share groups' states; return its answer's row."""
    module = import_module(f"mpbroker.protocol.messages.{name}")
    verb, what = {
        "initialize_share_group_state": ("Initialize", ""),
        "read_share_group_state": ("Read", ""),
        "write_share_group_state": ("Write", ""),
        "delete_share_group_state": ("Delete", ""),
        "read_share_group_state_summary": ("Read", "Summary"),
    }[name]
    data = getattr(module, f"{verb}State{what}Data")
    row_of = module.PartitionData(**{"partition": 0, **row})
    request = getattr(module, f"{verb}ShareGroupState{what}Request")(
        group_id="states", topics=[data(topic_id=topic_id, partitions=[row_of])]
    )
    response = getattr(module, f"{verb}ShareGroupState{what}Response")
    version = KAFKA_VERSIONS[ApiKey(request.api_key)][1]
    ((found,),) = [
        each.partitions for each in wire.ask(request, version, response).results
    ]
    return found


def test_states_of_share_groups_are_written_and_read_as_by_brokers(wire, topic_name):
    topic_id = wire.create(topic_name)
    key = f"states:{urlsafe_b64encode(topic_id).rstrip(b'=').decode()}:0"
    finding = FindCoordinatorRequest(key_type=2, coordinator_keys=[key])

    def initialized() -> bool:
        wire.ask(finding, 6, FindCoordinatorResponse)  # makes the coordinator's topic
        row = {"state_epoch": 1, "start_offset": 5}
        found = state_rows(wire, "initialize_share_group_state", topic_id, **row)
        return not found.error_code

    wait_until(initialized)
    batches = [
        StateBatch(first_offset=5, last_offset=5, delivery_state=0, delivery_count=1),
        StateBatch(first_offset=6, last_offset=7, delivery_state=2, delivery_count=1),
    ]
    write = {"start_offset": 5, "state_batches": batches, "delivery_complete_count": 2}
    for epoch, code in ((1, ErrorCode.NONE), (0, ErrorCode.FENCED_STATE_EPOCH)):
        said = state_rows(
            wire, "write_share_group_state", topic_id, state_epoch=epoch, **write
        )
        assert said.error_code == code
    found = state_rows(wire, "read_share_group_state", topic_id)
    assert (found.error_code, found.state_epoch, found.start_offset) == (0, 1, 5)
    assert [
        (b.first_offset, b.last_offset, b.delivery_state, b.delivery_count)
        for b in found.state_batches
    ] == [(5, 5, 0, 1), (6, 7, 2, 1)]
    found = state_rows(wire, "read_share_group_state_summary", topic_id)
    assert (found.error_code, found.state_epoch, found.start_offset) == (0, 1, 5)
    assert found.delivery_complete_count == 2
    codes = {
        name: ErrorCode(state_rows(wire, name, topic_id, partition=9).error_code)
        for name in STATE_APIS
    }
    assert codes == STATE_APIS
    for _ in range(2):
        said = state_rows(wire, "delete_share_group_state", topic_id)
        assert said.error_code == 0
    found = state_rows(wire, "read_share_group_state_summary", topic_id)
    assert (found.error_code, found.state_epoch, found.start_offset) == (0, 0, -1)


@pytest.mark.parametrize("version", [12, 13])
@pytest.mark.parametrize("name", [None, "", "other"])
def test_the_id_of_a_topic_decides_whatever_its_name_says(
    wire, topic_name, version, name
):
    topic_id = wire.create(topic_name)
    wanted = [
        MetadataRequestTopic(name=name, topic_id=each) for each in (topic_id, b"?" * 16)
    ]
    told = {each.topic_id: each for each in wire.describe(*wanted, version=version)}
    assert (told[topic_id].error_code, told[topic_id].name) == (0, topic_name)
    unknown = told[b"?" * 16]
    assert (unknown.error_code, unknown.name) == (ErrorCode.UNKNOWN_TOPIC_ID, None)


# -- AlterPartitionReassignments -------------------------------------------------------


def reassign(wire: Wire, name: str, index: int, replicas: list[int] | None) -> Any:
    """Ask for one reassignment; return the name of the error, and the message."""
    partition = ReassignablePartition(partition_index=index, replicas=replicas)
    topic = ReassignableTopic(name=name, partitions=[partition])
    request = AlterPartitionReassignmentsRequest(topics=[topic])
    answer = wire.ask(request, 1, AlterPartitionReassignmentsResponse)
    assert answer.error_code == ErrorCode.NONE
    (found,) = answer.responses[0].partitions
    assert (answer.responses[0].name, found.partition_index) == (name, index)
    return ErrorCode(found.error_code).name, found.error_message


def test_a_partition_stays_on_the_only_broker(wire, topic_name):
    wire.create(topic_name)
    assert reassign(wire, topic_name, 0, [1]) == ("NONE", None)
    assert reassign(wire, topic_name, 0, None) == ("NO_REASSIGNMENT_IN_PROGRESS", None)
    unknown = "broker {}, but no such broker is registered"
    for replicas, what in (
        ([], "an empty replica list"),
        ([9], unknown.format(9)),
        ([1, 9], unknown.format(9)),
        ([-1], unknown.format(-1)),
        ([1, 1], "the broker 1 more than once"),
    ):
        assert reassign(wire, topic_name, 0, replicas) == (
            "INVALID_REPLICA_ASSIGNMENT",
            f"The manual partition assignment includes {what}.",
        )
    code = "UNKNOWN_TOPIC_OR_PARTITION"
    message = f"Unable to find partition {topic_name}:9."
    assert reassign(wire, topic_name, 9, [1]) == (code, message)
    message = f"Unable to find a topic named {topic_name}-2."
    assert reassign(wire, f"{topic_name}-2", 0, None) == (code, message)


# -- CreateTopics ----------------------------------------------------------------------


def test_two_names_of_one_request_may_collide_and_are_both_in_the_way(wire, topic_name):
    first, second, third = (topic_name + end for end in (".a_b", "_a.b", "_a_b"))

    def create(*names: str) -> list[str]:
        topics = [
            CreatableTopic(name=name, num_partitions=1, replication_factor=1)
            for name in names
        ]
        request = CreateTopicsRequest(topics=topics, timeout_ms=10_000)
        answer = wire.ask(request, 7, CreateTopicsResponse)
        return [ErrorCode(each.error_code).name for each in answer.topics]

    assert create(first, second) == ["NONE", "NONE"]
    assert create(third) == ["INVALID_TOPIC_EXCEPTION"]
    assert create(second) == ["TOPIC_ALREADY_EXISTS"]


# -- fetch sessions --------------------------------------------------------------------


class FetchSession:
    """A fetch session, and the topics of its next request."""

    def __init__(self, wire: Wire, version: int) -> None:
        self._wire, self._version = wire, version
        self._session_id = self._epoch = 0

    def fetch(
        self,
        wanted: Iterable[tuple[str, bytes, int]] = (),
        forgotten: Iterable[tuple[str, bytes, int]] = (),
    ) -> dict[tuple[str, bytes, int], str]:
        """Send the session's next request, with what it adds and forgets.

        Each partition has its topic's name and id. Return the names of errors by
        partition.
        """
        request = FetchRequest(
            session_id=self._session_id,
            session_epoch=self._epoch,
            max_bytes=1 << 20,
            topics=[
                FetchTopic(
                    topic=name,
                    topic_id=topic_id,
                    partitions=[
                        FetchPartition(
                            partition=index, fetch_offset=0, partition_max_bytes=1 << 20
                        )
                    ],
                )
                for name, topic_id, index in wanted
            ],
            forgotten_topics_data=[
                ForgottenTopic(topic=name, topic_id=topic_id, partitions=[index])
                for name, topic_id, index in forgotten
            ],
        )
        answer = self._wire.ask(request, self._version, FetchResponse)
        assert answer.error_code == ErrorCode.NONE, ErrorCode(answer.error_code)
        assert answer.session_id == (self._session_id or answer.session_id) != 0
        self._session_id = answer.session_id
        self._epoch += 1
        by_name = self._version < 13
        return {
            (
                topic.topic if by_name else "",
                b"" if by_name else topic.topic_id,
                each.partition_index,
            ): ErrorCode(each.error_code).name
            for topic in answer.responses
            for each in topic.partitions
        }


@pytest.mark.parametrize("again", [False, True], ids=["at first", "later"])
def test_a_fetch_session_has_room_for_a_name_that_is_not_there_yet(
    wire, topic_name, again
):
    wire.create(topic_name)
    later = topic_name + "-later"
    there, missing = (topic_name, bytes(16), 0), (later, bytes(16), 0)
    above = (topic_name, bytes(16), 9)
    shown = {(name, b"", index) for name, _, index in (missing, above)}
    session = FetchSession(wire, 12)
    if again:
        assert session.fetch([there]) == {(topic_name, b"", 0): "NONE"}
        answer = session.fetch([missing, above])
    else:
        answer = session.fetch([there, missing, above])
        assert answer.pop((topic_name, b"", 0)) == "NONE"
    unknown = dict.fromkeys(shown, "UNKNOWN_TOPIC_OR_PARTITION")
    assert answer == unknown
    assert session.fetch() == unknown
    wire.create(later)
    topic = CreatePartitionsTopic(name=topic_name, count=10, assignments=None)
    request = CreatePartitionsRequest(topics=[topic], timeout_ms=10_000)
    (created,) = wire.ask(request, 3, CreatePartitionsResponse).results
    assert created.error_code == ErrorCode.NONE, created
    seen: dict[tuple[str, bytes, int], str] = {}

    def served() -> bool:
        seen.update(session.fetch())
        return seen == dict.fromkeys(shown, "NONE")

    wait_until(served)
    assert session.fetch() == {}
    wire.delete(later)
    wait_until(lambda: session.fetch() == {(later, b"", 0): unknown[later, b"", 0]})
    assert session.fetch([], [missing]) == {}


def test_a_partition_that_is_not_there_ends_no_wait_for_another(
    wire, bootstrap, topic_name
):
    topic_id = wire.create(topic_name)
    partitions = [
        FetchPartition(partition=index, fetch_offset=0, partition_max_bytes=1 << 20)
        for index in (0, 9)
    ]
    request = FetchRequest(
        max_wait_ms=25_000,
        min_bytes=1,
        max_bytes=1 << 20,
        topics=[FetchTopic(topic=topic_name, partitions=partitions)],
    )
    wire.sock.sendall(frame(request.api_key, 12, request.encode(12)))
    assert not select([wire.sock], [], [], 0.5)[0]
    other = Wire(bootstrap)
    try:
        other.produce(topic_id, batch((now_ms(), b"k")))
    finally:
        other.sock.close()
    answer = FetchResponse.decode(12, memoryview(receive_frame(wire.sock))[5:])
    found = {
        each.partition_index: (ErrorCode(each.error_code).name, each.high_watermark)
        for topic in answer.responses
        for each in topic.partitions
    }
    assert found == {0: ("NONE", 1), 9: ("UNKNOWN_TOPIC_OR_PARTITION", -1)}


def test_a_fetch_session_tells_of_ids_that_are_gone_or_not_there(wire, topic_name):
    topic_id = wire.create(topic_name)
    doomed = topic_name + "-doomed"
    old = wire.create(doomed)
    stranger = b"\x07" * 16
    session = FetchSession(wire, 13)
    wanted = [("", each, 0) for each in (topic_id, old, stranger)]
    assert session.fetch(wanted) == {
        ("", topic_id, 0): "NONE",
        ("", old, 0): "NONE",
        ("", stranger, 0): "UNKNOWN_TOPIC_ID",
    }
    strange = {("", stranger, 0): "UNKNOWN_TOPIC_ID"}
    assert session.fetch() == strange
    wire.delete(doomed)
    gone = {("", old, 0): "UNKNOWN_TOPIC_OR_PARTITION"}
    wait_until(lambda: session.fetch() == strange | gone)
    new = wire.create(doomed)
    replaced = {("", old, 0): "INCONSISTENT_TOPIC_ID"}
    wait_until(lambda: session.fetch() == strange | replaced)
    answer = session.fetch([("", new, 0)], [("", old, 0), ("", stranger, 0)])
    assert answer == {("", new, 0): "NONE"}
    assert session.fetch() == {}


# -- Produce ---------------------------------------------------------------------------


def told(answer: PartitionProduceResponse) -> dict[str, Any]:
    return {
        "error": ErrorCode(answer.error_code).name,
        "base offset": answer.base_offset,
        "log start": answer.log_start_offset,
        "records": [each.batch_index for each in answer.record_errors],
    }


@pytest.mark.parametrize("is_split", [False, True])
def test_the_last_batch_counts_of_a_partition_named_again(wire, topic_name, is_split):
    topic_id = wire.create(topic_name)
    rows = [
        PartitionProduceData(index=0, records=batch(*[(now_ms(), b"k")] * count))
        for count in (1, 2, 3)
    ]
    topics = [
        TopicProduceData(topic_id=topic_id, partition_data=each)
        for each in ([[row] for row in rows] if is_split else [rows])
    ]
    request = ProduceRequest(acks=1, timeout_ms=10_000, topic_data=topics)
    answer = wire.ask(request, 13, ProduceResponse)
    (found,) = (row for topic in answer.responses for row in topic.partition_responses)
    assert (ErrorCode(found.error_code).name, found.base_offset) == ("NONE", 0)
    after = wire.produce(topic_id, batch((now_ms(), b"k")))
    assert (ErrorCode(after.error_code).name, after.base_offset) == ("NONE", 3)


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.GZIP])
def test_a_refused_batch_names_each_record_without_a_key(wire, topic_name, codec):
    topic_id = wire.create(topic_name, cleanup_policy="compact")
    keys = [b"k", None, b"k", None, b"k"]
    answer = wire.produce(
        topic_id, batch(*((now_ms(), key) for key in keys), codec=codec)
    )
    assert told(answer) == {
        "error": "INVALID_RECORD",
        "base offset": -1,
        "log start": 0,
        "records": [1, 3],
    }
    for each in answer.record_errors:
        assert " key" in each.batch_index_error_message
    assert answer.error_message


def test_a_refused_batch_names_each_record_whose_time_is_out_of_range(wire, topic_name):
    topic_id = wire.create(topic_name, message_timestamp_before_max_ms="1000")
    now = now_ms()  # a module may be loaded long before its tests are run
    late, good = now - 3_600_000, now + 600_000
    answer = wire.produce(
        topic_id, batch((good, None), (late, None), (-1, None), (late, b"k"))
    )
    assert told(answer) == {
        "error": "INVALID_TIMESTAMP",
        "base offset": -1,
        "log start": 0,
        "records": [1, 3],
    }
    for each in answer.record_errors:
        assert str(late) in each.batch_index_error_message


def test_a_missing_key_is_named_before_a_bad_time(wire, topic_name):
    topic_id = wire.create(
        topic_name, cleanup_policy="compact", message_timestamp_before_max_ms="1000"
    )
    now = now_ms()  # a module may be loaded long before its tests are run
    late, good = now - 3_600_000, now + 600_000
    answer = wire.produce(topic_id, batch((late, None), (good, b"k")))
    assert told(answer)["error"] == "INVALID_RECORD"
    assert told(answer)["records"] == [0]
    answer = wire.produce(topic_id, batch((late, None), (late, b"k")))
    assert told(answer)["error"] == "INVALID_TIMESTAMP"
    assert told(answer)["records"] == [0, 1]


def test_a_refusal_that_names_no_record_has_a_log_start_or_not(wire, topic_name):
    topic_id = wire.create(topic_name, max_message_bytes="200")
    large = RecordBatchBuilder()
    large.append(now_ms(), None, bytes(1000))
    answer = wire.produce(topic_id, bytes(large.build()))
    assert told(answer) == {
        "error": "MESSAGE_TOO_LARGE",
        "base offset": -1,
        "log start": -1,
        "records": [],
    }


# -- configs ---------------------------------------------------------------------------


def alter(wire: Wire, name: str, key: str, value: str | None) -> str:
    """Set a config of broker ``name``, or remove it; return the name of the error."""
    config = AlterableConfig(
        name=key, config_operation=1 if value is None else 0, value=value
    )
    resource = AlterConfigsResource(
        resource_type=BROKER, resource_name=name, configs=[config]
    )
    request = IncrementalAlterConfigsRequest(resources=[resource])
    (answer,) = wire.ask(request, 1, IncrementalAlterConfigsResponse).responses
    return ErrorCode(answer.error_code).name


def describe(wire: Wire, kind: int, name: str, key: str) -> tuple[str | None, str]:
    """Return the value of a config, and its source."""
    resource = DescribeConfigsResource(
        resource_type=kind, resource_name=name, configuration_keys=[key]
    )
    request = DescribeConfigsRequest(resources=[resource])
    (answer,) = wire.ask(request, 4, DescribeConfigsResponse).results
    if not answer.configs:
        return None, "unset"  # Kafka's broker learns of a change a moment later
    (config,) = answer.configs
    return config.value, ConfigSource(config.config_source).name


@pytest.mark.parametrize(
    ("name", "key", "value", "error"),
    [
        ("1", "sasl.kerberos.min.time.before.relogin", "58000", "NONE"),
        ("1", "sasl.login.refresh.buffer.seconds", "12", "NONE"),
        ("1", "remote.log.reader.threads", "9", "NONE"),
        ("1", "metric.reporters", "", "NONE"),
        ("", "remote.log.reader.threads", "9", "NONE"),
        ("", "sasl.kerberos.min.time.before.relogin", "58000", "INVALID_REQUEST"),
        ("1", "ssl.keystore.type", "PEM", "INVALID_REQUEST"),
        ("1", "ssl.truststore.location", "/x", "INVALID_REQUEST"),
        ("1", "request.timeout.ms", "5", "INVALID_REQUEST"),
        ("1", "remote.log.manager.thread.pool.size", "5", "INVALID_REQUEST"),
        ("1", "remote.log.reader.threads", "0", "INVALID_REQUEST"),
        ("1", "remote.log.reader.threads", "few", "INVALID_REQUEST"),
    ],
)
def test_a_broker_takes_what_it_can_change_with_effect_or_without(
    wire, name, key, value, error
):
    assert alter(wire, name, key, value) == error
    try:
        if error == "NONE":
            source = ConfigSource(2 if name else 3).name
            wanted = (value, source)
            wait_until(lambda: describe(wire, BROKER, name, key) == wanted)
    finally:
        alter(wire, name, key, None)


def test_the_least_number_of_replicas_in_sync_is_a_default_of_the_cluster(
    wire, topic_name
):
    wire.create(topic_name)
    key = "min.insync.replicas"
    told = ("1", "DYNAMIC_DEFAULT_BROKER_CONFIG")
    assert describe(wire, TOPIC, topic_name, key) == told
    assert describe(wire, BROKER, "1", key) == told
    assert describe(wire, BROKER, "", key) == told
    assert alter(wire, "1", key, "1") == "INVALID_CONFIG"  # it is the cluster's alone
