"""The life of a child as a table, and what is said of its end."""

from __future__ import annotations

import contextlib
import os
import signal
from itertools import product
from types import SimpleNamespace

import pytest

from mpbroker.base.exit_status import explain_exit
from mpbroker.supervisor.child import (
    TRANSITIONS,
    Child,
    ChildEvent,
    ChildState,
    IllegalTransitionError,
    Role,
)

S, E = ChildState, ChildEvent


@pytest.fixture(autouse=True)
def every_life_is_short(monkeypatch):
    """Stop the clock: on a loaded machine a fork alone may take half a second."""
    stopped = SimpleNamespace(monotonic=lambda: 1000.0)
    monkeypatch.setattr("mpbroker.supervisor.child.time", stopped)


def child(state=S.BACKOFF):
    made = Child(Role.HANDLER, 3, lambda: None)
    made.state = state
    return made


@pytest.mark.parametrize(("state", "event"), list(product(ChildState, ChildEvent)))
def test_every_pair_is_in_the_table_or_illegal(state, event):
    one = child(state)
    if (state, event) in TRANSITIONS:
        one.happens(event)
        assert one.state is TRANSITIONS[state, event]
    else:
        with pytest.raises(IllegalTransitionError, match="handler 3"):
            one.happens(event)
        assert one.state is state


def test_every_state_can_be_reached_and_every_child_can_be_stopped():
    reached, fresh = {S.BACKOFF}, {S.BACKOFF}
    while fresh:
        fresh = {to for (at, _), to in TRANSITIONS.items() if at in reached} - reached
        reached |= fresh
    assert reached == set(S)
    for state in set(S) - {S.DRAINING}:
        assert (state, E.STOP_REQUESTED) in TRANSITIONS
    for state in (S.STARTING, S.READY, S.DRAINING):  # it has a process
        assert (state, E.EXITED) in TRANSITIONS
        assert (state, E.EXITED_CONFIG) in TRANSITIONS


def test_a_child_that_has_ended_or_failed_is_never_started_again():
    for state in (S.ENDED, S.FAILED):
        assert (state, E.RESTARTED) not in TRANSITIONS


@pytest.mark.parametrize(
    ("end", "text"),
    [
        (lambda: os._exit(0), "exit status 0"),
        (lambda: os._exit(78), "exit status 78"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "signal 9"),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), "signal 15"),
    ],
)
def test_how_a_process_ended_is_told_in_words(end, text):
    assert explain_exit(end_of(end)) == text


def end_of(end) -> int:
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        end()
    return os.waitpid(pid, 0)[1]


def live_and_die(one, end=lambda: os._exit(1)):
    pid = os.fork()
    if pid == 0:
        end()
    one.started(pid)
    one.exited(os.waitpid(pid, 0)[1])


def test_the_first_death_is_followed_at_once_and_more_of_them_ever_later():
    one = child()
    pauses = []
    for _ in range(12):
        live_and_die(one)
        assert one.state is S.BACKOFF
        pauses.append(max(0.0, one.restart_at - one.started_at))
    assert one.restarts == one.failures == 12
    assert pauses[0] < pauses[3] < pauses[6]
    assert max(pauses) < 3


def test_a_good_life_is_forgiven(monkeypatch):
    one = child()
    for _ in range(5):
        live_and_die(one)
    monkeypatch.setattr("mpbroker.supervisor.child._GOOD_LIFE_S", 0.0)
    live_and_die(one)
    assert one.failures == one.crashes == 0


def test_who_is_killed_has_not_crashed_however_often_and_however_young():
    one = child()
    for _ in range(12):
        live_and_die(one, lambda: os.kill(os.getpid(), signal.SIGKILL))
    assert (one.failures, one.crashes) == (12, 0)
    live_and_die(one, lambda: os.kill(os.getpid(), signal.SIGXCPU))
    live_and_die(one)
    assert (one.failures, one.crashes) == (14, 2)


def test_one_that_was_ready_is_always_started_again():
    """What kills it comes from a client, and the others are served in between."""
    one = child()
    for _ in range(30):
        pid = os.fork()
        if pid == 0:
            os._exit(1)
        one.started(pid)
        one.happens(E.REPORTED_READY)
        one.exited(os.waitpid(pid, 0)[1])
    assert (one.failures, one.crashes) == (30, 0)
    assert one.restart_at - one.started_at > 1
    live_and_die(one)
    assert one.crashes == 1


def test_a_child_that_says_it_is_configured_wrong_is_not_tried_again():
    one = child()
    live_and_die(one, lambda: os._exit(os.EX_CONFIG))
    assert one.state is S.FAILED
    assert one.last_exit == f"exit status {os.EX_CONFIG}"


def test_a_dead_childs_descriptor_is_closed():
    one, of_children = child(), []

    def look(status):
        # What other tests have left may be closed meanwhile, but is no process.
        of_children.append(os.readlink(f"/proc/self/fd/{one.pidfd}"))
        numbers.append(one.pidfd)
        exited(status)

    numbers: list[int] = []
    exited, one.exited = one.exited, look
    live_and_die(one)
    assert of_children == ["anon_inode:[pidfd]"]
    with contextlib.suppress(FileNotFoundError):
        assert os.readlink(f"/proc/self/fd/{numbers[0]}") != of_children[0]
    assert not one.is_alive
