"""Handlers hand the coordinator's requests on in C, where there is a compiled core."""

from __future__ import annotations

import sys

import pytest

from mpbroker.ipc.compiled import IS_COMPILED
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.headers import encode_request_header
from mpbroker.protocol.messages.heartbeat import HeartbeatRequest, HeartbeatResponse
from tests.broker.load import dial, receive_frame
from tests.support.broker import Broker
from tests.support.children import wait_until


@pytest.mark.skipif(not IS_COMPILED, reason="the compiled core is not there")
def test_a_plain_heartbeat_needs_no_python_of_a_handler_and_another_does(tmp_path):
    command = [sys.executable, "-m", "tests.broker.unforwarding"]
    with Broker(tmp_path / "data", {}, command=command) as broker:
        loading = {
            ErrorCode.NONE,
            ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
            ErrorCode.COORDINATOR_NOT_AVAILABLE,
            ErrorCode.NOT_COORDINATOR,
        }
        codes = []

        def is_loaded():
            codes.append(beat(broker, b"\0"))
            return codes[-1] not in loading

        wait_until(is_loaded)
        assert codes[-1] == ErrorCode.UNKNOWN_MEMBER_ID
        assert beat(broker, b"\1\7\1x") == ErrorCode.UNKNOWN_SERVER_ERROR
        assert beat(broker, b"\0") == ErrorCode.UNKNOWN_MEMBER_ID


def beat(broker, tags):
    """A heartbeat of nobody's, with these tagged fields in its header; its error."""
    body = HeartbeatRequest(group_id="g", generation_id=1, member_id="m").encode(4)
    head = encode_request_header(ApiKey.HEARTBEAT, 4, 7, "test")[:-1] + tags
    with dial(broker) as sock:
        sock.sendall((len(head) + len(body)).to_bytes(4, "big") + head + body)
        return HeartbeatResponse.decode(4, receive_frame(sock)[5:]).error_code
