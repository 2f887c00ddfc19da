"""The dispatcher: handlers of requests, refusals, errors and bugs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError, ProtocolError, TooManyElementsError
from mpbroker.protocol.headers import encode_request_header
from mpbroker.protocol.messages.api_versions import ApiVersionsResponse
from mpbroker.protocol.messages.metadata import MetadataResponse
from mpbroker.server.api_messages import error_answer as real_error_answer
from mpbroker.server.api_messages import refusal, response_class
from mpbroker.server.apis import APIS, advertised_versions
from mpbroker.server.dispatcher import RequestDispatcher, ServedApi
from mpbroker.server.request import CLOSE, Request

# Their requests have no arrays, or their answers no errors.
NO_ARRAYS = {ApiKey.API_VERSIONS}


def dispatcher(handle=lambda request: b"answer", error_answer=None):
    return RequestDispatcher(
        {int(key): ServedApi(key, api.versions, handle) for key, api in APIS.items()},
        advertised_versions(APIS.values()),
        error_answer or (lambda request, code: b"error %d" % code),
        lambda connection: f"connection {connection}",
    )


def parse(frame, **options):
    return dispatcher(**options).parse(5, 7, memoryview(frame), 99)


def test_a_request_is_parsed_with_all_that_its_handler_needs():
    request = parse(encode_request_header(ApiKey.METADATA, 12, 42, "me") + b"body")
    assert isinstance(request, Request)
    assert (request.slot, request.connection, request.received_ns) == (5, 7, 99)
    assert (request.api_key, request.api_version) == (3, 12)
    assert (request.correlation_id, request.client_id) == (42, "me")
    assert bytes(request.body) == b"body"
    assert request.frame(b"x") == b"\0\0\0\x06\0\0\0\x2a\0x"


def test_the_answer_to_an_old_version_has_no_tagged_fields():
    request = parse(encode_request_header(ApiKey.METADATA, 8, 42, None))
    assert request.frame(b"x") == b"\0\0\0\x05\0\0\0\x2ax"


def test_the_answer_to_api_versions_never_has_a_flexible_header():
    request = parse(encode_request_header(ApiKey.API_VERSIONS, 4, 1, None))
    assert request.frame(b"x") == b"\0\0\0\x05\0\0\0\x01x"


@pytest.mark.parametrize("key", list(APIS))
def test_a_version_that_is_not_served_closes_the_connection(key, caplog):
    caplog.set_level("INFO")
    oldest, newest = APIS[key].versions
    for version in {oldest - 1, newest + 1, 32767} - {-1}:
        if key is ApiKey.API_VERSIONS:
            continue
        header = encode_request_header(key, min(version, newest), 1, None)
        frame = header[:2] + version.to_bytes(2, "big") + header[4:]
        assert parse(frame) is None
    for version in (oldest, newest):
        assert parse(encode_request_header(key, version, 1, None)) is not None


def test_an_api_that_is_not_served_closes_the_connection_and_says_so(caplog):
    caplog.set_level("INFO")
    assert parse(encode_request_header(ApiKey.VOTE, 0, 1, None)) is None
    assert "connection 7" in caplog.text and "52" in caplog.text
    assert parse(b"\x03\xe7\0\0\0\0\0\x01\xff\xff") is None
    assert "999" in caplog.text


@pytest.mark.parametrize("version", [5, 6, 99, 32767])
@pytest.mark.parametrize("rest", [b"", b"\xff\xff", b"\0\x03abc\0", b"\xff" * 50])
def test_api_versions_of_the_future_is_answered_in_version_0_with_all_we_serve(
    version, rest
):
    frame = b"\0\x12" + version.to_bytes(2, "big") + b"\0\0\0\x2a" + rest
    answer = parse(frame)
    assert isinstance(answer, bytes)
    assert int.from_bytes(answer[:4], "big") == len(answer) - 4
    assert answer[4:8] == b"\0\0\0\x2a"
    response = ApiVersionsResponse.decode(0, memoryview(answer)[8:])
    assert response.error_code == ErrorCode.UNSUPPORTED_VERSION
    served = {k.api_key: (k.min_version, k.max_version) for k in response.api_keys}
    assert served == advertised_versions(APIS.values())


def counted(frame):
    """The errors that are counted of a request that goes nowhere."""
    found = []
    made = RequestDispatcher(
        {int(key): ServedApi(key, api.versions, bytes) for key, api in APIS.items()},
        advertised_versions(APIS.values()),
        lambda request, code: None,
        lambda connection: "it",
        lambda key, code: found.append((key, code)),
    )
    made.parse(5, 7, memoryview(frame), 99)
    return found


def test_a_request_that_closes_its_connection_is_counted_with_the_reason():
    """Kafka only writes a line to its log, so it is hard to find old clients."""
    unsupported = ErrorCode.UNSUPPORTED_VERSION
    fetch, _ = APIS[ApiKey.FETCH].versions
    old = encode_request_header(ApiKey.FETCH, fetch - 1, 1, "old")
    assert counted(old) == [(ApiKey.FETCH, unsupported)]
    assert counted(encode_request_header(ApiKey.VOTE, 0, 1, None)) == [
        (ApiKey.VOTE, unsupported)
    ]
    assert counted(b"\0\x12\0\x63\0\0\0\x2a") == [(ApiKey.API_VERSIONS, unsupported)]
    assert counted(b"\x03\xe7\0\0\0\0\0\x01\xff\xff") == [(-1, unsupported)]
    assert counted(b"\0\3\0") == [(-1, ErrorCode.INVALID_REQUEST)]
    assert counted(encode_request_header(ApiKey.FETCH, fetch, 1, None)) == []


@given(st.binary(max_size=60))
def test_any_bytes_are_a_request_an_answer_or_a_reason_to_close(data):
    assert isinstance(parse(data), Request | bytes | None)


@given(st.sampled_from(list(APIS)), st.integers(-1, 20), st.binary(max_size=40))
def test_any_bytes_behind_a_known_key_are_no_surprise_either(key, version, data):
    frame = int(key).to_bytes(2, "big") + version.to_bytes(2, "big", signed=True) + data
    assert isinstance(parse(frame), Request | bytes | None)


# -- what an exception becomes ------------------------------------------------------


def dispatched(error, **options):
    def handle(request):
        raise error

    made = dispatcher(handle, **options)
    request = made.parse(
        1, 7, memoryview(encode_request_header(ApiKey.METADATA, 9, 1, None)), 0
    )
    return made.dispatch(request), made


def test_a_malformed_request_closes_its_connection(caplog):
    caplog.set_level("INFO")
    answer, made = dispatched(ProtocolError("12 bytes too many"))
    assert answer is CLOSE
    assert "connection 7" in caplog.text and "12 bytes too many" in caplog.text
    assert made.errors == 0


def test_a_request_with_too_many_elements_keeps_its_connection(caplog):
    caplog.set_level("INFO")
    answer, made = dispatched(TooManyElementsError("more than 7 elements"))
    (row,) = MetadataResponse.decode(9, answer).topics
    assert (row.error_code, row.name) == (ErrorCode.INVALID_REQUEST, "")
    assert "connection 7" in caplog.text and "more than 7 elements" in caplog.text
    assert made.errors == 0


@pytest.mark.parametrize("key", [key for key in APIS if key not in NO_ARRAYS])
def test_every_api_with_arrays_can_be_refused_without_a_decoded_request(key):
    oldest, newest = APIS[key].versions
    for version in range(oldest, newest + 1):
        request = parse(encode_request_header(key, version, 1, None))
        body = refusal(request, ErrorCode.INVALID_REQUEST)
        assert body is not None, version
        decoded = response_class(key).decode(version, memoryview(body))
        assert "error_code=42" in repr(decoded).replace(repr(ErrorCode(42)), "42")


def test_a_refusal_is_answered_with_its_code():
    answer, made = dispatched(ApiError(ErrorCode.INVALID_TOPIC_EXCEPTION, "no"))
    assert answer == b"error 17"
    assert made.errors == 0


@pytest.mark.parametrize("error", [KeyError("x"), OSError(5, "disk"), MemoryError()])
def test_a_bug_is_logged_with_its_traceback_and_answered(error, caplog):
    answer, made = dispatched(error)
    assert answer == b"error -1"
    assert made.errors == 1
    # Not caplog.text: PySpark changes the format of handlers that it finds.
    (record,) = caplog.records
    assert record.exc_info[1] is error and "METADATA v9" in record.getMessage()


def test_an_api_that_has_no_place_for_an_error_is_closed():
    answer, _ = dispatched(KeyError("x"), error_answer=lambda request, code: None)
    assert answer is CLOSE


@pytest.mark.parametrize("key", list(APIS))
def test_every_api_can_be_answered_with_an_error_or_closed(key):
    """In every version: an answer that cannot be encoded would end the handler."""
    oldest, newest = APIS[key].versions
    for version in range(oldest, newest + 1):
        request = parse(encode_request_header(key, version, 1, None))
        for code in (ErrorCode.UNKNOWN_SERVER_ERROR, ErrorCode.KAFKA_STORAGE_ERROR):
            body = real_error_answer(request, code)
            assert body is None or isinstance(body, bytes)
