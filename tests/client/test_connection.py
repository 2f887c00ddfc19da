"""`Connection`: versions, what is in flight, and what a broker may not do."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpbroker.client.connection import Connection
from mpbroker.client.errors import ClientError, UnsupportedVersionError
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError, ProtocolError
from mpbroker.protocol.framing import FrameDecoder, encode_frame
from mpbroker.protocol.headers import (
    encode_response_header,
    parse_request_header,
    response_header_version,
)
from mpbroker.protocol.messages.api_versions import ApiVersion, ApiVersionsResponse
from mpbroker.protocol.messages.fetch import FetchRequest
from mpbroker.protocol.messages.metadata import MetadataRequest, MetadataResponse
from mpbroker.protocol.messages.produce import ProduceRequest, ProduceResponse
from tests.client.fake_broker import size_prefix, split_every


def versions_answer(correlation_id=0, error_code=0, version=4, **ranges):
    response = ApiVersionsResponse(
        error_code=error_code,
        api_keys=[
            ApiVersion(api_key=ApiKey[name], min_version=low, max_version=high)
            for name, (low, high) in ranges.items()
        ],
    )
    header = encode_response_header(ApiKey.API_VERSIONS, version, correlation_id)
    return encode_frame([header, response.encode(version)])


def ready(**ranges):
    connection = Connection("test")
    connection.negotiate()
    connection.data_to_send()
    assert connection.receive_data(versions_answer(**ranges)) == []
    assert connection.is_ready
    return connection


def metadata_answer(correlation_id, version, cluster_id="c"):
    header = encode_response_header(ApiKey.METADATA, version, correlation_id)
    return encode_frame(
        [header, MetadataResponse(cluster_id=cluster_id).encode(version)]
    )


def sent_headers(connection):
    decoder = FrameDecoder()
    decoder.feed(connection.data_to_send())
    headers = []
    while (frame := decoder.next_frame()) is not None:
        headers.append(parse_request_header(frame))
    return headers


def test_a_connection_asks_for_versions_first_and_names_itself():
    connection = Connection("someone")
    connection.negotiate()
    (header,) = sent_headers(connection)
    assert header.api_key == ApiKey.API_VERSIONS
    assert header.api_version == 4
    assert header.client_id == "someone"


def test_a_broker_that_refuses_the_newest_api_versions_is_asked_in_version_0():
    connection = Connection()
    connection.negotiate()
    connection.data_to_send()
    refusal = ApiVersionsResponse(error_code=ErrorCode.UNSUPPORTED_VERSION)
    connection.receive_data(
        encode_frame([encode_response_header(18, 4, 0), refusal.encode(0)])
    )
    (header,) = sent_headers(connection)
    assert (header.api_key, header.api_version) == (18, 0)
    connection.receive_data(versions_answer(1, version=0, METADATA=(0, 5)))
    assert connection.version_for(MetadataRequest) == 5


def test_a_broker_that_knows_no_version_of_api_versions_is_given_up():
    connection = Connection()
    connection.negotiate()
    refusal = ApiVersionsResponse(error_code=ErrorCode.UNSUPPORTED_VERSION).encode(0)
    connection.receive_data(encode_frame([encode_response_header(18, 4, 0), refusal]))
    with pytest.raises(ProtocolError, match="no version of ApiVersions"):
        connection.receive_data(
            encode_frame([encode_response_header(18, 0, 1), refusal])
        )


def test_a_broker_that_refuses_to_tell_its_versions_raises_its_error():
    connection = Connection()
    connection.negotiate()
    with pytest.raises(ApiError) as caught:
        connection.receive_data(
            versions_answer(error_code=ErrorCode.CLUSTER_AUTHORIZATION_FAILED)
        )
    assert caught.value.error_code == ErrorCode.CLUSTER_AUTHORIZATION_FAILED


@pytest.mark.parametrize(
    ("broker", "cap", "expected"),
    [((0, 12), None, 12), ((0, 99), None, 13), ((0, 99), 9, 9), ((4, 4), None, 4)],
)
def test_the_highest_version_that_both_sides_speak_is_chosen(broker, cap, expected):
    assert ready(METADATA=broker).version_for(MetadataRequest, cap) == expected


def test_no_common_version_is_an_error_that_names_both_ranges():
    connection = ready(FETCH=(0, 3), METADATA=(20, 30))
    with pytest.raises(UnsupportedVersionError, match=r"FETCH 0-3, this client 4-18"):
        connection.version_for(FetchRequest)
    with pytest.raises(UnsupportedVersionError, match=r"METADATA 20-30.*0-13"):
        connection.version_for(MetadataRequest)
    with pytest.raises(UnsupportedVersionError, match="does not serve PRODUCE"):
        connection.version_for(ProduceRequest)


def test_nothing_is_sent_before_versions_are_known():
    with pytest.raises(ClientError, match="negotiate"):
        Connection().send(MetadataRequest(), MetadataResponse)


@given(st.integers(1, 40), st.integers(1, 5))
def test_answers_do_not_depend_on_how_the_stream_was_cut(step, count):
    connection = ready(METADATA=(0, 12))
    sent = [connection.send(MetadataRequest(), MetadataResponse) for _ in range(count)]
    stream = b"".join(metadata_answer(number, 12, f"c{number}") for number in sent)
    answers = []
    for piece in split_every(stream, step):
        answers += connection.receive_data(piece)
    assert [answer.correlation_id for answer in answers] == sent
    assert [answer.response.cluster_id for answer in answers] == [
        f"c{number}" for number in sent
    ]
    assert connection.in_flight == 0
    assert connection.buffered_bytes == 0


def test_an_answer_out_of_turn_is_a_protocol_error():
    connection = ready(METADATA=(0, 12))
    first = connection.send(MetadataRequest(), MetadataResponse)
    second = connection.send(MetadataRequest(), MetadataResponse)
    with pytest.raises(ProtocolError, match=f"{second}, but the oldest is {first}"):
        connection.receive_data(metadata_answer(second, 12))


def test_an_answer_to_no_request_is_a_protocol_error():
    with pytest.raises(ProtocolError, match="no request"):
        ready(METADATA=(0, 12)).receive_data(metadata_answer(1, 12))


def test_a_produce_without_acks_waits_for_no_answer():
    connection = ready(PRODUCE=(0, 9), METADATA=(0, 12))
    connection.send(ProduceRequest(acks=0), ProduceResponse, expect_answer=False)
    sent = connection.send(MetadataRequest(), MetadataResponse)
    assert connection.in_flight == 1
    (answer,) = connection.receive_data(metadata_answer(sent, 12))
    assert answer.correlation_id == sent


@pytest.mark.parametrize("length", [-1, 1001, 2**31 - 1])
def test_a_frame_above_the_limit_is_refused_before_it_arrives(length):
    connection = Connection(max_frame_bytes=1000)
    connection.negotiate()
    with pytest.raises(ProtocolError, match=str(length)):
        connection.receive_data(size_prefix(length))


@given(st.binary(max_size=120), st.booleans())
def test_any_bytes_give_answers_or_a_protocol_error_and_nothing_else(data, framed):
    connection = ready(METADATA=(0, 12))
    connection.send(MetadataRequest(), MetadataResponse)
    with suppress(ProtocolError):
        connection.receive_data(encode_frame(data) if framed else data)


@given(st.binary(max_size=120), st.integers(0, 4))
def test_any_answer_to_api_versions_gives_versions_or_a_known_error(data, version):
    connection = Connection()
    connection.negotiate()
    header = encode_response_header(18, version, 0)
    assert response_header_version(18, version) == 0
    with suppress(ProtocolError, ApiError):
        connection.receive_data(encode_frame(header + data))
