"""Connections outlive the processors that carry them: real brokers, real kills."""

from __future__ import annotations

import os
import signal
import socket
import time
from contextlib import ExitStack, closing, suppress
from typing import Final

import pytest

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.messages.fetch import FetchResponse
from mpbroker.protocol.records.record_batch import iter_records
from tests.broker.load import (
    api_versions,
    ask,
    children,
    create_topic,
    dial,
    frame,
    kill,
    produce_body,
    receive_frame,
)
from tests.chaos.peek import Peek
from tests.supervisor.test_kills import fetch_body
from tests.support.children import wait_until

# How often a processor is killed in each test, and how many connections come and go.
KILLS: Final = int(os.environ.get("MPBROKER_TEST_KILLS", "4"))
CONNECTIONS: Final = int(os.environ.get("MPBROKER_TEST_CONNECTIONS", "1000"))
LARGE: Final = 5_000_000
GAPS_MS: Final = (2, 0, 5, 1, 10)  # between two kills
SETTINGS: Final = {
    "num.network.threads": 1,
    "num.io.threads": 2,
    "message.max.bytes": 2 * LARGE,
}


def kill_processor(broker) -> None:
    """Kill it, and do not wait for its successor."""
    pid = kill(broker, "processor", 0)
    wait_until(lambda: children(broker)["processor", 0] != pid)


def receive_rest(sock: socket.socket, data: bytes, length: int) -> bytes:
    """Go on receiving until there are so many bytes."""
    parts = [data]
    have = len(data)
    while have < length:
        part = sock.recv(1 << 20)
        assert part, f"closed after {have} of {length} bytes"
        parts.append(part)
        have += len(part)
    return b"".join(parts)


@pytest.fixture
def broker(make_broker):
    return make_broker(SETTINGS)


def test_an_idle_connection_does_not_notice(broker):
    with dial(broker) as sock:
        expected = api_versions(sock)
        for _ in range(KILLS):
            kill_processor(broker)
            assert api_versions(sock) == expected


@pytest.mark.parametrize("cut", [2, 4, 3_000, 400_000])
def test_half_a_request_is_read_on(broker, cut):
    create_topic(broker)
    with dial(broker) as sock:
        for number in range(KILLS):
            payload = bytes([number]) * (LARGE if cut > 10_000 else 10_000)
            data = frame(ApiKey.PRODUCE, 9, produce_body(payload), number)
            sock.sendall(data[:cut])
            kill_processor(broker)
            sock.sendall(data[cut:])
            assert receive_frame(sock)[:4] == number.to_bytes(4, "big")
        body = ask(sock, ApiKey.FETCH, 11, fetch_body(0, KILLS - 1))
        (topic,) = FetchResponse.decode(11, body).responses
        assert topic.partitions[0].high_watermark == KILLS


def test_half_an_answer_is_sent_on(broker):
    """From a file, by sendfile, to a client that reads slowly."""
    create_topic(broker)
    payload = os.urandom(LARGE)
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32 * 1024)
        sock.settimeout(90)
        host, _, port = broker.bootstrap.rpartition(":")
        sock.connect((host, int(port)))
        ask(sock, ApiKey.PRODUCE, 9, produce_body(payload))
        for number in range(KILLS):
            sock.sendall(frame(ApiKey.FETCH, 11, fetch_body(0), number))
            data = sock.recv(1 << 16)
            for at in (100_000, 2_000_000):
                kill_processor(broker)
                data = receive_rest(sock, data, at)
            data = receive_rest(sock, data, 4 + int.from_bytes(data[:4], "big"))
            assert data[4:8] == number.to_bytes(4, "big")
            (topic,) = FetchResponse.decode(11, memoryview(data)[8:]).responses
            records = memoryview(topic.partitions[0].records)
            (record,) = iter_records(records)
            assert record.value == payload


def test_pipelined_requests_are_all_answered_in_order(broker):
    with dial(broker) as sock:
        for _ in range(KILLS):
            pid = children(broker)["processor", 0]
            for number in range(400):
                sock.sendall(frame(ApiKey.API_VERSIONS, 0, b"", number))
                if number == 200:
                    os.kill(pid, signal.SIGKILL)
            data = b""
            for number in range(400):
                data = receive_rest(sock, data, 4)
                length = 4 + int.from_bytes(data[:4], "big")
                data = receive_rest(sock, data, length)
                assert data[4:8] == number.to_bytes(4, "big")
                data = data[length:]
            assert not data
            wait_until(lambda pid=pid: children(broker)["processor", 0] != pid)


def test_a_request_that_waits_is_answered_at_the_successor(broker):
    create_topic(broker)
    with dial(broker) as consumer, dial(broker) as producer:
        consumer.sendall(frame(ApiKey.FETCH, 11, fetch_body(20_000), 7))
        api_versions(producer)
        kill_processor(broker)
        ask(producer, ApiKey.PRODUCE, 9, produce_body(b"at last"))
        assert receive_frame(consumer)[:4] == b"\0\0\0\x07"


# -- the keeper -----------------------------------------------------------------------


def sockets_of(pid: int) -> int:
    """How many sockets a process has."""
    count = 0
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            count += os.readlink(f"/proc/{pid}/fd/{name}").startswith("socket:")
        except FileNotFoundError:
            continue
    return count


def has_other_ends(pid: int, socks: list[socket.socket]) -> bool:
    """Whether a process has the broker's ends of these connections."""
    ports = {sock.getsockname()[1] for sock in socks}
    with open("/proc/net/tcp") as table:
        rows = [line.split() for line in table][1:]
    # Local and remote address and port, in hexadecimal; the tenth is the inode.
    ends = {row[9] for row in rows if int(row[2].partition(":")[2], 16) in ports}
    found = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):
            target = os.readlink(f"/proc/{pid}/fd/{name}")
            found.add(target.removeprefix("socket:[").removesuffix("]"))
    return len(ends & found) == len(socks)


def test_the_keepers_own_death_loses_nothing(broker):
    with ExitStack() as stack:
        socks = [stack.enter_context(dial(broker)) for _ in range(100)]
        for sock in socks:
            api_versions(sock)
        for _ in range(KILLS):
            before = kill(broker, "keeper")
            wait_until(lambda before=before: children(broker)["keeper", 0] != before)
            keeper = children(broker)["keeper", 0]
            # The processors' duplicates have come.
            wait_until(lambda keeper=keeper: has_other_ends(keeper, socks))
            kill_processor(broker)
            for sock in socks:
                api_versions(sock)


def guard_of(keeper: int) -> int | None:
    with (
        suppress(FileNotFoundError, ProcessLookupError),
        open(f"/proc/{keeper}/task/{keeper}/children") as file,
    ):
        return next(map(int, file.read().split()), None)
    return None


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("first", ["keeper", "processor"])
def test_connections_outlive_their_processor_and_the_keeper(broker, first, how):
    """Killed at nearly the same time: the keeper's guard has the sockets.

    A stopped keeper is killed before the processor's death is repaired.
    """
    with ExitStack() as stack:
        socks = [stack.enter_context(dial(broker)) for _ in range(50)]
        for number in range(2 * KILLS):
            for sock in socks:
                api_versions(sock)
            both = children(broker)
            keeper, processor = both["keeper", 0], both["processor", 0]
            wait_until(
                lambda keeper=keeper: guard_of(keeper) and has_other_ends(keeper, socks)
            )
            cut = socks[0]
            cut.sendall(frame(ApiKey.FETCH, 11, fetch_body(0))[:20])
            kills = [(keeper, how), (processor, signal.SIGKILL)]
            for pid, signal_number in kills if first == "keeper" else kills[::-1]:
                os.kill(pid, signal_number)
                time.sleep(GAPS_MS[number % len(GAPS_MS)] / 1000)
            for sock in socks[1:]:
                api_versions(sock)
            cut.sendall(frame(ApiKey.FETCH, 11, fetch_body(0))[20:])
            assert receive_frame(cut)
            wait_until(
                lambda dead={keeper, processor}: not dead & {*children(broker).values()}
            )
    with closing(Peek(broker.pid)) as peek:
        wait_until(lambda: not peek.in_use())


def test_with_keeper_and_guard_a_processor_takes_its_connections_along(broker):
    """At once, so that clients dial again; and nothing of them is left."""
    keeper = children(broker)["keeper", 0]
    with dial(broker) as sock:
        api_versions(sock)
        # What it has not read yet would wait for its successor, and live.
        wait_until(lambda: has_other_ends(keeper, [sock]))
        wait_until(lambda: guard_of(keeper))
        sock.sendall(frame(ApiKey.FETCH, 11, fetch_body(20_000))[:20])
        os.kill(keeper, signal.SIGSTOP)  # killed before the repair, which looks for it
        os.kill(guard_of(keeper), signal.SIGKILL)
        kill_processor(broker)
        with suppress(ConnectionResetError):
            assert sock.recv(1) == b""
    wait_until(lambda: children(broker)["keeper", 0] != keeper)
    with dial(broker) as sock:
        assert api_versions(sock)
    with closing(Peek(broker.pid)) as peek:
        wait_until(lambda: not peek.in_use())


def test_what_a_dead_keeper_had_not_read_lives_on(broker):
    """Even though its processor dies as well: the supervisor has the queue's ends."""
    os.kill(children(broker)["keeper", 0], signal.SIGSTOP)
    with dial(broker) as sock:
        api_versions(sock)
        kill_processor(broker)  # and the stopped keeper, by the repair
        assert api_versions(sock)


def test_a_client_sees_the_end_of_its_connection_at_once(broker):
    """Though the keeper has a duplicate of its socket, and is stopped just now."""
    keeper = children(broker)["keeper", 0]
    with dial(broker) as sock:
        api_versions(sock)
        os.kill(keeper, signal.SIGSTOP)
        try:
            sock.sendall(b"GET / HTTP/1.1\r\n")
            assert sock.recv(1) == b""
        finally:
            os.kill(keeper, signal.SIGCONT)


def test_no_socket_is_left_of_connections_that_came_and_went(broker):
    pids = [children(broker)[role, 0] for role in ("keeper", "processor", "acceptor")]
    with dial(broker) as sock:
        api_versions(sock)
    before = 0

    def settled() -> bool:
        nonlocal before
        last, before = before, sum(map(sockets_of, pids))
        return last == before

    wait_until(settled)
    fresh = before
    for _ in range(CONNECTIONS // 50):
        with ExitStack() as stack:
            for number in range(50):
                sock = stack.enter_context(dial(broker))
                if number % 2:
                    api_versions(sock)
    wait_until(lambda: sum(map(sockets_of, pids)) <= fresh)
