"""A request that kills whoever executes it is given up; its neighbours are not."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.headers import encode_request_header
from mpbroker.protocol.messages.produce import ProduceResponse
from mpbroker.supervisor.repair.quarantine import (
    MAX_FILE_BYTES,
    MAX_FILES,
    answer_to,
    keep_frame,
)
from tests.broker.load import (
    TOPIC,
    api_versions,
    children,
    dial,
    produce_body,
    receive_frame,
)
from tests.support.broker import Broker
from tests.support.children import wait_until


@pytest.fixture
def poisoned(tmp_path):
    broker = Broker(
        tmp_path / "data",
        {"num.network.threads": 1, "num.io.threads": 2},
        command=[sys.executable, "-m", "tests.supervisor.repair.poisoned"],
    )
    with broker:
        yield broker


def request(client_id, api_key=ApiKey.API_VERSIONS, version=0, body=b""):
    payload = encode_request_header(api_key, version, 1, client_id) + body
    return len(payload).to_bytes(4, "big") + payload


def test_it_is_answered_an_error_after_three_deaths_and_all_others_are_served(
    poisoned,
):
    innocents = [dial(poisoned) for _ in range(12)]
    bad = dial(poisoned)
    for sock in innocents[:6]:
        sock.sendall(request("innocent"))
    bad.sendall(request("poison"))
    for sock in innocents[6:]:
        sock.sendall(request("innocent"))
    answer = receive_frame(bad)
    assert answer[:6] == b"\0\0\0\x01\xff\xff"  # its id; UNKNOWN_SERVER_ERROR
    for sock in innocents:
        assert receive_frame(sock)[:4] == b"\0\0\0\x01"
        assert api_versions(sock)  # and goes on
        sock.close()
    assert api_versions(bad)  # a connection is not to blame for one request
    bad.close()
    assert "ended 3 handlers" in poisoned.log_tail()
    wait_until(lambda: len(children(poisoned, "handler")) == 2)


def test_its_bytes_are_kept_as_they_came(poisoned):
    frame = request("poison")
    with dial(poisoned) as sock:
        sock.sendall(frame)
        assert receive_frame(sock)
    (kept,) = (poisoned.data_dir / "quarantine").iterdir()
    assert kept.read_bytes() == frame
    assert str(kept) in poisoned.log_tail()


def test_a_produce_is_refused_for_each_of_its_partitions(poisoned):
    with dial(poisoned) as sock:
        sock.sendall(request("poison", ApiKey.PRODUCE, 9, produce_body(b"bad")))
        answer = ProduceResponse.decode(9, memoryview(receive_frame(sock))[5:])
        (partition,) = answer.responses[0].partition_responses
        assert (answer.responses[0].name, partition.index) == (TOPIC, 0)
        assert partition.error_code == ErrorCode.UNKNOWN_SERVER_ERROR


@pytest.mark.parametrize(
    "frame",
    [
        request("plague"),  # whoever answers it dies as well
        request("poison", ApiKey.PRODUCE, 9, produce_body(b"bad", acks=0)),
        request("poison", ApiKey.METADATA, 0, b"\0\0\0\0"),  # has no place for one
    ],
)
def test_its_connection_is_closed_where_no_error_can_be_answered(poisoned, frame):
    with dial(poisoned) as sock:
        sock.sendall(frame)
        assert receive_frame(sock) == b""
    with dial(poisoned) as sock:
        assert api_versions(sock)


def test_two_such_requests_do_not_end_the_broker(poisoned):
    socks = [dial(poisoned) for _ in range(2)]
    for sock in socks:
        sock.sendall(request("poison"))
    for sock in socks:
        assert receive_frame(sock)[4:6] == b"\xff\xff"
        sock.close()
    with dial(poisoned) as sock:
        assert api_versions(sock)


def kill_whoever_executes(broker):
    """Kill the handlers one after the other, until each has a successor."""
    pids = children(broker, "handler")
    for pid in pids.values():
        with suppress(ProcessLookupError):  # the poison was faster
            os.kill(pid, signal.SIGKILL)
    wait_until(
        lambda: not set(pids.values()) & set(children(broker, "handler").values())
    )


def test_one_that_only_was_there_when_all_handlers_were_killed_is_answered(poisoned):
    """Again and again; each time another handler has just begun to execute it."""
    with dial(poisoned) as sock:
        expected = api_versions(sock)
        sock.sendall(request("slow"))
        for _ in range(4):
            kill_whoever_executes(poisoned)
        assert receive_frame(sock)[4:] == expected
    assert "is not tried again" not in poisoned.log_tail()


def test_one_that_kills_is_found_while_others_kill_as_well(poisoned):
    innocents = [dial(poisoned) for _ in range(6)]
    with dial(poisoned) as bad:
        bad.sendall(request("poison"))
        bad.setblocking(False)
        answer = None
        while answer is None:
            kill_whoever_executes(poisoned)
            for sock in innocents:
                assert int.from_bytes(api_versions(sock)[:2], "big") == ErrorCode.NONE
            with suppress(BlockingIOError):
                answer = bad.recv(100)
        assert answer[8:10] == b"\xff\xff"
    for sock in innocents:
        sock.close()


def test_a_quarantine_holds_the_latest_few_and_no_more_of_each_than_a_mebibyte(
    tmp_path,
):
    folder = tmp_path / "quarantine"
    keep_frame(folder, memoryview(bytes(3 * MAX_FILE_BYTES)))
    (large,) = folder.iterdir()
    assert large.stat().st_size == MAX_FILE_BYTES
    for number in range(MAX_FILES + 3):
        keep_frame(folder, memoryview(b"%d" % number))
    kept = [path.read_bytes()[4:] for path in sorted(folder.iterdir())]
    assert kept == [b"%d" % number for number in range(3, MAX_FILES + 3)]


@given(st.binary(max_size=200))
def test_any_bytes_are_answered_or_given_up_and_nothing_else(data):
    answer = answer_to(memoryview(data))
    assert answer is None or int.from_bytes(answer[:4]) == len(answer) - 4
