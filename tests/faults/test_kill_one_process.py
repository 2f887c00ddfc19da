"""SIGKILL for one process at a time, under load: nothing acknowledged is lost."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest

from tests.bench.processes import title_of
from tests.faults.producers import Ledger, Producer
from tests.faults.test_kill_the_whole_tree import address_of, producers_for
from tests.support.broker import Broker
from tests.support.patience import Patience

TOPIC = "one-killed"
KILLS = 4


def pids_with(broker: Broker, role: str) -> set[int]:
    return {pid for pid in broker.processes() if role in title_of(pid)}


def wait_until(what: str, is_so: Callable[[], bool]) -> None:
    patience = Patience()
    while not is_so():
        patience.check(what)
        time.sleep(0.005)


def has_progressed(producers: list[Producer]) -> Callable[[], bool]:
    """Return a question: has each producer got three more batches through?"""
    before = [len(producer.acknowledged) for producer in producers]

    def ask() -> bool:
        for producer in producers:
            assert producer.complaint is None, producer.complaint
        now = [len(producer.acknowledged) for producer in producers]
        return all(b + 9 <= n for b, n in zip(before, now, strict=True))

    return ask


@pytest.mark.parametrize(
    ("role", "clients_may_notice"),
    [("request-handler", False), ("network-thread", True), ("socket-acceptor", False)],
)
def test_a_killed_process_is_replaced_and_nothing_is_lost(
    make_broker: Callable[..., Broker], role: str, clients_may_notice: bool
) -> None:
    broker = make_broker()
    producers = producers_for(broker, TOPIC, 2)
    for producer in producers:
        producer.start()
    for _ in range(KILLS):
        wait_until("load", has_progressed(producers))
        pids = pids_with(broker, role)
        victim = min(pids)
        os.kill(victim, signal.SIGKILL)

        def replaced(pids: set[int] = pids, victim: int = victim) -> bool:
            now = pids_with(broker, role)
            return victim not in now and len(now) == len(pids)

        wait_until(f"{role} {victim} replaced", replaced)
        wait_until("load goes on", has_progressed(producers))
    for producer in producers:
        producer.stop()
    assert Ledger(TOPIC, producers).check(address_of(broker)) > 0
    if not clients_may_notice:
        assert [producer.losses for producer in producers] == [0] * len(producers)


def test_the_tree_dies_with_its_supervisor(make_broker: Callable[..., Broker]) -> None:
    broker = make_broker()
    children = broker.processes().keys() - {broker.pid}
    assert len(children) > 2
    os.kill(broker.pid, signal.SIGKILL)
    wait_until("all gone", lambda: not broker.processes())
    broker.kill()
    with broker:  # and what it left does not matter
        assert broker.processes()
