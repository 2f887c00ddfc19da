"""A partition whose disk has failed: what the next start makes of it.

The lost pages are in the page cache, and not on the disk: `read_past_cache` is made to
return the content that the disk has.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mpbroker.ipc.layout import RowStatus
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.storage.files import lost_writes
from mpbroker.storage.files.log_files import OFFLINE_FILE
from mpbroker.storage.log.log_loader import LoadHints
from mpbroker.storage.log.partition_log import PartitionLog
from tests.storage.batches import batch, read_all
from tests.storage.conftest import OpenLog
from tests.storage.dump_checks import check_directory

_CONFIG = {"segment_bytes": 600, "index_interval_bytes": 100}

Disk = Callable[[dict[str, bytes]], None]


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    """Return a function that says which content the disk has of files, by name."""

    def lay_down(contents: dict[str, bytes]) -> None:
        real = lost_writes.read_past_cache

        def read_past_cache(direct, buffer, position):
            name = os.path.basename(os.readlink(f"/proc/self/fd/{direct}"))
            if name not in contents:
                return real(direct, buffer, position)
            found = contents[name][position : position + len(buffer)]
            buffer[: len(found)] = found
            return len(found)

        monkeypatch.setattr(lost_writes, "read_past_cache", read_past_cache)

    return lay_down


def fill(log: PartitionLog, count: int) -> list[tuple[int, bytes]]:
    for number in range(count):
        log.append(batch(b"%03d" % number * 10), now_ms=1)
    return read_all(log)


def fail_a_sync(log: PartitionLog, monkeypatch: pytest.MonkeyPatch) -> None:
    def fdatasync(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", fdatasync)
        with pytest.raises(ApiError):
            log.sync.flush()
    assert log.row.status == RowStatus.OFFLINE


def mark(tmp_path: Path) -> Path:
    return tmp_path / "t-0" / OFFLINE_FILE


def logs_in(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "t-0").glob("*.log"))


@pytest.mark.parametrize("kept", [0, 1, 63, 64, 200, 450])
def test_a_start_cuts_off_what_the_disk_lacks(
    open_log: OpenLog, tmp_path, disk, monkeypatch, caplog, kept
):
    """The page cache has the lost pages, and every later fdatasync succeeds."""
    log = open_log()
    records = fill(log, 8)
    fail_a_sync(log, monkeypatch)
    assert mark(tmp_path).exists()
    (path,) = logs_in(tmp_path)
    content = path.read_bytes()
    disk({path.name: content[:kept] + bytes(255 - byte for byte in content[kept:])})
    again = open_log()
    whole = [record for record in records if end_of(log, record[0]) <= kept]
    assert read_all(again) == whole
    assert again.row.durable_end_offset == again.row.log_end_offset == len(whole)
    assert not mark(tmp_path).exists()
    assert f"lacks {len(content) - kept} bytes" in caplog.text
    check_directory(again.directory)
    assert again.append(batch(b"new"), now_ms=1).base_offset == len(whole)


def end_of(log: PartitionLog, offset: int) -> int:
    found = log.view.segments.get(0)
    position, size = found.find(offset, found.file_size(), 0)
    return position + size


def test_a_lost_page_in_an_older_segment_takes_all_later_ones_along(
    open_log: OpenLog, tmp_path, disk, monkeypatch
):
    """Also if the disk has whole batches up to there: no gap of offsets is left."""
    log = open_log(**_CONFIG)
    records = fill(log, 40)
    fail_a_sync(log, monkeypatch)
    first, second, *later = logs_in(tmp_path)
    assert later
    content = second.read_bytes()
    base = int(second.stem)
    segment = log.view.segments.get(base)
    kept = segment.find(base + 2, len(content), 0)[0]
    disk({second.name: content[:kept]})  # a shorter file: its size was not stored
    again = open_log(**_CONFIG)
    assert read_all(again) == records[: base + 2]
    assert logs_in(tmp_path) == [first, second]
    check_directory(again.directory)


@pytest.mark.parametrize("clean", [True, False])
def test_a_start_that_finds_all_on_the_disk_loses_nothing(
    open_log: OpenLog, tmp_path, monkeypatch, caplog, clean
):
    """These are real reads with O_DIRECT, if the file system of the tests can."""
    log = open_log(**_CONFIG)
    records = fill(log, 40)
    log.sync.flush()
    point = log.sync.flush_indexes()
    records += [(offset + 40, value) for offset, value in records]
    for _, value in records[40:]:
        log.append(batch(value), now_ms=1)
    fail_a_sync(log, monkeypatch)
    hints = LoadHints(clean=clean, recovery_point=point, checked_end=80)
    again = open_log(hints=hints, **_CONFIG)
    assert read_all(again) == records
    assert not mark(tmp_path).exists()
    assert "lacks" not in caplog.text
    check_directory(again.directory)


def test_indexes_are_rebuilt_that_the_disk_may_lack(
    open_log: OpenLog, tmp_path, monkeypatch
):
    log = open_log(**_CONFIG)
    fill(log, 40)
    log.sync.flush()
    point = log.sync.flush_indexes()
    fill(log, 5)
    log.close()
    fail_a_sync(log, monkeypatch)
    log.close()

    def inodes() -> dict[str, int]:
        indexes = (tmp_path / "t-0").glob("*index")
        return {path.name: path.stat().st_ino for path in indexes}

    before = inodes()
    for name in before:  # so that their inodes are not given out again
        os.link(tmp_path / "t-0" / name, tmp_path / name)
    again = open_log(hints=LoadHints(recovery_point=point), **_CONFIG)
    again.view.state()
    changed = {name for name, inode in inodes().items() if before[name] != inode}
    # Those that end below the recovery point were forced to disk, and are left alone.
    bases = [int(path.stem) for path in logs_in(tmp_path)]
    ends = [*bases[1:], point + 1]
    assert changed == {
        f"{base:020d}.{kind}"
        for base, end in zip(bases, ends, strict=True)
        if end > point
        for kind in ("index", "timeindex")
    }


def test_a_disk_that_still_fails_leaves_the_partition_offline(
    open_log: OpenLog, tmp_path, monkeypatch
):
    log = open_log()
    records = fill(log, 8)
    fail_a_sync(log, monkeypatch)

    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(lost_writes, "read_past_cache", fail)
        again = open_log()
        with pytest.raises(ApiError) as caught:
            again.view.state()
        assert caught.value.error_code == ErrorCode.KAFKA_STORAGE_ERROR
    assert again.row.status == RowStatus.OFFLINE
    assert mark(tmp_path).exists()
    assert read_all(open_log()) == records  # at a start when it works again


def test_without_direct_reads_the_cache_is_dropped(
    open_log: OpenLog, monkeypatch, caplog
):
    log = open_log()
    records = fill(log, 8)
    fail_a_sync(log, monkeypatch)
    real_open, dropped = os.open, []

    def open_cached(path, flags, *mode):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real_open(path, flags, *mode)

    monkeypatch.setattr(os, "open", open_cached)
    monkeypatch.setattr(os, "posix_fadvise", lambda *how: dropped.append(how[1:]))
    assert read_all(open_log()) == records
    assert set(dropped) == {(0, 0, os.POSIX_FADV_DONTNEED)}
    assert "without O_DIRECT" in caplog.text


@pytest.mark.parametrize("call", ["pwrite", "fsync"])
def test_an_offline_partition_is_marked_though_the_disk_takes_nothing(
    open_log: OpenLog, tmp_path, monkeypatch, caplog, call
):
    """The mark is then in the page cache only, as are the records that are lost."""
    log = open_log()
    fill(log, 1)

    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fail)
        patch.setattr(os, call, fail)
        with pytest.raises(ApiError):
            log.append(batch(b"lost"), now_ms=1)
    assert log.row.status == RowStatus.OFFLINE
    assert mark(tmp_path).exists()
    assert f"{OFFLINE_FILE} cannot be forced to disk" in caplog.text
    assert len(read_all(open_log())) == 1
    assert not mark(tmp_path).exists()


def test_an_error_that_no_process_was_told_of_yet_does_not_stop_a_start(
    open_log: OpenLog, disk, tmp_path, monkeypatch
):
    log = open_log()
    records = fill(log, 8)
    fail_a_sync(log, monkeypatch)
    (path,) = logs_in(tmp_path)
    content = path.read_bytes()
    disk({path.name: content[: len(content) // 2]})
    fdatasync, told = os.fdatasync, []

    def tell_once(fd: int) -> None:
        if not told:
            told.append(fd)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fdatasync(fd)

    monkeypatch.setattr(os, "fdatasync", tell_once)
    assert read_all(open_log()) == records[:4]
    assert told


def test_a_full_disk_leaves_no_mark(open_log: OpenLog, tmp_path, monkeypatch):
    log = open_log()
    fill(log, 1)

    def pwrite(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", pwrite)
        with pytest.raises(ApiError):
            log.append(batch(b"x"), now_ms=1)
    assert log.row.status == RowStatus.ONLINE and not mark(tmp_path).exists()


def test_a_deleted_partition_gets_no_mark(open_log: OpenLog, tmp_path):
    log = open_log()
    fill(log, 1)
    log.row.status = RowStatus.DELETED
    with pytest.raises(ApiError):
        log.view.fail(OSError(errno.EIO, "gone"), "cannot be read")
    assert log.row.status == RowStatus.DELETED and not mark(tmp_path).exists()


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_sync_that_fails_in_a_recovery_is_not_believed_at_the_next(
    open_log: OpenLog, tmp_path, disk, monkeypatch, number
):
    """The kernel reports it once, and a full disk leaves the partition online."""
    records = fill(open_log(), 8)
    (path,) = logs_in(tmp_path)
    content = path.read_bytes()
    end = len(content) // 2

    def fdatasync(fd: int) -> None:
        raise OSError(number, os.strerror(number))

    again = open_log()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", fdatasync)
        with pytest.raises(ApiError):
            again.view.state()
    disk({path.name: content[:end]})
    if number != errno.ENOSPC:
        again = open_log()
    assert read_all(again) == records[:4]
    assert again.row.durable_end_offset == 4
    assert not mark(tmp_path).exists()


def lose_when_dropped(path: Path, end: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the disk lack a log from a byte on, which the page cache has."""

    def drop(fd: int, offset: int, length: int, advice: int) -> None:
        assert (offset, length, advice) == (0, 0, os.POSIX_FADV_DONTNEED)
        assert fd in synced  # only clean pages leave the cache
        size = path.stat().st_size
        os.truncate(path, end)
        os.truncate(path, size)

    fdatasync, synced = os.fdatasync, set()

    def remember(fd: int) -> None:
        fdatasync(fd)
        synced.add(fd)

    monkeypatch.setattr(os, "fdatasync", remember)
    monkeypatch.setattr(os, "posix_fadvise", drop)


def test_a_start_after_a_kill_reads_the_disk_and_not_the_cache(
    open_log: OpenLog, tmp_path, monkeypatch
):
    """All processes were killed between an error and the note of it."""
    records = fill(open_log(), 8)
    (path,) = logs_in(tmp_path)
    lose_when_dropped(path, path.stat().st_size // 2, monkeypatch)
    again = open_log()
    assert read_all(again) == records[:4]
    assert again.row.durable_end_offset == 4


def test_an_upgrade_does_not_read_again_what_the_old_program_has_committed(
    open_log: OpenLog, tmp_path, monkeypatch
):
    """Its clients wait. What is in doubt is not said to be committed."""
    records = fill(open_log(), 8)
    (path,) = logs_in(tmp_path)
    lose_when_dropped(path, path.stat().st_size // 2, monkeypatch)
    assert read_all(open_log(hints=LoadHints(checked_end=8))) == records


def test_a_comparison_with_the_disk_shows_that_it_goes_on(
    open_log: OpenLog, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Or the lease of its process would end on a long log."""
    log = open_log(index_interval_bytes=100)
    fill(log, 10)
    steps = []
    monkeypatch.setattr(lost_writes, "_CHUNK_BYTES", 4096)
    with logs_in(tmp_path)[0].open("ab") as file:
        file.write(bytes(5 * 4096))
    monkeypatch.setattr(lost_writes.pulse, "step", lambda: steps.append(1))
    lost_writes.drop_lost_writes(str(tmp_path / "t-0"), 0)
    assert len(steps) > 5
