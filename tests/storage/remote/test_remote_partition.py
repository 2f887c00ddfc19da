"""Copies of closed segments: whole, named, and none left over, whoever dies when."""

from __future__ import annotations

import contextlib
import os
import shutil
from itertools import pairwise

import pytest

from mpbroker.base.storage_errors import (
    CorruptLogError,
    RemoteStorageError,
    StorageError,
)
from mpbroker.protocol.records.crc32c import crc32c
from mpbroker.storage.files.log_files import REMOTE_MANIFEST_FILE, base_offsets
from mpbroker.storage.partition_directory import complete_directory
from mpbroker.storage.remote import remote_partition
from mpbroker.storage.remote.object_store import ObjectStore
from mpbroker.storage.remote.remote_log_manager import Copier
from mpbroker.storage.remote.remote_manifest import (
    CHUNK_BYTES,
    ManifestError,
    RemoteManifest,
    SegmentIndexes,
    indexes_key,
    log_key,
)
from mpbroker.storage.remote.remote_partition import RemotePartition
from mpbroker.storage.remote.remote_plan import (
    PartitionPlan,
    RemotePlan,
    read_known,
)
from mpbroker.storage.remote.remote_stats import SharedStats
from mpbroker.storage.remote.retry_backoff import BackoffLimits
from tests.storage.batches import batch

_ID = bytes(range(16))
_PREFIX = f"{_ID.hex()}/0"


class KilledError(BaseException):
    """The copier's end."""


class DyingStore:
    """A store whose process is killed before or after the n-th change of anything.

    Each second step is the moment after a change that the process did not learn of.
    """

    def __init__(self, store: ObjectStore, step: int) -> None:
        self._store = store
        self.left = step

    def __getattr__(self, name):
        return getattr(self._store, name)

    def step(self):
        self.left -= 1
        if self.left < 0:
            raise KilledError

    def changed_by(self, change, *args):
        self.step()
        change(*args)
        self.step()

    def put(self, key, content):
        self.changed_by(self._store.put, key, content)

    def put_stream(self, key, chunks, size):
        self.changed_by(self._store.put_stream, key, chunks, size)

    def delete(self, keys):
        for key in keys:
            self.changed_by(self._store.delete, [key])


@pytest.fixture
def log(open_log):
    log = open_log(segment_bytes=500, retention_ms=-1)
    for number in range(20):
        sent = batch(b"%03d" % number * 30, producer=(7, 0, number), timestamp=number)
        log.append(sent, now_ms=1)
    log.sync.flush()
    return log


def plan_of(log, start=0, below=None):
    active = log.row.snapshot().active_base_offset
    below = active if below is None else below
    return PartitionPlan("t", _ID, 0, log.directory, below, start)


def partition(store, late_s=0.0):
    return RemotePartition(store, "t", _ID, 0, late_s=late_s)


def names(store):
    """Return what is in the store, and what the manifest says should be."""
    manifest = partition(store).manifest
    named = [
        key(_PREFIX, s) for s in manifest.segments for key in (log_key, indexes_key)
    ]
    return sorted(store.list("")), sorted([f"{_PREFIX}/manifest", *named])


def check(store, log, start=0):
    """Compare every object with the local files."""
    there, named = names(store)
    assert there == named
    manifest = partition(store).manifest
    assert manifest == RemoteManifest.of_directory(log.directory)
    assert not manifest.unfinished()
    bases = base_offsets(log.directory, ".log")
    expected = [b for b, n in pairwise(bases) if n > start]
    assert [s.base_offset for s in manifest.copied()] == expected
    assert manifest.copied_to() == bases[-1]
    for segment in manifest.copied():
        stem = f"{log.directory}/{segment.base_offset:020d}"
        with open(f"{stem}.log", "rb") as file:
            records = file.read()
        assert store.get(log_key(_PREFIX, segment)) == records
        content = store.get(indexes_key(_PREFIX, segment))
        assert segment.indexes_crc == crc32c(content)
        indexes = SegmentIndexes.decode(content)
        assert indexes.chunks == tuple(
            crc32c(records[at : at + CHUNK_BYTES])
            for at in range(0, len(records), CHUNK_BYTES)
        )
        for suffix in (".index", ".timeindex"):
            with open(stem + suffix, "rb") as file:
                assert indexes.files[suffix] == file.read()
        assert indexes.leader_epochs == b"0\n1\n0 0\n"


@pytest.fixture
def with_epochs(log):
    with open(f"{log.directory}/leader-epoch-checkpoint", "wb") as file:
        file.write(b"0\n1\n0 0\n")
    return log


@pytest.mark.parametrize("store_url", ["file", "s3"], indirect=True)
def test_closed_segments_are_copied_and_the_active_one_is_not(store, with_epochs):
    log = with_epochs
    copied = []
    partition(store).run(plan_of(log, below=9), copied.append)
    assert partition(store).manifest.copied_to() == 9
    sizes = [s.size for s in partition(store).manifest.copied()]
    assert (
        copied
        == sizes
        == [os.path.getsize(log.view.segments.get(b).path) for b in (0, 3, 6)]
    )
    partition(store).run(plan_of(log), copied.append)
    check(store, log)
    assert len(copied) == 6
    partition(store).run(plan_of(log), copied.append)
    assert len(copied) == 6
    timestamps = [s.largest_timestamp for s in partition(store).manifest.copied()]
    assert timestamps == [2, 5, 8, 11, 14, 17]


def test_segments_below_the_log_start_go_and_are_not_copied_again(store, with_epochs):
    log = with_epochs
    partition(store).run(plan_of(log, below=9))
    partition(store).run(plan_of(log, start=7))
    check(store, log, start=7)


def test_all_objects_of_a_deleted_topic_go(store, with_epochs):
    partition(store).run(plan_of(with_epochs))
    partition(store).remove()
    partition(store).remove()
    assert not list(store.list(""))


def deaths(store, run, monkeypatch):
    """Call ``run`` with stores that die one step later each time, until none dies."""
    for step in range(1000):
        dying = DyingStore(store, step)

        def write(path, content, dying=dying, write_file=remote_partition.write_file):
            dying.changed_by(write_file, path, content)

        with monkeypatch.context() as patch:
            patch.setattr(remote_partition, "write_file", write)
            try:
                run(dying)
            except KilledError:
                yield step
            else:
                return


def test_a_copier_killed_at_any_step_leaves_no_hole_and_no_object(
    store, with_epochs, monkeypatch
):
    log = with_epochs
    part = plan_of(log, below=6)
    for step in deaths(store, lambda dying: partition(dying).run(part), monkeypatch):
        there, named = names(store)
        assert set(there) <= set(named), step
        for segment in RemoteManifest.of_directory(log.directory).copied():
            assert store.size(log_key(_PREFIX, segment)) == segment.size
        # Each attempt begins anew, so that every step of the whole is a death's.
        partition(store).remove()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{log.directory}/{REMOTE_MANIFEST_FILE}")
    assert step > 20
    partition(store).run(plan_of(log))
    check(store, log)


def test_a_copier_killed_again_and_again_is_ready_at_last(
    store, with_epochs, monkeypatch
):
    for step in deaths(
        store, lambda dying: partition(dying).run(plan_of(with_epochs)), monkeypatch
    ):
        pass
    assert step > 5
    check(store, with_epochs)


def test_a_request_that_takes_effect_late_leaves_no_object(
    store, with_epochs, monkeypatch
):
    log = with_epochs
    late = []

    class LateStore(DyingStore):
        """One whose PUTs of segments are given up, and done later."""

        def put_stream(self, key, chunks, size):
            late.append((key, b"".join(chunks)))
            raise RemoteStorageError("no answer")

    now = [1000.0]
    monkeypatch.setattr(remote_partition.time, "monotonic", lambda: now[0])
    with pytest.raises(RemoteStorageError):
        partition(LateStore(store, 1000)).run(plan_of(log))
    again = partition(store, late_s=60.0)
    again.run(plan_of(log))
    ((key, content),) = late
    assert again.manifest.copied_to() == 18
    store.put(key, content)
    now[0] += 59
    again.run(plan_of(log))
    there, named = names(store)
    assert set(there) < set(named) and key in there
    now[0] += 1
    again.run(plan_of(log))
    check(store, log)


@pytest.fixture
def deleted(store, log, tmp_path, monkeypatch):
    """A topic that is deleted after one of its requests was given up."""

    def delete_after(method):
        late = []

        def give_up(self, key, content, size=0):
            whole = content if isinstance(content, bytes) else b"".join(content)
            late.append((key, whole))
            raise RemoteStorageError("no answer")

        now = [1000.0]
        monkeypatch.setattr(remote_partition.time, "monotonic", lambda: now[0])
        home, at_once = str(tmp_path), BackoffLimits(first_s=0.0)
        copier = Copier(store, home, SharedStats(home), backoff=at_once)
        copier.run(RemotePlan(frozenset({_ID}), (plan_of(log, below=9),)))
        with monkeypatch.context() as patch:
            patch.setattr(ObjectStore, method, give_up)
            copier.run(RemotePlan(frozenset({_ID}), (plan_of(log),)))

        def look(later_s):
            now[0] += later_s
            copier.run(RemotePlan(frozenset(), ()))

        look(0)
        ((key, content),) = late
        return key, content, look

    return delete_after


def test_a_request_that_takes_effect_after_its_topic_was_deleted_leaves_no_object(
    store, deleted, tmp_path
):
    key, content, look = deleted("put_stream")
    store.put(key, content)
    assert sorted(store.list("")) == [key, f"{_PREFIX}/manifest"]
    look(remote_partition.LATE_S)
    assert not list(store.list("")) and not read_known(str(tmp_path))


def test_a_manifest_that_comes_after_its_topic_was_deleted_goes(
    store, deleted, tmp_path
):
    key, content, look = deleted("put")
    assert not list(store.list(""))
    store.put(key, content)
    # Until then the store is not asked again.
    look(remote_partition.LATE_S - 1)
    assert list(store.list("")) == [key] and read_known(str(tmp_path))
    look(1)
    assert not list(store.list("")) and not read_known(str(tmp_path))


def test_a_removal_killed_at_any_step_goes_on(store, with_epochs, monkeypatch):
    log = with_epochs
    partition(store).run(plan_of(log))
    plan = plan_of(log, start=10)
    for step in deaths(store, lambda dying: partition(dying).run(plan), monkeypatch):
        there, named = names(store)
        assert set(there) <= set(named), step
        assert partition(store).manifest.copied_to() == 18
    check(store, log, start=10)
    for step in deaths(store, lambda dying: partition(dying).remove(), monkeypatch):
        assert f"{_PREFIX}/manifest" in store.list("") or not list(store.list(""))
    assert not list(store.list(""))


def test_all_goes_of_a_topic_without_remote_storage_whoever_dies_when(
    store, with_epochs, monkeypatch
):
    log = with_epochs
    plan = plan_of(log, below=-1)._replace(remove_all=True)
    whole = partition(store)
    whole.run(plan_of(log))
    assert whole.stored[0] == len(whole.manifest.copied()) > 0
    for step in deaths(store, lambda dying: partition(dying).run(plan), monkeypatch):
        there, named = names(store)
        assert set(there) <= set(named), step
    whole.run(plan)
    assert whole.stored == (0, 0)
    assert step > 5
    assert not list(store.list(""))
    assert not os.path.exists(f"{log.directory}/{REMOTE_MANIFEST_FILE}")
    partition(store).run(plan_of(log))  # it is switched on again
    check(store, log)


def test_a_damaged_segment_is_not_copied(store, with_epochs):
    log = with_epochs
    path = log.view.segments.get(3).path
    with open(path, "r+b") as file:
        file.seek(100)
        file.write(b"?")
    with pytest.raises(CorruptLogError, match=r"no valid batch at 0"):
        partition(store).run(plan_of(log))
    assert partition(store).manifest.copied_to() == 3
    there, named = names(store)
    assert there == named


def test_a_store_that_lost_bytes_is_noticed(store, with_epochs, monkeypatch):
    monkeypatch.setattr(ObjectStore, "size", lambda self, key: 5)
    with pytest.raises(RemoteStorageError, match=r"has 5 bytes, not"):
        partition(store).run(plan_of(with_epochs))
    assert partition(store).manifest.copied_to() == -1


def test_the_newer_manifest_counts_wherever_it_is(store, with_epochs):
    log = with_epochs
    partition(store).run(plan_of(log, below=9))
    old = store.get(f"{_PREFIX}/manifest")
    partition(store).run(plan_of(log))
    store.put(f"{_PREFIX}/manifest", old)  # a PUT that was given up takes effect late
    partition(store).run(plan_of(log))
    assert partition(store).manifest.copied_to() == 18
    check_local = RemotePartition(store, "t", _ID, 0, log.directory)
    assert check_local.manifest.copied_to() == 18
    check(store, log)
    os.unlink(f"{log.directory}/{REMOTE_MANIFEST_FILE}")  # a disk that was lost
    assert RemotePartition(store, "t", _ID, 0, log.directory).manifest.copied_to() == 18
    check(store, log)


def test_a_log_that_is_not_the_one_that_was_copied_is_left_alone(
    store, with_epochs, open_log
):
    partition(store).run(plan_of(with_epochs))
    other = open_log(name="other-0", segment_bytes=500)
    other.append(batch(b"x" * 90), now_ms=1)
    with pytest.raises(CorruptLogError, match=r"these are other records"):
        partition(store).run(plan_of(other))
    assert partition(store).manifest.copied_to() == 18


_NEW_ID = bytes(range(1, 17))


def recreate(directory):
    """Delete a topic, and make one of the same name."""
    shutil.rmtree(directory)
    complete_directory(directory, _NEW_ID)


def manifest_path(log):
    return f"{log.directory}/{REMOTE_MANIFEST_FILE}"


def test_a_plan_from_before_a_topic_was_recreated_changes_nothing(store, log):
    plan = plan_of(log)
    partition(store).run(plan)
    before = list(store.list(""))
    recreate(log.directory)
    late = partition(store)
    late.run(plan)
    assert (late.measure(plan), late.lag) == ([], [])
    assert not os.path.exists(manifest_path(log))
    assert list(store.list("")) == before


def test_a_topic_that_is_recreated_amid_a_pass_gets_no_manifest(store, log):
    class Recreating(DyingStore):
        def step(self):
            self.left -= 1
            if not self.left:
                recreate(log.directory)

    with pytest.raises(StorageError, match="is another topic's by now"):
        partition(Recreating(store, 1)).run(plan_of(log))
    assert not os.path.exists(manifest_path(log))
    deleted = partition(store)
    assert not deleted.remove() and deleted.remove()
    assert not list(store.list(""))


def test_the_manifest_that_a_deleted_topic_has_left_does_not_count(store, log):
    partition(store).run(plan_of(log))
    left = RemoteManifest.of_directory(log.directory)
    other = left._replace(prefix=f"{_NEW_ID.hex()}/0", generation=left.generation + 1)
    with open(manifest_path(log), "wb") as file:
        file.write(other.encode())
    partition(store).run(plan_of(log))
    assert RemoteManifest.of_directory(log.directory) == left
    partition(store).remove()
    with open(manifest_path(log), "wb") as file:
        file.write(other.encode())
    partition(store).run(plan_of(log, below=-1))
    empty = RemoteManifest("t", prefix=_PREFIX)
    assert RemoteManifest.of_directory(log.directory) == empty


def test_the_manifest_of_another_partition_in_the_store_is_refused(store, log):
    partition(store).run(plan_of(log))
    own = RemoteManifest.of_directory(log.directory)
    other = own._replace(prefix=f"{_ID.hex()}/1", generation=own.generation + 1)
    store.put(f"{_PREFIX}/manifest", other.encode())
    with pytest.raises(ManifestError, match=f"{_ID.hex()}/1, not of {_PREFIX}"):
        partition(store).run(plan_of(log))
    assert RemoteManifest.of_directory(log.directory) == own
