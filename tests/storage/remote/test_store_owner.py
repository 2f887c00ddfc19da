"""Directories that were lost: what a start makes of them, whenever it is killed."""

from __future__ import annotations

import os

import pytest

from mpbroker.base.storage_errors import RemoteStorageError
from mpbroker.ipc.layout import RowStatus
from mpbroker.metadata.metadata_image import topic_record
from mpbroker.metadata.metadata_log import MetadataLog, recover_metadata_log
from mpbroker.storage.partition_directory import read_topic_id
from mpbroker.storage.remote import store_owner
from mpbroker.storage.remote.remote_manifest import indexes_key
from mpbroker.storage.remote.remote_partition import RemotePartition
from mpbroker.storage.remote.remote_plan import (
    KnownPartition,
    PartitionPlan,
    write_known,
)
from mpbroker.storage.remote.store_owner import (
    OWNER_KEY,
    NotOwnerError,
    StoreOwner,
    claim,
    lost_partitions,
    require_owner,
    restore_lost,
)
from tests.storage.batches import batch
from tests.support.metadata import NOW_MS, PlainCell

_ID = bytes(range(16))
_OTHER_ID = bytes(range(1, 17))
_EPOCHS = b"0\n2\n0 0\n3 5\n"


@pytest.fixture
def lost(store, open_log, tmp_path):
    """Return the directories of a broker that has lost one of a partition."""
    log = open_log(segment_bytes=500, retention_ms=-1)
    for number in range(20):
        sent = batch(b"%03d" % number * 30, producer=(7, 0, number))
        log.append(sent, now_ms=1)
    with open(f"{log.directory}/leader-epoch-checkpoint", "wb") as file:
        file.write(_EPOCHS)
    active = log.row.snapshot().active_base_offset
    plan = PartitionPlan("again", _ID, 0, log.directory, active, 0)
    RemotePartition(store, "again", _ID, 0).run(plan)
    directories = [f"{tmp_path}/one", f"{tmp_path}/two"]
    for each in directories:
        os.mkdir(each)
    write_known(
        directories[0],
        [
            KnownPartition("again", _ID, 0),
            KnownPartition("nothing-copied", _OTHER_ID, 1),
            KnownPartition("again", b"deleted, and new", 1),
            KnownPartition("deleted", b"deleted, the id.", 0),
        ],
    )
    cell = PlainCell()
    recover_metadata_log(directories[0], cell, NOW_MS)
    metadata = MetadataLog(directories[0], cell)
    metadata.read_new()
    metadata.append(
        [topic_record("again", _ID), topic_record("nothing-copied", _OTHER_ID)], NOW_MS
    )
    metadata.close()
    return directories


def test_a_lost_partition_comes_back_with_its_producers_and_leader_epochs(
    store, lost, open_log
):
    assert len(lost_partitions(lost)) == 2
    restore_lost(store, lost)
    assert os.listdir(lost[1]) == ["again-0"]
    assert read_topic_id(f"{lost[1]}/again-0") == _ID
    assert [each.topic for each in lost_partitions(lost)] == ["nothing-copied"]
    log = open_log(name="two/again-0", segment_bytes=500, retention_ms=-1)
    assert (log.lookup.earliest(), log.lookup.latest()) == (0, 18)
    assert log.lookup.leader_epoch == 3
    # The producer goes on; what it sends again is known.
    assert log.append(batch(b"x", producer=(7, 0, 17)), now_ms=1).duplicate
    assert log.append(batch(b"x", producer=(7, 0, 18)), now_ms=1).base_offset == 18
    assert log.row.status == RowStatus.ONLINE


def test_a_start_that_is_killed_before_it_is_complete_begins_again(
    store, lost, monkeypatch
):
    class KilledError(BaseException):
        """The start's end."""

    whole = store_owner.write_file
    for step in range(4):

        def write(path, content, step=step, left=[step]):  # noqa: B006 - counts down
            if not left[0]:
                raise KilledError
            left[0] -= 1
            whole(path, content)

        with monkeypatch.context() as patch:
            patch.setattr(store_owner, "write_file", write)
            with pytest.raises(KilledError):
                restore_lost(store, lost)
        assert not os.path.exists(f"{lost[1]}/again-0")
    restore_lost(store, lost)
    assert not lost_partitions(lost)[1:]


def test_a_store_that_gives_other_bytes_is_not_believed(store, lost):
    manifest = RemotePartition(store, "again", _ID, 0).manifest
    key = indexes_key(manifest.prefix, manifest.copied()[-1])
    store.put(key, store.get(key)[:-1] + b"?")
    with pytest.raises(RemoteStorageError, match=r"other bytes"):
        restore_lost(store, lost)
    assert not os.path.exists(f"{lost[1]}/again-0")


def test_a_place_without_an_owner_is_claimed_when_it_is_written_to(store):
    first, second = StoreOwner("cluster", 1), StoreOwner("cluster", 2)
    require_owner(store, first)  # the store was away when this broker started
    require_owner(store, first)
    assert store.get(OWNER_KEY) == first.encode()
    with pytest.raises(NotOwnerError, match=r"node\.id=1"):
        require_owner(store, second)
    store.delete([OWNER_KEY])  # behind our back
    require_owner(store, first)
    assert store.get(OWNER_KEY) == first.encode()


def test_bytes_that_are_no_owner_are_not_another_owner(store):
    store.put(OWNER_KEY, b"cluster.id=cluster\nnode.id=\x81\n")
    for ask in (claim, require_owner):
        with pytest.raises(RemoteStorageError, match=r"other bytes for owner") as told:
            ask(store, StoreOwner("cluster", 1))
        assert not isinstance(told.value, NotOwnerError)
