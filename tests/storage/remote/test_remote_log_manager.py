"""The process that talks to the store: it follows the plan and answers handlers."""

from __future__ import annotations

import errno
import os
import threading
import time

import pytest

from mpbroker.base.storage_errors import (
    RemotePendingError,
    RemoteStorageError,
    RemoteUnreachableError,
)
from mpbroker.storage.cleaning.retention import apply_retention
from mpbroker.storage.files.log_files import base_offsets
from mpbroker.storage.files.throttler import Throttler
from mpbroker.storage.remote import remote_log_manager, remote_partition
from mpbroker.storage.remote.object_store import ObjectStore
from mpbroker.storage.remote.remote_cache import SOCKET_FILE, cache_of
from mpbroker.storage.remote.remote_log_manager import (
    Copier,
    RemoteLimits,
    RemoteLogManager,
    attempt,
)
from mpbroker.storage.remote.remote_manifest import RemoteManifest
from mpbroker.storage.remote.remote_plan import (
    KnownPartition,
    PartitionPlan,
    RemotePlan,
    plan_path,
    read_known,
    write_known,
    write_plan,
)
from mpbroker.storage.remote.remote_stats import RemoteStats, SharedStats, read_stats
from mpbroker.storage.remote.retry_backoff import BackoffLimits
from mpbroker.storage.remote.store_owner import StoreOwner, claim, require_owner
from tests.storage.batches import batch
from tests.support.patience import LONGEST_S

_ID = bytes(range(16))
AT_ONCE = BackoffLimits(first_s=0.0)


@pytest.fixture
def log(open_log):
    log = open_log(
        segment_bytes=500,
        retention_ms=-1,
        remote_storage_enable=True,
        local_retention_bytes=1,
    )
    for number in range(20):
        log.append(batch(b"%03d" % number * 30, timestamp=number), now_ms=1)
    return log


@pytest.fixture
def told():
    """The rows of which handlers were told."""
    return []


@pytest.fixture
def start(store, tmp_path, told):
    """Return what starts the process's objects."""
    started = []

    def start_it():
        owner = StoreOwner("cluster", 1)
        manager = RemoteLogManager(
            store, [str(tmp_path)], told.append, owner, RemoteLimits(1 << 20, 2, 1.0)
        )
        started.append(manager)
        return manager

    yield start_it
    for manager in started:
        manager.close()


def copier_of(store, tmp_path):
    return Copier(store, str(tmp_path), SharedStats(str(tmp_path)))


def plan_of(log):
    below = log.row.snapshot().active_base_offset
    return PartitionPlan("t", _ID, 0, log.directory, below, log.row.log_start_offset)


def test_a_plan_is_followed_once_and_a_deleted_topic_goes(
    store, log, tmp_path, monkeypatch
):
    copier = copier_of(store, tmp_path)
    assert not copier.look()
    write_plan(str(tmp_path), RemotePlan(frozenset({_ID}), (plan_of(log),)))
    assert copier.look() and not copier.look()
    assert log.view.remote.segments()
    assert len(read_known(str(tmp_path))) == 1
    # Remote storage was switched off: nothing more is copied, and nothing goes.
    write_plan(str(tmp_path), RemotePlan(frozenset({_ID}), ()))
    assert copier_of(store, tmp_path).look()
    assert len(list(store.list(""))) > 1
    gone = RemotePlan(frozenset(), ())
    write_plan(str(tmp_path), gone)
    copier = copier_of(store, tmp_path)
    assert copier.look()
    assert not list(store.list("")) and read_known(str(tmp_path))
    # And once more, for requests that take effect late.
    late = time.monotonic() + remote_partition.LATE_S
    monkeypatch.setattr(remote_partition.time, "monotonic", lambda: late)
    copier.run(gone)
    assert not read_known(str(tmp_path))


def test_a_plan_is_on_disk_so_that_none_before_it_comes_back(tmp_path, monkeypatch):
    """An older plan lacks topics, whose objects would be removed."""
    forced = []
    fsync = os.fsync

    def note(fd):
        forced.append(os.readlink(f"/proc/self/fd/{fd}").removesuffix(".tmp"))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", note)
    write_plan(str(tmp_path), RemotePlan(frozenset({_ID}), ()))
    assert forced == [f"{plan_path(str(tmp_path))}.{os.getpid()}", str(tmp_path)]


def test_a_store_that_fails_is_tried_again_and_told_once(
    store, log, tmp_path, monkeypatch, caplog
):
    def refuse(self, key, content):
        raise RemoteStorageError("it is away")

    stats = SharedStats(str(tmp_path))
    copier = Copier(store, str(tmp_path), stats, backoff=AT_ONCE)
    plan = RemotePlan(frozenset({_ID}), (plan_of(log),))
    assert read_stats(str(tmp_path)) == RemoteStats()
    with monkeypatch.context() as patch:
        patch.setattr(ObjectStore, "put", refuse)
        copier.run(plan)
        copier.run(plan)
    assert not log.view.remote.segments()
    stats.write()
    told = read_stats(str(tmp_path))
    assert (told.copy_errors, told.lag_segments, told.copied_segments) == (2, 6, 0)
    assert caplog.text.count("it is away") == 1
    assert not told.copy_success_time_seconds
    began = int(time.time())
    copier.run(plan)
    segments = log.view.remote.segments()
    stats.write()
    now = read_stats(str(tmp_path))
    assert now.copy_success_time_seconds >= began
    SharedStats(str(tmp_path)).write()  # the process is started again
    again = read_stats(str(tmp_path))
    assert again.copy_success_time_seconds == now.copy_success_time_seconds
    assert not again.copied_segments
    assert (now.lag_bytes, now.lag_segments, now.copied_segments) == (0, 0, 6)
    assert now.copied_bytes == sum(each.size for each in segments) == told.lag_bytes


def other_partition(log, open_log):
    """Return the plan of a second partition, which has closed segments, too."""
    other = open_log(name="t-1", segment_bytes=500, retention_ms=-1)
    for number in range(9):
        other.append(batch(b"%03d" % number * 30, timestamp=number), now_ms=1)
    return plan_of(other)._replace(partition=1)


def test_a_store_that_is_away_ends_the_pass_and_the_lag_grows_all_the_same(
    store, log, open_log, tmp_path, monkeypatch, caplog
):
    away = []
    asked = []

    def fence():
        asked.append(1)
        if away:
            raise RemoteUnreachableError("no answer")

    home = str(tmp_path)
    stats = SharedStats(home)
    copier = Copier(store, home, stats, fence, backoff=AT_ONCE)
    other = other_partition(log, open_log)
    write_plan(home, RemotePlan(frozenset({_ID}), (plan_of(log), other)))
    away.append(1)
    for count in (1, 2, 3):
        assert copier.look()
        assert len(asked) == count  # one request for all partitions
        stats.write()
        assert read_stats(home).lag_segments == 6 + 2
    for number in range(6):
        log.append(batch(b"%03d" % number * 30, timestamp=1), now_ms=1)
    write_plan(home, RemotePlan(frozenset({_ID}), (plan_of(log), other)))
    assert copier.look()
    stats.write()
    assert read_stats(home) == RemoteStats(
        copy_errors=4,
        lag_segments=8 + 2,
        lag_bytes=sum(
            os.path.getsize(f"{each.directory}/{base:020d}.log")
            for each in (plan_of(log), other)
            for base in base_offsets(each.directory, ".log")
            if base < each.copy_below
        ),
    )
    away.clear()
    assert copier.look() and not copier.look()
    stats.write()
    assert read_stats(home).lag_segments == 0
    assert caplog.text.count("no answer") == 1


def test_a_partition_that_fails_does_not_keep_the_others_waiting(
    store, log, open_log, tmp_path, caplog
):
    home = str(tmp_path)
    path = log.view.segments.get(3).path
    with open(path, "r+b") as file:
        file.seek(100)
        right = file.read(1)
        file.seek(100)
        file.write(b"?")
    copier = Copier(store, home, SharedStats(home), backoff=AT_ONCE)
    other = other_partition(log, open_log)
    write_plan(home, RemotePlan(frozenset({_ID}), (plan_of(log), other)))
    assert copier.look() and copier.look()
    assert RemoteManifest.of_directory(other.directory).copied_to() == other.copy_below
    assert log.view.remote.segments()[-1].next_base == 3
    with open(path, "r+b") as file:
        file.seek(100)
        file.write(right)
    assert copier.look() and not copier.look()
    assert log.view.remote.segments()[-1].next_base == plan_of(log).copy_below
    assert caplog.text.count("no valid batch") == 1


def test_a_partition_with_much_to_copy_does_not_keep_the_others_waiting(
    store, log, open_log, tmp_path, monkeypatch
):
    other = other_partition(log, open_log)
    monkeypatch.setattr(remote_partition, "_TURN_BYTES", 900)  # two segments
    home = str(tmp_path)
    copier = copier_of(store, tmp_path)
    plans = (plan_of(log), other)
    write_plan(home, RemotePlan(frozenset({_ID}), plans))
    counts = []
    while copier.look():
        manifests = (RemoteManifest.of_directory(each.directory) for each in plans)
        counts.append([len(each.copied()) for each in manifests])
    assert counts == [[2, 2], [4, 2], [6, 2]]
    # Nothing waits of a partition that has no remote storage any more.
    copier._partitions[next(iter(copier._partitions))].lag = [500]
    write_plan(home, RemotePlan(frozenset({_ID}), plans[1:]))
    assert copier.look() and not copier.look()


def test_threads_copy_several_partitions_at_the_same_time(
    store, log, open_log, tmp_path, monkeypatch
):
    other = other_partition(log, open_log)
    put_stream, meeting = ObjectStore.put_stream, threading.Barrier(2)
    first_two = iter(range(2))

    def meet(self, key, chunks, size):
        if next(first_two, None) is not None:
            meeting.wait(LONGEST_S)
        put_stream(self, key, chunks, size)

    home = str(tmp_path)
    monkeypatch.setattr(ObjectStore, "put_stream", meet)
    plans = (plan_of(log), other)
    copier = Copier(store, home, SharedStats(home), threads=2)
    copier.run(RemotePlan(frozenset({_ID}), plans))
    for each in plans:
        manifest = RemoteManifest.of_directory(each.directory)
        assert manifest.copied_to() == each.copy_below


def test_a_store_that_fails_several_threads_is_told_and_asked_once(
    store, log, open_log, tmp_path, monkeypatch, caplog
):
    other = other_partition(log, open_log)
    meeting = threading.Barrier(2)
    away = []
    asked = []

    def fence():
        asked.append(len(away))
        if away:
            raise RemoteUnreachableError("no answer")

    def fail(self, key, chunks, size):
        meeting.wait(LONGEST_S)
        away.append(1)
        raise RemoteUnreachableError("no answer")

    home = str(tmp_path)
    monkeypatch.setattr(ObjectStore, "put_stream", fail)
    copier = Copier(store, home, SharedStats(home), fence, threads=2)
    copier.run(RemotePlan(frozenset({_ID}), (plan_of(log), other)))
    assert caplog.text.count("nothing is copied") == 1
    assert sum(map(bool, asked)) == 1


def test_what_was_refused_for_wrong_bytes_of_the_owner_goes_on(
    store, log, tmp_path, monkeypatch, caplog
):
    owner = StoreOwner("cluster", 1)
    claim(store, owner)
    get, wrong = ObjectStore.get, [b"clustor.id=", b"?" * 30, b""]

    def bend(self, key):
        found = get(self, key)
        return wrong.pop() if key == "owner" and wrong else found

    monkeypatch.setattr(ObjectStore, "get", bend)
    home = str(tmp_path)
    copier = Copier(
        store,
        home,
        SharedStats(home),
        lambda: require_owner(store, owner),
        backoff=AT_ONCE,
    )
    write_plan(home, RemotePlan(frozenset({_ID}), (plan_of(log),)))
    while wrong:
        assert copier.look()
        assert not log.view.remote.segments()
    assert copier.look() and not copier.look()
    assert log.view.remote.segments()
    assert caplog.text.count("other bytes for owner") == 1


def test_what_is_asked_for_by_datagram_comes_and_its_row_is_told(
    store, log, tmp_path, start, told
):
    plan = RemotePlan(frozenset({_ID}), (plan_of(log),))
    copier_of(store, tmp_path).run(plan)
    apply_retention(log, 0)
    with pytest.raises(RemotePendingError) as pending:
        log.reader.read(0, 100, min_one_batch=True)
    pending.value.wait.ask(7)  # there is no reader yet: nothing happens
    manager = start()
    assert os.path.exists(f"{cache_of(log.directory)}/{SOCKET_FILE}")
    asked = 0
    while True:
        try:
            found = log.reader.read(0, 100, min_one_batch=True)
            break
        except RemotePendingError as pending:
            for _ in range(3):
                pending.wait.ask(7)
            asked += 1
            while len(told) < asked:
                manager.turn(10_000)
            assert pending.wait.is_over()
    assert found.length and told == [7] * asked
    with open(found.segment_path, "rb") as file:
        assert b"000" in file.read()


def test_a_damaged_list_of_partitions_keeps_no_reader_waiting(tmp_path, start, caplog):
    write_known(str(tmp_path), [KnownPartition("t", _ID, 0)])
    (path,) = tmp_path.glob("remote-log-partitions")
    path.write_bytes(path.read_bytes()[:-1])
    manager = start()
    manager.turn(0)
    write_plan(str(tmp_path), RemotePlan(frozenset(), ()))
    told = ""
    for _ in range(2):
        told = attempt(manager._copier.look, told)
    assert caplog.text.count("the list of partitions of") == 1


def test_a_failure_is_told_too(store, log, tmp_path, start, told):
    copier_of(store, tmp_path).run(RemotePlan(frozenset({_ID}), (plan_of(log),)))
    apply_retention(log, 0)
    store.delete(list(store.list("")))
    manager = start()
    with pytest.raises(RemotePendingError) as pending:
        log.reader.read(0, 100, min_one_batch=True)
    pending.value.wait.ask(7)
    while not told:
        manager.turn(10_000)
    assert "has no object" in pending.value.wait.failure()


def test_a_full_disk_ends_nothing_and_is_told_once(start, monkeypatch, caplog):
    def refuse(self):
        raise OSError(errno.ENOSPC, "No space left on device")

    turns = iter(range(1, 1_000))
    monkeypatch.setattr(SharedStats, "write", refuse)
    monkeypatch.setattr(time, "monotonic", lambda: float(next(turns) * 10))
    manager = start()
    for _ in range(3):
        manager.turn(0)
    assert caplog.text.count("No space left on device") == len(caplog.records) == 1
    failing = attempt(lambda: 1 // 0, "")
    assert attempt(lambda: 1 // 0, failing) == failing
    assert len(caplog.records) == 2
    assert not attempt(lambda: None, failing)


def test_a_place_that_was_taken_over_is_not_written_to(store, log, tmp_path, caplog):
    old, new = StoreOwner("cluster", 1), StoreOwner("cluster", 1, "restored")
    claim(store, old)
    copier = Copier(
        store,
        str(tmp_path),
        SharedStats(str(tmp_path)),
        lambda: require_owner(store, old),
    )
    plan = RemotePlan(frozenset({_ID}), (plan_of(log),))
    store.put("owner", new.encode())
    for _ in range(2):
        copier.run(plan)
        copier.run(RemotePlan(frozenset(), ()))
    assert list(store.list("")) == ["owner"]
    assert caplog.text.count("belongs to another broker by now") == 1


def test_a_place_that_is_taken_over_during_a_copy_has_no_manifest(store, log, tmp_path):
    old = StoreOwner("cluster", 1)
    claim(store, old)
    looks = []

    def fence():
        looks.append(1)
        if len(looks) == 4:  # after the pass has begun
            store.put("owner", StoreOwner("cluster", 1, "restored").encode())
        require_owner(store, old)

    stats = SharedStats(str(tmp_path))
    copier = Copier(store, str(tmp_path), stats, fence)
    copier.run(RemotePlan(frozenset({_ID}), (plan_of(log),)))
    before = store.get(f"{_ID.hex()}/0/manifest")
    copier.run(RemotePlan(frozenset(), ()))
    assert store.get(f"{_ID.hex()}/0/manifest") == before
    assert looks == [1] * 5


def test_copies_and_fetches_keep_to_their_rates(store, log, tmp_path, monkeypatch):
    clock = [0.0]

    def sleep(seconds):
        clock[0] += seconds

    class Throttled(Throttler):
        """One with a clock of its own."""

        def __init__(self, rate, beat):
            super().__init__(rate, beat, lambda: clock[0], sleep)

    monkeypatch.setattr(remote_log_manager, "Throttler", Throttled)
    owner = StoreOwner("cluster", 1)
    claim(store, owner)
    home = str(tmp_path)
    manager = RemoteLogManager(
        store,
        [home],
        lambda _: None,
        owner,
        RemoteLimits(1 << 20, 2, 1.0, copy_rate=100.0, fetch_rate=50.0),
    )
    write_plan(home, RemotePlan(frozenset({_ID}), (plan_of(log),)))
    manager._copier.look()
    segments = log.view.remote.segments()
    copied = sum(segment.size for segment in segments)
    assert clock[0] == pytest.approx(copied / 100, rel=0.2)
    ((_, fetcher),) = manager._sockets.values()
    clock[0] = 0.0
    prefix = f"{_ID.hex()}/0"
    assert all(fetcher.fetch(prefix, segment, 0) for segment in segments)
    assert clock[0] == pytest.approx(copied / 50, rel=0.2)
    assert all(fetcher.fetch(prefix, segments[-1], 0) for _ in range(3))
    assert clock[0] == pytest.approx(copied / 50, rel=0.2)
    manager.close()
