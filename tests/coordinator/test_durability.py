"""Callbacks that wait for the disk: when they are called, with which failures."""

from __future__ import annotations

from collections.abc import Hashable
from types import SimpleNamespace
from typing import Any

import pytest

from mpbroker.coordinator.durability import DEADLINE_NS, Awaited, Durability
from mpbroker.ipc.layout import RowStatus
from mpbroker.metadata.log_config import LogConfig


class FakeRow:
    def __init__(self, index: int) -> None:
        self.index = index
        self.durable_end_offset = 0
        self.status = RowStatus.ONLINE


class FakeLog:
    def __init__(self, index: int) -> None:
        self.row = FakeRow(index)
        self.view = SimpleNamespace(config=LogConfig())


class FakeNotices:
    """The notices of other processes."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.lost = False

    def is_empty(self) -> bool:
        return not self.rows and not self.lost

    def take(self) -> tuple[list[int], bool]:
        taken = self.rows, self.lost
        self.rows, self.lost = [], False
        return taken


class Rig:
    def __init__(self) -> None:
        self.wanted: list[FakeLog] = []
        self.notices = FakeNotices()
        self.durability = Durability(self.wanted.append, self.notices)  # type: ignore[arg-type]
        self.logs = [FakeLog(index) for index in range(3)]
        self.called: list[tuple[str, list[Hashable]]] = []
        self.now_ns = 0

    def when(self, name: str, **ends: int) -> None:
        """Wait as ``name`` for logs: log0=5 is log 0 up to offset 5."""
        awaited = [
            Awaited(key, self.logs[int(key[-1])], end)  # type: ignore[arg-type]
            for key, end in ends.items()
        ]
        self.durability.when(
            awaited, lambda failed: self.called.append((name, failed)), self.now_ns
        )

    def synced(self, log: int, end: int) -> None:
        self.logs[log].row.durable_end_offset = end
        self.durability.sync_ended(log)
        self.durability.go_on(self.now_ns)

    def names(self) -> list[str]:
        return [name for name, _ in self.called]


@pytest.fixture
def rig() -> Any:
    return Rig()


def test_a_callback_for_logs_on_disk_runs_at_once(rig: Rig) -> None:
    rig.logs[0].row.durable_end_offset = 5
    rig.when("a", log0=5)
    rig.when("nothing")
    assert rig.called == [("a", []), ("nothing", [])]
    assert not rig.wanted
    assert not len(rig.durability)


def test_each_goes_on_when_its_own_part_is_on_disk(rig: Rig) -> None:
    rig.when("first", log0=5)
    rig.when("second", log0=7)
    assert rig.wanted == [rig.logs[0]] * 2
    rig.wanted.clear()
    rig.synced(0, 5)
    assert rig.names() == ["first"]
    assert rig.wanted == [rig.logs[0]]  # what came too late for that sync
    rig.synced(0, 7)
    assert rig.names() == ["first", "second"]
    assert not len(rig.durability)


def test_a_callback_for_several_logs_runs_after_the_last(rig: Rig) -> None:
    rig.when("all", log0=1, log1=2, log2=3)
    rig.when("one", log1=2)
    rig.synced(2, 3)
    rig.synced(1, 2)
    assert rig.names() == ["one"]
    rig.synced(0, 1)
    assert rig.names() == ["one", "all"]


def test_a_log_that_goes_offline_fails_the_callbacks_for_lost_records(rig: Rig) -> None:
    rig.logs[0].row.durable_end_offset = 3
    rig.when("lost", log0=5, log1=2)
    rig.logs[0].row.status = RowStatus.OFFLINE
    rig.durability.sync_ended(0)
    rig.durability.go_on(0)
    assert not rig.called
    rig.synced(1, 2)
    assert rig.called == [("lost", ["log0"])]


def test_syncs_of_other_processes_are_heard_of_by_the_ring(rig: Rig) -> None:
    rig.when("a", log0=5)
    rig.logs[0].row.durable_end_offset = 5
    assert not rig.durability.go_on(0)
    rig.notices.rows = [7, 0]
    assert rig.durability.go_on(0)
    assert rig.names() == ["a"]


def test_everything_is_looked_at_when_notices_were_lost(rig: Rig) -> None:
    rig.when("a", log0=5)
    rig.when("b", log1=5)
    for log in rig.logs:
        log.row.durable_end_offset = 5
    rig.notices.lost = True
    assert rig.durability.go_on(0)
    assert rig.names() == ["a", "b"]


def test_a_notice_that_comes_too_early_asks_for_the_next_sync(rig: Rig) -> None:
    """The other process's sync did not cover our records, so we start the next."""
    rig.when("a", log0=5)
    rig.wanted.clear()
    rig.notices.rows = [0]
    assert rig.durability.go_on(0)  # otherwise no sync would be started
    assert rig.wanted == [rig.logs[0]]
    assert not rig.called


def test_a_callback_that_waits_too_long_fails(rig: Rig) -> None:
    rig.when("old", log0=5, log1=5)
    rig.now_ns = DEADLINE_NS // 2
    rig.when("young", log0=6)
    rig.now_ns = DEADLINE_NS + 1
    assert rig.durability.go_on(rig.now_ns)
    assert rig.called == [("old", ["log0", "log1"])]
    rig.synced(0, 6)
    assert rig.names() == ["old", "young"]


def test_a_callback_may_wait_again(rig: Rig) -> None:
    rig.durability.when(
        [Awaited("log0", rig.logs[0], 1)],  # type: ignore[arg-type]
        lambda failed: rig.when("again", log0=2, log1=1),
        0,
    )
    rig.synced(0, 1)
    assert not rig.called
    rig.synced(1, 1)
    rig.synced(0, 2)
    assert rig.names() == ["again"]


def test_a_log_synced_at_once_needs_no_further_sync(rig):
    def sync_at_once(logs: list[FakeLog]) -> None:
        for log in logs:
            log.row.durable_end_offset = 5

    rig.durability = Durability(rig.wanted.append, rig.notices, sync_at_once)
    rig.when("a", log0=5, log1=5)
    assert rig.called == [("a", [])]
    assert rig.wanted == [] and len(rig.durability) == 0
    rig.when("b", log0=5, log1=6)
    assert rig.names() == ["a"]
    assert rig.wanted == [rig.logs[1]]


def test_a_log_that_failed_at_once_is_never_synced_again(rig):
    def sync_at_once(logs: list[FakeLog]) -> None:
        logs[0].row.status = RowStatus.OFFLINE

    rig.durability = Durability(rig.wanted.append, rig.notices, sync_at_once)
    rig.when("a", log0=5)
    assert rig.called == [("a", ["log0"])]
    rig.when("b", log1=5, log2=5)
    assert rig.wanted == [rig.logs[2]]
    rig.synced(2, 5)
    assert rig.called[1] == ("b", ["log1"])
