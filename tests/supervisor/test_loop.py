"""The supervisor's loop forks children that nobody can take for it, or none."""

from __future__ import annotations

import gc
import os
import resource
import signal
from collections.abc import Iterator

import pytest

from mpbroker.supervisor.loop import Loop
from mpbroker.supervisor.signals import HANDLED, SignalSocket

_TURN_S = 1.0


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
