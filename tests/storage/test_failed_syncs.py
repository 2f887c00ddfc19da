"""An fdatasync that fails in one process: no other process calls the log durable.

The kernel tells each open file of a failed write once, and a file that is opened after
some process was told of nothing.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable

import pytest

from mpbroker.ipc.layout import HOUSEKEEPER, ROW_SYNC_OWNER, RowStatus
from mpbroker.protocol.errors import ApiError
from mpbroker.server.group_commit import GroupCommit
from mpbroker.storage.log.disk_sync import DiskSync
from mpbroker.storage.log.log_sync import LogSync
from mpbroker.storage.log.partition_log import PartitionLog
from tests.storage.batches import batch
from tests.support.children import Child

HANDLER, OTHER_HANDLER = 3, 4


class Pipe:
    """One byte from one process to another."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()

    def tell(self) -> None:
        os.write(self._write, b"x")

    def wait(self) -> None:
        assert os.read(self._read, 1)


def append(log: PartitionLog) -> None:
    log.append(batch(b"value"), now_ms=0)


def fail_slowly(seen: Pipe, go: Pipe) -> Callable[[int], None]:
    """Return an fdatasync that has its error, and does not return before it may."""

    def fdatasync(fd: int) -> None:
        seen.tell()
        go.wait()
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    return fdatasync


@pytest.fixture
def failing(open_log, new_row, table):
    """A log, and a child whose flush of it has failed and has not said so yet."""
    row = new_row()
    table.initialise_row(row)
    log = open_log(row=row)
    append(log)
    seen, go = Pipe(), Pipe()

    def flush() -> None:
        log.sync.process = OTHER_HANDLER
        os.fdatasync = fail_slowly(seen, go)
        with pytest.raises(ApiError):
            log.sync.flush()

    child = Child(flush)
    seen.wait()
    yield log, child, go
    child.kill()


def is_ended(child: Child) -> bool:
    return child.wait() == 0


def test_a_handler_does_not_publish_what_another_process_failed_to_sync(failing):
    log, child, go = failing
    told: list[tuple[int, int]] = []
    disk = DiskSync()
    commit = GroupCommit(HANDLER, disk, lambda row, mask: told.append((row, mask)))
    commit.is_alone = True
    commit.sync_at_once([log])
    assert log.row.durable_end_offset == 0
    commit.want(log)
    commit.start()
    assert disk.is_idle and log.row.durable_end_offset == 0
    go.tell()
    assert is_ended(child)
    assert log.row.status == RowStatus.OFFLINE
    assert log.row.durable_end_offset == 0


def test_a_flush_waits_for_the_sync_of_another_process_and_fails_with_it(
    failing, monkeypatch
):
    log, child, go = failing
    looked = 0

    def let_owner_go_on() -> None:
        nonlocal looked
        looked += 1
        if looked == 1:
            go.tell()
        os.sched_yield()

    monkeypatch.setattr(LogSync, "_let_owner_go_on", staticmethod(let_owner_go_on))
    with pytest.raises(ApiError):
        log.sync.flush()
    assert is_ended(child) and looked
    assert log.row.status == RowStatus.OFFLINE
    assert log.row.durable_end_offset == 0


def test_a_flush_does_not_wait_for_ever(failing, monkeypatch):
    log, child, go = failing
    monkeypatch.setattr(LogSync, "_let_owner_go_on", staticmethod(lambda: None))
    times = iter(range(0, 10**12, 4 * 10**9))
    monkeypatch.setattr(time, "monotonic_ns", lambda: next(times))
    with pytest.raises(ApiError, match="does not end"):
        log.sync.flush()
    assert log.row.status == RowStatus.ONLINE
    go.tell()
    assert is_ended(child)


def test_a_flush_tells_the_handlers_that_wait_for_its_end(open_log, monkeypatch):
    log = open_log()
    append(log)
    told: list[tuple[int, int]] = []
    log.sync.notify = lambda row, mask: told.append((row, mask))
    commit = GroupCommit(HANDLER, DiskSync(), lambda *_: None)
    fdatasync = os.fdatasync

    def want_meanwhile(fd: int) -> None:
        commit.want(log)
        commit.start()
        fdatasync(fd)

    monkeypatch.setattr(os, "fdatasync", want_meanwhile)
    assert log.sync.flush() == 1
    assert told == [(log.row.index, 1 << HANDLER)]
    assert log.row.words[log.row.base + ROW_SYNC_OWNER] == 0


def test_a_flush_during_a_sync_of_its_own_process_leaves_the_publishing_to_it(open_log):
    log = open_log()
    append(log)
    log.sync.process = HANDLER
    assert log.row.begin_sync(HANDLER) == 1
    assert log.sync.flush() == 0
    assert log.row.owns_sync(HANDLER)
    log.row.end_sync(1)
    assert log.sync.flush() == 1


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_flush_that_failed_is_not_made_again(open_log, monkeypatch, number):
    """An error such as a full disk passes, but not what the kernel has dropped."""
    log = open_log()
    append(log)

    def fail(fd: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fdatasync", fail)
    with pytest.raises(ApiError):
        log.sync.flush()
    monkeypatch.undo()
    with pytest.raises(ApiError):
        log.sync.flush()
    assert log.row.status == RowStatus.OFFLINE
    assert log.row.durable_end_offset == 0


def test_a_clean_close_does_not_wait_for_an_owner_that_was_killed(open_log):
    log = open_log()
    append(log)
    log.row.begin_sync(HANDLER)
    assert log.close_cleanly() == 1
    assert log.row.durable_end_offset == 1


def test_the_syncs_of_a_dead_housekeeper_are_released(open_log):
    log = open_log()
    append(log)
    log.row.begin_sync(HOUSEKEEPER)
    log.row.forget_sync(HANDLER)
    assert log.row.owns_sync(HOUSEKEEPER)
    log.row.forget_sync(HOUSEKEEPER)
    assert log.sync.flush() == 1


INDEXES = ("index", "timeindex", "txnindex")


def fail_once(monkeypatch: pytest.MonkeyPatch, suffix: str, number: int) -> list[str]:
    """Let the fsync of one file fail once, as the kernel does; return its path."""
    fsync, failed = os.fsync, []

    def fail(fd: int) -> None:
        path = os.readlink(f"/proc/self/fd/{fd}")
        if path.endswith(f".{suffix}") and not failed:
            failed.append(path)
            raise OSError(number, os.strerror(number))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", fail)
    return failed


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("suffix", INDEXES)
def test_an_index_that_could_not_be_synced_is_not_believed_later(
    open_log, tmp_path, monkeypatch, suffix, number
):
    """The recovery point says that indexes below it are on disk."""
    log = open_log(index_interval_bytes=0)
    for _ in range(5):
        append(log)
    (tmp_path / "t-0" / "00000000000000000000.txnindex").write_bytes(b"")
    log.sync.flush()
    failed = fail_once(monkeypatch, suffix, number)
    for _ in range(2):
        with pytest.raises(ApiError):
            log.sync.flush_indexes()
    assert failed
    assert log.row.status == RowStatus.OFFLINE
    again = open_log(index_interval_bytes=0)
    assert again.view.state().index_entries == 4
    assert again.sync.flush_indexes() == 5


def test_an_index_that_cannot_be_opened_now_is_synced_later(open_log, monkeypatch):
    log = open_log(index_interval_bytes=0)
    append(log)
    log.sync.flush()
    failed = fail_once(monkeypatch, "index", errno.EMFILE)
    with pytest.raises(OSError):
        log.sync.flush_indexes()
    assert failed
    assert log.row.status == RowStatus.ONLINE
    assert log.sync.flush_indexes() == 1
