"""Children of the housekeeper that are stopped (SIGSTOP) while they have a row's lock.

All who need the lock wait, for a process that does not go on. The supervisor has no row
of these children in which it could see that: it looks for them in /proc.
"""

from __future__ import annotations

import mmap
import os
import signal
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from mpbroker.broker.cluster_node import ClusterNode
from mpbroker.broker.housekeeper_child import HousekeeperChild
from mpbroker.broker.log_cleaners import CleanerProcess
from mpbroker.broker.remote_storage import RemoteStorage
from mpbroker.inspect.process_state import children_of, process_state
from mpbroker.ipc.layout import CONTROL_WORDS
from mpbroker.ipc.tables.partition_table import PartitionTable
from mpbroker.supervisor.child import Child, Role
from mpbroker.supervisor.repair.leases import Leases
from tests.support.children import wait_until

ROW = 5


def words() -> memoryview:
    return memoryview(mmap.mmap(-1, CONTROL_WORDS * 8)).cast("q")


def cleaner(parts: Any) -> HousekeeperChild:
    return CleanerProcess(parts, 0, words(), parts.registry)


MAKERS: dict[str, Callable[[Any], HousekeeperChild]] = {
    "log cleaner": cleaner,
    "remote log manager": RemoteStorage,
    "cluster node": ClusterNode,
}


class Family:
    """A supervisor whose only child is a housekeeper."""

    asides: frozenset[int] = frozenset()

    def __init__(self, housekeeper: int) -> None:
        child = Child(Role.HOUSEKEEPER, 0, lambda: None)
        child.pid, child.pidfd = housekeeper, os.pidfd_open(housekeeper)
        self.children = [child]
        self.before_repair = lambda: None

    def every(self, interval_s: float, run: object) -> None:
        raise NotImplementedError


def test_each_kind_of_child_is_tried_here() -> None:
    kinds = {
        each
        for each in HousekeeperChild.__subclasses__()
        if each.__module__.startswith("mpbroker.")
    }
    assert len(kinds) == len(MAKERS)


@pytest.fixture
def table() -> Iterator[PartitionTable]:
    made = PartitionTable.create()
    made.initialise_row(ROW)
    yield made
    os.close(made.segment.fd)


@pytest.fixture(params=MAKERS)
def housekeeper(
    request: pytest.FixtureRequest,
    table: PartitionTable,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[int]:
    """One whose child stops, with the lock of a row."""
    parts: Any = SimpleNamespace(
        directories=[],
        registry=SimpleNamespace(row_count=0),
        config=SimpleNamespace(max_partitions=0),
        memory=SimpleNamespace(table=table, notices=[]),
    )
    made = MAKERS[request.param](parts)

    def stop_with_a_lock() -> None:
        with table.row(ROW).locked():
            os.kill(os.getpid(), signal.SIGSTOP)

    monkeypatch.setattr(made, "_serve", stop_with_a_lock)
    pid = os.fork()
    if pid == 0:
        try:
            made.look(0)
            signal.pause()
        finally:
            os._exit(1)
    yield pid
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def stopped_child(housekeeper: int) -> int:
    wait_until(lambda: [process_state(p) for p in children_of(housekeeper)] == ["T"])
    (pid,) = children_of(housekeeper)
    return pid


@pytest.mark.parametrize("when", ["looked at", "before a repair"])
def test_a_child_that_is_stopped_with_the_lock_of_a_row_is_killed_and_the_row_is_free(
    table: PartitionTable, housekeeper: int, when: str
) -> None:
    pid = stopped_child(housekeeper)
    leases = Leases(Family(housekeeper), words())
    for _ in range(2 if when == "looked at" else 1):
        assert process_state(pid) == "T"
        if when == "looked at":
            leases.check()
        else:
            leases.kill_stopped()
    with table.row(ROW).locked():  # it would be waited for without an end
        wait_until(lambda: process_state(pid) in ("", "Z"))
    assert process_state(housekeeper) not in ("", "Z")
