"""Group commit: one sync for many requests; late records are in the next one."""

from __future__ import annotations

import errno
import os

import pytest

from mpbroker.ipc.layout import (
    MASK_BITS,
    MAX_HANDLERS,
    ROW_SYNC_OWNER,
    ROW_SYNC_WAITERS,
    RowStatus,
)
from mpbroker.ipc.masks import read_mask
from mpbroker.ipc.tables.partition_table import LogState
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.server.group_commit import GroupCommit
from mpbroker.storage.log.disk_sync import SyncDone
from mpbroker.supervisor.repair.recovery import Repair


class Disk:
    """Syncs end when the test says so."""

    def __init__(self):
        self.started = []
        self._done = []
        self.is_quick = False
        self.made = []
        self.together = []  # how many logs were synced side by side
        self.error = 0
        self.failing = None  # or the one of them that fails

    def sync_now(self, fds):
        self.made += fds
        return self.error

    def sync_side_by_side(self, files):
        self.together.append(len(files))
        errors = [self.sync_now(fds) for fds in files]
        if self.failing is not None:
            errors[self.failing] = errno.EIO
        return errors

    @property
    def is_idle(self):
        return not self.started and not self._done

    def start_all(self, syncs):
        self.started += syncs

    def end(self, error=0, count=None):
        ending = self.started[:count]
        del self.started[:count]
        self._done += [SyncDone(token, error) for token, _ in ending]

    def finished(self):
        done, self._done = self._done, []
        return done


class Log:
    """A log of some files, as group commit sees it."""

    def __init__(self, memory, index, files=1, error=None):
        self.row = memory.table.row(index)
        self.row.status = RowStatus.ONLINE
        self.sync = self
        self.files = files
        self.error = error
        self.asked = []
        self.marks = []

    def mark_offline(self, why):
        assert self.row.status == RowStatus.OFFLINE  # before it is written down
        self.marks.append(why)

    def grow(self, end):
        self.row.publish(LogState(log_end_offset=end))

    def segments_to_sync(self, from_offset, to_offset):
        if self.error:
            raise self.error
        self.asked.append((from_offset, to_offset))
        return list(range(100, 100 + self.files))


class Commit:
    """A handler's group commit, and the notices that it has sent."""

    def __init__(self, handler=0):
        self.disk = Disk()
        self.told = []
        self.commit = GroupCommit(
            handler, self.disk, lambda row, mask: self.told.append((row, mask))
        )

    def want(self, log):
        self.commit.want(log)
        self.commit.start()

    def end(self, error=0, count=None):
        self.disk.end(error, count)
        self.commit.process_finished()


def owner(log):
    return log.row.words[log.row.base + ROW_SYNC_OWNER]


def test_a_sync_makes_durable_the_records_present_at_its_start(memory):
    log, own = Log(memory, 1), Commit()
    log.grow(10)
    own.want(log)
    log.grow(15)
    assert log.row.durable_end_offset == 0
    own.end()
    assert log.row.durable_end_offset == 10
    assert own.told == [(1, 1)]
    assert own.commit.is_idle and owner(log) == 0


def test_many_requests_of_a_batch_share_one_sync(memory):
    log, own = Log(memory, 1), Commit()
    for end in range(1, 40):
        log.grow(end)
        own.commit.want(log)
    own.commit.start()
    assert len(own.disk.started) == 1
    own.end()
    assert log.row.durable_end_offset == 39
    assert own.commit.syncs == 1


def test_records_that_come_late_start_the_next_sync_when_the_first_has_ended(memory):
    log, own = Log(memory, 1), Commit()
    log.grow(10)
    own.want(log)
    log.grow(20)
    own.want(log)
    assert len(own.disk.started) == 1  # one at a time
    own.end()
    own.commit.start()
    assert len(own.disk.started) == 1
    own.end()
    assert log.row.durable_end_offset == 20
    assert log.asked == [(0, 10), (10, 20)]


@pytest.mark.parametrize("number", [5, MASK_BITS, MAX_HANDLERS])
def test_another_handler_asks_to_be_told_instead_of_syncing_too(memory, number):
    log, own, other = Log(memory, 1), Commit(0), Commit(number)
    log.grow(10)
    own.want(log)
    other.want(log)
    assert other.disk.started == [] and other.commit.is_idle
    own.end()
    assert own.told == [(1, 1 | 1 << number)]
    assert read_mask(log.row.words, log.row.base + ROW_SYNC_WAITERS) == 0


def test_different_logs_are_synced_side_by_side(memory):
    logs, own = [Log(memory, index) for index in range(3)], Commit()
    for log in logs:
        log.grow(5)
        own.commit.want(log)
    own.commit.start()
    assert len(own.disk.started) == 3
    own.end(count=1)
    assert [log.row.durable_end_offset for log in logs] == [5, 0, 0]
    own.end()
    assert [log.row.durable_end_offset for log in logs] == [5, 5, 5]


def test_nothing_is_durable_before_the_last_of_its_files_is(memory):
    log, own = Log(memory, 1, files=3), Commit()
    log.grow(10)
    own.want(log)
    own.end(count=2)
    assert log.row.durable_end_offset == 0 and own.told == []
    own.end()
    assert log.row.durable_end_offset == 10


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_failed_sync_of_any_file_takes_the_partition_offline(memory, failing, caplog):
    log, own = Log(memory, 1, files=3), Commit()
    log.grow(10)
    own.want(log)
    for number in range(3):
        own.end(error=5 if number == failing else 0, count=1)
    assert log.row.status == RowStatus.OFFLINE
    assert log.row.durable_end_offset == 0
    assert own.told == [(1, 1)] and log.marks == [os.strerror(5)]
    assert os.strerror(5) in caplog.text
    assert own.commit.is_idle


def test_files_that_cannot_be_opened_take_the_partition_offline(memory):
    log, own = Log(memory, 1, error=OSError(5, "gone")), Commit()
    log.grow(10)
    own.want(log)
    assert log.row.status == RowStatus.OFFLINE
    assert own.told == [(1, 1)]
    assert own.commit.is_idle and owner(log) == 0


def test_nothing_left_to_sync_ends_at_once(memory):
    log, own = Log(memory, 1, files=0), Commit()
    log.grow(10)
    own.want(log)
    assert own.told == [(1, 1)]
    assert log.row.durable_end_offset == 10


def test_a_sync_whose_owner_died_is_made_again_by_a_waiting_handler(memory):
    log, dead, alive = Log(memory, 1), Commit(0), Commit(1)
    log.grow(10)
    dead.want(log)
    alive.want(log)
    assert alive.disk.started == []
    Repair(memory).after_handler(0, 8)
    assert memory.notices[1].take() == ([], True)  # so it looks, and wants again
    alive.want(log)
    assert len(alive.disk.started) == 1
    alive.end()
    assert log.row.durable_end_offset == 10


def test_an_older_sync_never_takes_durability_back(memory):
    log, own = Log(memory, 1), Commit()
    log.grow(10)
    own.want(log)
    log.row.durable_end_offset = 50  # a flush by the housekeeper went further
    own.end()
    assert log.row.durable_end_offset == 50


def test_a_log_whose_sync_failed_is_durable_for_no_process(memory):
    log, own = Log(memory, 1), Commit()
    log.grow(10)
    own.want(log)
    log.row.status = RowStatus.OFFLINE  # an fsync of another process, of the same pages
    own.end()
    assert log.row.durable_end_offset == 0
    assert log.row.status == RowStatus.OFFLINE


# -- at once -------------------------------------------------------------------------


def test_a_lone_request_on_a_fast_disk_is_synced_at_once(memory):
    log, own = Log(memory, 1, files=2), Commit()
    log.grow(10)
    own.commit.is_alone = own.disk.is_quick = True
    own.commit.sync_at_once([log])
    assert log.row.durable_end_offset == 10
    assert own.disk.made == [100, 101] and own.disk.started == []
    assert owner(log) == 0 and own.commit.is_idle


@pytest.mark.parametrize(("alone", "quick"), [(False, True), (True, False)])
def test_no_sync_is_made_at_once_while_other_requests_wait(memory, alone, quick):
    log, own = Log(memory, 1), Commit()
    log.grow(10)
    own.commit.is_alone, own.disk.is_quick = alone, quick
    own.commit.sync_at_once([log])
    assert own.disk.made == [] and log.row.durable_end_offset == 0


def test_so_many_logs_are_synced_at_once_and_more_are_not(memory):
    logs, own = [Log(memory, index) for index in range(9)], Commit()
    for log in logs:
        log.grow(10)
    own.commit.is_alone = own.disk.is_quick = True
    own.commit.sync_at_once(logs)
    assert own.disk.made == []
    own.commit.sync_at_once(logs[:8])
    assert len(own.disk.made) == 8 and own.disk.together == [8]


def test_of_those_that_are_synced_together_one_may_fail(memory):
    logs, own = [Log(memory, index) for index in range(3)], Commit()
    for log in logs:
        log.grow(10)
    own.commit.is_alone = own.disk.is_quick = True
    own.disk.failing = 1
    own.commit.sync_at_once(logs)
    assert [log.row.durable_end_offset for log in logs] == [10, 0, 10]
    assert [log.row.status for log in logs] == [
        RowStatus.ONLINE,
        RowStatus.OFFLINE,
        RowStatus.ONLINE,
    ]


def test_records_appended_during_a_sync_at_once_are_not_durable_by_it(memory):
    logs, own = [Log(memory, index) for index in range(2)], Commit()
    for log in logs:
        log.grow(10)
    own.commit.is_alone = own.disk.is_quick = True
    own.disk.sync_now = lambda fds: logs[1].grow(20) or 0
    own.commit.sync_at_once(logs)
    assert [log.row.durable_end_offset for log in logs] == [10, 10]


def test_no_log_is_synced_at_once_that_another_process_syncs(memory):
    """The kernel may have told the other one of an error, and tell nobody again."""
    log, own, other = Log(memory, 1), Commit(0), Commit(1)
    log.grow(10)
    other.want(log)
    log.grow(15)
    own.commit.is_alone = own.disk.is_quick = True
    own.commit.sync_at_once([log])
    assert own.disk.made == []
    assert log.row.durable_end_offset == 0 and owner(log) == 2
    own.want(log)
    other.end(error=errno.EIO)
    assert other.told == [(1, 1 | 1 << 1)]
    assert log.row.durable_end_offset == 0
    assert log.row.status == RowStatus.OFFLINE


@pytest.mark.parametrize("error", [0, errno.EIO])
def test_a_sync_at_once_is_owned_and_its_waiters_are_told_of_its_end(memory, error):
    log, own, other = Log(memory, 1), Commit(0), Commit(5)
    log.grow(10)
    own.commit.is_alone = own.disk.is_quick = True

    def sync_now(fds):
        other.want(log)
        assert other.disk.started == [] and owner(log) == 1
        return error

    own.disk.sync_now = sync_now
    own.commit.sync_at_once([log])
    assert owner(log) == 0 and own.told == [(1, 1 << 5)]
    assert log.row.durable_end_offset == (0 if error else 10)


def test_a_bug_in_a_sync_at_once_leaves_no_owner_behind(memory):
    logs, own = [Log(memory, index) for index in range(2)], Commit()
    for log in logs:
        log.grow(10)
    own.commit.is_alone = own.disk.is_quick = True
    logs[1].error = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        own.commit.sync_at_once(logs)
    assert [owner(log) for log in logs] == [0, 0]
    assert [log.row.durable_end_offset for log in logs] == [0, 0]


@pytest.mark.parametrize("error", [None, OSError(5, "gone")])
def test_a_failed_sync_at_once_takes_the_partition_offline(memory, error, caplog):
    log, own = Log(memory, 1, error=error), Commit()
    log.grow(10)
    own.commit.is_alone = own.disk.is_quick = True
    own.disk.error = 5
    own.commit.sync_at_once([log])
    assert log.row.status == RowStatus.OFFLINE and log.marks == [os.strerror(5)]
    assert log.row.durable_end_offset == 0
    assert os.strerror(5) in caplog.text


def cannot_be_opened(number):
    error = ApiError(ErrorCode.KAFKA_STORAGE_ERROR, "cannot be read")
    error.__cause__ = OSError(number, "gone")
    return error


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("status", [RowStatus.OFFLINE, RowStatus.DELETED])
def test_a_log_whose_files_are_gone_is_done_with(memory, at_once, status, caplog):
    """No handler fails; the row still says that the log was deleted."""
    log, own = Log(memory, 1, error=cannot_be_opened(2)), Commit()
    log.grow(10)
    if status == RowStatus.DELETED:
        segments_to_sync = log.sync.segments_to_sync

        def deleted_meanwhile(*offsets):
            log.row.status = status
            return segments_to_sync(*offsets)

        log.sync.segments_to_sync = deleted_meanwhile
    if at_once:
        own.commit.is_alone = own.disk.is_quick = True
        own.commit.sync_at_once([log])
    else:
        own.want(log)
        assert own.told == [(1, 1)]
    assert log.row.status == status
    assert len(log.marks) == (status == RowStatus.OFFLINE)
    assert log.row.durable_end_offset == 0 and owner(log) == 0
    assert own.commit.is_idle
    assert (os.strerror(2) in caplog.text) == (status == RowStatus.OFFLINE)


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("number", [errno.ENFILE, errno.EMFILE, errno.ENOMEM])
def test_a_log_that_cannot_be_opened_now_is_synced_later(memory, at_once, number):
    """Nothing has failed to be written: that it is not tried again is for fsync."""
    log, own, other = Log(memory, 1), Commit(), Commit(1)
    log.error, log.make_room = OSError(number, os.strerror(number)), lambda: None
    log.grow(10)
    if at_once:
        own.commit.is_alone = own.disk.is_quick = True
        own.commit.sync_at_once([log])
        assert own.commit.is_idle  # each waiting handler wants a sync
    own.want(log)
    assert log.row.status == RowStatus.ONLINE and log.row.durable_end_offset == 0
    assert not own.commit.is_idle and owner(log) == 0 and not own.told
    own.commit.start()
    assert not own.disk.started
    log.error = None
    other.want(log)  # whom it does not hold up
    own.commit.start()
    assert len(other.disk.started) == 1 and not own.disk.started
    other.end()
    own.want(log)
    own.end()
    assert log.row.durable_end_offset == 10 and own.commit.is_idle


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("helps", [True, False])
def test_without_free_descriptors_files_are_closed_and_opening_is_tried_again(
    memory, at_once, helps
):
    first, log, own = Log(memory, 1), Log(memory, 2), Commit()
    log.error = OSError(errno.EMFILE, "Too many open files")
    begun = []

    def make_room():
        begun.append(len(own.disk.started))
        log.error = None if helps else log.error

    log.make_room = make_room
    for each in (first, log):
        each.grow(10)
    if at_once:
        own.commit.is_alone = own.disk.is_quick = True
        own.commit.sync_at_once([first, log])
        assert len(own.disk.made) == 1 + helps
    else:
        own.commit.want(first)
        own.want(log)
        assert begun == [1]  # before the files of the others are closed
        own.end()
    assert len(begun) == 1
    assert first.row.durable_end_offset == 10
    assert log.row.durable_end_offset == (10 if helps else 0)
    assert log.row.status == RowStatus.ONLINE
    assert own.commit.is_idle == (at_once or helps)


def test_a_sync_at_once_makes_nothing_durable_that_has_failed_for_another(memory):
    log, own = Log(memory, 1), Commit()
    log.grow(10)
    log.row.status = RowStatus.OFFLINE
    own.commit.is_alone = own.disk.is_quick = True
    own.commit.sync_at_once([log])
    assert log.row.durable_end_offset == 0
    assert log.row.status == RowStatus.OFFLINE


def test_a_log_that_is_offline_is_not_synced_at_once(memory):
    log, own = Log(memory, 1), Commit()
    log.grow(10)
    log.row.status = RowStatus.OFFLINE
    own.commit.is_alone = own.disk.is_quick = True
    own.commit.sync_at_once([log])
    assert own.disk.made == [] and log.row.durable_end_offset == 0


def test_a_turn_makes_so_many_syncs_at_once_and_no_more(memory):
    """However many steps it has: who came meanwhile is not to wait for all of them."""
    log, own = Log(memory, 1), Commit()
    own.disk.is_quick = True
    for _ in range(2):
        own.disk.made.clear()
        own.commit.is_alone = True
        for end in range(1, 101):
            log.grow(end)
            own.commit.sync_at_once([log])
        assert 8 <= len(own.disk.made) < 32
