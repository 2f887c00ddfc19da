"""An fdatasync that fails in one process: no other process calls the log durable.

The kernel tells each open file of a failed write once, and a file that is opened after
some process was told of nothing.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import pathlib
import time
from collections.abc import Callable

import pytest

from mpbroker.ipc import pulse
from mpbroker.ipc.layout import HOUSEKEEPER, ROW_SYNC_OWNER, RowStatus
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.server.group_commit import GroupCommit
from mpbroker.storage.files import lost_writes
from mpbroker.storage.files.log_files import OFFLINE_FILE
from mpbroker.storage.files.log_segment import LogSegment
from mpbroker.storage.files.txn_index import (
    AbortedTransaction,
    append_aborted,
    restore_aborted,
)
from mpbroker.storage.log.disk_sync import DiskSync
from mpbroker.storage.log.log_sync import LogSync
from mpbroker.storage.log.partition_log import PartitionLog
from tests.storage.batches import batch
from tests.support.children import Child, wait_until

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


def test_a_flush_that_waits_for_another_process_shows_that_it_goes_on(
    failing, monkeypatch
):
    """Or its process would be taken for one that hangs: the other waits for a disk."""
    log, child, go = failing
    steps: list[int] = []

    def step() -> None:
        steps.append(1)
        if len(steps) == 3:
            go.tell()

    monkeypatch.setattr(pulse, "step", step)
    with pytest.raises(ApiError):
        log.sync.flush()
    assert len(steps) >= 3
    assert is_ended(child)


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


# -- an owner that is killed before it can say that its sync has failed ----------------


@pytest.fixture
def killed(failing, monkeypatch):
    """A log whose sync's owner had an error and was killed; and what the disk has."""
    log, child, _ = failing
    child.kill()
    log.row.forget_sync(OTHER_HANDLER)
    disk = Disk(log)
    monkeypatch.setattr(lost_writes, "read_past_cache", disk.read)
    return log, disk


class Disk:
    """The disk under a log: by default it has what the page cache has."""

    def __init__(self, log: PartitionLog) -> None:
        self.content = pathlib.Path(log.directory, f"{0:020d}.log").read_bytes()
        self.reads = 0

    def read(self, direct: int, buffer: mmap.mmap, position: int) -> int:
        self.reads += 1
        found = self.content[position : position + len(buffer)]
        buffer[: len(found)] = found
        return len(found)


def flush(log: PartitionLog) -> None:
    with contextlib.suppress(ApiError):
        log.sync.flush()


def sync_at_once(log: PartitionLog) -> None:
    commit = GroupCommit(HANDLER, DiskSync(), lambda *_: None)
    commit.is_alone = True
    commit.sync_at_once([log])


def sync_in_the_background(log: PartitionLog) -> None:
    commit = GroupCommit(HANDLER, DiskSync(), lambda *_: None)
    commit.want(log)
    commit.start()

    def has_ended() -> bool:
        commit.process_finished()  # of a new log, its directory is synced, too
        return not commit.is_syncing

    wait_until(has_ended)


WAYS = (flush, sync_at_once, sync_in_the_background)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kept", [0, 20])
def test_the_next_owner_does_not_believe_its_fdatasync_alone(killed, way, kept):
    log, disk = killed
    disk.content = disk.content[:kept]
    way(log)
    assert log.row.status == RowStatus.OFFLINE
    assert log.row.durable_end_offset == 0
    assert (pathlib.Path(log.directory) / OFFLINE_FILE).exists()


@pytest.mark.parametrize("way", WAYS)
def test_the_next_owner_goes_on_if_the_disk_has_everything(killed, way):
    log, disk = killed
    way(log)
    assert log.row.durable_end_offset == 1
    assert disk.reads == 1
    append(log)
    way(log)  # from now on an fdatasync is believed again
    assert log.row.durable_end_offset == 2
    assert disk.reads == 1


def test_what_was_durable_before_is_not_read_back(open_log, monkeypatch):
    log = open_log(segment_bytes=500, index_interval_bytes=0)
    for _ in range(20):
        append(log)
    log.sync.flush()
    segments = len(log.view.segments.bases)
    assert segments > 2
    append(log)
    log.row.begin_sync(HANDLER)
    log.row.forget_sync(HANDLER)
    read = []
    real = lost_writes.read_past_cache

    def read_past_cache(direct: int, buffer: mmap.mmap, position: int) -> int:
        read.append(os.readlink(f"/proc/self/fd/{direct}"))
        return real(direct, buffer, position)

    monkeypatch.setattr(lost_writes, "read_past_cache", read_past_cache)
    assert log.sync.flush() == 21
    assert (
        1 <= len(read) <= 2
    )  # the last segment, and the one that may have ended there


def test_a_clean_close_reads_back_what_a_killed_owner_had_begun(open_log, monkeypatch):
    log = open_log()
    append(log)
    log.row.begin_sync(HANDLER)
    monkeypatch.setattr(lost_writes, "read_past_cache", lambda *_: 0)
    with pytest.raises(ApiError):
        log.close_cleanly()
    assert log.row.status == RowStatus.OFFLINE


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


def test_a_directory_that_was_moved_meanwhile_takes_nothing_offline(
    open_log, tmp_path, monkeypatch
):
    """Another process moves the partition, or deletes the topic."""
    log = open_log(index_interval_bytes=0)
    append(log)
    log.sync.flush()
    directory, moved = tmp_path / "t-0", tmp_path / "moved"
    sync_indexes = LogSegment.sync_indexes

    def remove_behind_the_listing(segment):
        segment.close_indexes()
        directory.rename(moved)
        log.row.structure_version += 2
        sync_indexes(segment)

    monkeypatch.setattr(LogSegment, "sync_indexes", remove_behind_the_listing)
    with pytest.raises(FileNotFoundError):
        log.sync.flush_indexes()
    assert log.row.status == RowStatus.ONLINE
    monkeypatch.undo()
    moved.rename(directory)
    assert log.sync.flush_indexes() == 1


# -- a housekeeper that is killed before it can say that an index could not be synced --


@pytest.fixture
def unsaid(open_log, tmp_path, new_row, table, monkeypatch):
    """Return a function that has a child's sync of an index fail, and kills the child.

    The log of a successor is returned, and the contents that the disk has of files, by
    suffix: by default it has what the page cache has.
    """

    def fail(suffix: str) -> tuple[PartitionLog, dict[str, bytes]]:
        row = new_row()
        table.initialise_row(row)
        log = open_log(row=row, index_interval_bytes=0)
        for _ in range(5):
            append(log)
        aborted = AbortedTransaction(1, 0, 3, 4)
        append_aborted(str(tmp_path / "t-0" / f"{0:020d}.txnindex"), aborted, 3)
        log.sync.flush()
        seen, never = Pipe(), Pipe()

        def fsync(fd: int) -> None:
            if os.readlink(f"/proc/self/fd/{fd}").endswith(f".{suffix}"):
                fail_slowly(seen, never)(fd)

        def flush_indexes() -> None:
            os.fsync = fsync
            log.sync.flush_indexes()

        child = Child(flush_indexes)
        seen.wait()
        child.kill()
        contents: dict[str, bytes] = {}
        real = lost_writes.read_past_cache

        def read_past_cache(direct: int, buffer: mmap.mmap, position: int) -> int:
            name = os.readlink(f"/proc/self/fd/{direct}").rpartition(".")[2]
            if name not in contents:
                return real(direct, buffer, position)
            found = contents[name][position : position + len(buffer)]
            buffer[: len(found)] = found
            return len(found)

        monkeypatch.setattr(lost_writes, "read_past_cache", read_past_cache)
        return open_log(row=row, index_interval_bytes=0), contents

    return fail


@pytest.mark.parametrize("suffix", INDEXES)
@pytest.mark.parametrize("kept", [b"", bytes(4096)])
def test_the_next_housekeeper_does_not_believe_its_sync_of_an_index_alone(
    unsaid, suffix, kept
):
    """Zeros in a time index would let retention remove the segment."""
    log, contents = unsaid(suffix)
    contents[suffix] = kept
    for _ in range(2):
        with pytest.raises(ApiError):
            log.sync.flush_indexes()
    assert log.row.status == RowStatus.OFFLINE
    assert (pathlib.Path(log.directory) / OFFLINE_FILE).exists()


@pytest.mark.parametrize("suffix", INDEXES)
def test_the_next_housekeeper_goes_on_if_the_disk_has_the_indexes(
    unsaid, open_log, suffix
):
    log, contents = unsaid(suffix)
    assert log.sync.flush_indexes() == 5
    append(log)
    log.sync.flush()
    contents[suffix] = b""  # from now on it is believed again
    assert log.sync.flush_indexes() == 6


def test_an_index_of_aborted_transactions_is_written_again_by_a_start(tmp_path):
    """It may be in the page cache only, and no fsync would tell."""
    path = str(tmp_path / "0.txnindex")
    below, above = AbortedTransaction(1, 0, 3, 4), AbortedTransaction(1, 5, 7, 8)
    for entry in (below, above):
        append_aborted(path, entry, entry.last_offset)
    before = os.stat(path).st_ino
    with open(path, "rb") as file:  # its inode is not used again
        restore_aborted(path, [below, above], 5)
        assert os.stat(path).st_ino != before
        assert file.read() == pathlib.Path(path).read_bytes()
    before = os.stat(path).st_ino
    restore_aborted(path, [below, above], 9)
    assert os.stat(path).st_ino == before


# -- indexes that cannot be read -------------------------------------------------------


def read(log: PartitionLog, **options: bool) -> object:
    return log.reader.read(1, 1000, min_one_batch=True, **options)


@pytest.mark.parametrize(
    ("suffix", "look"),
    [
        ("index", read),
        ("timeindex", lambda log: log.lookup.offset_for_timestamp(1)),
        ("txnindex", lambda log: read(log, read_committed=True)),
    ],
)
def test_an_index_that_cannot_be_read_takes_the_partition_offline(
    open_log, new_row, table, monkeypatch, suffix, look
):
    """What the disk returns later is not believed before it was checked by a start."""
    row = new_row()
    table.initialise_row(row)
    log = open_log(row=row, index_interval_bytes=0, segment_bytes=200)
    for number in range(9):
        log.append(batch(b"value", timestamp=number), now_ms=0)
    first = pathlib.Path(log.directory, f"{0:020d}.txnindex")
    append_aborted(str(first), AbortedTransaction(1, 0, 1, 2), 1)
    pread = os.pread

    def fail(fd: int, size: int, position: int) -> bytes:
        if os.readlink(f"/proc/self/fd/{fd}").endswith(f"{0:020d}.{suffix}"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return pread(fd, size, position)

    other = open_log(row=row, index_interval_bytes=0, segment_bytes=200)
    monkeypatch.setattr(os, "pread", fail)
    with pytest.raises(ApiError) as raised:
        look(other)
    assert raised.value.error_code == ErrorCode.KAFKA_STORAGE_ERROR
    monkeypatch.undo()
    for each in (other, log):
        with pytest.raises(ApiError):
            look(each)
    assert log.row.status == RowStatus.OFFLINE
    assert pathlib.Path(log.directory, OFFLINE_FILE).exists()
