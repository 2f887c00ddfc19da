"""Request and response headers."""

from __future__ import annotations

import importlib
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kio.schema import index

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.errors import ProtocolError
from mpbroker.protocol.headers import (
    FLEXIBLE_FROM,
    RequestHeader,
    encode_request_header,
    encode_response_header,
    header_version,
    parse_request_header,
    parse_response_header,
    response_header_version,
)

INT16 = st.integers(-(2**15), 2**15 - 1)
INT32 = st.integers(-(2**31), 2**31 - 1)
CLIENT_IDS = st.none() | st.text(max_size=80).filter(
    lambda text: text.isprintable() or text == ""
)


@given(st.integers(0, 92), st.integers(0, 20), INT32, CLIENT_IDS, st.binary(max_size=9))
def test_request_headers_come_back(
    api_key: int, version: int, correlation_id: int, client_id: str | None, body: bytes
) -> None:
    encoded = encode_request_header(api_key, version, correlation_id, client_id)
    if header_version(api_key, version) == 0:
        client_id = None
    for buffer in (encoded + body, memoryview(bytearray(encoded + body))):
        assert parse_request_header(buffer) == RequestHeader(
            api_key, version, correlation_id, client_id, len(encoded)
        )


@pytest.mark.parametrize(
    ("api_key", "version", "expected"),
    [
        (ApiKey.PRODUCE, 8, 1),
        (ApiKey.PRODUCE, 9, 2),
        (ApiKey.API_VERSIONS, 2, 1),
        (ApiKey.API_VERSIONS, 3, 2),
        (ApiKey.API_VERSIONS, 99, 2),
        (ApiKey.SASL_HANDSHAKE, 1, 1),
        (ApiKey.OFFSET_DELETE, 30_000, 1),
        (ApiKey.CONTROLLED_SHUTDOWN, 0, 0),
        (ApiKey.CONTROLLED_SHUTDOWN, 1, 1),
        (ApiKey.CONTROLLED_SHUTDOWN, 3, 2),
        (95, 5, 1),
        (-1, 5, 1),
        (ApiKey.PRODUCE, -1, 1),
    ],
)
def test_the_header_version_follows_from_key_and_version(
    api_key: int, version: int, expected: int
) -> None:
    assert header_version(api_key, version) == expected


def test_every_assigned_key_has_a_flexible_version_or_never_will() -> None:
    assert [int(key) for key in ApiKey] == list(range(len(FLEXIBLE_FROM)))


@pytest.mark.parametrize("api_key", ApiKey)
def test_kio_has_the_same_header_versions(api_key: ApiKey) -> None:
    name = index.api_key_map.get(int(api_key))
    if name is None:
        pytest.skip("kio has no such API")
    checked = 0
    for version, directions in index.schema_name_map[name].items():
        for direction, expected in (
            ("request", header_version),
            ("response", response_header_version),
        ):
            path = next(
                (p for kind, p in directions.items() if kind.name == direction), None
            )
            if path is None:
                continue
            module, _, attribute = path.partition(":")
            schema = getattr(importlib.import_module(module), attribute)
            theirs = schema.__header_schema__.__version__
            assert theirs == expected(int(api_key), version), (name, version)
            checked += 1
    assert checked


def test_api_versions_answers_with_the_oldest_header() -> None:
    assert response_header_version(ApiKey.API_VERSIONS, 4) == 0
    assert encode_response_header(ApiKey.API_VERSIONS, 4, 7) == b"\0\0\0\7"


@given(st.integers(0, 92), st.integers(0, 20), INT32, st.binary(max_size=9))
def test_response_headers_come_back(
    api_key: int, version: int, correlation_id: int, body: bytes
) -> None:
    encoded = encode_response_header(api_key, version, correlation_id)
    assert len(encoded) == 4 + response_header_version(api_key, version)
    assert parse_response_header(encoded + body, api_key, version) == (
        correlation_id,
        len(encoded),
    )


def test_tagged_fields_of_a_request_header_are_skipped() -> None:
    plain = encode_request_header(ApiKey.FETCH, 12, 1, "c")
    for tags in (b"\2\0\3abc\7\0", b"\2\7\0\0\3abc", b"\2\7\0\7\3abc"):
        tagged = plain[:-1] + tags
        header = parse_request_header(tagged + b"body")
        assert header.size == len(tagged)
        assert header.client_id == "c"


def test_a_controlled_shutdown_of_old_has_no_client_id() -> None:
    frame = b"\0\7\0\0\0\0\0\5" + b"\0\1\0\2"
    assert parse_request_header(frame) == RequestHeader(7, 0, 5, None, 8)
    assert parse_request_header(frame[:8]).size == 8


@given(st.binary(max_size=60))
def test_any_bytes_are_a_header_or_a_protocol_error(data: bytes) -> None:
    with suppress(ProtocolError):
        assert parse_request_header(memoryview(data)).size <= len(data)
    for version in (8, 9):
        with suppress(ProtocolError):
            assert parse_response_header(data, ApiKey.PRODUCE, version)[1] <= len(data)


@given(INT16, INT16, INT32, st.integers(-(2**15), 80), st.binary(max_size=60))
def test_headers_of_any_key_and_length_are_read_or_refused(
    api_key: int, version: int, correlation_id: int, length: int, rest: bytes
) -> None:
    frame = (
        api_key.to_bytes(2, "big", signed=True)
        + version.to_bytes(2, "big", signed=True)
        + correlation_id.to_bytes(4, "big", signed=True)
        + length.to_bytes(2, "big", signed=True)
        + rest
    )
    with suppress(ProtocolError):
        header = parse_request_header(frame)
        assert header[:3] == (api_key, version, correlation_id)
        assert header.size <= len(frame)


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (b"", "0 bytes"),
        (b"\0\0\0\3\0\0\0\1\0", "9 bytes"),
        (b"\0\0\0\3\0\0\0\1\0\5abcd", "client id of 5 bytes with 4 left"),
        (b"\0\0\0\3\0\0\0\1\x2a\xab" + b"\xff" * 10_923, "client id: 'utf-8'"),
        (b"\0\0\0\x09\0\0\0\1\0\1c", "cut off"),
    ],
)
def test_malformed_request_headers_are_refused(frame: bytes, reason: str) -> None:
    with pytest.raises(ProtocolError, match=reason):
        parse_request_header(frame)


@pytest.mark.parametrize(
    ("sent", "read"), [(b"f\xfcr", "f\ufffdr"), (b"\xff" * 70, "\ufffd" * 70)]
)
def test_a_client_id_that_is_not_utf_8_is_read_as_java_reads_it(
    sent: bytes, read: str
) -> None:
    """librdkafka with a client.id in Latin-1 is served by Kafka."""
    frame = b"\0\0\0\3\0\0\0\1" + len(sent).to_bytes(2, "big") + sent
    header = parse_request_header(memoryview(frame))
    assert (header.client_id, header.size) == (read, len(frame))


def test_any_negative_length_of_a_client_id_is_null() -> None:
    header = parse_request_header(b"\0\0\0\3\0\0\0\1\xff\xfe")
    assert (header.client_id, header.size) == (None, 10)


def test_a_client_id_beyond_an_int16_cannot_be_sent() -> None:
    with pytest.raises(ProtocolError, match="40000 bytes"):
        encode_request_header(ApiKey.FETCH, 4, 1, "x" * 40_000)
