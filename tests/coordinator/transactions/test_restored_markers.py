"""Markers that a power cut has taken are appended again, and forced to disk."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from mpbroker.coordinator.context import CoordinatorContext
from mpbroker.coordinator.groups.group_coordinator import GroupCoordinator
from mpbroker.coordinator.groups.group_offsets import OffsetAndMetadata
from mpbroker.coordinator.outbox import AppendedMarker, Markers, Outbox
from mpbroker.coordinator.timers import Timers
from mpbroker.coordinator.transactions.transaction_markers import MarkerWriter
from mpbroker.ipc.tables.partition_table import PartitionTable
from mpbroker.metadata.log_config import LogConfig
from mpbroker.metadata.topic_names import OFFSETS_TOPIC
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.storage.log.log_sync import LogSync
from mpbroker.storage.log.own_appends import OwnAppends
from mpbroker.storage.log.partition_log import PartitionLog
from tests.coordinator.rig import FakeTopics, no_sessions
from tests.storage.batches import batch
from tests.support.coordinator_settings import group_settings

PRODUCER = 7
NAMED = AppendedMarker(PRODUCER, 0, True, "t", bytes(16), 0, 10)


class Killed(BaseException):
    pass


@pytest.fixture
def log(tmp_path: Path) -> Iterator[PartitionLog]:
    table = PartitionTable.create()
    table.initialise_row(0)
    log = PartitionLog(str(tmp_path), table.row(0), LogConfig({}))
    yield log
    log.close()


def writer_to(log: PartitionLog) -> MarkerWriter:
    topic = SimpleNamespace(topic_id=bytes(16), partitions=[0], config=LogConfig({}))
    registry: Any = SimpleNamespace(topic={"t": topic}.get)
    groups: Any = MagicMock()
    return MarkerWriter(registry, lambda *_: log, groups, lambda _: None, OwnAppends())


def append(log: PartitionLog, count: int, producer: int = -1) -> None:
    made: Any = batch(*[b"x"] * count)
    if producer >= 0:
        made = batch(*[b"x"] * count, producer=(producer, 0, 0), transactional=True)
    log.append(made, now_ms=1)


def test_a_marker_of_a_transaction_that_wrote_nothing_there_is_appended_again(
    log: PartitionLog,
) -> None:
    """Who has read behind it would miss what came in its place."""
    append(log, 10)
    log.sync.flush()
    ((left, moved),) = writer_to(log).restore([[NAMED]], 1)
    assert (left, moved) == ([], True)
    assert log.row.log_end_offset == log.row.durable_end_offset == 11
    # And not a third time, by one that has the same record to go by.
    assert writer_to(log).restore([[NAMED]], 1) == [([], False)]
    assert log.row.log_end_offset == 11


@pytest.mark.parametrize("cause", [errno.ENOTDIR, errno.EIO, errno.EMFILE])
def test_a_partition_that_cannot_be_opened_keeps_no_others_from_being_restored(
    log: PartitionLog, cause: int
) -> None:
    """But if that may be otherwise in a moment, it is all tried again."""

    def find(topic: Any, partition: int) -> PartitionLog:
        if partition == 1:
            refused = ApiError(ErrorCode.KAFKA_STORAGE_ERROR, "it cannot be made")
            raise refused from OSError(cause, os.strerror(cause))
        return log

    writer = writer_to(log)
    writer._log = find
    append(log, 5, PRODUCER)
    append(log, 5)
    unopened = NAMED._replace(partition=1)
    if cause == errno.EMFILE:
        with pytest.raises(ApiError):
            writer.restore([[unopened], [NAMED]], 1)
        return
    assert writer.restore([[unopened], [NAMED]], 1) == [([unopened], False), ([], True)]
    assert log.row.snapshot().first_unstable_offset == -1


def test_of_many_producers_that_lost_theirs_a_log_is_synced_once(
    log: PartitionLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody reads or writes anything meanwhile."""
    producers = range(20)
    for producer in producers:
        append(log, 1, producer)
    log.sync.flush()
    synced: list[int] = []
    sync = os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda fd: (synced.append(fd), sync(fd)))
    ends = [[NAMED._replace(producer_id=each, offset=20 + each)] for each in producers]
    assert writer_to(log).restore(ends, 1) == [([], True)] * len(producers)
    assert log.row.log_end_offset == log.row.durable_end_offset == 40
    assert log.row.snapshot().first_unstable_offset == -1
    assert len(synced) == 1


@pytest.mark.parametrize("durable", [7, 12])
def test_a_marker_whose_second_append_died_before_its_sync_is_forced_to_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: int
) -> None:
    """Though all is on disk, perhaps, as far as the place where it was once."""
    table = PartitionTable.create()
    table.initialise_row(0)
    log = PartitionLog(str(tmp_path), table.row(0), LogConfig({}))
    topic = SimpleNamespace(topic_id=bytes(16), partitions=[0], config=LogConfig({}))
    registry: Any = SimpleNamespace(topic={"t": topic}.get)

    def writer() -> MarkerWriter:
        groups: Any = MagicMock()
        return MarkerWriter(
            registry, lambda *_: log, groups, lambda _: None, OwnAppends()
        )

    made: Any = batch(*[b"x"] * 5, producer=(PRODUCER, 0, 0), transactional=True)
    log.append(made, now_ms=1)
    for count in (2, 5):  # others, since the broker started again
        others: Any = batch(*[b"x"] * count)
        log.append(others, now_ms=1)
        if log.row.log_end_offset == durable:
            log.sync.flush()

    def die(*_: Any) -> int:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(LogSync, "flush", die)
        with pytest.raises(Killed):
            writer().restore([[NAMED]], 1)
    assert (log.row.log_end_offset, log.row.durable_end_offset) == (13, durable)
    ((left, _),) = writer().restore([[NAMED]], 1)
    assert left == []
    assert log.row.durable_end_offset == log.row.log_end_offset == 13
    log.close()


def test_a_marker_ends_nothing_of_a_partition_that_is_not_loaded_as_far(
    tmp_path: Path,
) -> None:
    """The load comes to it, and before that to the end of an earlier transaction."""
    table = PartitionTable.create()
    table.initialise_row(0)
    log = PartitionLog(str(tmp_path), table.row(0), LogConfig({}))
    topic = SimpleNamespace(topic_id=bytes(16), partitions=[0], config=LogConfig({}))
    registry: Any = SimpleNamespace(topic={OFFSETS_TOPIC: topic}.get)
    groups = GroupCoordinator(
        group_settings(),
        CoordinatorContext(Outbox(), Timers(), FakeTopics(), no_sessions()),
        1,
        lambda: "id",
    )
    writer = MarkerWriter(
        registry, lambda *_: log, groups, lambda _: None, OwnAppends()
    )
    groups.begin_loading([0])
    committed = OffsetAndMetadata(5, -1, "", 1, -1)
    groups.replay_offset("g", "t", 0, committed, 1, PRODUCER)
    abort = Markers(PRODUCER, 0, False, 0, [(OFFSETS_TOPIC, 0)], lambda *_: None)
    writer.append(abort, 1)
    groups.replay_end_of_transaction(0, PRODUCER, commit=True)
    groups.replay_end_of_transaction(0, PRODUCER, commit=False)
    groups.loaded(0, 1)
    offsets = groups.offsets.offsets("g")
    assert offsets is not None
    assert offsets.get("t", 0) == committed
    log.close()


@pytest.mark.parametrize(
    "code", [ErrorCode.KAFKA_STORAGE_ERROR, ErrorCode.NOT_LEADER_OR_FOLLOWER]
)
def test_a_transaction_whose_marker_may_yet_be_written_has_not_ended(
    log: PartitionLog, code: ErrorCode
) -> None:
    """The disk was full, or the partition's directory was not there at the start."""
    append(log, 1)
    with pytest.raises(ApiError, match="t-0 lacks a marker"):
        writer_to(log).require_ended({("t", 0): code})
