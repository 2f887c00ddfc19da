"""Whatever bytes a peer sends, decoding ends in a message or in ProtocolError."""

from __future__ import annotations

import tracemalloc
from contextlib import suppress
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpbroker.protocol.errors import ProtocolError, TooManyElementsError
from mpbroker.protocol.message import (
    MAX_REQUEST_ELEMENTS,
    MAX_REQUEST_NAMES,
    Message,
)
from mpbroker.protocol.messages.api_versions import (
    ApiVersionsRequest,
    ApiVersionsResponse,
)
from mpbroker.protocol.messages.create_topics import CreateTopicsRequest
from mpbroker.protocol.messages.describe_groups import DescribeGroupsRequest
from mpbroker.protocol.messages.fetch import FetchRequest, FetchResponse
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
from mpbroker.protocol.primitives import write_unsigned_varint
from tests.support.message_cases import MESSAGES, PAIRS, pair_name, random_message

INT32_MAX = b"\x7f\xff\xff\xff"
VARINT_MAX = b"\xff\xff\xff\xff\x0f"
TEMPTING = [b"\0", b"\1", b"\x7f", b"\x80", b"\xff", INT32_MAX, b"\xff" * 4, VARINT_MAX]


def mutated(rng: Random, data: bytes) -> bytes:
    """Flip, cut, insert or overwrite at a random place, once to three times."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        at = rng.randint(0, len(changed))
        match rng.randrange(4):
            case 0 if at < len(changed):
                changed[at] ^= 1 << rng.randrange(8)
            case 1:
                del changed[at:]
            case 2:
                changed[at:at] = rng.choice(TEMPTING)
            case _:
                tempting = rng.choice(TEMPTING)
                changed[at : at + len(tempting)] = tempting
    return bytes(changed)


@pytest.mark.parametrize(("message", "version"), PAIRS, ids=pair_name)
def test_mutated_messages_decode_or_are_refused(
    message: type[Message], version: int
) -> None:
    rng = Random(f"{message.__name__} {version}")
    for _ in range(4):
        valid = random_message(rng, message, version).encode(version)[:2000]
        for _ in range(25):
            with suppress(ProtocolError):
                message.decode(version, memoryview(mutated(rng, valid)))


@pytest.mark.parametrize("message", MESSAGES, ids=pair_name)
@settings(max_examples=30, deadline=None)
@given(data=st.binary(max_size=120), version=st.integers(0, 18))
def test_any_bytes_decode_or_are_refused(
    message: type[Message], data: bytes, version: int
) -> None:
    with suppress(ProtocolError):
        message.decode(version, data)


@pytest.mark.parametrize("message", MESSAGES, ids=pair_name)
def test_every_prefix_is_refused_and_a_byte_behind_a_request_ignored(
    message: type[Message],
) -> None:
    rng = Random(message.__name__)
    for version in message.valid_versions:
        while len(valid := random_message(rng, message, version).encode(version)) > 300:
            pass
        for size in range(len(valid)):
            with pytest.raises(ProtocolError):
                message.decode(version, valid[:size])
        if message.is_request():
            assert message.decode(version, valid + b"\0").encode(version) == valid
            continue
        with pytest.raises(ProtocolError, match="1 bytes too many"):
            message.decode(version, valid + b"\0")


def test_librdkafkas_request_for_all_topics_is_understood() -> None:
    # As sent by librdkafka 2.16.0: the null array takes four bytes, not one.
    assert MetadataRequest.decode(13, bytes.fromhex("00000000010000")) == (
        MetadataRequest(topics=None, allow_auto_topic_creation=False)
    )


@pytest.mark.parametrize(
    ("message", "version", "data"),
    [
        (MetadataRequest, 5, INT32_MAX + bytes(16)),
        (MetadataRequest, 12, VARINT_MAX + bytes(15)),
        (ProduceRequest, 3, b"\xff\xff" + bytes(6) + INT32_MAX + bytes(8)),
        (FetchResponse, 12, bytes(10) + VARINT_MAX + bytes(5)),
        (MetadataResponse, 12, bytes(4) + VARINT_MAX + bytes(11)),
        # a tagged field section of 2^32 - 1 fields
        (ApiVersionsRequest, 3, b"\1\1" + VARINT_MAX + bytes(13)),
        # a tagged field of 2^31 - 1 bytes
        (ApiVersionsRequest, 3, b"\1\1\1\7\xff\xff\xff\xff\7" + bytes(11)),
    ],
)
def test_a_count_beyond_the_bytes_is_refused_without_allocating(
    message: type[Message], version: int, data: bytes
) -> None:
    message.decoder(version)  # compiling allocates
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError) as refusal:
            message.decode(version, data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert message.__name__ in str(refusal.value)
    assert peak < 20_000


@pytest.mark.parametrize("version", MetadataRequest.valid_versions)
def test_an_element_may_not_be_smaller_than_its_least_size(version: int) -> None:
    # as many elements as bytes: each needs two bytes at least, so half of them lie
    count = 1000
    flexible = version >= MetadataRequest.flexible_from
    lead = write_unsigned_varint(count + 1) if flexible else count.to_bytes(4, "big")
    with pytest.raises(ProtocolError, match=r"topics at byte .*: count 1000 with 1000"):
        MetadataRequest.decode(version, lead + bytes(count))


@pytest.mark.parametrize(
    ("message", "version", "data", "reason"),
    [
        (MetadataRequest, 0, b"\xff\xff\xff\xff", "topics at byte 4 of 4: count -1"),
        (MetadataRequest, 0, b"\xff\xff\xff\xfe", "topics .* count -2"),
        (MetadataRequest, 1, b"\0\0\0\1\xff\xff", "topics.name .* length -1"),
        (MetadataRequest, 1, b"\0\0\0\1\0\5ab", "topics.name .* length 5 with 2 bytes"),
        (
            MetadataRequest,
            1,
            b"\0\0\0\1\x2a\xab" + b"\xff" * 10_923,  # no int16 has the new length
            "topics.name .*utf-8",
        ),
        (MetadataRequest, 9, b"\2\0\0\1\0\0\0", "topics.name .* length -1"),
        (MetadataRequest, 9, b"\xff\xff\xff\xff\x1f", "topics .* 32 bits"),
        (MetadataRequest, 9, b"\x80\x80\x80\x80\x80\x01", "topics .* 32 bits"),
        (MetadataRequest, 9, b"\x80", "topics .* the bytes end here"),
        (MetadataRequest, 9, b"\1\1", "needs 1 bytes, 0 left"),
        (MetadataRequest, 4, b"\0\0\0\0", "allow_auto_topic_creation .* needs 1"),
        (ProduceRequest, 3, b"\xff\xff\0\1\0", "timeout_ms at byte 2 .* needs 4 bytes"),
        (
            ApiVersionsResponse,
            3,
            b"\0\0\1\0\0\0\0\2\1\0\1\0",
            "finalized_features_epoch .* needs 8 bytes, 2 left",
        ),
        (FetchRequest, 99, b"", "FetchRequest has no version 99, only 4-18"),
    ],
)
def test_a_refusal_names_the_field_and_the_numbers(
    message: type[Message], version: int, data: bytes, reason: str
) -> None:
    with pytest.raises(ProtocolError, match=reason) as refusal:
        message.decode(version, data)
    assert message.__name__ in str(refusal.value)


def test_unknown_tagged_fields_are_skipped_at_every_level() -> None:
    tags = b"\2\x07\3abc\xc8\1\0"
    topic = b"\2a" + tags
    decoded = MetadataRequest.decode(9, b"\2" + topic + b"\1\0\0" + tags)
    assert decoded == MetadataRequest(topics=[MetadataRequestTopic(name="a")])


@pytest.mark.parametrize("tags", [b"\2\5\0\5\0", b"\2\5\0\4\0"])
def test_unknown_tagged_fields_may_come_twice_and_in_any_order(tags: bytes) -> None:
    assert ApiVersionsRequest.decode(3, b"\1\1" + tags) == ApiVersionsRequest()


@pytest.mark.parametrize(
    "tags",
    [
        b"\2" + b"\3\1\1" + b"\1\x08" + bytes(7) + b"\5",  # 3 before 1
        b"\3" + b"\3\1\0" + b"\3\1\1" + b"\1\x08" + bytes(7) + b"\5",  # 3 twice
    ],
)
def test_the_last_of_a_known_tagged_field_counts(tags: bytes) -> None:
    decoded = ApiVersionsResponse.decode(3, b"\0\0\1\0\0\0\0" + tags)
    assert decoded == ApiVersionsResponse(
        finalized_features_epoch=5, zk_migration_ready=True
    )


@pytest.mark.parametrize("length", [-1, -2, -(2**31)])
def test_any_negative_length_is_null_where_null_is_allowed(length: int) -> None:
    data = length.to_bytes(4, "big", signed=True) + b"\1"
    assert MetadataRequest.decode(4, data) == MetadataRequest(topics=None)


def test_many_unknown_tagged_fields_are_skipped() -> None:
    count = 10_000
    tags = b"".join(write_unsigned_varint(tag) + b"\0" for tag in range(count))
    data = b"\1\1" + write_unsigned_varint(count) + tags
    assert ApiVersionsRequest.decode(3, data) == ApiVersionsRequest()


def test_known_and_unknown_tagged_fields_mix() -> None:
    # tag 1 is an int64 epoch, tag 3 a boolean; 2 is empty here and 9 is nobody's
    tags = b"\4" + b"\1\x08" + b"\0" * 7 + b"\5" + b"\2\1\1" + b"\3\1\1" + b"\x09\1x"
    decoded = ApiVersionsResponse.decode(3, b"\0\0\1\0\0\0\0" + tags)
    assert decoded == ApiVersionsResponse(
        finalized_features_epoch=5, zk_migration_ready=True
    )


@pytest.mark.parametrize(
    "tags",
    [
        b"\1\1\x09" + bytes(9),  # an int64 that says it has 9 bytes
        b"\1\1\7" + bytes(7),
    ],
)
def test_known_tagged_fields_must_have_their_size(tags: bytes) -> None:
    with pytest.raises(ProtocolError, match="ApiVersionsResponse v3"):
        ApiVersionsResponse.decode(3, b"\0\0\1\0\0\0\0" + tags)


def test_a_value_that_does_not_fit_its_field_is_refused_by_name() -> None:
    request = ProduceRequest(
        topic_data=[
            TopicProduceData(
                name="t", partition_data=[PartitionProduceData(index=1 << 31)]
            )
        ]
    )
    with pytest.raises(ProtocolError, match=r"topic_data.partition_data.index: 21474"):
        request.encode(9)
    with pytest.raises(ProtocolError, match=r"FetchRequest v12.*topics"):
        FetchRequest(topics=None).encode(12)  # type: ignore[arg-type]
    with pytest.raises(ProtocolError, match=r"topics.name: .*40000"):
        MetadataRequest(topics=[MetadataRequestTopic(name="x" * 40_000)]).encode(1)
    with pytest.raises(ProtocolError, match=r"topics.topic_id: a uuid of 3 bytes"):
        MetadataRequest(topics=[MetadataRequestTopic(topic_id=b"abc")]).encode(12)
    with pytest.raises(ProtocolError, match=r"topics.name.*surrogates"):
        MetadataRequest(topics=[MetadataRequestTopic(name="\ud800")]).encode(12)


def test_a_string_is_not_longer_than_any_version_can_say() -> None:
    """It would be answered in older ones, and be in logs: there lengths are int16."""
    names = [MetadataRequestTopic(name="x" * 32_767)]
    assert MetadataRequest.decode(9, MetadataRequest(topics=names).encode(9))
    names[0].name = "x" * 32_768
    with pytest.raises(ProtocolError, match=r"topics.name at byte .* of 32768 bytes"):
        MetadataRequest.decode(9, MetadataRequest(topics=names).encode(9))
    # Each byte that is not UTF-8 becomes three.
    names[0].name = "x" * 10_923
    data = MetadataRequest(topics=names).encode(9).replace(b"x", b"\xff")
    with pytest.raises(ProtocolError, match=r"topics.name at byte"):
        MetadataRequest.decode(9, data)


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        (b"\xc3\x28", "\ufffd("),
        (b"\xff" * 64, "\ufffd" * 64),
        (b"\xff" * 10_922, "\ufffd" * 10_922),
    ],
    ids=["short", "long", "longest"],
)
@pytest.mark.parametrize("message", [MetadataRequest, ProduceRequest])
def test_a_string_that_is_not_utf_8_is_read_as_java_reads_it(
    message: type[Message], sent: bytes, read: str
) -> None:
    """Of both kinds of decoder: with and without views of the request's bytes."""
    for version in (3, 9):
        name = "x" * len(sent)
        request: Message
        if message is MetadataRequest:
            request = MetadataRequest(topics=[MetadataRequestTopic(name=name)])
        else:
            request = ProduceRequest(topic_data=[TopicProduceData(name=name)])
        data = request.encode(version).replace(name.encode(), sent)
        decoded = message.decode(version, memoryview(data))
        text = repr(read)[1:-1]
        assert f"name='{text}'" in repr(decoded)
        assert read.encode() in decoded.encode(version)


def test_a_set_field_that_the_version_lacks_is_refused_unless_ignorable() -> None:
    with pytest.raises(ProtocolError, match="allow_auto_topic_creation: False"):
        MetadataRequest(allow_auto_topic_creation=False).encode(3)
    named = MetadataRequest(topics=[MetadataRequestTopic(topic_id=b"i" * 16, name="a")])
    assert MetadataRequest.decode(9, named.encode(9)).topics == [
        MetadataRequestTopic(name="a")
    ]
    with pytest.raises(ProtocolError, match="no version 1, only 2-7"):
        CreateTopicsRequest().encode(1)


@pytest.mark.parametrize("version", [4, 12])
@pytest.mark.parametrize("more", [0, 1])
def test_a_request_has_a_limited_number_of_elements(version: int, more: int) -> None:
    """2 MB of empty names cost a handler 58 MB, before anything was authorized."""
    names = [MetadataRequestTopic(name="")] * (MAX_REQUEST_ELEMENTS + more)
    data = MetadataRequest(topics=names).encode(version)
    if more:
        with pytest.raises(
            TooManyElementsError, match=r"topics at byte .* more than 262144"
        ):
            MetadataRequest.decode(version, data)
    else:
        assert MetadataRequest.decode(version, data).topics == names


def test_the_limit_is_one_of_all_arrays_of_a_request_together() -> None:
    partitions = [PartitionProduceData(index=0, records=None)] * 1000
    topics = [TopicProduceData(name="", partition_data=partitions)] * 262
    data = b"".join(ProduceRequest(topic_data=topics).encode_parts(9))
    with pytest.raises(TooManyElementsError, match="more than 262144") as refusal:
        ProduceRequest.decode(9, data)
    assert refusal.value.partial.acks == 0  # how to answer is known
    few = b"".join(ProduceRequest(topic_data=topics[:261]).encode_parts(9))
    assert len(ProduceRequest.decode(9, few).topic_data) == 261


@pytest.mark.parametrize("version", [4, 12])
def test_an_array_that_kafka_refuses_is_malformed(version: int) -> None:
    """Kafka closes the connection. Up to a million elements it answers."""
    for count, kind in [(1_000_000, TooManyElementsError), (1_000_001, ProtocolError)]:
        lead = write_unsigned_varint(count + 1) if version == 12 else struct_of(count)
        with pytest.raises(ProtocolError) as refusal:
            MetadataRequest.decode(version, lead + bytes(19 * count))
        assert type(refusal.value) is kind


def struct_of(count: int) -> bytes:
    return count.to_bytes(4, "big")


def test_names_to_be_described_are_fewer() -> None:
    most = DescribeGroupsRequest(groups=[""] * MAX_REQUEST_NAMES).encode(5)
    assert len(DescribeGroupsRequest.decode(5, most).groups) == MAX_REQUEST_NAMES
    more = DescribeGroupsRequest(groups=[""] * (MAX_REQUEST_NAMES + 1)).encode(5)
    with pytest.raises(TooManyElementsError, match=r"groups .* more than 100000"):
        DescribeGroupsRequest.decode(5, more)


@pytest.mark.parametrize("message", [MetadataRequest, FetchRequest])
def test_tagged_fields_are_limited_as_in_kafka(message: type[Message]) -> None:
    """FetchRequest knows some; 50 million in a request took a handler half a minute."""
    data = message().encode(12)[:-1]
    most = data + write_unsigned_varint(10_000) + b"\x63\0" * 10_000
    assert message.decode(12, most) == message.decode(12, data + b"\0")
    more = data + write_unsigned_varint(10_001) + b"\x63\0" * 10_001
    with pytest.raises(ProtocolError, match="10001 tagged fields") as refusal:
        message.decode(12, more)
    assert type(refusal.value) is ProtocolError


def test_tagged_fields_count_as_elements() -> None:
    tags = write_unsigned_varint(10_000) + b"\x63\0" * 10_000
    topic = bytes(16) + b"\1" + tags  # no id, an empty name
    data = b"\x1c" + topic * 27 + bytes(3)
    with pytest.raises(TooManyElementsError, match="more than 262144"):
        MetadataRequest.decode(12, data)


def test_an_answer_may_have_more_elements() -> None:
    """A client asked for it, and Kafka's brokers describe more partitions than ours."""
    topics = [MetadataResponseTopic(name="", topic_id=bytes(16))] * (
        MAX_REQUEST_ELEMENTS + 1
    )
    data = MetadataResponse(topics=topics).encode(12)
    assert len(MetadataResponse.decode(12, data).topics) == MAX_REQUEST_ELEMENTS + 1
