"""What threads wait for that may be interrupted."""

from __future__ import annotations

import threading
from itertools import count

from mpbroker.producer.latch import Latch
from tests.producer.interrupts import interrupted_at
from tests.support.children import wait_until
from tests.support.patience import LONGEST_S


def test_all_who_wait_go_on_when_it_is_set_and_nobody_waits_then():
    latch, seen = Latch(), []
    threads = [
        threading.Thread(target=lambda: seen.append(latch.wait(LONGEST_S)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(latch._locks) == 3)
    assert not latch.is_set()
    latch.set()
    for thread in threads:
        thread.join()
    assert seen == [True] * 3
    assert latch.wait()
    latch.set()


def test_a_wait_ends_with_its_time_and_leaves_nothing_behind():
    latch = Latch()
    assert not latch.wait(0.001)
    assert not latch.wait(-1)
    assert latch._locks == []


def test_who_sets_it_does_not_wait_for_a_wait_that_was_interrupted():
    for nth in count(1):
        latch = Latch()
        with interrupted_at(nth) as interrupted:
            latch.wait(0)
        setter = threading.Thread(target=latch.set, daemon=True)
        setter.start()
        setter.join(LONGEST_S)
        assert not setter.is_alive(), interrupted.where
        assert latch.wait(0)
        if not interrupted.where:
            break
    assert nth > 3


def test_what_is_set_while_somebody_begins_to_wait_is_seen(monkeypatch):
    latch = Latch()

    class Lock:
        def acquire(self, timeout=None):
            assert timeout is None  # not a second time: nobody would release it
            latch.set()

    monkeypatch.setattr(threading, "Lock", Lock)
    assert latch.wait(LONGEST_S)
