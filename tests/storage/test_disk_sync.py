"""Syncs that are asked for and end later, with and without the kernel's help."""

from __future__ import annotations

import ctypes
import errno
import os
import select
import signal
import time

import pytest

from mpbroker.storage.log.disk_sync import DiskSync
from tests.support.children import wait_until


def no_aio(*_: object) -> int:
    ctypes.set_errno(errno.ENOSYS)
    return -1


@pytest.fixture(params=["io_uring", "aio", "at once"])
def disk(request):
    made = DiskSync(
        no_aio if request.param == "at once" else None,
        io_uring=request.param == "io_uring",
    )
    if request.param != "at once" and made.event_fd < 0:
        pytest.skip("this kernel has no asynchronous I/O")
    yield made
    if made.event_fd >= 0:
        os.close(made.event_fd)


@pytest.fixture
def file(tmp_path):
    fd = os.open(tmp_path / "log", os.O_RDWR | os.O_CREAT)
    os.write(fd, b"x" * 100_000)
    yield fd
    os.close(fd)


def ended(disk, count):
    done = []

    def look():
        done.extend(disk.finished())
        return len(done) >= count

    wait_until(look)
    return sorted(done)


def test_a_sync_ends_with_its_token_and_no_error(disk, file):
    assert disk.is_idle and disk.finished() == []
    disk.start(7, file)
    assert not disk.is_idle
    assert ended(disk, 1) == [(7, 0)]
    assert disk.is_idle


def test_every_one_of_many_syncs_ends_once(disk, file):
    """More at a time than the kernel was asked to queue, too."""
    for token in range(300):
        disk.start(token, file)
    assert ended(disk, 300) == [(token, 0) for token in range(300)]


def test_syncs_that_are_begun_together_end_each_for_itself(disk, file):
    reader, writer = os.pipe()
    disk.start_all([(n, writer if n % 3 == 0 else file) for n in range(300)])
    found = ended(disk, 300)
    assert [token for token, _ in found] == list(range(300))
    assert {bool(error) for token, error in found if token % 3 == 0} == {True}
    assert {error for token, error in found if token % 3} == {0}
    assert disk.is_idle
    os.close(reader)
    os.close(writer)


def test_a_file_that_is_closed_meanwhile_is_synced_all_the_same(disk, tmp_path):
    """By whoever makes room, has done with a segment, or finds it replaced."""
    open_before = len(os.listdir("/proc/self/fd"))
    files = []
    for number in range(100):
        fd = os.open(tmp_path / str(number), os.O_RDWR | os.O_CREAT)
        os.write(fd, b"x" * 10_000)
        files.append(fd)
    disk.start_all(list(enumerate(files)))
    for fd in files:
        os.close(fd)
    assert ended(disk, 100) == [(token, 0) for token in range(100)]
    assert len(os.listdir("/proc/self/fd")) <= open_before


@pytest.mark.parametrize("what", ["closed", "pipe"])
def test_what_cannot_be_synced_ends_with_an_error(disk, what):
    reader, writer = os.pipe()
    if what == "closed":
        os.close(writer)
    disk.start(1, writer)
    ((token, error),) = ended(disk, 1)
    assert token == 1
    assert error in (errno.EBADF, errno.EINVAL)
    os.close(reader)
    if what == "pipe":
        os.close(writer)


@pytest.mark.parametrize("io_uring", [True, False])
def test_the_end_of_a_sync_wakes_who_polls(file, io_uring):
    disk = DiskSync(io_uring=io_uring)
    if disk.event_fd < 0:
        pytest.skip("this kernel has no asynchronous I/O")
    epoll = select.epoll()
    epoll.register(disk.event_fd, select.EPOLLIN | select.EPOLLET)
    for token in range(5):
        disk.start(token, file)
        assert epoll.poll(30)
        assert ended(disk, 1) == [(token, 0)]
    os.close(disk.event_fd)


def test_without_the_kernels_help_a_sync_has_ended_when_it_was_started(file):
    disk = DiskSync(no_aio)
    assert disk.event_fd == -1
    disk.start(3, file)
    assert not disk.is_idle
    assert disk.finished() == [(3, 0)]


def test_a_sync_made_now_says_how_it_went(disk, file):
    assert disk.is_quick
    assert disk.sync_now([file, file]) == 0
    assert disk.is_idle
    reader, writer = os.pipe()
    assert disk.sync_now([file, writer]) == errno.EINVAL
    os.close(reader)
    os.close(writer)


class Clock:
    """Time that only passes while something is synced, or waited for."""

    def __init__(self, disk, file, monkeypatch):
        self._disk, self._file = disk, file
        self.now_ns, self._sync_ns = 10**12, 0
        monkeypatch.setattr("time.monotonic_ns", lambda: self.now_ns)
        monkeypatch.setattr(os, "fdatasync", self._fdatasync)

    def _fdatasync(self, _fd):
        self.now_ns += self._sync_ns

    def sync(self, took_ms):
        """Make a sync; how many ms none is waited for after it."""
        self._sync_ns = int(took_ms * 1e6)
        self._disk.sync_now([self._file])
        ended = self.now_ns
        while not self._disk.is_quick:
            self.now_ns += 1_000_000
        return (self.now_ns - ended) // 1_000_000


@pytest.fixture
def clock(disk, file, monkeypatch):
    return Clock(disk, file, monkeypatch)


def test_a_disk_that_is_slow_now_and_then_is_waited_for(clock):
    """One step in two hundred takes 2 ms, and once in a while one takes 10."""
    for number in range(3000):
        took_ms = 10 if number % 1000 == 0 else 2 if number % 200 == 0 else 0.2
        assert clock.sync(took_ms) == 0


def test_a_disk_that_takes_its_time_is_waited_for_less_and_less(clock):
    pauses = [clock.sync(5) for _ in range(16)]
    assert pauses[:6] == [0, 15, 155, 315, 635, 1275]
    assert pauses[-3:] == [30_000] * 3
    # As long as it does. Then all is paid for, or soon is.
    for _ in range(1000):
        assert clock.sync(0.2) == 0
    assert [clock.sync(5) for _ in range(2)] == [0, 15]


def test_one_step_that_takes_very_long_costs_as_much(clock):
    assert clock.sync(1000) == 7900


def test_no_more_than_an_eighth_of_the_time_is_lost_by_waiting(clock):
    started, lost_ms = clock.now_ns, 0
    for number in range(2000):
        took_ms = 3 if number % 2 else 0.5
        clock.sync(took_ms)
        lost_ms += took_ms if took_ms > 1 else 0
    assert 0.1 < lost_ms / ((clock.now_ns - started) / 1e6) < 0.13


def test_while_syncs_are_under_way_none_is_made_beside_them(disk, file):
    disk.start(1, file)
    assert not disk.is_quick
    assert ended(disk, 1) == [(1, 0)]
    assert disk.is_quick


# -- side by side --------------------------------------------------------------------


def test_syncs_made_side_by_side_say_how_each_went(disk, file):
    reader, writer = os.pipe()
    groups = [[file], [writer], [file, file], [], [file, writer]]
    errors = [0, errno.EINVAL, 0, 0, errno.EINVAL]
    for _ in range(3):
        assert disk.sync_side_by_side(groups) == errors
        assert disk.sync_side_by_side([[file]]) == [0]
        assert disk.is_idle and disk.finished() == []
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("disk", ["io_uring"], indirect=True)
def test_of_syncs_that_were_waited_for_no_event_tells(disk, file):
    poll = select.poll()
    poll.register(disk.event_fd, select.POLLIN)
    for token in range(3):
        assert disk.sync_side_by_side([[file], [file], [file]]) == [0, 0, 0]
        assert poll.poll(0) == []
        disk.start(token, file)
        assert poll.poll(30_000)  # and of these it does
        assert ended(disk, 1) == [(token, 0)]
        os.eventfd_read(disk.event_fd)


@pytest.mark.parametrize("disk", ["io_uring"], indirect=True)
def test_signals_that_come_meanwhile_change_nothing(disk, file):
    came = []
    before = signal.signal(signal.SIGALRM, lambda *_: came.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    until = time.monotonic() + 60
    try:
        while len(came) < 100 and time.monotonic() < until:
            os.pwrite(file, b"y", 0)
            assert disk.sync_side_by_side([[file], [file]]) == [0, 0]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert disk.finished() == []


def test_what_the_kernel_does_not_take_is_synced_one_by_one(file, monkeypatch):
    disk = DiskSync()
    if disk._ring is None:
        pytest.skip("this kernel has no io_uring")
    synced = []
    monkeypatch.setattr(os, "fdatasync", synced.append)
    monkeypatch.setattr(disk._ring, "_syscall", no_aio)
    assert disk.sync_side_by_side([[file], [file, file]]) == [0, 0]
    assert synced == [file] * 3
    os.close(disk.event_fd)


@pytest.mark.parametrize("disk", ["io_uring"], indirect=True)
def test_where_a_sync_is_nothing_they_are_made_in_a_row(disk, file, monkeypatch):
    """It is found out now and then, and whether it is still so each time."""
    now_ns, sync_ns, in_a_row = 10**12, 1_000, 0

    def fdatasync(_fd):
        nonlocal now_ns, in_a_row
        now_ns += sync_ns
        in_a_row += 1

    def rounds(number):
        nonlocal in_a_row
        in_a_row = 0
        for _ in range(number):
            assert disk.sync_side_by_side([[file], [file], [file]]) == [0, 0, 0]
        return in_a_row // 3

    monkeypatch.setattr("time.monotonic_ns", lambda: now_ns)
    monkeypatch.setattr(os, "fdatasync", fdatasync)
    assert rounds(100) == 37  # from the 64th on
    sync_ns = 200_000
    assert rounds(1) == 1
    assert rounds(63) == 0
    assert rounds(1) == 1
    assert rounds(63) == 0


@pytest.mark.parametrize("disk", ["io_uring"], indirect=True)
def test_more_syncs_than_the_ring_has_room_for_are_made_all_the_same(disk, file):
    # Of a log with that many segments: to wait for what was not begun never ends.
    assert disk.sync_side_by_side([[file] * 300, [file]]) == [0, 0]
    assert disk.is_idle and disk.finished() == []
