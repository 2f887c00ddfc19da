"""The lock that outlives its owners."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterator

import pytest

from mpbroker.inspect.process_state import process_state
from mpbroker.ipc import pulse, robust_mutex
from mpbroker.ipc.errors import DamagedSegmentError
from mpbroker.ipc.layout import (
    CONTROL_WORDS,
    HANDLER_AWAITS,
    HANDLER_STEPS,
    handler_row,
)
from mpbroker.ipc.robust_mutex import MUTEX_WORDS, RobustMutex
from mpbroker.ipc.segment import Segment
from tests.support.children import die, fork, running, wait_until


@pytest.fixture
def segment() -> Iterator[Segment]:
    made = Segment.create("mutex-test", 4096)
    RobustMutex.initialise(made, 0)
    yield made
    os.close(made.fd)


def test_the_next_owner_is_told_that_the_last_one_died_holding_the_lock(segment):
    mutex = RobustMutex(segment, 0)

    def take_and_die() -> None:
        mutex.acquire()
        die()

    assert fork(take_and_die) == -signal.SIGKILL
    assert mutex.acquire() is True
    mutex.release()


def test_a_lock_whose_owner_died_is_an_ordinary_lock_once_taken_over(segment):
    mutex = RobustMutex(segment, 0)

    def take_and_die() -> None:
        mutex.acquire()
        die()

    for _ in range(3):
        fork(take_and_die)
        with mutex as owner_died:
            assert owner_died
        with mutex as owner_died:
            assert not owner_died


def test_whoever_dies_while_taking_over_is_reported_in_turn(segment):
    mutex = RobustMutex(segment, 0)

    def take_and_die() -> None:
        mutex.acquire()
        die()

    fork(take_and_die)
    fork(take_and_die)  # has been told, and dies before it has repaired anything
    assert mutex.acquire() is True
    mutex.release()


def test_one_process_waits_until_another_lets_go(segment):
    mutex, words = RobustMutex(segment, 0), segment.words

    def hold() -> None:
        with mutex:
            words[100] = 1
            while not words[101]:
                pass
            words[102] = 1

    def follow() -> None:
        with mutex:
            words[103] = words[102]

    with running(hold) as (holder,):
        wait_until(lambda: words[100])
        with running(follow) as (follower,):
            assert follower.is_alive
            words[101] = 1
            assert follower.wait() == 0
        assert holder.wait() == 0
    assert words[103] == 1


def test_no_increment_is_lost_between_processes(segment):
    mutex, words = RobustMutex(segment, 0), segment.words

    def count() -> None:
        for _ in range(3000):
            with mutex:
                words[100] += 1

    with running(count, count, count) as children:
        assert [child.wait() for child in children] == [0, 0, 0]
    assert words[100] == 9000


def test_the_lock_is_let_go_when_its_block_raises(segment):
    mutex = RobustMutex(segment, 0)
    with pytest.raises(KeyError), mutex:
        raise KeyError
    assert fork(mutex.acquire) == 0  # it would wait for ever
    with mutex as owner_died:
        assert owner_died


def test_a_mutex_fits_the_words_that_the_layout_gives_it(segment):
    segment.words[MUTEX_WORDS] = 42
    RobustMutex.initialise(segment, 0)
    with RobustMutex(segment, 0):
        assert segment.words[MUTEX_WORDS] == 42


def test_a_mutex_that_cannot_be_taken_over_is_an_error_not_a_hang(segment):
    mutex = RobustMutex(segment, 0)

    def die_unrepaired() -> None:
        # Let go after EOWNERDEAD without marking it consistent: ENOTRECOVERABLE.
        import mpbroker.ipc.robust_mutex as module

        module.spin_lock(mutex.argument)
        module.pthread_mutex_unlock(mutex.argument)

    def take_and_die() -> None:
        mutex.acquire()
        die()

    fork(take_and_die)
    assert fork(die_unrepaired) == 0
    with pytest.raises(DamagedSegmentError, match="ENOTRECOVERABLE"):
        mutex.acquire()


# -- sleeping for it ------------------------------------------------------------------

AWAITS, DONE = 200, 201


@pytest.fixture(params=["as built", "pure Python"])
def twin(request, monkeypatch) -> None:
    """Both implementations of the wait."""
    if request.param == "pure Python" and robust_mutex.core is not None:
        monkeypatch.setattr(robust_mutex, "core", None)
        for name, ours in (
            ("spin_lock", robust_mutex.spin_lock_in_python),
            ("pthread_mutex_unlock", robust_mutex._pthread.pthread_mutex_unlock),
            ("_mark_consistent", robust_mutex._pthread.pthread_mutex_consistent),
            ("show_waits_at", robust_mutex._show_waits_at_in_python),
            ("on_wait", robust_mutex._on_wait_in_python),
        ):
            monkeypatch.setattr(robust_mutex, name, ours)


@pytest.mark.usefixtures("twin")
def test_a_process_that_sleeps_for_a_lock_shows_whose_it_is(segment):
    mutex, words = RobustMutex(segment, 0), segment.words

    def sleep_for_it() -> None:
        robust_mutex.show_waits_at(segment.address + AWAITS * 8)
        with mutex:
            words[DONE] = 1 + words[AWAITS]

    mutex.acquire()
    with running(sleep_for_it) as (sleeper,):
        wait_until(lambda: words[AWAITS] == os.getpid())
        mutex.release()
        assert sleeper.wait() == 0
    assert words[DONE] == 1  # it shows none when it has the lock


@pytest.mark.usefixtures("twin")
def test_a_process_shows_the_next_owner_when_another_has_got_the_lock(segment):
    mutex, words = RobustMutex(segment, 0), segment.words

    def hold() -> None:
        with mutex:
            wait_until(lambda: words[DONE])

    def sleep_for_it() -> None:
        robust_mutex.show_waits_at(segment.address + AWAITS * 8)
        mutex.acquire()

    mutex.acquire()
    with running(hold) as (holder,):
        wait_until(lambda: process_state(holder.pid) == "S")
        with running(sleep_for_it) as (sleeper,):
            wait_until(lambda: words[AWAITS] == os.getpid())
            mutex.release()
            wait_until(lambda: words[AWAITS] in (holder.pid, 0))
            words[DONE] = 1
            assert holder.wait() == 0
            assert sleeper.wait() == 0


@pytest.mark.usefixtures("twin")
def test_whoever_waits_for_a_lock_can_look_at_its_owner_meanwhile(segment):
    mutex, words = RobustMutex(segment, 0), segment.words

    def stop_with_it() -> None:
        mutex.acquire()
        words[DONE] = 1
        os.kill(os.getpid(), signal.SIGSTOP)

    def wait_for_it(owner: int) -> None:
        robust_mutex.on_wait(lambda found: found == owner and os.kill(owner, 9))
        assert mutex.acquire() is True

    with running(stop_with_it) as (stopped,):
        wait_until(lambda: words[DONE])
        assert fork(lambda: wait_for_it(stopped.pid)) == 0
        assert stopped.wait() == -signal.SIGKILL


def test_a_lock_is_tried_without_waiting(segment):
    mutex = RobustMutex(segment, 0)

    def try_it() -> None:
        assert robust_mutex.try_lock(mutex.argument) == errno.EBUSY

    assert robust_mutex.try_lock(mutex.argument) == 0
    assert robust_mutex.owner_of(mutex.argument) == os.getpid()
    assert fork(try_it) == 0
    mutex.release()
    assert robust_mutex.owner_of(mutex.argument) == 0


def test_a_process_does_not_show_what_its_predecessor_slept_for():
    control = Segment.create("control-test", CONTROL_WORDS * 8)
    row = handler_row(3)
    control.words[row + HANDLER_AWAITS] = 4711

    def begin() -> None:
        pulse.step()  # not shown yet: nothing happens
        pulse.show(control, 3)
        assert control.words[row + HANDLER_AWAITS] == 0
        pulse.step()

    assert fork(begin) == 0
    assert control.words[row + HANDLER_STEPS] == 1
    os.close(control.fd)
