"""What an acceptor has in hand when it is killed is not lost."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import select
import signal
import socket
import sys

import pytest

from mpbroker.ipc.fdpass import recv_fds
from mpbroker.ipc.layout import PROCESSOR_LISTENER, processor_row
from mpbroker.ipc.limits_page import BrokerLimits, Limits, LimitsPage
from mpbroker.network import acceptor_guard, descriptor_guard
from mpbroker.network.acceptor import Acceptor
from mpbroker.network.connection_quotas import ConnectionQuotas
from mpbroker.network.moves.hand_over import KEEP, MAX_SOCKETS, RESCUED
from tests.support.children import Child, deaths, kill_at_line, running, wait_until
from tests.support.memory import broker_memory

FILES = ("network/acceptor.py", "network/moves/hand_over.py", "ipc/fdpass.py")
LINES = 110  # of those files: a start, and one connection


class Porch:
    """A listener, and what its acceptor leaves with the keeper."""

    def __init__(self, memory) -> None:
        self.memory = memory
        self.sock = socket.create_server(("127.0.0.1", 0))
        self.sock.setblocking(False)
        memory.control.words[processor_row(0) + PROCESSOR_LISTENER] = 1
        self.kept: dict[int, int] = {}  # the client's port: who left it

    def accept(self, line: int | None = None) -> None:
        """In a process of its own: serve; die at a line of it."""
        memory = self.memory
        acceptor = Acceptor(
            0,
            self.sock,
            memory.control,
            {number: ends[0] for number, ends in enumerate(memory.handovers)},
            memory.keeper_link,
            memory.acceptor_bell,
            ConnectionQuotas(0, memory.limits, memory.control),
            lambda: sys.settrace(None),
        )
        if line is not None:
            kill_at_line(line, FILES)
        acceptor.run()

    def look(self) -> dict[int, int]:
        """Who has been left with the keeper so far."""
        link = self.memory.keeper_pair[1]
        with contextlib.suppress(BlockingIOError):
            while True:
                message, fds = recv_fds(link, KEEP.size, MAX_SOCKETS)
                for fd in fds:
                    with socket.socket(fileno=fd) as sock:
                        port = sock.getpeername()[1]
                    self.kept[port] = KEEP.unpack(message)[0]
        return self.kept

    def is_waited_at(self) -> bool:
        """Whether somebody has not been accepted yet."""
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        return bool(poll.poll(0))

    def waits(self) -> bool:
        """Whether somebody had not been accepted; who had not is sent away."""
        with contextlib.suppress(BlockingIOError):
            self.sock.accept()[0].close()
            return True
        return False


@pytest.fixture
def porch():
    with broker_memory() as memory:
        made = Porch(memory)
        yield made
        made.sock.close()


def test_no_line_of_an_acceptor_loses_the_connection_it_dies_with(porch):
    rescued = 0
    for line in deaths(LINES, 40, 1):
        with socket.create_connection(porch.sock.getsockname()) as client:
            port = client.getsockname()[1]
            child = Child(lambda line=line: porch.accept(line))
            try:
                wait_until(lambda c=child, p=port: p in porch.look() or not c.is_alive)
                if not child.is_alive and not porch.waits():
                    wait_until(lambda port=port: port in porch.look())
            finally:
                child.kill()
            rescued += porch.kept.get(port) == RESCUED
    assert rescued > 0  # some died with nobody having it but their guard


def test_another_guard_comes_after_the_death_of_one(porch):
    with running(porch.accept) as (child,):
        first = wait_until(lambda: children_of(child.pid))
        os.kill(first[0], signal.SIGKILL)
        wait_until(lambda: children_of(child.pid) not in ([], first))


def test_another_guard_comes_for_one_that_was_stopped_and_that_one_ends(porch):
    with running(porch.accept) as (child,):
        first = wait_until(lambda: children_of(child.pid))
        os.kill(first[0], signal.SIGSTOP)
        wait_until(lambda: children_of(child.pid) not in ([], first))
        wait_until(lambda: has_ended(first[0]))


def test_a_guard_ends_with_its_acceptor(porch):
    with running(porch.accept) as (child,):
        (guard,) = wait_until(lambda: children_of(child.pid))
    wait_until(lambda: has_ended(guard))


def test_whoever_comes_too_fast_is_rescued_by_nobody(porch):
    LimitsPage(porch.memory.limits).publish(
        Limits(BrokerLimits(address_rate=1, rate_samples=2))
    )
    with running(porch.accept) as (child,):
        wait_until(lambda: children_of(child.pid))
        with contextlib.ExitStack() as stack:
            clients = [
                stack.enter_context(socket.create_connection(porch.sock.getsockname()))
                for _ in range(8)
            ]
            # All: whoever waits at the door when it dies waits for another acceptor.
            wait_until(lambda: held_by(child.pid) and not porch.is_waited_at())
            child.kill()
            closed = 0
            for client in clients:
                if client.getsockname()[1] not in porch.look():
                    client.settimeout(90.0)
                    with contextlib.suppress(ConnectionResetError):
                        assert client.recv(1) == b""
                    closed += 1
    assert closed > 0


def test_a_system_without_such_clones_has_acceptors_all_the_same(porch, monkeypatch):
    monkeypatch.setattr(descriptor_guard, "_SYS_CLONE", {})
    with running(porch.accept) as (child,):
        with socket.create_connection(porch.sock.getsockname()) as client:
            wait_until(lambda: client.getsockname()[1] in porch.look())
        assert not children_of(child.pid)


def no_such_call(monkeypatch):
    monkeypatch.setattr(descriptor_guard, "_SYS_CLONE", {os.uname().machine: 1 << 20})


def no_descriptor(monkeypatch):
    def pidfd_open(pid):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "pidfd_open", pidfd_open)


@pytest.mark.parametrize("lack", [no_such_call, no_descriptor])
def test_what_lacks_for_a_guard_is_said_once_and_stops_nobody(
    porch, monkeypatch, caplog, lack
):
    caplog.set_level("INFO")
    lack(monkeypatch)
    monkeypatch.setattr(descriptor_guard, "_POST_AGAIN_S", 0)
    guard = acceptor_guard.AcceptorGuard(porch.sock, lambda socks: None, lambda: None)
    gc.collect()  # what earlier tests have left open goes now
    before = len(os.listdir("/proc/self/fd"))
    assert [guard.post() for _ in range(3)] == [-1] * 3
    assert caplog.text.count("an acceptor has no guard") == 1
    assert len(os.listdir("/proc/self/fd")) <= before
    guard.bury()


def children_of(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(word) for word in file.read().split()]


def has_ended(pid: int) -> bool:
    """Also if nobody has reaped it: it is not our child."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def held_by(pid: int) -> bool:
    """Whether a process has a descriptor that exec would not close, of a connection."""
    for name in os.listdir(f"/proc/{pid}/fdinfo"):
        with contextlib.suppress(OSError):
            with open(f"/proc/{pid}/fdinfo/{name}") as file:
                flags = int(file.read().split("flags:")[1].split()[0], 8)
            target = os.readlink(f"/proc/{pid}/fd/{name}")
            if not flags & os.O_CLOEXEC and target.startswith("socket:"):
                return True
    return False
