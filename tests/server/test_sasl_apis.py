"""SASL's own requests where a handler gets them: out of place, that is."""

from __future__ import annotations

import pytest

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.headers import encode_request_header
from mpbroker.protocol.messages.sasl_authenticate import (
    SaslAuthenticateRequest,
    SaslAuthenticateResponse,
)
from mpbroker.protocol.messages.sasl_handshake import (
    SaslHandshakeRequest,
    SaslHandshakeResponse,
)
from mpbroker.server.request import parse_request
from mpbroker.server.sasl_apis import SaslApis


def ask(api_key, version, message):
    frame = encode_request_header(api_key, version, 1, None) + message.encode(version)
    request = parse_request(0, 0, memoryview(frame), 0)
    return memoryview(SaslApis(None).handlers()[api_key](request))


@pytest.mark.parametrize("version", [0, 1])
def test_who_has_authenticated_may_not_begin_again(version):
    asked = SaslHandshakeRequest(mechanism="PLAIN")
    body = ask(ApiKey.SASL_HANDSHAKE, version, asked)
    answer = SaslHandshakeResponse.decode(version, body)
    assert answer.error_code == ErrorCode.ILLEGAL_SASL_STATE
    assert list(answer.mechanisms) == []


@pytest.mark.parametrize("version", [0, 1, 2])
def test_a_token_of_who_has_authenticated_is_not_looked_at(version):
    asked = SaslAuthenticateRequest(auth_bytes=b"\0alice\0wonder")
    body = ask(ApiKey.SASL_AUTHENTICATE, version, asked)
    answer = SaslAuthenticateResponse.decode(version, body)
    assert answer.error_code == ErrorCode.ILLEGAL_SASL_STATE
    assert "wonder" not in answer.error_message
    assert bytes(answer.auth_bytes) == b""
