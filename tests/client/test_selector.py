"""The selector, on real sockets. Mirrors what applies of Kafka's SelectorTest."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from mpbroker.client.addresses import Address
from mpbroker.client.selector import PlaintextChannel, Selector, resolve


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


@pytest.fixture
def selector() -> Iterator[Selector]:
    made = Selector()
    yield made
    made.shutdown()


def connect(selector: Selector, server: socket.socket, node: int = 1) -> socket.socket:
    selector.connect(node, Address(*server.getsockname()), "localhost")
    poll_until(selector, lambda: node in selector.connected)
    peer, _ = server.accept()
    return peer


def poll_until(selector: Selector, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 90
    while True:
        selector.poll(50)
        if condition():
            return
        assert time.monotonic() < deadline


def test_bytes_go_and_come(selector, server):
    with connect(selector, server) as peer:
        selector.send(1, b"question")
        assert peer.recv(100) == b"question"
        peer.sendall(b"answer")
        poll_until(selector, lambda: bool(selector.received))
        assert selector.received == [(1, b"answer")]
        selector.poll(0)
        assert selector.received == []


def test_what_the_socket_does_not_take_at_once_goes_later_and_in_order(
    selector, server
):
    sent = os.urandom(20_000_000)
    with connect(selector, server) as peer:
        selector.send(1, sent)
        assert selector.is_sending(1)
        selector.send(1, b"the end")
        got = bytearray()
        peer.setblocking(False)

        def take() -> bool:
            try:
                got.extend(peer.recv(1 << 20))
            except BlockingIOError:
                pass
            return len(got) == len(sent) + 7

        poll_until(selector, take)
        assert got == sent + b"the end"
        selector.poll(0)
        assert not selector.is_sending(1)


def test_parts_go_one_after_the_other_however_many_and_large(selector, server):
    parts = [os.urandom(size) for size in (5, 1_000_000, 1, 3_000_000)] * 3
    parts += [b"%d," % number for number in range(3000)]
    with connect(selector, server) as peer:
        selector.send_parts(1, parts)
        assert selector.is_sending(1)
        selector.send_parts(1, [b"the", b" end"])
        got = bytearray()
        peer.setblocking(False)

        def take() -> bool:
            try:
                got.extend(peer.recv(70_001))
            except BlockingIOError:
                pass
            return got.endswith(b"the end")

        poll_until(selector, take)
        assert got == b"".join(parts) + b"the end"
        assert not selector.is_sending(1)


def test_answers_of_all_sizes_come_whole_and_in_order(selector, server):
    sizes = [1, 4096, 5_000_000, 10, 4097, 300_000, 262_144, 3]
    answers = [os.urandom(size) for size in sizes]
    with connect(selector, server) as peer:
        for answer in answers:
            sending = threading.Thread(target=peer.sendall, args=(answer,))
            sending.start()
            found = b""
            while len(found) < len(answer):
                poll_until(selector, lambda: bool(selector.received))
                found += b"".join(data for _, data in selector.received)
            sending.join()
            assert found == answer


def test_the_peers_end_is_told_after_what_it_said(selector, server):
    peer = connect(selector, server)
    peer.sendall(b"last words")
    peer.close()
    words = []

    def ended() -> bool:
        words.extend(selector.received)
        return 1 in selector.disconnected

    poll_until(selector, ended)
    assert words == [(1, b"last words")]
    with connect(selector, server):  # the same node can be connected again
        pass


def test_a_refused_connection_is_told_and_not_raised(selector):
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = Address(*gone.getsockname())
    selector.connect(1, address, "localhost")
    poll_until(selector, lambda: 1 in selector.disconnected)
    assert selector.disconnected[1] == "connection refused"
    assert selector.connected == []


def test_a_node_is_connected_once(selector, server):
    with connect(selector, server), pytest.raises(AssertionError, match="already"):
        selector.connect(1, Address(*server.getsockname()), "localhost")


def test_a_channel_that_cannot_be_made_leaves_nothing_open(server):
    def refuse(sock, host):
        raise OSError("no keys")

    selector = Selector(make_channel=refuse)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="no keys"):
        selector.connect(1, Address(*server.getsockname()), "localhost")
    assert len(os.listdir("/proc/self/fd")) == before
    selector.shutdown()


def test_closing_one_connection_leaves_the_others(selector, server):
    with connect(selector, server, 1), connect(selector, server, 2) as second:
        selector.close(1)
        selector.close(1)
        second.sendall(b"still here")
        poll_until(selector, lambda: bool(selector.received))
        assert selector.received == [(2, b"still here")]
        assert 1 not in selector.disconnected


def test_waking_ends_the_wait_now_or_the_next_one(selector):
    selector.wakeup()
    selector.poll(float("inf"))
    woken = threading.Thread(target=lambda: [selector.wakeup() for _ in range(3)])
    waker = threading.Timer(0.05, selector.wakeup)
    waker.start()
    selector.poll(float("inf"))
    waker.join()
    woken.start()
    woken.join()
    selector.poll(float("inf"))


def test_no_wake_up_is_lost_in_a_race(selector):
    turns = 3000
    seen = threading.Semaphore(0)

    def wake() -> None:
        for _ in range(turns):
            selector.wakeup()
            assert seen.acquire(timeout=60)

    thread = threading.Thread(target=wake)
    thread.start()
    for _ in range(turns):
        selector.poll(30_000)
        seen.release()
    thread.join(30)
    assert not thread.is_alive()


def test_a_wake_up_that_comes_late_is_written_into_no_file(monkeypatch, tmp_path):
    selector = Selector()
    write, has_begun, files = os.eventfd_write, threading.Event(), []

    def run() -> None:
        while not has_begun.is_set():
            selector.poll(float("inf"))
        selector.shutdown()
        flags = os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC
        files.extend(os.open(tmp_path / name, flags) for name in "abc")

    def late(descriptor: int, value: int) -> None:
        has_begun.set()
        write(descriptor, value)  # another thread's, that was faster
        loop.join()
        write(descriptor, value)

    monkeypatch.setattr(os, "eventfd_write", late)
    loop = threading.Thread(target=run)
    loop.start()
    while not has_begun.is_set():
        selector.wakeup()
    written = [os.fstat(file).st_size for file in files]
    for file in files:
        os.close(file)
    assert written == [0, 0, 0]


def test_a_closed_selector_keeps_no_descriptor():
    before = os.listdir("/proc/self/fd")
    selector = Selector()
    selector.shutdown()
    selector.shutdown()
    selector.wakeup()
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_connection_that_is_made_and_lost_in_one_poll_is_only_lost(selector, server):
    selector.connect(1, Address(*server.getsockname()), "localhost")
    peer, _ = server.accept()
    peer.close()  # before the first poll
    poll_until(selector, lambda: bool(selector.disconnected))
    assert selector.connected == []
    assert selector.disconnected == {1: "closed by the broker"}


def test_five_connections_carry_hundreds_of_answers_each_in_order(selector, server):
    nodes = range(5)
    peers = {node: connect(selector, server, node) for node in nodes}
    try:
        got = dict.fromkeys(nodes, b"")
        want = b"".join(b"%04d" % number for number in range(500))
        for number in range(500):
            for node in nodes:
                selector.send(node, b"%04d" % number)
        echoed = dict.fromkeys(nodes, 0)
        deadline = time.monotonic() + 60
        while any(len(data) < len(want) for data in got.values()):
            assert time.monotonic() < deadline
            for node, peer in peers.items():
                if echoed[node] < len(want):
                    data = peer.recv(4096)  # all of it is sent, or under way
                    echoed[node] += len(data)
                    peer.sendall(data)
            selector.poll(0)
            for node, data in selector.received:
                got[node] += data
        assert got == dict.fromkeys(nodes, want)
    finally:
        for peer in peers.values():
            peer.close()


def test_what_one_poll_told_the_next_one_does_not_repeat(selector, server):
    peer = connect(selector, server)
    selector.poll(0)
    assert not selector.connected
    peer.close()
    poll_until(selector, lambda: 1 in selector.disconnected)
    selector.poll(0)
    assert not selector.disconnected


def test_one_that_cannot_be_closed_does_not_keep_the_others_open(server):
    class Stubborn(PlaintextChannel):
        def close(self) -> None:
            super().close()
            raise OSError("cannot be closed")

    made = Selector(make_channel=lambda sock, host: Stubborn(sock))
    peers = [connect(made, server, node) for node in range(3)]
    made.shutdown()
    for peer in peers:
        peer.settimeout(90)
        assert peer.recv(1) == b""
        peer.close()


@pytest.mark.parametrize("name", ["a..b", "x" * 70, "\udcff"])
def test_what_no_host_can_be_called_is_as_unknown_as_other_names(name):
    with pytest.raises(socket.gaierror):
        resolve(name, 9092)
