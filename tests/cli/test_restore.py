"""`mpbroker restore`, killed at each step; transactions of committed offsets."""

from __future__ import annotations

import os
from base64 import urlsafe_b64encode
from pathlib import Path

import pytest

from mpbroker.base.file_id import file_id
from mpbroker.base.storage_errors import LogDirectoryError, RemoteStorageError
from mpbroker.cli.remote import restore as restoring
from mpbroker.cli.remote.restore import RestoreError, restore
from mpbroker.coordinator.groups.group_records import offset_key, offset_value
from mpbroker.metadata.meta_properties import open_data_directories
from mpbroker.metadata.metadata_image import (
    config_record,
    partition_record,
    topic_record,
)
from mpbroker.metadata.metadata_log import MetadataLog, recover_metadata_log
from mpbroker.protocol.records.control_record import (
    EndTransactionMarker,
    build_end_transaction_marker,
)
from mpbroker.protocol.records.record_batch import (
    RecordBatchBuilder,
    iter_batches,
    set_base_offset,
)
from mpbroker.storage.files.checkpoints import read_offsets
from mpbroker.storage.files.log_files import REMOTE_MANIFEST_FILE
from mpbroker.storage.partition_directory import complete_directory
from mpbroker.storage.remote import store_owner
from mpbroker.storage.remote.metadata_copy import MetadataCopy, MetadataIndex
from mpbroker.storage.remote.object_store import ObjectStore
from mpbroker.storage.remote.remote_partition import RemotePartition
from mpbroker.storage.remote.remote_plan import (
    KnownPartition,
    PartitionPlan,
    RemotePlan,
    StateLogPlan,
    read_known,
)
from mpbroker.storage.remote.store_owner import (
    StoreOwner,
    claim,
    read_token,
    require_owner,
)

_TIERED, _PLAIN, _OFFSETS = (bytes([each]) * 16 for each in (1, 2, 3))
_OLD = StoreOwner("cluster", 1)


def batches(*built):
    """Return batches one after another, each with the offset behind the one before."""
    whole = bytearray()
    offset = 0
    for each in built:
        placed = bytearray(each)
        set_base_offset(memoryview(placed), offset, 0)
        header, _ = next(iter_batches(placed))
        offset += header.record_count
        whole += placed
    return bytes(whole), offset


def commits(*offsets, producer=-1):
    options = {}
    if producer >= 0:
        options = {"producer_id": producer, "producer_epoch": 0, "base_sequence": 0}
    builder = RecordBatchBuilder(transactional=producer >= 0, **options)
    for group, topic, offset in offsets:
        value = None if offset is None else offset_value(offset, -1, "", 1, -1)
        builder.append(1, offset_key(group, topic, 0), value)
    return builder.build()


def marker(producer, *, commit):
    end = EndTransactionMarker(commit=commit, coordinator_epoch=0)
    return build_end_transaction_marker(producer, 0, end, 1)


class Machine:
    """A broker's directory, and what it has copied to the store."""

    def __init__(self, tmp_path, store):
        self.store = store
        self.home = tmp_path / "home"
        self.home.mkdir()
        cell = restoring._Cell()
        recover_metadata_log(str(self.home), cell, 1)
        log = MetadataLog(str(self.home), cell)
        log.read_new()
        log.append(
            [
                topic_record("tiered", _TIERED),
                partition_record(_TIERED, 0, 1),
                topic_record("plain", _PLAIN),
                partition_record(_PLAIN, 0, 1),
                topic_record("__consumer_offsets", _OFFSETS),
                partition_record(_OFFSETS, 0, 1),
                config_record(2, "tiered", "retention.ms", "777"),
            ],
            1,
        )
        log.close()
        self.tiered = self.home / "tiered-0"
        complete_directory(str(self.tiered), _TIERED)
        for base in range(3):
            builder = RecordBatchBuilder()
            builder.append(1, None, b"x" * 100)
            placed = bytearray(builder.build())
            set_base_offset(memoryview(placed), base, 0)
            (self.tiered / f"{base:020}.log").write_bytes(placed)
        self.plan = PartitionPlan("tiered", _TIERED, 0, str(self.tiered), 2, 1, 3)
        claim(store, _OLD)
        RemotePartition(store, "tiered", _TIERED, 0).run(
            self.plan._replace(log_start_offset=0)
        )

    def commit(self, *built):
        """Write __consumer_offsets and copy the metadata."""
        directory = self.home / "__consumer_offsets-0"
        directory.mkdir(exist_ok=True)
        path = directory / f"{0:020}.log"
        content, end = batches(*built)
        path.write_bytes(content)
        with path.open("rb") as segment:
            number = file_id(segment.fileno())
        state = StateLogPlan(
            "__consumer_offsets",
            _OFFSETS,
            0,
            str(directory),
            end,
            ((0, number),),
        )
        ids = frozenset({_TIERED, _PLAIN, _OFFSETS})
        copy = MetadataCopy(self.store, str(self.home), "cluster", 1)
        copy.run(RemotePlan(ids, (self.plan,), (state,)))
        return content


@pytest.fixture
def store(tmp_path):
    (tmp_path / "store").mkdir()
    return ObjectStore(f"file://{tmp_path}/store", retry_s=1)


@pytest.fixture
def machine(tmp_path, store):
    return Machine(tmp_path, store)


def files(directory):
    """Return all that a restore makes; times and random ids are left out."""
    found = {}
    for path in sorted(Path(directory).rglob("*")):
        name = str(path.relative_to(directory))
        if path.is_file() and name not in ("meta.properties", "remote-store-token"):
            found[name] = path.stat().st_size
    return found


def test_a_directory_is_made_with_all_that_the_store_has(machine, store, tmp_path):
    content = machine.commit(commits(("a", "tiered", 1), ("b", "tiered", 3)))
    made = f"{tmp_path}/made/data"
    report = restore(store, made, take_over=True)
    assert [tuple(each) for each in report.logs] == [
        ("plain", 0, 0, 0, -1),
        ("tiered", 0, 1, 2, 3),
    ]
    assert [tuple(each) for each in report.set_back] == [("b", "tiered", 0, 3, 2)]
    offsets = Path(made, "__consumer_offsets-0", f"{0:020}.log").read_bytes()
    assert offsets.startswith(content)
    cell = restoring._Cell()
    image = recover_metadata_log(made, cell, 1)
    assert image.config(2, "tiered") == {"retention.ms": "777"}
    assert image.next_producer_id >= 1_000_000
    assert read_known(made) == {KnownPartition("tiered", _TIERED, 0)}
    assert read_offsets(f"{made}/log-start-offset-checkpoint") == {("tiered", 0): 1}
    text = urlsafe_b64encode(_TIERED).rstrip(b"=")
    assert text in Path(made, "tiered-0", "partition.metadata").read_bytes()
    log = Path(made, "__cluster_metadata-0", f"{0:020}.log")
    assert log.stat().st_mode & 0o777 == 0o600
    # It may write to the place from now on, and the broker of before may not.
    assert open_data_directories([made], 1) == "cluster"
    require_owner(store, StoreOwner("cluster", 1, read_token(made)))
    with pytest.raises(RemoteStorageError, match=r"another broker by now"):
        require_owner(store, _OLD)


def test_only_offsets_that_count_are_set_back(machine, store, tmp_path):
    machine.commit(
        commits(("lowered", "tiered", 9)),
        commits(("lowered", "tiered", 1)),
        commits(("deleted", "tiered", 9)),
        commits(("deleted", "tiered", None)),
        commits(("committed", "tiered", 9), producer=5),
        commits(("aborted", "tiered", 9), producer=6),
        commits(("open", "tiered", 9), producer=7),
        commits(("gone-topic", "gone", 9), ("plain", "plain", 4)),
        marker(6, commit=False),
        marker(5, commit=True),
    )
    report = restore(store, f"{tmp_path}/made", take_over=True)
    assert sorted(each[:2] for each in report.set_back) == [
        ("committed", "tiered"),
        ("plain", "plain"),
    ]


def test_a_directory_with_content_is_left_as_it_is(machine, store, tmp_path):
    machine.commit(commits(("a", "tiered", 1)))
    before = files(machine.home)
    with pytest.raises(RestoreError, match=r"not empty"):
        restore(store, str(machine.home), take_over=True)
    assert files(machine.home) == before
    require_owner(store, _OLD)
    with pytest.raises(
        RestoreError, match=r"cluster.id=cluster node.id=1.*--take-over"
    ):
        restore(store, f"{tmp_path}/made", take_over=False)
    assert not os.path.exists(f"{tmp_path}/made")
    (tmp_path / "other").mkdir()
    other = ObjectStore(f"file://{tmp_path}/other")
    with pytest.raises(RestoreError, match=r"no copy of a broker's metadata"):
        restore(other, f"{tmp_path}/made", take_over=True)


class KilledError(BaseException):
    """The command's end."""


def test_a_command_that_is_killed_is_run_again(machine, store, tmp_path, monkeypatch):
    machine.commit(commits(("a", "tiered", 1), ("b", "tiered", 3)))
    restore(store, f"{tmp_path}/whole", take_over=True)
    wanted = files(f"{tmp_path}/whole")
    step = 0
    while True:
        calls = []
        made = f"{tmp_path}/made-{step}"

        def dying(whole, calls=calls, step=step):
            def call(*arguments, **options):
                calls.append(whole)
                if len(calls) > step:
                    raise KilledError
                return whole(*arguments, **options)

            return call

        with monkeypatch.context() as patch:
            patch.setattr(ObjectStore, "put", dying(ObjectStore.put))
            patch.setattr(ObjectStore, "get", dying(ObjectStore.get))
            for module, name in (
                (restoring, "write_file"),
                (restoring, "write_whole"),
                (restoring, "write_offsets"),
                (restoring, "write_known"),
                (restoring, "complete_directory"),
                (restoring, "write_meta_properties"),
                (store_owner, "write_file"),
            ):
                patch.setattr(module, name, dying(getattr(module, name)))
            try:
                restore(store, made, take_over=True)
            except KilledError:
                pass
            else:
                break
        if os.path.exists(f"{made}/meta.properties"):
            with pytest.raises(LogDirectoryError, match=r"incomplete.*run it again"):
                open_data_directories([made], 1)
        restore(store, made, take_over=True)
        assert files(made) == wanted
        assert open_data_directories([made], 1) == "cluster"
        step += 1
    assert step > 15
    assert MetadataIndex.decode(store.get("metadata/index"))
    assert REMOTE_MANIFEST_FILE in " ".join(wanted)
