"""The control socket among clients that are slow, gone, lying, or not welcome."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import struct
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mpbroker.base.errors import MpbrokerError
from mpbroker.inspect.control_protocol import (
    MAX_ANSWER_BYTES,
    ControlSocketError,
    FrameReader,
    encode_frame,
)
from mpbroker.supervisor.control import control_server
from mpbroker.supervisor.control.control_server import MAX_SESSIONS, ControlServer
from tests.support.children import Child, die, fork

NOBODY = 65534


class Loop:
    """The supervisor's, without a supervisor: one turn at a time."""

    def __init__(self):
        self.only_ours = set()
        self.watched = {}
        self.tasks = []
        self.epoll = select.epoll()

    def watch(self, fd, events, ready):
        (self.epoll.modify if fd in self.watched else self.epoll.register)(fd, events)
        self.watched[fd] = ready

    def unwatch(self, fd):
        del self.watched[fd]
        self.epoll.unregister(fd)

    def every(self, interval_s, run):
        self.tasks.append(run)

    def turn(self, timeout_s=0.0):
        for fd, events in self.epoll.poll(timeout_s):
            if fd in self.watched:
                self.watched[fd](events)


class Server:
    """A control server with commands for tests, and clients of it."""

    def __init__(self, path):
        self.loop = Loop()
        self.path = str(path)
        self.executed = []
        self.server = ControlServer(self.loop, self.path, self.execute)
        self.clients = []

    def execute(self, name, arguments):
        self.executed.append(name)
        if name == "refuse":
            raise MpbrokerError("not today")
        if name == "bug":
            raise ZeroDivisionError
        if name == "large":
            return "x" * (MAX_ANSWER_BYTES - 1000)
        return {"said": arguments.get("say")}

    def connect(self):
        client = socket.socket(socket.AF_UNIX)
        self.clients.append(client)
        client.connect(self.path)
        client.setblocking(False)
        return client

    def answers(self, client, count=1):
        """Turn the loop until so many answers have come, or the end of the stream."""
        reader, found = FrameReader(MAX_ANSWER_BYTES), []
        deadline = time.monotonic() + 90
        while len(found) < count and time.monotonic() < deadline:
            self.loop.turn(0.01)
            with contextlib.suppress(BlockingIOError):
                data = client.recv(1 << 20)
                if not data:
                    return [*found, None]
                reader.feed(data)
            while (answer := reader.next_map()) is not None:
                found.append(answer)
        assert len(found) >= count, f"{found} within 90 s"
        return found

    def close(self):
        for client in self.clients:
            client.close()
        with contextlib.suppress(KeyError):
            self.server.close()
        self.loop.epoll.close()


@pytest.fixture
def server(tmp_path):
    made = Server(tmp_path / "control.sock")
    yield made
    made.close()


def say(text):
    return encode_frame({"command": "say", "arguments": {"say": text}})


def test_a_request_is_answered_and_the_connection_goes_on(server):
    client = server.connect()
    for text in ("one", "two"):
        client.send(say(text))
        assert server.answers(client) == [{"ok": True, "result": {"said": text}}]


def test_several_requests_at_once_are_answered_in_order(server):
    client = server.connect()
    client.send(b"".join(say(number) for number in range(50)))
    said = [each["result"]["said"] for each in server.answers(client, 50)]
    assert said == list(range(50))


def test_one_client_gets_one_answer_a_turn_however_much_it_asks(server):
    greedy, other = server.connect(), server.connect()
    server.loop.turn(1)  # both are accepted
    server.loop.turn(1)
    greedy.send(b"".join(say(number) for number in range(50)))
    other.send(encode_frame({"command": "other"}))
    server.answers(other)
    assert server.executed.index("other") < 5


def test_a_refusal_is_an_answer_and_a_bug_is_one_too(server, caplog):
    client = server.connect()
    client.send(encode_frame({"command": "refuse"}))
    assert server.answers(client) == [{"ok": False, "error": "not today"}]
    client.send(encode_frame({"command": "bug"}))
    (answer,) = server.answers(client)
    assert not answer["ok"] and "ZeroDivisionError" in answer["error"]
    assert "this is a bug" in caplog.text
    client.send(say("still here"))
    assert server.answers(client)[0]["ok"]


@pytest.mark.parametrize(
    "request_",
    [{}, {"command": 3}, {"command": "say", "arguments": []}, {"arguments": {}}],
)
def test_a_request_of_another_shape_is_told_so_and_closed(server, request_):
    client = server.connect()
    client.send(encode_frame(request_))
    answer, end = server.answers(client, 2)
    assert "a request is" in answer["error"] and end is None


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(st.binary(min_size=1, max_size=400))
def test_garbage_ends_its_own_session_and_no_other(server, data):
    liar, honest = server.connect(), server.connect()
    liar.send(data)
    honest.send(say("hello"))
    assert server.answers(honest) == [{"ok": True, "result": {"said": "hello"}}]
    liar.close()
    honest.close()
    while len(server.loop.watched) > 1:
        server.loop.turn(0.01)


def test_a_length_of_gigabytes_is_refused_at_once(server):
    client = server.connect()
    client.send(struct.pack(">I", 1 << 31))
    answer, end = server.answers(client, 2)
    assert "at most 65536 are read" in answer["error"] and end is None


def test_half_a_request_holds_nobody_up_and_is_closed_after_a_while(
    server, monkeypatch
):
    half, whole = server.connect(), server.connect()
    half.send(say("never said")[:-3])
    whole.send(say("said"))
    assert server.answers(whole)[0]["ok"]
    monkeypatch.setattr(control_server, "_HALF_A_REQUEST_S", -1.0)
    (look,) = server.loop.tasks
    look()
    assert server.answers(half) == [None]
    whole.send(say("again"))
    assert server.answers(whole)[0]["ok"]


def test_a_trickle_of_bytes_does_not_count_as_activity(server, monkeypatch):
    client = server.connect()
    frame = say("slowly")
    client.send(frame[:3])
    server.loop.turn(1)
    server.loop.turn(1)
    began = time.monotonic()
    client.send(frame[3:6])
    server.loop.turn(1)
    (session,) = server.server._sessions.values()
    assert session.active <= began


def test_a_client_that_does_not_read_costs_one_answer_and_is_closed(
    server, monkeypatch
):
    deaf, other = server.connect(), server.connect()
    deaf.send(encode_frame({"command": "large"}) * 3)
    other.send(say("hello"))
    assert server.answers(other)[0]["ok"]
    for _ in range(20):
        server.loop.turn()
    assert server.executed.count("large") == 1  # not the next before this one is out
    monkeypatch.setattr(control_server, "_UNREAD_ANSWER_S", -1.0)
    (look,) = server.loop.tasks
    look()
    assert len(server.server._sessions) == 1


def test_a_large_answer_arrives_whole(server):
    client = server.connect()
    client.send(encode_frame({"command": "large"}))
    (answer,) = server.answers(client)
    assert len(answer["result"]) == MAX_ANSWER_BYTES - 1000


def test_what_a_client_asked_for_is_not_done_once_it_has_gone(server):
    client = server.connect()
    client.send(encode_frame({"command": "resize"}))
    client.close()
    for _ in range(5):
        server.loop.turn()
    assert server.executed == [] and len(server.loop.watched) == 1


def test_clients_beyond_the_limit_are_told_so(server):
    for _ in range(MAX_SESSIONS):
        server.connect()
        server.loop.turn(1)
    answer, end = server.answers(server.connect(), 2)
    assert f"{MAX_SESSIONS} others" in answer["error"] and end is None
    server.clients[0].close()
    server.loop.turn(1)
    last = server.connect()
    last.send(say("now"))
    assert server.answers(last)[0]["ok"]


def test_children_of_the_supervisor_are_told_to_close_what_is_not_theirs(server):
    client = server.connect()
    server.loop.turn(1)
    assert len(server.loop.only_ours) == 2  # where it listens, and the session
    client.close()
    server.loop.turn(1)
    assert len(server.loop.only_ours) == 1
    server.server.close()
    assert not server.loop.only_ours and not server.loop.watched


def test_without_descriptors_it_looks_away_for_a_while_and_then_goes_on(
    server, monkeypatch
):
    class OutOfFiles:
        def fileno(self):
            return listener.fileno()

        def accept(self):
            raise OSError(errno.EMFILE, "Too many open files")

    listener = server.server._listener
    client = server.connect()
    with monkeypatch.context() as patch:
        patch.setattr(server.server, "_listener", OutOfFiles())
        server.loop.turn(1)
    assert not server.loop.watched
    (look,) = server.loop.tasks
    look()
    client.send(say("at last"))
    assert server.answers(client)[0]["ok"]


# -- the file ------------------------------------------------------------------------


def test_the_file_is_for_owner_and_group_and_goes_with_the_server(server):
    assert os.stat(server.path).st_mode & 0o777 == 0o660
    server.server.close()
    assert not os.path.lexists(server.path)


def test_what_a_dead_broker_left_there_is_replaced(tmp_path):
    path = str(tmp_path / "control.sock")

    def live_briefly():
        ControlServer(Loop(), path, lambda name, arguments: None)
        die()

    Child(live_briefly).wait()
    assert os.path.exists(path)
    server = Server(path)
    client = server.connect()
    client.send(say("hello"))
    assert server.answers(client)[0]["ok"]
    server.close()


def test_a_living_brokers_socket_is_left_alone(server):
    with pytest.raises(ControlSocketError, match=f"in use by process {os.getpid()}"):
        ControlServer(Loop(), server.path, server.execute)
    client = server.connect()
    client.send(say("hello"))
    assert server.answers(client)[0]["ok"]


def test_a_file_that_is_no_socket_is_left_alone(tmp_path):
    path = tmp_path / "control.sock"
    path.write_text("precious")
    with pytest.raises(ControlSocketError, match="is not a socket"):
        ControlServer(Loop(), str(path), lambda name, arguments: None)
    assert path.read_text() == "precious"


def test_a_successors_socket_is_not_removed_by_its_predecessor(tmp_path):
    path = tmp_path / "control.sock"
    old = Server(path)
    path.unlink()
    new = Server(path)
    old.server.close()
    assert path.exists()
    new.server.close()
    old.loop.epoll.close()
    new.loop.epoll.close()


# -- strangers -----------------------------------------------------------------------


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_a_stranger_is_told_that_it_may_not_although_it_could_connect(server, caplog):
    os.chmod(server.path, 0o666)
    directory, name = os.path.split(server.path)
    os.chmod(directory, 0o755)

    def ask():
        os.chdir(directory)  # those above it are closed to others, and may stay so
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(90)
            client.connect(name)
            with contextlib.suppress(OSError):
                client.sendall(say("let me in"))
            reader = FrameReader(MAX_ANSWER_BYTES)
            while (answer := reader.next_map()) is None:
                data = client.recv(4096)
                assert data, "closed without a word"
                reader.feed(data)
        assert answer == {
            "ok": False,
            "error": f"user {NOBODY} may not control this broker",
        }

    stranger = Child(ask)
    deadline = time.monotonic() + 90
    while stranger.is_alive and time.monotonic() < deadline:
        server.loop.turn(0.01)
    assert stranger.wait() == 0
    assert server.executed == []
    assert f"user {NOBODY} was refused" in caplog.text


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_a_stranger_cannot_even_connect_to_the_file_as_it_is_made(server, tmp_path):
    for directory in (tmp_path, *tmp_path.parents):
        if directory.stat().st_uid == os.geteuid() and directory.name:
            directory.chmod(directory.stat().st_mode | 0o055)

    def ask():
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        with (
            socket.socket(socket.AF_UNIX) as client,
            contextlib.suppress(PermissionError),
        ):
            client.connect(server.path)
            raise AssertionError("it could connect")

    assert fork(ask) == 0
