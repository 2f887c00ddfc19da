"""What message classes offer to those who build and read messages."""

from __future__ import annotations

import mmap
import pickle
import subprocess
import sys
from dataclasses import dataclass

import pytest

from mpbroker.protocol.errors import ProtocolError
from mpbroker.protocol.fields import FOREVER
from mpbroker.protocol.headers import FLEXIBLE_FROM
from mpbroker.protocol.message import Message
from mpbroker.protocol.messages.describe_topic_partitions import (
    Cursor,
    DescribeTopicPartitionsRequest,
)
from mpbroker.protocol.messages.fetch import (
    EpochEndOffset,
    FetchableTopicResponse,
    FetchRequest,
    FetchResponse,
    LeaderIdAndEpoch,
    PartitionData,
)
from mpbroker.protocol.messages.list_offsets import (
    ListOffsetsPartitionResponse,
    ListOffsetsResponse,
    ListOffsetsTopicResponse,
)
from mpbroker.protocol.messages.metadata import (
    MetadataRequest,
    MetadataRequestTopic,
    MetadataResponse,
    MetadataResponseTopic,
)
from mpbroker.protocol.messages.produce import (
    PartitionProduceData,
    ProduceRequest,
    TopicProduceData,
)
from tests.support.message_cases import MESSAGES, pair_name


@dataclass
class Region:
    """Bytes of a log file, as the server would put them into a response."""

    size_in_bytes: int


def produce_request(records: object) -> ProduceRequest:
    partition = PartitionProduceData(index=3, records=records)  # type: ignore[arg-type]
    return ProduceRequest(
        acks=1, topic_data=[TopicProduceData(name="t", partition_data=[partition])]
    )


def fetch_response(*records: object) -> FetchResponse:
    partitions = [
        PartitionData(partition_index=index, records=value)  # type: ignore[arg-type]
        for index, value in enumerate(records)
    ]
    return FetchResponse(
        responses=[FetchableTopicResponse(topic="t", partitions=partitions)]
    )


# -- classes -----------------------------------------------------------------------


def test_the_constructor_has_the_protocol_s_defaults() -> None:
    request = MetadataRequest()
    assert request.topics == []
    assert request.allow_auto_topic_creation is True
    assert FetchRequest().max_bytes == 0x7FFF_FFFF
    assert FetchRequest().replica_id == -1
    assert MetadataResponseTopic().topic_authorized_operations == -(2**31)
    assert MetadataResponse().cluster_id is None
    assert PartitionProduceData().records is None


def test_default_lists_are_not_shared() -> None:
    MetadataRequest().topics.append(MetadataRequestTopic())  # type: ignore[union-attr]
    assert MetadataRequest().topics == []


def test_null_is_not_the_same_as_not_given() -> None:
    assert MetadataRequest(topics=None).topics is None


def test_messages_compare_by_value_and_show_their_fields() -> None:
    one, other = produce_request(b"ab"), produce_request(memoryview(b"ab"))
    assert one == other
    assert one != produce_request(b"ac")
    assert one != "something else"
    assert "TopicProduceData(name='t'" in repr(one)
    assert "<2 bytes>" in repr(other)


def test_messages_have_no_other_attributes() -> None:
    with pytest.raises(AttributeError):
        MetadataRequest().topic = []  # type: ignore[attr-defined]
    with pytest.raises(TypeError):
        MetadataRequest(topic=[])  # type: ignore[call-arg]


def test_messages_can_be_pickled() -> None:
    request = produce_request(b"ab")
    assert pickle.loads(pickle.dumps(request)) == request


@pytest.mark.parametrize("message", MESSAGES, ids=pair_name)
def test_flexible_versions_are_those_of_the_header(message: type[Message]) -> None:
    header = FLEXIBLE_FROM[message.api_key]
    assert message.flexible_from == (FOREVER if header == 0x8000 else header)


@pytest.mark.parametrize("message", MESSAGES, ids=pair_name)
def test_requests_and_responses_have_the_same_versions(message: type[Message]) -> None:
    twins = [other for other in MESSAGES if other.api_key is message.api_key]
    assert len(twins) == 2
    assert twins[0].valid_versions == twins[1].valid_versions


def test_importing_messages_compiles_nothing() -> None:
    code = (
        "import sys, mpbroker.protocol.messages.fetch; "
        "print(sorted(m for m in sys.modules if 'codec' in m and 'mpbroker' in m))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


# -- buffers -----------------------------------------------------------------------


def test_records_are_views_of_the_buffer_and_strings_are_copies() -> None:
    encoded = produce_request(b"abc").encode(9)
    shared = mmap.mmap(-1, 4096)
    view = memoryview(shared)
    view[100 : 100 + len(encoded)] = encoded
    request = ProduceRequest.decode(9, view[: 100 + len(encoded)], 100)
    (topic,) = request.topic_data
    records = topic.partition_data[0].records
    assert isinstance(records, memoryview)
    at = 100 + encoded.index(b"abc")
    view[at] = ord("X")
    view[100 + encoded.index(b"t")] = ord("X")
    assert records == b"Xbc"
    assert topic.name == "t"
    records.release()
    view.release()
    shared.close()  # fails while any view of it lives


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_buffer_can_be_decoded(kind: type) -> None:
    request = produce_request(b"abc")
    assert ProduceRequest.decode(9, kind(request.encode(9))) == request
    metadata = MetadataRequest(topics=[MetadataRequestTopic(name="größer")])
    assert MetadataRequest.decode(12, kind(metadata.encode(12))) == metadata


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_records_may_be_any_bytes(kind: type) -> None:
    expected = produce_request(b"abc").encode(9)
    assert produce_request(kind(b"abc")).encode(9) == expected
    assert produce_request(kind(b"abc")).encode_parts(9) == [expected]


@pytest.mark.parametrize("version", [4, 11, 12, 18])
@pytest.mark.parametrize("size", [0, 126, 127, 5_000, 70_000, 3_000_000])
def test_regions_stand_in_for_their_bytes(version: int, size: int) -> None:
    first, second = Region(size), Region(7)
    parts = fetch_response(first, b"inline", second).encode_parts(version)
    expected = fetch_response(bytes(size), b"inline", bytes(7)).encode(version)
    assert [part for part in parts if isinstance(part, Region)] == [first, second]
    after = [bytes] if version >= 12 else []  # tagged fields
    assert [type(part) for part in parts] == [bytes, Region, bytes, Region, *after]
    filled = b"".join(
        bytes(part.size_in_bytes) if isinstance(part, Region) else bytes(part)
        for part in parts
    )
    assert filled == expected


def test_a_response_without_regions_is_one_part() -> None:
    response = fetch_response(b"a", None)
    assert response.encode_parts(12) == [response.encode(12)]


def test_regions_cannot_be_encoded_to_plain_bytes() -> None:
    with pytest.raises(ProtocolError, match=r"FetchResponse v12.*encode_parts"):
        fetch_response(Region(5)).encode(12)


def test_records_that_are_neither_bytes_nor_a_region_are_refused() -> None:
    with pytest.raises(ProtocolError, match=r"responses.partitions.records"):
        fetch_response(5).encode_parts(12)


# -- versions ----------------------------------------------------------------------


def test_fields_that_a_version_lacks_have_their_defaults() -> None:
    request = MetadataRequest(topics=[MetadataRequestTopic(name="a")])
    old = MetadataRequest.decode(0, request.encode(0))
    assert old.allow_auto_topic_creation is True
    assert old.topics == [MetadataRequestTopic(name="a", topic_id=bytes(16))]


def test_a_set_field_that_an_old_version_lacks_is_refused_by_name() -> None:
    response = ListOffsetsResponse(
        topics=[
            ListOffsetsTopicResponse(
                name="t", partitions=[ListOffsetsPartitionResponse(leader_epoch=4)]
            )
        ]
    )
    assert ListOffsetsResponse.decode(4, response.encode(4)) == response
    with pytest.raises(ProtocolError, match=r"topics.partitions.leader_epoch: 4"):
        response.encode(3)


def test_tagged_structs_are_none_when_absent_and_travel_when_set() -> None:
    response = fetch_response(b"a")
    (partition,) = response.responses[0].partitions
    plain = response.encode(12)
    partition.current_leader = LeaderIdAndEpoch()
    assert response.encode(12) == plain  # all defaults: not sent
    partition.current_leader = LeaderIdAndEpoch(leader_id=3, leader_epoch=9)
    partition.diverging_epoch = EpochEndOffset(epoch=2, end_offset=5)
    decoded = FetchResponse.decode(12, response.encode(12))
    assert decoded == response
    assert decoded.responses[0].partitions[0].snapshot_id is None
    with pytest.raises(ProtocolError, match="diverging_epoch"):
        response.encode(11)


def test_a_nullable_struct_is_led_by_its_presence() -> None:
    without = DescribeTopicPartitionsRequest()
    cursor = Cursor(topic_name="t", partition_index=2)
    having = DescribeTopicPartitionsRequest(cursor=cursor)
    assert without.encode(0) == b"\1" + b"\0\0\x07\xd0" + b"\xff" + b"\0"
    assert having.encode(0) == (
        b"\1" + b"\0\0\x07\xd0" + b"\1" + b"\2t\0\0\0\2\0" + b"\0"
    )
    for request in (without, having):
        decoded = DescribeTopicPartitionsRequest.decode(0, request.encode(0))
        assert decoded == request
