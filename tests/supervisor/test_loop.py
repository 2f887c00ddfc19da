"""The supervisor's loop forks children that nobody can take for it, or none."""

from __future__ import annotations

import errno
import gc
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator

import pytest

from mpbroker.supervisor.child import Child
from mpbroker.supervisor.loop import Loop
from mpbroker.supervisor.repair.leases import Leases, may_one_be_stopped
from mpbroker.supervisor.signals import HANDLED, SignalSocket

_TURN_S = 1.0
_first_acts: list[Callable[[], None]] = []  # of whatever is forked here


def _act() -> None:
    for act in _first_acts:
        act()


os.register_at_fork(after_in_child=_act)


@pytest.fixture
def signals() -> Iterator[SignalSocket]:
    numbers = (*HANDLED, signal.SIGCHLD)
    before = {number: signal.getsignal(number) for number in numbers}
    made = SignalSocket()
    yield made
    made.close()
    for number, handler in before.items():
        signal.signal(number, handler)


def end_of_aside(loop: Loop, run: object) -> int:
    """Run something aside; return its wait status, in this process alone."""
    ended: list[int] = []
    ourselves = os.getpid()
    try:
        loop.fork_aside(run, ended.append)  # type: ignore[arg-type]
    except OSError:
        if os.getpid() != ourselves:
            os._exit(77)  # a second supervisor would go on from here
        raise
    while not ended:
        loop.dispatch(_TURN_S)
    return ended[0]


def test_a_signal_for_a_child_is_not_its_parents(signals: SignalSocket) -> None:
    status = end_of_aside(Loop(), lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert status == 0
    assert signals.take() == []


def test_a_signal_in_a_childs_first_moment_is_not_its_parents(
    signals: SignalSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "_first_acts", [_terminate_us])
    status = end_of_aside(Loop(), lambda: os._exit(len(_blocked() & set(HANDLED))))
    assert status == 0
    assert signals.take() == []
    assert not _blocked() & set(HANDLED)


def _terminate_us() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _blocked() -> set[int]:
    return set(signal.pthread_sigmask(signal.SIG_BLOCK, ()))


class Family(Loop):
    """A supervisor without children."""

    def __init__(self) -> None:
        super().__init__()
        self.children: list[Child] = []
        self.before_repair: Callable[[], None] = lambda: None


@pytest.mark.parametrize("is_repair", [False, True])
def test_whoever_is_stopped_while_it_does_something_aside_is_ended(
    is_repair: bool,
) -> None:
    family, ended = Family(), list[int]()
    leases = Leases(family, memoryview(b""))
    leases.begin()
    family.fork_aside(lambda: time.sleep(3600), ended.append)
    (pid,) = family.asides
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)  # it is the leases' to see
    if is_repair:
        family.before_repair()
    else:
        leases.check()
        assert os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        leases.check()
    while not ended:
        family.dispatch(_TURN_S)
    assert ended == [signal.SIGKILL]


def test_a_child_that_cannot_begin_ends_and_is_no_second_parent() -> None:
    loop = Loop()
    closed = os.dup(0)
    os.close(closed)
    loop.only_ours.add(closed)
    assert os.waitstatus_to_exitcode(end_of_aside(loop, lambda: None)) == 1


def test_without_a_descriptor_to_watch_it_there_is_no_child() -> None:
    loop = Loop()
    gc.collect()  # what earlier tests have left open must not give us one
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        status = end_of_aside(loop, lambda: None)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert os.waitstatus_to_exitcode(status) == 1
    assert loop.asides == set()


def test_children_can_be_waited_for_though_our_starter_ignored_their_ends() -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    handlers = {number: signal.getsignal(number) for number in HANDLED}
    signals = SignalSocket()
    try:
        assert end_of_aside(Loop(), lambda: None) == 0
    finally:
        signals.close()
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.signal(signal.SIGCHLD, before)


def test_what_is_due_soon_goes_along_with_what_is_due(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr("mpbroker.supervisor.loop.time.monotonic", lambda: now)
    loop = Loop()
    ran: list[str] = []
    loop.every(1.0, lambda: ran.append("first"))
    now = 100.2
    loop.every(1.0, lambda: ran.append("soon after it"))
    now = 100.5
    loop.every(1.0, lambda: ran.append("much later"))
    now = 100.9
    loop.dispatch(0)
    assert ran == []  # what is due soon makes no turn of its own
    now = 101.0
    loop.dispatch(0)
    assert ran == ["first", "soon after it"]
    assert loop.run_turns() == pytest.approx(0.5)
    now = 101.5
    loop.dispatch(0)
    assert ran == ["first", "soon after it", "much later"]
    now = 102.0
    loop.dispatch(0)
    assert ran[3:] == ["first", "soon after it"]


def test_what_is_done_once_is_done_when_there_are_descriptors_for_it_and_not_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr("mpbroker.supervisor.loop.time.monotonic", lambda: now)
    loop = Loop()
    ran: list[float] = []
    errors = [OSError(errno.EMFILE, "Too many open files")]

    def run() -> None:
        if errors:
            raise errors.pop()
        ran.append(now)

    loop.once(1.0, run)
    loop.every(1.0, lambda: None)
    for now in (100.5, 101.0, 102.0, 103.0, 104.0):
        loop.dispatch(0)
    assert ran == [102.0]


def test_a_child_is_seen_to_be_stopped_for_as_long_as_it_is() -> None:
    family, ended = Family(), list[int]()
    assert not may_one_be_stopped()  # there is none
    family.fork_aside(lambda: time.sleep(3600), ended.append)
    (pid,) = family.asides
    assert not may_one_be_stopped()
    for _ in range(2):
        os.kill(pid, signal.SIGSTOP)
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
        assert may_one_be_stopped()
        assert may_one_be_stopped()
        os.kill(pid, signal.SIGCONT)
        os.waitid(os.P_PID, pid, os.WCONTINUED | os.WNOWAIT)
        assert not may_one_be_stopped()
    os.kill(pid, signal.SIGKILL)
    while not ended:
        family.dispatch(_TURN_S)
    assert ended == [signal.SIGKILL]
