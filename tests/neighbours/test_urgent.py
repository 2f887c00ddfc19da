"""A client that sends TCP urgent data loses its connection, and harms no other.

The kernel counts urgent bytes as received. If they were not read as all others, the
successor of a processor would look for the next request at the wrong byte.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable

import pytest

from mpbroker.network.moves.tcp_counters import stream_counts
from tests.bench import wire
from tests.broker.load import Load, create_topic, kill, read_log
from tests.faults.test_kill_the_whole_tree import address_of
from tests.support.api_versions import without_epoch
from tests.support.broker import Broker

FRAME = wire.api_versions()
PLACES = (1, 4, len(FRAME) // 2, len(FRAME) - 1, len(FRAME))


@pytest.fixture
def broker(make_broker: Callable[..., Broker]) -> Broker:
    made = make_broker({"num.network.threads": 1, "num.io.threads": 2})
    create_topic(made)
    return made


def answers(sock: socket.socket) -> list[bytes]:
    """Return all that comes until the broker closes the connection, by answer."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while chunk := sock.recv(1 << 16):
            data += chunk
    found = []
    while data:
        size = 4 + int.from_bytes(data[:4], "big")
        found.append(data[:size])
        data = data[size:]
    return found


def send_urgent(sock: socket.socket, at: int) -> None:
    """Send a frame whose byte before ``at`` is urgent."""
    with contextlib.suppress(OSError):  # it is closed between the two
        sock.send(FRAME[:at], socket.MSG_OOB)
        sock.send(FRAME[at:])


@pytest.mark.parametrize("at", PLACES)
def test_a_connection_that_sends_urgent_data_is_closed_and_no_other(broker, at):
    with Load(broker, 4) as load:
        with wire.Connection(address_of(broker)) as connection:
            wanted = without_epoch(connection.ask(FRAME)[4:])
        for _ in range(5):
            with socket.create_connection(address_of(broker), timeout=30) as sock:
                send_urgent(sock, at)
                for each in answers(sock):
                    assert without_epoch(each[8:]) == wanted
        load.run(20)
    assert sum(load.losses) == 0


def test_urgent_data_before_a_succession_harms_nobody(broker):
    with wire.Connection(address_of(broker)) as connection:
        wanted = without_epoch(connection.ask(FRAME)[4:])
    with Load(broker, 4) as load:
        for at in PLACES:
            with socket.create_connection(address_of(broker), timeout=30) as sock:
                sock.sendall(FRAME)
                send_urgent(sock, at)
                kill(broker, "processor")
                send_urgent(sock, at)
                for each in answers(sock):
                    assert without_epoch(each[8:]) == wanted
            load.run(10)
    assert sum(load.losses) == 0
    broker.stop()
    load.verify(read_log(broker.data_dir))


def test_urgent_bytes_are_counted_as_they_are_read():
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_OOBINLINE, 1)
        with socket.create_connection(server.getsockname()) as client:
            accepted, _ = server.accept()
            with accepted:
                client.send(b"abc", socket.MSG_OOB)
                client.send(b"def")
                read = b""
                while len(read) < 6:
                    read += accepted.recv(2)
                    counts = stream_counts(accepted)
                    assert counts is not None
                    assert counts.received == len(read)
                assert read == b"abcdef"
