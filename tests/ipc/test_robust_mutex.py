"""The lock that outlives its owners."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from mpbroker.ipc.errors import DamagedSegmentError
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
