"""Log directories from other brokers: their last leader epoch is the broker's."""

from __future__ import annotations

import errno
import os
from types import SimpleNamespace

import pytest

from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.messages.fetch import FetchRequest
from mpbroker.protocol.messages.list_offsets import (
    ListOffsetsPartition,
    ListOffsetsRequest,
    ListOffsetsTopic,
)
from mpbroker.protocol.messages.metadata import MetadataRequest
from mpbroker.protocol.messages.offset_for_leader_epoch import (
    OffsetForLeaderEpochRequest,
    OffsetForLeaderPartition,
    OffsetForLeaderTopic,
)
from mpbroker.server.fetch.fetch_handler import Target, check_leader_epoch, read_targets
from mpbroker.server.handlers.list_offsets import handle_list_offsets
from mpbroker.server.handlers.metadata import handle_metadata
from mpbroker.server.handlers.offset_for_leader_epoch import (
    handle_offset_for_leader_epoch,
)
from tests.server.contexts import context
from tests.server.core_cache.handler_stage import Stage
from tests.storage.batches import batch

STORAGE = ErrorCode.KAFKA_STORAGE_ERROR
FENCED, UNKNOWN = ErrorCode.FENCED_LEADER_EPOCH, ErrorCode.UNKNOWN_LEADER_EPOCH


@pytest.fixture
def stage(memory, tmp_path):
    """Partition 1 was led in epochs 0, 3 and, from offset 4 on, 5."""
    made = Stage(memory, tmp_path / "data", short=False)
    made.registry.create_topic("t", 3)
    log = made.log("t", 1)
    for _ in range(6):
        log.append(batch(b"v"), now_ms=1)
    made.logs.close()
    with open(f"{log.directory}/leader-epoch-checkpoint", "w") as file:
        file.write("0\n3\n0 0\n3 2\n5 4\n")
    return made


def context_of(stage, version=12):
    return context(stage.registry, version=version, logs=stage.logs)


def epochs(stage, asking=None):
    request = MetadataRequest(topics=None)
    (topic,) = handle_metadata(request, asking or context_of(stage)).topics
    return [each.leader_epoch for each in topic.partitions]


@pytest.mark.parametrize("is_open", [False, True])
def test_clients_are_told_the_last_epoch_of_each_partition(stage, is_open):
    if is_open:
        stage.log("t", 1)
    assert epochs(stage) == [0, 5, 0]
    assert is_open or not os.path.exists(f"{stage.log('t', 1).directory[:-1]}0")


def test_epochs_of_a_deleted_topic_of_the_same_name_are_ignored(stage):
    stage.registry.delete_topic("t")
    stage.registry.create_topic("t", 3)
    assert epochs(stage) == [0, 0, 0]


def test_a_directory_that_cannot_be_read_keeps_no_client_from_the_others(
    stage, monkeypatch
):
    def broken(directory):
        raise OSError(errno.EIO, "Input/output error")

    asking = context_of(stage)
    with monkeypatch.context() as patch:
        patch.setattr("mpbroker.storage.log_manager.read_leader_epochs", broken)
        assert epochs(stage, asking) == [-1, -1, -1]
    assert epochs(stage, asking) == [0, 5, 0]


def test_unreadable_epochs_do_not_affect_other_partitions(stage, monkeypatch):
    """Another process may be able to read them: the partition stays online."""

    def broken(directory):
        raise OSError(errno.EIO, "Input/output error")

    stage.logs.close()
    first, second = stage.log("t", 0), stage.log("t", 1)
    targets = [
        Target("t", bytes(16), number, 0, 1000, epoch, log)
        for number, epoch, log in ((0, -1, first), (1, 5, second))
    ]
    asked = ListOffsetsPartition(partition_index=1, current_leader_epoch=5)
    request = ListOffsetsRequest(
        topics=[ListOffsetsTopic(name="t", partitions=[asked])]
    )
    with monkeypatch.context() as patch:
        patch.setattr("mpbroker.storage.log.partition_view.read_leader_epochs", broken)
        reading = read_targets(targets, FetchRequest(), 1000)
        assert [each[2] for each in reading.results] == [0, STORAGE]
        listed = handle_list_offsets(request, context_of(stage, 7))
        assert listed.topics[0].partitions[0].error_code == STORAGE
        with pytest.raises(ApiError) as refused:
            second.append(batch(b"v"), now_ms=1)
        assert refused.value.error_code == STORAGE
        assert epochs(stage) == [-1, -1, 0]
    assert second.append(batch(b"v"), now_ms=1).base_offset == 6
    assert epochs(stage) == [0, 5, 0]


@pytest.mark.parametrize(
    ("current", "error"),
    [(-1, 0), (0, FENCED), (4, FENCED), (5, 0), (6, UNKNOWN)],
)
def test_a_request_with_another_leader_epoch_is_refused(stage, current, error):
    log = stage.log("t", 1)
    if error:
        with pytest.raises(ApiError) as refused:
            check_leader_epoch(current, log.lookup)
        assert refused.value.error_code == error
    target = Target("t", bytes(16), 1, 0, 1000, current, log)
    reading = read_targets([target], FetchRequest(), 1000)
    assert reading.results[0][2] == error
    asked = ListOffsetsPartition(
        partition_index=1, current_leader_epoch=current, timestamp=-1
    )
    request = ListOffsetsRequest(
        topics=[ListOffsetsTopic(name="t", partitions=[asked])]
    )
    listed = handle_list_offsets(request, context_of(stage, 7))
    (answer,) = listed.topics[0].partitions
    assert answer.error_code == error
    wanted = OffsetForLeaderPartition(
        partition=1, current_leader_epoch=current, leader_epoch=3
    )
    ended = handle_offset_for_leader_epoch(
        OffsetForLeaderEpochRequest(
            topics=[OffsetForLeaderTopic(topic="t", partitions=[wanted])]
        ),
        context_of(stage),
    )
    (end,) = ended.topics[0].partitions
    assert end.error_code == error
    if not error:
        assert (end.leader_epoch, end.end_offset) == (3, 4)


@pytest.mark.parametrize(
    ("timestamp", "offset", "epoch"), [(-1, 6, 5), (-2, 0, 0), (1_000, 0, 0)]
)
def test_an_offset_comes_with_its_own_epoch(stage, timestamp, offset, epoch):
    asked = ListOffsetsPartition(partition_index=1, timestamp=timestamp)
    request = ListOffsetsRequest(
        topics=[ListOffsetsTopic(name="t", partitions=[asked])]
    )
    listed = handle_list_offsets(request, context_of(stage, 7))
    (answer,) = listed.topics[0].partitions
    assert (answer.offset, answer.leader_epoch) == (offset, epoch)


def test_an_offset_is_of_the_last_epoch_that_began_below_it(stage):
    found = stage.log("t", 1).lookup.epochs
    assert [found.at(offset) for offset in range(6)] == [0, 0, 3, 3, 5, 5]
    log = SimpleNamespace(leader_epoch=0)
    check_leader_epoch(0, log)


@pytest.fixture
def in_cluster(stage, monkeypatch):
    """Return what makes a shared topic, as in a cluster."""

    def create(name):
        with monkeypatch.context() as patch:
            patch.setattr(
                "mpbroker.metadata.log_config._check_diskless", lambda config: None
            )
            stage.registry.create_topic(name, 1, {"diskless.enable": "true"})

    return create


def test_no_client_thinks_that_records_of_a_shared_topic_were_cut_off(
    stage, in_cluster
):
    in_cluster("shared")
    stage.log("shared", 0).append(batch(b"v"), now_ms=1)
    for name, end in (("shared", (1 << 63) - 1), ("t", 0)):
        asked = OffsetForLeaderPartition(
            partition=0, current_leader_epoch=0, leader_epoch=0
        )
        request = OffsetForLeaderEpochRequest(
            topics=[OffsetForLeaderTopic(topic=name, partitions=[asked])]
        )
        answer = handle_offset_for_leader_epoch(request, context_of(stage, 4))
        assert answer.topics[0].partitions[0].end_offset == end


@pytest.mark.parametrize("is_behind", [True, False])
def test_an_offset_above_a_copy_of_a_shared_partition_is_waited_for(
    stage, in_cluster, is_behind
):
    in_cluster("shared")
    shared, local = stage.log("shared", 0), stage.log("t", 0)
    for log in (shared, local):
        log.append(batch(b"v"), now_ms=1)
    targets = [
        Target(name, bytes(16), 0, offset, 1000, -1, log)
        for name, log in (("shared", shared), ("t", local))
        for offset in (1, 7, -7)
    ]
    reading = read_targets(targets, FetchRequest(), 1000, 0, lambda: is_behind)
    out = ErrorCode.OFFSET_OUT_OF_RANGE
    above = 0 if is_behind else out
    errors = [error for _, _, error in reading.results]
    assert errors == [0, above, out, 0, out, out]
    if is_behind:
        assert reading.results[1][1].high_watermark == 1
