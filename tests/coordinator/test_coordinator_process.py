"""The coordinator's process: what rests on a log that turns out to be lost."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from mpbroker.coordinator.coordinator_process import Clock, CoordinatorProcess
from mpbroker.coordinator.durability import Durability
from mpbroker.coordinator.outbox import Call, Outbox
from mpbroker.coordinator.timers import Timers
from mpbroker.ipc.layout import RowStatus
from tests.coordinator.test_durability import FakeLog, FakeNotices

PARTITION = 3


class Stage:
    """A process that has nothing real around it but what waits for the disk."""

    def __init__(self) -> None:
        self.log = FakeLog(1)
        self.out = Outbox()
        self.sent: list[str] = []
        self.bell = os.eventfd(0)
        topic = MagicMock()
        topic.append.side_effect = lambda *_: (self.log, 5)
        transactions = MagicMock()
        transactions.handlers = {}
        disk = SimpleNamespace(event_fd=-1, is_idle=True)
        channel = MagicMock()
        channel.send_bytes.side_effect = lambda slot, body: self.sent.append(body)
        self.coordinator = MagicMock()
        self.process = CoordinatorProcess(
            SimpleNamespace(words=[0] * 100_000),  # type: ignore[arg-type]
            MagicMock(),
            channel,
            SimpleNamespace(fd=self.bell),  # type: ignore[arg-type]
            self.coordinator,
            self.out,
            Timers(),
            Clock(),
            topic,
            transactions,
            MagicMock(),
            MagicMock(),
            Durability(lambda log: None, FakeNotices(), self.fail),  # type: ignore[arg-type]
            disk,  # type: ignore[arg-type]
            lambda: None,
            lambda connection: "",
            lambda connection: "",
            lambda request, code: code.name.encode(),
            sync=True,
        )

    def fail(self, logs: list[FakeLog]) -> None:
        """The sync that is made at once has failed."""
        logs[0].row.status = RowStatus.OFFLINE

    def call(self) -> Call:
        request = SimpleNamespace(slot=1, frame=lambda body: body.decode())
        return Call(0, "c", "h", request)


@pytest.fixture
def stage() -> Iterator[Stage]:
    made = Stage()
    yield made
    os.close(made.bell)


def test_all_that_rests_on_a_log_is_told_that_its_sync_has_failed(stage: Stage) -> None:
    """The second too: by then nothing of the log is known any more."""
    told: list[bool] = []
    stage.out.write(PARTITION, b"k", b"v")
    stage.out.answer(stage.call(), MagicMock(), (PARTITION,))
    stage.out.then((PARTITION,), told.append)
    stage.process._flush()
    assert stage.sent == ["COORDINATOR_NOT_AVAILABLE"]
    assert told == [False]
    stage.coordinator.failed.assert_called_once_with(PARTITION)


def test_a_log_that_was_loaded_again_is_rested_on_again(stage: Stage) -> None:
    told: list[bool] = []
    stage.out.write(PARTITION, b"k", b"v")
    stage.out.then((PARTITION,), told.append)
    stage.process._flush()
    stage.log.row.status = RowStatus.ONLINE
    stage.log.row.log_end_offset = stage.log.row.durable_end_offset = 5
    stage.process._note_end(PARTITION, stage.log)  # type: ignore[arg-type]
    stage.out.then((PARTITION,), told.append)
    stage.process._flush()
    assert told == [False, True]
