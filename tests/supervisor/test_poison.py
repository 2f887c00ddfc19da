"""A request that kills whoever executes it is given up; its neighbours are not."""

from __future__ import annotations

import sys

import pytest

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.headers import encode_request_header
from tests.supervisor.load import api_versions, children, dial, receive_frame
from tests.support.broker import Broker
from tests.support.children import wait_until


@pytest.fixture
def poisoned(tmp_path):
    broker = Broker(
        tmp_path / "data",
        {"num.network.threads": 1, "num.io.threads": 2},
        command=[sys.executable, "-m", "tests.supervisor.poisoned"],
    )
    with broker:
        yield broker


def request(client_id):
    payload = encode_request_header(ApiKey.API_VERSIONS, 0, 1, client_id)
    return len(payload).to_bytes(4, "big") + payload


def test_its_connection_is_closed_after_three_deaths_and_all_others_are_answered(
    poisoned,
):
    innocents = [dial(poisoned) for _ in range(12)]
    bad = dial(poisoned)
    for sock in innocents[:6]:
        sock.sendall(request("innocent"))
    bad.sendall(request("poison"))
    for sock in innocents[6:]:
        sock.sendall(request("innocent"))
    assert receive_frame(bad) == b""
    for sock in innocents:
        assert receive_frame(sock)[:4] == b"\0\0\0\x01"
        assert api_versions(sock)  # and goes on
        sock.close()
    bad.close()
    assert "ended 3 handlers" in poisoned.log_tail()
    wait_until(lambda: len(children(poisoned, "handler")) == 2)


def test_two_such_requests_do_not_end_the_broker(poisoned):
    socks = [dial(poisoned) for _ in range(2)]
    for sock in socks:
        sock.sendall(request("poison"))
    for sock in socks:
        assert receive_frame(sock) == b""
        sock.close()
    with dial(poisoned) as sock:
        assert api_versions(sock)
