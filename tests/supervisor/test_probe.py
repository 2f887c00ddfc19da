"""The supervisor's own client, against servers that do not do as they should."""

from __future__ import annotations

import errno
import os
import select
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpbroker.protocol.framing import encode_frame
from mpbroker.supervisor.probe import Outcome, Round, Target
from tests.support.patience import LONGEST_S


class Loop:
    """The part of the supervisor that a probe uses."""

    def __init__(self):
        self.only_ours = set()
        self._watched = {}
        self._epoll = select.epoll()

    def watch(self, fd, events, ready):
        if fd in self._watched:
            self._epoll.modify(fd, events)
        else:
            self._epoll.register(fd, events)
        self._watched[fd] = ready

    def unwatch(self, fd):
        del self._watched[fd]
        self._epoll.unregister(fd)

    def turn(self):
        for fd, events in self._epoll.poll(LONGEST_S):
            if fd in self._watched:
                self._watched[fd](events)

    def close(self):
        assert not self._watched and not self.only_ours
        self._epoll.close()


@pytest.fixture
def loop():
    made = Loop()
    yield made
    made.close()


def listen():
    return socket.create_server(("127.0.0.1", 0))


def target(sock, name="PLAINTEXT"):
    return Target(name, sock.family, sock.getsockname())


def begin(loop, *targets):
    ended = []
    probes = Round(targets, loop, ended.append)
    probes.start()
    return probes, ended


def turn_for_ever(loop):
    while True:
        loop.turn()


def probe_and_answer(loop, *chunks):
    """One probe of a server that says these bytes and hangs up; how it ended."""
    with listen() as server:
        probes, ended = begin(loop, target(server))
        loop.turn()  # connected: it asks
        client, _ = server.accept()
        with client:
            client.settimeout(LONGEST_S)
            assert client.recv(1000)
            for chunk in chunks:
                client.sendall(chunk)
            client.shutdown(socket.SHUT_WR)
            while not ended:
                loop.turn()
    assert ended == [probes]
    return probes.probes[0]


API_VERSIONS = encode_frame(b"\0\0\0\0" + b"\0\0" + b"\0\0\0\0")
METADATA = encode_frame(b"\0\0\0\1" + b"whatever it says")


def test_both_answers_are_wanted_however_they_are_cut(loop):
    answers = API_VERSIONS + METADATA
    for cut in range(1, len(answers)):
        probe = probe_and_answer(loop, answers[:cut], answers[cut:])
        assert probe.outcome is Outcome.ANSWERED


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"", "closed unanswered"),
        (API_VERSIONS, "closed unanswered"),
        (METADATA + API_VERSIONS, "answer 0 begins 00000001"),
        (encode_frame(b"\0\0\0\0" + b"\0\x23") + METADATA, "error 0023"),
        (encode_frame(b""), "answer 0 begins with nothing"),
        (b"\x7f\xff\xff\xff", "2147483647"),
        (b"HTTP/1.1 400 Bad Request\r\n", "bytes"),
    ],
)
def test_anything_else_is_a_failure_and_says_why(loop, answer, why):
    probe = probe_and_answer(loop, answer)
    assert probe.outcome is Outcome.FAILED
    assert why in probe.reason


@given(answer=st.binary(max_size=60))
def test_no_answer_breaks_the_probe(answer):
    loop = Loop()
    assert probe_and_answer(loop, answer).outcome is Outcome.FAILED
    loop.close()


def test_a_refused_connection_is_a_failure(loop):
    with listen() as server:
        gone = target(server)
    probes, ended = begin(loop, gone)
    while not ended:
        loop.turn()
    assert probes.names(Outcome.FAILED) == ["PLAINTEXT"]
    assert os.strerror(errno.ECONNREFUSED) in probes.explain(Outcome.FAILED)


def test_an_address_without_a_way_to_it_is_no_failure(loop):
    """TCP goes to no multicast address; the kernel says so before it sends anything."""
    nowhere = Target("EXTERNAL", socket.AF_INET, ("224.0.0.1", 9092))
    probes, ended = begin(loop, nowhere)
    assert ended == [probes]
    assert probes.names(Outcome.UNREACHABLE) == ["EXTERNAL"]


def test_a_round_ends_with_its_last_probe_and_without_any_at_once(loop):
    _, ended = begin(loop)
    assert ended
    with listen() as one, listen() as two:
        probes, ended = begin(loop, target(one, "ONE"), target(two, "TWO"))
        loop.turn()
        for server in (one, two):
            assert not ended
            client, _ = server.accept()
            with client:
                client.sendall(API_VERSIONS + METADATA)
                while len(probes.names(Outcome.ANSWERED)) < 1 + (server is two):
                    loop.turn()
        assert ended == [probes]


@pytest.mark.parametrize(
    ("was_reached", "outcome"),
    [(True, Outcome.FAILED), (False, Outcome.UNREACHABLE)],
)
def test_a_connection_never_made_says_something_only_of_who_was_reached(
    loop, was_reached, outcome
):
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
        full = []
        for _ in range(3):  # connections that nobody accepts, and one too many
            client = socket.socket()
            client.setblocking(False)
            client.connect_ex(server.getsockname())
            full.append(client)
        probes, ended = begin(loop, target(server))
        probes.give_up({"PLAINTEXT"} if was_reached else set())
        assert ended and probes.names(outcome) == ["PLAINTEXT"]
        for client in full:
            client.close()


def test_an_answer_never_given_is_a_failure(loop):
    with listen() as server:
        probes, ended = begin(loop, target(server))
        loop.turn()
        probes.give_up(set())
        assert ended and probes.names(Outcome.FAILED) == ["PLAINTEXT"]
        assert "in vain" in probes.explain(Outcome.FAILED)


def test_a_socket_that_the_loop_cannot_watch_ends_the_probe_and_is_closed(
    loop, monkeypatch
):
    def no_room(fd, events, ready):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(loop, "watch", no_room)
    with listen() as server:
        probes, ended = begin(loop, target(server))
    assert ended == [probes]
    assert probes.names(Outcome.FAILED) == ["PLAINTEXT"]


@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENFILE])
def test_without_a_descriptor_to_dial_with_nobody_is_found_wanting(
    loop, monkeypatch, error
):
    def no_room(*arguments):
        raise OSError(error, os.strerror(error))

    with listen() as server:
        place = target(server)
    with monkeypatch.context() as patch:
        patch.setattr(socket, "socket", no_room)
        probes, ended = begin(loop, place)
    assert ended == [probes]
    assert probes.names(Outcome.UNREACHABLE) == ["PLAINTEXT"]


@pytest.mark.parametrize("error", [OSError("no room for the pid file"), ValueError()])
def test_what_fails_when_all_have_answered_is_not_put_down_to_who_was_asked(
    loop, error
):
    def announce(_):
        raise error

    with listen() as server:
        probes = Round([target(server)], loop, announce)
        probes.start()
        loop.turn()
        client, _ = server.accept()
        with client:
            client.sendall(API_VERSIONS + METADATA)
            with pytest.raises(type(error)):
                turn_for_ever(loop)
    assert probes.names(Outcome.ANSWERED) == ["PLAINTEXT"]
