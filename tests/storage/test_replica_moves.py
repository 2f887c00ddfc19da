"""Partitions move between log directories: nothing is lost or there twice, ever."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mpbroker.ipc.layout import HOUSEKEEPER, RowStatus
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.storage import replica_directories
from mpbroker.storage.cleaning import replica_moves
from mpbroker.storage.cleaning.log_cleaner import LogCleaner
from mpbroker.storage.cleaning.log_upkeep import LogUpkeep
from mpbroker.storage.cleaning.replica_moves import ReplicaMoves
from mpbroker.storage.files.checkpoints import read_offsets
from mpbroker.storage.log.partition_log import PartitionLog
from mpbroker.storage.log_directory import LogDirectory
from mpbroker.storage.log_manager import LogManager
from mpbroker.storage.partition_directory import exclusive, partition_directories
from tests.storage.batches import batch, read_all
from tests.storage.broker_rig import Broker, Start, Topics
from tests.support import children
from tests.support.children import Child, fork, wait_until

FILES = (
    "mpbroker/storage/cleaning/replica_moves.py",
    "mpbroker/storage/replica_directories.py",
    "mpbroker/storage/log_directory.py",
)
RENAMES = ("mpbroker/storage/replica_directories.py",)
CONFIG = {"segment_bytes": 2_500, "index_interval_bytes": 300}


@pytest.fixture
def broker(start: Start, topics: Topics) -> Iterator[Broker]:
    """A broker with two log directories, and a topic with four segments."""
    topics.create("t", **CONFIG)
    started = start(topics, "a", "b")
    fill(started.manager.log("t", 0), 0, 80)
    yield started
    started.manager.close()


def value(number: int) -> bytes:
    return b"%d" % number * 20


def fill(log: PartitionLog, first: int, count: int) -> None:
    for number in range(first, first + count):
        log.append(
            batch(value(number), producer=(7, 0, number), timestamp=1_000 + number),
            now_ms=1_000,
        )


def expected(count: int) -> list[tuple[int, bytes]]:
    return [(number, value(number)) for number in range(count)]


def another(broker: Broker, topics: Topics) -> LogManager:
    """Another process's logs."""
    return LogManager(broker.directories, broker.manager._table, topics)


def places(tmp_path: Path) -> list[str]:
    """The log directories that have the partition."""
    return [
        name
        for name in ("a", "b", "c")
        if (tmp_path / name).is_dir()
        and "t-0" in partition_directories(str(tmp_path / name))
    ]


def copies(tmp_path: Path) -> list[Path]:
    return sorted(tmp_path.glob("*/*-future"))


def move(broker: Broker, topics: Topics, to: Path) -> None:
    topic = topics.topic("t")
    assert topic is not None
    broker.manager.move(topic, 0, str(to))


def finish(moves: ReplicaMoves, tmp_path: Path) -> None:
    def is_done() -> bool:
        moves.look(0)
        return not copies(tmp_path)

    wait_until(is_done)


def in_small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_moves, "CHUNK_BYTES", 100)
    monkeypatch.setattr(replica_moves, "LAST_BYTES", 0)


def a_step(moves: ReplicaMoves, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy one chunk: only the look at the clock behind it says that time is over."""
    times = iter([0.0, 0.0])
    clock = SimpleNamespace(
        monotonic=lambda: next(times, 1.0), time=time.time, sleep=time.sleep
    )
    with monkeypatch.context() as patch:
        patch.setattr(replica_moves, "SLICE_S", 1e-9)
        patch.setattr(replica_moves, "time", clock)
        moves.look(0)


def test_a_partition_moves_with_all_its_files(
    broker: Broker, topics: Topics, tmp_path: Path
) -> None:
    log = broker.manager.log("t", 0)
    log.sync.take_snapshot()
    before = {
        path.name: path.read_bytes()
        for path in (tmp_path / "a" / "t-0").iterdir()
        if path.name != "partition.metadata"
    }
    move(broker, topics, tmp_path / "b")
    assert places(tmp_path) == ["a"]
    finish(ReplicaMoves(broker.manager, topics), tmp_path)
    assert places(tmp_path) == ["b"]
    after = {
        path.name: path.read_bytes()
        for path in (tmp_path / "b" / "t-0").iterdir()
        if path.name != "partition.metadata"
    }
    assert after == before
    assert log.directory == str(tmp_path / "b" / "t-0")
    assert log.row.durable_end_offset == 80
    assert read_all(log) == expected(80)


def test_other_processes_go_on_in_the_new_directory(
    broker: Broker, topics: Topics, tmp_path: Path
) -> None:
    other = another(broker, topics)
    theirs = other.log("t", 0)
    fill(theirs, 80, 5)
    assert read_all(theirs) == expected(85)
    move(broker, topics, tmp_path / "b")
    finish(ReplicaMoves(broker.manager, topics), tmp_path)
    assert read_all(theirs) == expected(85)
    fill(theirs, 85, 40)  # rolls there, too
    fill(broker.manager.log("t", 0), 125, 5)
    for log in (theirs, broker.manager.log("t", 0)):
        assert read_all(log) == expected(130)
        assert log.directory == str(tmp_path / "b" / "t-0")
    # A batch that is sent again is found in the log.
    again = batch(value(129), producer=(7, 0, 129), timestamp=1_129)
    assert theirs.append(again, now_ms=1_000).duplicate
    # And a process that has not used the partition before.
    third = another(broker, topics)
    assert third.log("t", 0).append(again, now_ms=1_000).duplicate
    theirs.sync.flush()
    assert theirs.row.durable_end_offset == 130
    assert places(tmp_path) == ["b"]
    other.close()
    third.close()


def test_records_appended_during_the_copy_are_in_it(
    broker: Broker,
    topics: Topics,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    in_small_steps(monkeypatch)
    other = another(broker, topics)
    theirs = other.log("t", 0)
    moves = ReplicaMoves(broker.manager, topics)
    move(broker, topics, tmp_path / "b")
    count, lags = 80, []
    (future,) = broker.manager.future_replicas()
    topic = topics.topic("t")
    assert topic is not None
    while copies(tmp_path):
        if count < 200:
            fill(theirs, count, 1)
            count += 1
        a_step(moves, monkeypatch)
        if copies(tmp_path):
            size, lag = broker.manager.progress(topic, future)
            assert 0 <= lag <= count and size >= 0
            lags.append(lag)
    assert lags[0] > 70 and lags[-1] < 5
    assert read_all(theirs) == read_all(broker.manager.log("t", 0)) == expected(count)
    assert places(tmp_path) == ["b"]
    other.close()


def test_a_record_appended_just_before_the_end_is_forced_to_disk(
    broker: Broker, topics: Topics, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handler appends between the last flush and the taking of the lock."""
    log = broker.manager.log("t", 0)
    prepare = replica_moves._Move._prepare_checkpoints

    def prepare_and_append(*arguments: Any) -> None:
        prepare(*arguments)
        fill(log, 80, 1)

    monkeypatch.setattr(replica_moves._Move, "_prepare_checkpoints", prepare_and_append)
    move(broker, topics, tmp_path / "b")
    ended = fork(lambda: finish(ReplicaMoves(broker.manager, topics), tmp_path))
    assert ended == 0
    assert read_all(broker.manager.log("t", 0)) == expected(81)
    assert log.row.durable_end_offset == 81
    assert places(tmp_path) == ["b"]


def test_a_request_for_the_directory_where_it_is_cancels_the_move(
    broker: Broker,
    topics: Topics,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    in_small_steps(monkeypatch)
    moves = ReplicaMoves(broker.manager, topics)
    move(broker, topics, tmp_path / "b")
    for _ in range(5):
        a_step(moves, monkeypatch)
    assert copies(tmp_path)
    move(broker, topics, tmp_path / "a")
    assert not copies(tmp_path)
    finish(moves, tmp_path)
    assert places(tmp_path) == ["a"]
    assert read_all(broker.manager.log("t", 0)) == expected(80)
    # Retention and cleaners may have it again.
    with exclusive(str(tmp_path / "a" / "t-0")) as is_free:
        assert is_free


def test_the_same_request_again_changes_nothing(
    broker: Broker, topics: Topics, tmp_path: Path
) -> None:
    move(broker, topics, tmp_path / "b")
    before = copies(tmp_path)
    move(broker, topics, tmp_path / "b")
    assert copies(tmp_path) == before


def test_a_request_for_a_third_directory_takes_the_place_of_the_first(
    start: Start, topics: Topics, tmp_path: Path
) -> None:
    topics.create("t", **CONFIG)
    broker = start(topics, "a", "b", "c")
    fill(broker.manager.log("t", 0), 0, 10)
    move(broker, topics, tmp_path / "b")
    move(broker, topics, tmp_path / "c")
    (copy,) = copies(tmp_path)
    assert copy.parent.name == "c"
    finish(ReplicaMoves(broker.manager, topics), tmp_path)
    assert places(tmp_path) == ["c"]
    assert read_all(broker.manager.log("t", 0)) == expected(10)
    broker.manager.close()


def test_a_partition_moves_back_and_forth(
    broker: Broker, topics: Topics, tmp_path: Path
) -> None:
    other = another(broker, topics)
    moves = ReplicaMoves(broker.manager, topics)
    for number, name in enumerate("baba"):
        move(broker, topics, tmp_path / name)
        finish(moves, tmp_path)
        assert places(tmp_path) == [name]
        # This process has missed every second move.
        if number % 2:
            count = len(read_all(broker.manager.log("t", 0)))
            fill(other.log("t", 0), count, 3)
    assert read_all(other.log("t", 0)) == expected(86)
    assert read_all(broker.manager.log("t", 0)) == expected(86)
    other.close()


def test_the_copy_of_a_deleted_topic_is_removed(
    broker: Broker, topics: Topics, tmp_path: Path
) -> None:
    move(broker, topics, tmp_path / "b")
    broker.manager.delete_topic(topics.delete("t"))
    finish(ReplicaMoves(broker.manager, topics), tmp_path)
    assert places(tmp_path) == []


def test_a_copy_that_cannot_be_made_is_removed_and_the_partition_stays(
    broker: Broker,
    topics: Topics,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(replica_moves, "write_whole", full)
    move(broker, topics, tmp_path / "b")
    finish(ReplicaMoves(broker.manager, topics), tmp_path)
    assert places(tmp_path) == ["a"]
    assert [*(tmp_path / "b").glob("t-0*")] == []
    assert read_all(broker.manager.log("t", 0)) == expected(80)


def test_a_move_waits_for_a_free_descriptor_at_any_step(
    broker: Broker,
    topics: Topics,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there, back = "b", "a"
    for step in range(1000):
        left = step

        def exhausted(*args: Any, os_open: Any = os.open, **kwargs: Any) -> int:
            nonlocal left
            left -= 1
            if left == -1:
                raise OSError(errno.EMFILE, "Too many open files")
            return int(os_open(*args, **kwargs))

        move(broker, topics, tmp_path / there)
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", exhausted)
            finish(ReplicaMoves(broker.manager, topics), tmp_path)
        assert places(tmp_path) == [there]
        assert read_all(broker.manager.log("t", 0)) == expected(80)
        there, back = back, there
        if left >= 0:
            break
    assert step > 20


def test_a_move_of_a_topic_that_is_newer_than_the_registry_is_made(
    broker: Broker, topics: Topics, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    move(broker, topics, tmp_path / "b")
    moves = ReplicaMoves(broker.manager, topics)
    with monkeypatch.context() as patch:
        patch.setattr(topics, "topics", list)
        moves.look(0)
    finish(moves, tmp_path)
    assert places(tmp_path) == ["b"]


def test_a_rename_that_fails_leaves_the_partition_where_it_was(
    broker: Broker, topics: Topics, tmp_path: Path
) -> None:
    (tmp_path / "b" / "t-0").mkdir()
    (tmp_path / "b" / "t-0" / "somebody's").touch()
    move(broker, topics, tmp_path / "b")
    finish(ReplicaMoves(broker.manager, topics), tmp_path)
    log = broker.manager.log("t", 0)
    assert not log.row.structure_version & 1
    fill(log, 80, 1)
    assert read_all(log) == expected(81)
    assert log.directory == str(tmp_path / "a" / "t-0")


def test_a_log_that_is_being_compacted_is_moved_later(
    broker: Broker, topics: Topics, tmp_path: Path
) -> None:
    moves = ReplicaMoves(broker.manager, topics)
    move(broker, topics, tmp_path / "b")
    with exclusive(str(tmp_path / "a" / "t-0")) as is_free:
        assert is_free
        moves.look(0)
        assert copies(tmp_path)
    finish(moves, tmp_path)
    assert places(tmp_path) == ["b"]


def test_a_flock_taken_of_the_old_directory_is_worth_nothing(
    broker: Broker,
    topics: Topics,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A cleaner has opened the directory; before its flock the partition moves."""

    def flock(fd: int, operation: int) -> None:
        monkeypatch.undo()
        move(broker, topics, tmp_path / "b")
        finish(ReplicaMoves(broker.manager, topics), tmp_path)
        fcntl.flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    with exclusive(str(tmp_path / "a" / "t-0")) as is_free:
        assert not is_free


def test_checkpoints_follow_so_that_deleted_records_stay_deleted(
    broker: Broker, start: Start, topics: Topics, tmp_path: Path
) -> None:
    broker.manager.log("t", 0).delete_records(33)
    with broker.directories[0].cleaner_offsets_locked() as offsets:
        offsets["t", 0] = 12
    move(broker, topics, tmp_path / "b")
    finish(ReplicaMoves(broker.manager, topics), tmp_path)
    kept = {
        name: read_offsets(str(tmp_path / "b" / name))
        for name in (
            "recovery-point-offset-checkpoint",
            "log-start-offset-checkpoint",
            "cleaner-offset-checkpoint",
        )
    }
    assert [offsets["t", 0] for offsets in kept.values()] == [80, 33, 12]
    assert broker.directories[0].cleaner_offsets() == {}
    broker.die()
    again = start(topics.again(), "a", "b")
    assert read_all(again.manager.log("t", 0)) == expected(80)[33:]
    again.stop()


def test_a_cleaner_in_another_process_finds_the_log_in_its_new_place(
    start: Start, topics: Topics, tmp_path: Path
) -> None:
    topics.create("t", **CONFIG, cleanup_policy="compact")
    broker = start(topics, "a", "b")
    for number in range(100):
        pair = (b"key %d" % (number % 3), value(number))
        broker.manager.log("t", 0).append(batch(pair), now_ms=1_000)
    theirs = LogUpkeep(another(broker, topics), topics, LogCleaner())
    assert theirs.run_cleaner(1_000) == 1
    move(broker, topics, tmp_path / "b")
    finish(ReplicaMoves(broker.manager, topics), tmp_path)
    for number in range(100, 200):
        pair = (b"key %d" % (number % 3), value(number))
        broker.manager.log("t", 0).append(batch(pair), now_ms=1_000)
    assert theirs.run_cleaner(1_000) == 1
    (after,) = broker.directories[1].cleaner_offsets().values()
    assert after > 150
    assert broker.directories[0].cleaner_offsets() == {}
    assert len(read_all(broker.manager.log("t", 0))) < 60
    theirs.shut_down()
    assert places(tmp_path) == ["b"]
    broker.manager.close()


def test_a_clean_stop_and_start_find_it_where_it_is(
    broker: Broker, start: Start, topics: Topics, tmp_path: Path
) -> None:
    move(broker, topics, tmp_path / "b")
    finish(ReplicaMoves(broker.manager, topics), tmp_path)
    fill(broker.manager.log("t", 0), 80, 5)
    broker.stop()
    known = topics.again()
    again = start(known, "a", "b")
    log = again.manager.log("t", 0)
    assert read_all(log) == expected(85)
    assert log.directory == str(tmp_path / "b" / "t-0")
    fill(log, 85, 1)
    again.stop()


def test_the_next_start_goes_on_with_a_move(
    broker: Broker, start: Start, topics: Topics, tmp_path: Path
) -> None:
    move(broker, topics, tmp_path / "b")
    (copy,) = copies(tmp_path)
    (copy / f"{0:020d}.log").write_bytes(b"a part of what was copied before")
    broker.die()
    known = topics.again()
    again = start(known, "a", "b")
    finish(ReplicaMoves(again.manager, known), tmp_path)
    assert places(tmp_path) == ["b"]
    assert read_all(again.manager.log("t", 0)) == expected(80)
    again.stop()


def test_a_directory_that_was_used_while_its_copy_was_away_wins(
    broker: Broker, start: Start, topics: Topics, tmp_path: Path
) -> None:
    """Killed between the two renames; then a start without the second directory."""
    move(broker, topics, tmp_path / "b")
    assert fork(lambda: die_between_the_renames(broker, topics)) < 0
    broker.die()
    assert places(tmp_path) == ["a", "b"]
    (tmp_path / "b").rename(tmp_path / "away")
    alone = start(known := topics.again(), "a")
    fill(alone.manager.log("t", 0), 80, 3)
    alone.stop()
    (tmp_path / "away").rename(tmp_path / "b")
    again = start(known.again(), "a", "b")
    assert read_all(again.manager.log("t", 0)) == expected(83)
    assert places(tmp_path) == ["a"]
    assert len([*(tmp_path / "b").glob("t-0.*-stray")]) == 1
    again.stop()


def test_the_moved_directory_wins_when_the_one_that_it_left_comes_back(
    broker: Broker, start: Start, topics: Topics, tmp_path: Path
) -> None:
    """Killed between the two renames; then a start without the first directory."""
    move(broker, topics, tmp_path / "b")
    assert fork(lambda: die_between_the_renames(broker, topics)) < 0
    broker.die()
    (tmp_path / "a").rename(tmp_path / "away")
    alone = start(known := topics.again(), "b")
    fill(alone.manager.log("t", 0), 80, 3)
    alone.stop()
    (tmp_path / "away").rename(tmp_path / "a")
    again = start(known.again(), "a", "b")
    assert read_all(again.manager.log("t", 0)) == expected(83)
    assert places(tmp_path) == ["b"]
    again.stop()


def test_what_another_housekeeper_wrote_of_other_partitions_is_kept(
    tmp_path: Path,
) -> None:
    directory = LogDirectory(str(tmp_path / "c"))
    directory.open()
    ids = {"t": bytes(range(16)), "other": bytes(range(1, 17))}
    other = {("other", 0): 7}
    assert fork(lambda: directory.write_checkpoints(other, other, other, ids)) == 0
    directory.take_in(("t", 0), 5, 3, ids)
    points = read_offsets(str(tmp_path / "c" / "recovery-point-offset-checkpoint"))
    starts = read_offsets(str(tmp_path / "c" / "log-start-offset-checkpoint"))
    assert (points, starts) == (
        {("other", 0): 7, ("t", 0): 5},
        {("other", 0): 7, ("t", 0): 3},
    )
    directory.close()


def test_what_the_old_program_told_is_kept_when_a_partition_is_taken_in(
    tmp_path: Path,
) -> None:
    """An upgrade tells start offsets before any file has them."""
    directory = LogDirectory(str(tmp_path / "c"))
    directory.open()
    ids = {"t": bytes(range(16)), "other": bytes(range(1, 17))}
    other = {("other", 0): 7}
    directory.write_checkpoints(other, other, other, ids)
    (tmp_path / "c" / "other-0").mkdir()
    directory.know_logs([("other", 0, 9, 20)])
    (tmp_path / "c" / "checkpoint-topic-ids").write_text("damaged")
    directory.take_in(("t", 0), 5, None, ids)
    points = read_offsets(str(tmp_path / "c" / "recovery-point-offset-checkpoint"))
    starts = read_offsets(str(tmp_path / "c" / "log-start-offset-checkpoint"))
    assert points == {("other", 0): 7, ("t", 0): 5}
    assert starts == {("other", 0): 9}
    directory.close()


def die_between_the_renames(broker: Broker, topics: Topics) -> None:
    setattr(replica_directories, "rename_away", lambda *_: children.die())  # noqa: B010
    ReplicaMoves(broker.manager, topics).look(0)


def test_tiered_topics_are_refused(
    start: Start, topics: Topics, tmp_path: Path
) -> None:
    topics.create("t", remote_storage_enable="true")
    broker = start(topics, "a", "b")
    with pytest.raises(ApiError) as refusal:
        move(broker, topics, tmp_path / "b")
    assert refusal.value.error_code == ErrorCode.INVALID_REQUEST
    broker.manager.close()


def test_an_offline_partition_is_refused(
    broker: Broker, topics: Topics, tmp_path: Path
) -> None:
    broker.manager.log("t", 0).row.status = RowStatus.OFFLINE
    with pytest.raises(ApiError) as refusal:
        move(broker, topics, tmp_path / "b")
    assert refusal.value.error_code == ErrorCode.KAFKA_STORAGE_ERROR
    assert not copies(tmp_path)


# -- kills -------------------------------------------------------------------------


def places_to_die(
    broker: Broker, topics: Topics, tmp_path: Path, wanted: int
) -> list[tuple[int, tuple[str, ...]]]:
    """Some lines of all that a move runs, and each one near its two renames."""
    moves = ReplicaMoves(broker.manager, topics)
    counts = []
    for name, files in (("b", FILES), ("a", RENAMES)):
        move(broker, topics, tmp_path / name)
        counts.append(children.lines_of(lambda: finish(moves, tmp_path), files))
    some = [(number, FILES) for number in children.deaths(counts[0], wanted, seed=1)]
    return some + [(number, RENAMES) for number in range(1, counts[1] + 1)]


def make_and_die(
    broker: Broker,
    topics: Topics,
    tmp_path: Path,
    number: int,
    files: tuple[str, ...],
) -> str:
    """Move the partition in a child that is killed; return where it is then."""

    def work() -> None:
        children.kill_at_line(number, files)
        finish(ReplicaMoves(broker.manager, topics), tmp_path)

    (here,) = places(tmp_path)
    move(broker, topics, tmp_path / ("b" if here == "a" else "a"))
    Child(work).wait()
    return "+".join(places(tmp_path))


@pytest.mark.timeout(600)
def test_a_housekeeper_may_be_killed_at_any_line(
    broker: Broker, topics: Topics, tmp_path: Path
) -> None:
    """The other processes go on; the next housekeeper finishes the move."""
    other = another(broker, topics)
    log = other.log("t", 0)
    count = 80
    seen: set[str] = set()
    for number, files in places_to_die(broker, topics, tmp_path, 40):
        seen.add(make_and_die(broker, topics, tmp_path, number, files))
        log.row.forget_sync(HOUSEKEEPER)
        fill(log, count, 2)
        count += 2
        assert read_all(log) == expected(count), number
        assert len(places(tmp_path)) == 1
        log.sync.flush()
        finish(ReplicaMoves(broker.manager, topics), tmp_path)
        assert len(places(tmp_path)) == 1
        assert read_all(broker.manager.log("t", 0)) == expected(count), number
        for gone in tmp_path.glob("*/*-delete"):
            shutil.rmtree(gone)
    assert seen == {"a", "b", "a+b"}
    other.close()


@pytest.mark.timeout(600)
def test_a_broker_may_be_killed_at_any_line_of_a_move(
    broker: Broker, start: Start, topics: Topics, tmp_path: Path
) -> None:
    """The next start finds one whole partition, and finishes the move."""
    known: Topics = topics
    count = 80
    seen: set[str] = set()
    for number, files in places_to_die(broker, topics, tmp_path, 40):
        seen.add(make_and_die(broker, known, tmp_path, number, files))
        broker.die()
        known = known.again()
        broker = start(known, "a", "b")
        log = broker.manager.log("t", 0)
        assert read_all(log) == expected(count), number
        assert len(places(tmp_path)) == 1
        fill(log, count, 1)
        count += 1
        finish(ReplicaMoves(broker.manager, known), tmp_path)
        assert len(places(tmp_path)) == 1
        assert read_all(log) == expected(count), number
        assert not [*tmp_path.glob("*/*-stray")]
        for gone in tmp_path.glob("*/*-delete"):
            shutil.rmtree(gone)
    assert seen == {"a", "b", "a+b"}
    broker.manager.close()


def test_requests_may_be_killed_at_any_line(
    broker: Broker, topics: Topics, tmp_path: Path
) -> None:
    """A handler is killed; the request is executed again."""

    def ask() -> None:
        move(broker, topics, tmp_path / "b")

    for number in range(1, 60):

        def work(number: int = number) -> None:
            children.kill_at_line(number, RENAMES)
            ask()

        was_killed = Child(work).wait() < 0
        ask()
        assert len(copies(tmp_path)) == 1
        for copy in copies(tmp_path):
            shutil.rmtree(copy)
        if not was_killed:
            break
    else:
        raise AssertionError("the request has more lines than expected")


def test_a_reader_never_takes_the_files_of_a_change_that_has_just_begun(
    broker: Broker, topics: Topics, tmp_path: Path
) -> None:
    """Odd again when the list is read: the reader waits for this change, too."""
    log = broker.manager.log("t", 0)
    view, row = log.view, log.row
    reload, looks = view._reload, []

    def begun(active_base: int) -> None:
        if not looks:
            row.structure_version += 1  # by a process that dies at once
        looks.append(row.structure_version)
        reload(active_base)

    view._reload = begun  # type: ignore[method-assign]
    row.structure_version += 2
    view.refresh(view.committed()[1])
    assert len(looks) == 2
    assert not view.structure & 1
