"""A disk dies while the broker runs, or before it starts: the other disks go on."""

from __future__ import annotations

import copy
import errno
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from mpbroker.ipc.layout import RowStatus
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.storage.cleaning.log_upkeep import LogUpkeep
from mpbroker.storage.cleaning.replica_moves import ReplicaMoves
from mpbroker.storage.files.checkpoints import RECOVERY_POINT, read_offsets
from mpbroker.storage.log_directory import CLEAN_SHUTDOWN_FILE, LogDirectory
from mpbroker.storage.log_manager import LogManager
from mpbroker.storage.partition_directory import partition_directories
from tests.storage.batches import batch, read_all
from tests.storage.broker_rig import Broker, Start, Topic, Topics
from tests.storage.test_replica_moves import (
    CONFIG,
    another,
    expected,
    fill,
    finish,
    move,
    places,
)
from tests.support.dead_disk import kill_disk, revive_disk


def refused(work: Callable[[], object]) -> ErrorCode:
    with pytest.raises(ApiError) as raised:
        work()
    return raised.value.error_code


class Half(NamedTuple):
    """A broker whose log directory `a` has died, and which has `b`."""

    broker: Broker
    handler: LogManager
    dead: Topic
    alive: Topic


@pytest.fixture
def half(start: Start, topics: Topics, tmp_path: Path) -> Iterator[Half]:
    both = [topics.create(name, **CONFIG) for name in ("first", "second")]
    broker = start(topics, "a", "b")
    handler = another(broker, topics)
    for topic in both:
        fill(handler.log(topic, 0), 0, 80)
    broker.upkeep.write_checkpoints()
    for topic in both:
        fill(handler.log(topic, 0), 80, 40)
    both.sort(key=lambda topic: handler.log(topic, 0).directory)
    kill_disk(tmp_path / "a")
    yield Half(broker, handler, *both)
    handler.close()
    broker.die()


def test_the_checkpoints_of_the_other_disk_are_written(
    half: Half, tmp_path: Path
) -> None:
    path = str(tmp_path / "b" / RECOVERY_POINT)
    before = read_offsets(path)
    half.broker.upkeep.write_checkpoints()
    which = half.alive.name, 0
    assert read_offsets(path)[which] > before[which] > 0


def test_the_other_disk_is_stopped_cleanly(half: Half, tmp_path: Path) -> None:
    half.broker.upkeep.shut_down()
    assert (tmp_path / "b" / CLEAN_SHUTDOWN_FILE).exists()


def test_a_third_disk_is_no_trouble_to_a_partition_that_was_moved(
    start: Start, topics: Topics, tmp_path: Path
) -> None:
    """A process that has missed the move looks for the partition on all disks."""
    topics.create("t", **CONFIG)
    broker = start(topics, "a", "b", "c")
    fill(broker.manager.log("t", 0), 0, 80)
    other = another(broker, topics)
    log = other.log("t", 0)
    assert read_all(log) == expected(80)
    assert places(tmp_path) == ["a"]
    move(broker, topics, tmp_path / "c")
    finish(ReplicaMoves(broker.manager, topics), tmp_path)
    kill_disk(tmp_path / "b")
    assert read_all(log) == expected(80)
    assert log.row.status == RowStatus.ONLINE
    other.close()
    broker.die()


def test_a_partition_is_moved_beside_a_dead_disk(
    start: Start, topics: Topics, tmp_path: Path
) -> None:
    topic = topics.create("t", **CONFIG)
    broker = start(topics, "a", "b", "c")
    fill(broker.manager.log("t", 0), 0, 80)
    (_, _, third) = broker.directories
    which = "t", 0
    with broker.directories[0].cleaner_offsets_locked() as offsets:
        offsets[which] = 7
    kill_disk(tmp_path / "b")
    with pytest.raises(ApiError):
        move(broker, topics, tmp_path / "b")
    move(broker, topics, tmp_path / "c")
    finish(ReplicaMoves(broker.manager, topics), tmp_path)
    assert places(tmp_path) == ["c"]
    assert third.cleaner_offsets() == {which: 7}
    assert read_all(broker.manager.log(topic, 0)) == expected(80)
    broker.die()


def test_a_move_is_found_though_its_disk_could_not_be_read_at_once(
    start: Start, topics: Topics, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No descriptor was free, say, when its log directory had just changed."""
    topics.create("t", **CONFIG)
    broker = start(topics, "a", "b")
    fill(broker.manager.log("t", 0), 0, 80)
    moves = ReplicaMoves(broker.manager, topics)
    moves.look(0)
    move(broker, topics, tmp_path / "b")
    os.utime(tmp_path / "b", (1, 1))  # not within the clock's resolution of the look

    def full(path: str) -> list[str]:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", full)
        moves.look(0)
    finish(moves, tmp_path)
    assert places(tmp_path) == ["b"]
    broker.die()


def test_moves_log_once_that_a_disk_is_dead(
    half: Half, topics: Topics, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    moves = ReplicaMoves(half.broker.manager, topics)

    def lines() -> int:
        for _ in range(5):
            moves.look(0)
        return sum("cannot be read" in each.message for each in caplog.records)

    assert lines() == 1
    revive_disk(tmp_path / "a")
    assert lines() == 1
    kill_disk(tmp_path / "a")
    assert lines() == 2


def test_a_topic_is_deleted_though_a_part_of_it_is_on_a_dead_disk(
    start: Start, topics: Topics, tmp_path: Path
) -> None:
    """In the process that deletes it, and in the housekeeper."""
    topic = topics.create("t", 4)
    broker = start(topics, "a", "b")
    handler = another(broker, topics)
    for partition in range(4):
        fill(handler.log(topic, partition), 0, 1)
    kill_disk(tmp_path / "a")
    topics.delete("t")
    handler.delete_topic(topic)
    broker.upkeep.forget_topic(topic)
    statuses = {handler._table.status(row) for row in topic.partitions}
    assert statuses == {RowStatus.DELETED}
    assert partition_directories(str(tmp_path / "b")) == []
    handler.close()
    broker.die()


def test_deleted_bytes_of_the_other_disk_are_removed(
    half: Half, topics: Topics, tmp_path: Path
) -> None:
    topic = half.alive
    left = tmp_path / "b" / f"{topic.name}-0" / f"{0:020d}.log.deleted"
    left.touch()  # by a housekeeper before this one
    gone_ms = (int(time.time()) + 100) * 1000
    upkeep = half.broker.upkeep
    upkeep.remove_deleted(gone_ms)
    upkeep.remove_deleted(gone_ms + 100_000)
    assert not left.exists()
    half.broker.manager.delete_topic(topics.delete(topic.name))
    assert [*(tmp_path / "b").glob("*-delete")]
    upkeep.remove_deleted(gone_ms)
    assert not [*(tmp_path / "b").glob("*-delete")]


def test_a_log_on_the_other_disk_is_compacted(
    start: Start, topics: Topics, tmp_path: Path
) -> None:
    for name in ("first", "second"):
        topics.create(name, cleanup_policy=("compact",), segment_bytes=300)
    broker = start(topics, "a", "b")
    for name in ("first", "second"):
        log = broker.manager.log(name, 0)
        for number in range(8):
            log.append(batch((b"k", b"%d" % number * 100)), now_ms=1)
    (directory,) = (tmp_path / "b").glob("*-0")
    kill_disk(tmp_path / "a")
    assert broker.upkeep.run_cleaner(1) == 1
    log = broker.manager.log(directory.name[:-2], 0)
    assert [offset for offset, _ in read_all(log)] == [6, 7]
    broker.die()


def test_the_sizes_of_the_other_disks_partitions_are_told(
    half: Half, tmp_path: Path
) -> None:
    manager = half.broker.manager
    place, size = manager.place_and_size(half.alive, 0)
    assert place == str(tmp_path / "b") and size > 0
    sizes = partial(manager.place_and_size, half.dead, 0)
    assert refused(sizes) == ErrorCode.KAFKA_STORAGE_ERROR


def test_the_leader_epochs_of_the_other_disks_partitions_are_told(
    half: Half, topics: Topics
) -> None:
    """By a process that has not opened them."""
    late = another(half.broker, topics)
    assert late.leader_epoch(half.alive, 0) == 0


def test_a_copy_that_cannot_be_read_is_no_error_of_the_broker(
    start: Start, topics: Topics, tmp_path: Path
) -> None:
    topic = topics.create("t", **CONFIG)
    broker = start(topics, "a", "b")
    fill(broker.manager.log("t", 0), 0, 80)
    move(broker, topics, tmp_path / "b")
    (future,) = broker.manager.future_replicas()
    kill_disk(tmp_path / "b")
    progress = partial(broker.manager.progress, topic, future)
    assert refused(progress) == ErrorCode.KAFKA_STORAGE_ERROR
    broker.die()


@pytest.mark.parametrize("names", ["a", "ab"])
@pytest.mark.parametrize("is_closed", [False, True])
def test_a_directory_that_has_vanished_is_not_looked_for_for_ever(
    start: Start, topics: Topics, tmp_path: Path, names: str, is_closed: bool
) -> None:
    """Its disk is not mounted any more, say."""
    topics.create("t", **CONFIG)
    broker = start(topics, *names)
    log = broker.manager.log("t", 0)
    fill(log, 0, 80)
    log.view.size_in_bytes()
    (tmp_path / "a" / "t-0").rename(tmp_path / "away")
    if is_closed:
        log.close()
    for ask in (log.lookup.max_timestamp, log.view.size_in_bytes):
        assert refused(ask) == ErrorCode.KAFKA_STORAGE_ERROR
    (tmp_path / "away").rename(tmp_path / "a" / "t-0")
    assert read_all(log) == expected(80)
    broker.die()


# -- partitions that cannot be found -----------------------------------------------


def test_a_process_that_comes_later_makes_no_other_log_of_a_partition(
    half: Half, topics: Topics, tmp_path: Path
) -> None:
    late = another(half.broker, topics)
    assert refused(lambda: late.log(half.dead, 0)) == ErrorCode.KAFKA_STORAGE_ERROR
    assert not (tmp_path / "b" / f"{half.dead.name}-0").exists()
    revive_disk(tmp_path / "a")
    assert len(read_all(late.log(half.dead, 0))) == 120
    late.close()


def test_a_new_topic_is_made_on_the_other_disk(
    half: Half, topics: Topics, tmp_path: Path
) -> None:
    new = topics.create("new", 2)
    assert half.handler.look(new, 0).latest() == 0
    for partition in range(2):
        fill(half.handler.log(new, partition), 0, 1)
        assert (tmp_path / "b" / f"new-{partition}").is_dir()


@pytest.mark.parametrize("dies", ["before", "after"])
def test_a_start_without_a_disk_serves_no_empty_log_of_a_partition_on_it(
    start: Start, topics: Topics, tmp_path: Path, dies: str
) -> None:
    """It would acknowledge records at offsets that others have already."""
    topics.create("t", **CONFIG)
    broker = start(topics, "a", "b")
    fill(broker.manager.log("t", 0), 0, 80)
    broker.stop()
    if dies == "before":
        kill_disk(tmp_path / "a")
    known = topics.again()
    broker = start(known, "a", "b")
    assert len(broker.directories) == (1 if dies == "before" else 2)
    if dies == "after":
        kill_disk(tmp_path / "a")
    (topic,) = known.topics()
    manager = broker.manager
    code = {
        "before": ErrorCode.NOT_LEADER_OR_FOLLOWER,
        "after": ErrorCode.KAFKA_STORAGE_ERROR,
    }[dies]
    for ask in (manager.log, manager.look, manager.place_and_size):
        assert refused(lambda ask=ask: ask(topic, 0)) == code
    assert not (tmp_path / "b" / "t-0").exists()
    assert manager.may_have_log(topic, 0)
    new = known.create("new")
    assert not manager.may_have_log(new, 0)
    fill(manager.log(new, 0), 0, 1)
    broker.stop()
    revive_disk(tmp_path / "a")
    broker = start(known := known.again(), "a", "b")
    assert read_all(broker.manager.log("t", 0)) == expected(80)
    assert read_all(broker.manager.log("new", 0)) == expected(1)
    broker.stop()


def test_a_disk_that_is_not_mounted_any_more_is_no_empty_one(
    start: Start, topics: Topics, tmp_path: Path
) -> None:
    topic = topics.create("t")
    broker = start(topics, "a", "b")
    (tmp_path / "a").rename(tmp_path / "away")
    log = broker.manager.log
    assert refused(lambda: log(topic, 0)) == ErrorCode.KAFKA_STORAGE_ERROR
    (tmp_path / "away").rename(tmp_path / "a")
    fill(log(topic, 0), 0, 1)
    broker.die()


@pytest.mark.parametrize("is_used", [False, True])
def test_a_disk_that_is_unmounted_under_a_broker_is_no_empty_one(
    start: Start, topics: Topics, tmp_path: Path, is_used: bool
) -> None:
    """An empty directory of the file system below is at its path then."""
    topics.create("t", 4)
    broker = start(topics, "a", "b")
    for partition in range(4):
        fill(broker.manager.log("t", partition), 0, 1)
    broker.stop()
    known = topics.again()
    broker = start(known, "a", "b")
    (topic,) = known.topics()
    manager, second = broker.manager, broker.directories[1]
    lost = {int(name[-1]) for name in partition_directories(second.path)}
    if is_used:
        for partition in range(4):
            manager.log(topic, partition).view.state()
    (tmp_path / "b").rename(tmp_path / "away")
    (tmp_path / "b").mkdir()
    assert second._device is not None
    second._device += 1
    late = another(broker, known)
    for partition in range(4):
        if partition in lost:
            asked = partial(late.log, topic, partition)
            assert refused(asked) == ErrorCode.KAFKA_STORAGE_ERROR
        else:
            assert read_all(late.log(topic, partition)) == expected(1)
    new = known.create("new", 4)
    for partition in range(4):
        fill(late.log(new, partition), 0, 1)
    assert [*(tmp_path / "b").iterdir()] == []
    late.close()
    broker.die()


# -- the checkpoints of partitions that are offline --------------------------------


def forked(directories: list[LogDirectory]) -> list[LogDirectory]:
    """Copy what another process has of log directories from now on."""
    copies = copy.deepcopy(directories)
    for each in copies:
        each._lock_fd = -1
    return copies


def upkeep_of(
    directories: list[LogDirectory], broker: Broker, topics: Topics
) -> LogUpkeep:
    """The tasks of a housekeeper that is forked just now."""
    manager = LogManager(forked(directories), broker.manager._table, topics)
    return LogUpkeep(manager, topics)


def test_a_new_housekeeper_keeps_the_start_offset_of_a_partition_that_is_offline(
    start: Start, topics: Topics, tmp_path: Path
) -> None:
    """It would write that of the broker's start: deleted records would come back."""
    topics.create("t", **CONFIG)
    broker = start(topics, "a")
    supervisors = forked(broker.directories)
    log = broker.manager.log("t", 0)
    fill(log, 0, 80)
    log.sync.flush()
    log.raise_log_start(50)
    upkeep_of(supervisors, broker, topics).write_checkpoints()
    log.row.status = RowStatus.OFFLINE
    upkeep_of(supervisors, broker, topics).write_checkpoints()
    broker.die()
    broker = start(topics.again(), "a")
    log = broker.manager.log("t", 0)
    log.view.state()
    assert log.row.log_start_offset == 50
    broker.stop()


def test_a_topic_made_again_does_not_get_the_offsets_that_an_upgrade_has_told(
    start: Start, topics: Topics, tmp_path: Path
) -> None:
    """They are of the topic that had the name when the broker was upgraded."""
    old = topics.create("t")
    (tmp_path / "a" / "t-0").mkdir(parents=True)
    broker = start(topics, "a", logs=[("t", 0, 50, 80)])
    assert broker.directories[0].hints(("t", 0), old.topic_id, 1).log_start_offset == 50
    supervisors = forked(broker.directories)
    broker.manager.log("t", 0)
    broker.manager.delete_topic(topics.delete("t"))
    new = topics.create("t")
    assert new.topic_id != old.topic_id
    fill(broker.manager.log("t", 0), 0, 3)
    upkeep_of(supervisors, broker, topics).write_checkpoints()
    broker.manager.log("t", 0).row.status = RowStatus.OFFLINE
    upkeep_of(supervisors, broker, topics).write_checkpoints()
    broker.die()
    broker = start(topics.again(), "a")
    assert read_all(broker.manager.log("t", 0)) == expected(3)
    broker.stop()
