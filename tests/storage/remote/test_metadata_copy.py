"""The copy of metadata and committed offsets: whole or not there, whatever dies."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mpbroker.base.file_id import file_id
from mpbroker.base.storage_errors import RemoteObjectMissingError, RemoteStorageError
from mpbroker.protocol.records.record_batch import iter_batches
from mpbroker.storage.remote.metadata_copy import (
    INDEX_KEY,
    METADATA_PREFIX,
    MetadataCopy,
    MetadataIndex,
    read_piece,
)
from mpbroker.storage.remote.object_store import ObjectStore
from mpbroker.storage.remote.remote_manifest import ManifestError
from mpbroker.storage.remote.remote_plan import (
    PartitionPlan,
    RemotePlan,
    StateLogPlan,
    read_plan,
    write_plan,
)
from mpbroker.storage.remote.store_owner import NotOwnerError
from tests.storage.batches import batch
from tests.support.inodes import replace_with_same_inode

_ID = bytes(range(16))
_METADATA = "__cluster_metadata-0/00000000000000000000.log"


@pytest.fixture
def home(tmp_path):
    (tmp_path / "home" / "__cluster_metadata-0").mkdir(parents=True)
    (tmp_path / "home" / _METADATA).write_bytes(b"topics")
    return tmp_path / "home"


@pytest.fixture
def log(open_log):
    log = open_log(segment_bytes=500, retention_ms=-1)
    for number in range(12):
        log.append(batch(b"%03d" % number * 30), now_ms=1)
    return log


def id_of(path):
    with open(path, "rb") as file:
        return file_id(file.fileno())


def plan_of(log, end=None):
    end = log.lookup.latest() if end is None else end
    bases = sorted(int(n[:20]) for n in os.listdir(log.directory) if n.endswith(".log"))
    segments = tuple((base, id_of(f"{log.directory}/{base:020}.log")) for base in bases)
    state = StateLogPlan("__consumer_offsets", _ID, 3, log.directory, end, segments)
    tiered = PartitionPlan("t", _ID, 0, "/nowhere", -1, 0, 77)
    return RemotePlan(frozenset({_ID}), (tiered,), (state,))


def copy_of(store, home, **options):
    return MetadataCopy(store, str(home), "cluster", 1, **options)


def content(store):
    """Return what a restore would read: bytes by name."""
    index = MetadataIndex.decode(store.get(INDEX_KEY))
    found = {
        name: b"".join(read_piece(store, piece) for piece in pieces)
        for name, pieces in index.files
    }
    for each in index.state:
        for segment in each.segments:
            pieces = [read_piece(store, piece) for piece in segment.pieces]
            found[f"{segment.base_offset:020}"] = b"".join(pieces)
    assert index.ends[0].end_offset == 77
    return found


def local(log):
    return {
        name[:20]: Path(log.directory, name).read_bytes()
        for name in os.listdir(log.directory)
        if name.endswith(".log")
    }


def objects(store):
    return set(store.list(METADATA_PREFIX))


def test_a_plan_is_read_as_it_was_written_also_that_of_an_older_version(tmp_path, log):
    plan = plan_of(log)
    write_plan(str(tmp_path), plan)
    assert read_plan(str(tmp_path)) == plan
    old = plan._replace(state=(), partitions=(plan.partitions[0][:6],))
    write_plan(str(tmp_path), old)
    assert read_plan(str(tmp_path)).partitions[0].end_offset == -1


def test_only_what_is_new_goes_up(store, home, log):
    copy = copy_of(store, home)
    assert copy.run(plan_of(log))
    whole = {"00000000000000000000.log": b"topics", **local(log)}
    assert content(store) == whole
    before = objects(store)
    assert not copy.run(plan_of(log))
    log.append(batch(b"new"), now_ms=1)
    assert copy.run(plan_of(log))
    assert content(store) == {**whole, **local(log)}
    assert len(objects(store) - before) == 1 and before < objects(store)
    # So it does in the next process.
    log.append(batch(b"newer"), now_ms=1)
    assert copy_of(store, home).run(plan_of(log))
    assert content(store) == {**whole, **local(log)}
    (home / _METADATA).write_bytes(b"topics and users")
    assert copy.run(plan_of(log))
    assert content(store)["00000000000000000000.log"] == b"topics and users"


def test_batches_that_are_not_on_disk_yet_are_not_copied(store, home, log):
    end = log.lookup.latest()
    active = max(local(log))
    before = local(log)[active]
    log.append(batch(b"not yet"), now_ms=1)
    copy_of(store, home).run(plan_of(log, end))
    assert content(store)[active] == before
    # A killed writer's batch is replaced by another one of the same offset.
    path = f"{log.directory}/{active}.log"
    with open(path, "r+b") as file:
        file.truncate(len(before))
        file.write(b"torn")
    copy_of(store, home).run(plan_of(log, end + 1))
    assert content(store)[active] == before


def test_a_segment_that_the_cleaner_has_replaced_goes_up_anew(store, home, log):
    copy = copy_of(store, home)
    copy.run(plan_of(log))
    stale = plan_of(log)
    first = min(local(log))
    path = f"{log.directory}/{first}.log"
    _, batch_kept = next(iter_batches(local(log)[first]))
    cleaned = bytes(batch_kept)
    with open(path + ".swap", "wb") as file:
        file.write(cleaned)
    os.rename(path + ".swap", path)
    # The plan was made before: the copy stays as it is, and whole.
    before = content(store)
    copy.run(stale)
    assert content(store) == before
    copy.run(plan_of(log))
    assert content(store)[first] == cleaned
    assert objects(store) == {
        INDEX_KEY,
        *MetadataIndex.decode(store.get(INDEX_KEY)).keys(),
    }


def test_a_segment_that_got_the_inode_number_of_the_last_one_goes_up_anew(
    store, home, log
):
    """As the second of two compactions has it, where the first one's file was."""
    copy = copy_of(store, home)
    copy.run(plan_of(log))
    first = min(local(log))
    path, content_before = Path(f"{log.directory}/{first}.log"), local(log)[first]
    changed, end = bytes(batch(b"xyz" * 30).data), log.lookup.latest()
    log.close()  # an open file would keep its inode
    replace_with_same_inode(path, changed + content_before[len(changed) :])
    copy.run(plan_of(log, end))
    assert content(store)[first] == path.read_bytes() != content_before


def test_a_partition_that_is_offline_keeps_its_copy_and_a_deleted_one_does_not(
    store, home, log
):
    copy = copy_of(store, home)
    copy.run(plan_of(log))
    before = content(store)
    copy.run(plan_of(log)._replace(state=()))
    assert content(store) == before
    copy.run(plan_of(log)._replace(state=(), topic_ids=frozenset()))
    assert list(content(store)) == ["00000000000000000000.log"]


class KilledError(BaseException):
    """The process's end."""


@pytest.mark.parametrize("is_done", [False, True])
def test_a_process_that_is_killed_leaves_the_copy_before_or_the_next(
    store, home, log, monkeypatch, is_done
):
    copy_of(store, home).run(plan_of(log))
    states = [content(store)]
    (home / _METADATA).write_bytes(b"topics and users")
    for number in range(6):
        log.append(batch(b"%03d" % number * 30), now_ms=1)
    states.append({"00000000000000000000.log": b"topics and users", **local(log)})
    step = 0
    while True:
        calls = []

        def dying(name, calls=calls, step=step):
            whole = getattr(ObjectStore, name)

            def call(self, *arguments):
                calls.append(name)
                if len(calls) <= step:
                    return whole(self, *arguments)
                if is_done:  # its answer is lost
                    whole(self, *arguments)
                raise KilledError

            return call

        with monkeypatch.context() as patch:
            for name in ("put", "delete"):
                patch.setattr(ObjectStore, name, dying(name))
            try:
                copy_of(store, home).run(plan_of(log))
            except KilledError:
                assert content(store) in states
            else:
                break
        step += 1
    assert step > 4
    assert content(store) == states[1]
    copy_of(store, home).run(plan_of(log))
    index = MetadataIndex.decode(store.get(INDEX_KEY))
    assert objects(store) == {INDEX_KEY, *index.keys()}


def test_a_store_that_denies_its_index_keeps_the_copy_until_there_is_another(
    store, home, log, monkeypatch
):
    copy_of(store, home).run(plan_of(log))
    before, whole = objects(store), content(store)

    def deny(self, key):
        raise RemoteObjectMissingError("no such object")

    def refuse(self, key, content):
        raise RemoteStorageError("it is away")

    with monkeypatch.context() as patch:
        patch.setattr(ObjectStore, "get", deny)
        patch.setattr(ObjectStore, "put", refuse)
        with pytest.raises(RemoteStorageError):
            copy_of(store, home).run(plan_of(log))
    assert objects(store) == before and content(store) == whole
    with monkeypatch.context() as patch:
        patch.setattr(ObjectStore, "get", deny)
        copy_of(store, home).run(plan_of(log))
    assert content(store) == whole
    assert objects(store) & before == {INDEX_KEY}


def test_a_broker_that_lost_its_place_writes_no_index(store, home, log):
    def fence():
        raise NotOwnerError("another broker")

    with pytest.raises(NotOwnerError):
        copy_of(store, home, fence=fence).run(plan_of(log))
    assert not objects(store)


def test_other_bytes_than_were_written_are_refused(store, home, log):
    copy_of(store, home).run(plan_of(log))
    index = MetadataIndex.decode(store.get(INDEX_KEY))
    piece = index.files[0][1][0]
    store.put(piece.key, b"TOPICS")
    with pytest.raises(RemoteStorageError, match=r"other bytes"):
        read_piece(store, piece)
    store.put(INDEX_KEY, store.get(INDEX_KEY)[:-1] + b"?")
    with pytest.raises(ManifestError, match=r"index of the metadata .* damaged"):
        copy_of(store, home).run(plan_of(log))
