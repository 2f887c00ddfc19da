"""Log directories: who owns them, where partitions are made, how they are closed."""

import errno
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from mpbroker.base.storage_errors import LogDirectoryError, LogDirectoryLockedError
from mpbroker.ipc.layout import RowStatus
from mpbroker.metadata.log_config import LogConfig
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.storage import log_manager
from mpbroker.storage.cleaning.log_upkeep import LogUpkeep
from mpbroker.storage.files.checkpoints import (
    CheckpointError,
    read_offsets,
    write_offsets,
)
from mpbroker.storage.log_manager import LogManager
from mpbroker.storage.partition_directory import (
    partition_directories,
    read_topic_id,
)
from tests.storage.batches import batch, read_all
from tests.storage.broker_rig import Start, Topics
from tests.support.children import fork


def test_a_partition_gets_kafkas_directory(
    start: Start, topics: Topics, tmp_path: Path
) -> None:
    topic = topics.create("flights")
    broker = start(topics)
    broker.manager.log("flights", 0).append(batch(b"a"), now_ms=1)
    directory = tmp_path / "data" / "flights-0"
    assert sorted(os.listdir(directory)) == [
        f"{0:020d}.index",
        f"{0:020d}.log",
        f"{0:020d}.timeindex",
        "leader-epoch-checkpoint",
        "partition.metadata",
    ]
    assert (directory / "leader-epoch-checkpoint").read_text() == "0\n1\n0 0\n"
    version, topic_id = (directory / "partition.metadata").read_text().splitlines()
    assert version == "version: 0"
    assert len(topic_id) == len("topic_id: ") + 22
    assert read_topic_id(str(directory)) == topic.topic_id
    broker.die()


def test_records_are_closed_to_other_users(
    start: Start, topics: Topics, tmp_path: Path
) -> None:
    """Also in a data directory that was there before, and is open to them."""
    topics.create("flights")
    data = tmp_path / "data"
    data.mkdir(mode=0o755)
    before = os.umask(0)
    try:
        broker = start(topics)
        broker.manager.log("flights", 0).append(batch(b"a"), now_ms=1)
        broker.manager.close()
    finally:
        os.umask(before)
    directory = data / "flights-0"
    for path in (directory, *directory.iterdir()):
        assert path.stat().st_mode & 0o007 == 0, path


def test_unknown_topics_and_partitions_are_refused(
    start: Start, topics: Topics
) -> None:
    topics.create("t")
    broker = start(topics)
    for name, partition in (("t", 1), ("t", -1), ("u", 0)):
        with pytest.raises(ApiError) as refused:
            broker.manager.log(name, partition)
        assert refused.value.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    broker.die()


def test_a_live_brokers_directory_is_refused_and_a_dead_ones_is_not(
    start: Start, topics: Topics
) -> None:
    broker = start(topics)
    with pytest.raises(LogDirectoryLockedError, match=r"log.dirs=.*data.*running"):
        start(topics)
    broker.die()
    assert fork(lambda: start(topics) and os.kill(os.getpid(), 9)) == -signal.SIGKILL
    start(topics).die()


def test_a_directory_that_cannot_be_used_is_named_in_one_line(
    start: Start, topics: Topics, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(LogDirectoryError, match=r"log.dirs=.*file.*: "):
        start(topics, "file")
    broker = start(topics, "file", "good")
    assert [directory.path for directory in broker.directories] == [
        str(tmp_path / "good")
    ]
    broker.die()


def test_new_partitions_go_to_the_directory_with_the_fewest(
    start: Start, topics: Topics, tmp_path: Path
) -> None:
    topic = topics.create("t", 6)
    broker = start(topics, "a", "b", "c")
    for partition in range(6):
        broker.manager.log(topic, partition)
    for name in "abc":
        assert len(partition_directories(str(tmp_path / name))) == 2
    broker.stop()
    # And are found again where they are.
    again = topics.again()
    broker = start(again, "c", "b", "a")
    for partition in range(6):
        broker.manager.log("t", partition)
    assert len(partition_directories(str(tmp_path / "a"))) == 2
    broker.die()


def test_a_directory_that_takes_no_partition_is_passed_over(
    start: Start,
    topics: Topics,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    topic = topics.create("t", 4)
    broker = start(topics, "a", "b")
    real = os.mkdir

    def read_only(path: str, *mode: int) -> None:
        if path.startswith(str(tmp_path / "a")):
            raise OSError(30, "Read-only file system")
        real(path, *mode)

    monkeypatch.setattr(os, "mkdir", read_only)
    for partition in range(4):
        broker.manager.log(topic, partition).append(batch(b"a"), now_ms=1)
    assert len(partition_directories(str(tmp_path / "b"))) == 4
    broker.die()


@pytest.mark.parametrize("is_made", [True, False])
def test_a_log_is_opened_though_there_is_no_descriptor_left(
    start: Start, topics: Topics, monkeypatch: pytest.MonkeyPatch, is_made: bool
) -> None:
    """The others' files are closed for it: nobody else would, and it never open."""
    topics.create("many", 3)
    broker = start(topics)
    if is_made:
        broker.manager.log("many", 2).append(batch(b"c"), now_ms=1)
        broker.manager.close()
    logs = [broker.manager.log("many", partition) for partition in range(2)]
    for log in logs:
        log.append(batch(b"a"), now_ms=1)
    real = log_manager.complete_directory

    def lacking(directory: str, topic_id: bytes) -> None:
        if any(log.view.segments.get(0)._fd >= 0 for log in logs):
            raise OSError(errno.EMFILE, "Too many open files")
        real(directory, topic_id)

    monkeypatch.setattr(log_manager, "complete_directory", lacking)
    end = broker.manager.log("many", 2).append(batch(b"d"), now_ms=1).base_offset
    assert end == (1 if is_made else 0)
    assert [log.append(batch(b"b"), now_ms=1).base_offset for log in logs] == [1, 1]
    broker.die()


def test_a_clean_stop_is_marked_and_the_mark_is_taken_at_the_next_start(
    start: Start, topics: Topics, tmp_path: Path
) -> None:
    topics.create("t")
    topics.create("untouched")
    topics.broker_epoch = 11
    marker = tmp_path / "data" / ".kafka_cleanshutdown"
    broker = start(topics)
    log = broker.manager.log("t", 0)
    for sequence in range(3):
        log.append(batch(b"a", producer=(5, 0, sequence)), now_ms=1)
    log.delete_records(1)
    broker.stop()
    # A Kafka that goes on compares the epoch with that of our registration.
    assert marker.read_text() == '{"version":0,"brokerEpoch":11}'
    points = read_offsets(str(tmp_path / "data" / "recovery-point-offset-checkpoint"))
    assert points[("t", 0)] == 3
    assert (tmp_path / "data" / "t-0" / f"{3:020d}.snapshot").exists()
    again = topics.again()
    broker = start(again)
    assert broker.directories[0].clean
    assert not marker.exists()
    log = broker.manager.log("t", 0)
    assert (log.lookup.earliest(), log.lookup.latest()) == (1, 3)
    broker.die()
    broker = start(topics.again())
    assert not broker.directories[0].clean
    assert broker.manager.log("t", 0).lookup.latest() == 3
    broker.die()


def test_a_stop_recovers_what_nobody_has_looked_at_since_a_crash(
    start: Start, topics: Topics, tmp_path: Path
) -> None:
    topics.create("t")
    broker = start(topics)
    broker.manager.log("t", 0).append(batch(b"a"), now_ms=1)
    broker.die()
    log = tmp_path / "data" / "t-0" / f"{0:020d}.log"
    size = log.stat().st_size
    with log.open("ab") as file:
        file.write(b"torn")
    start(topics.again()).stop()
    assert log.stat().st_size == size
    broker = start(topics.again())
    assert broker.directories[0].clean
    broker.die()


def test_a_partition_that_cannot_be_closed_leaves_its_directory_unmarked(
    start: Start, topics: Topics, tmp_path: Path
) -> None:
    topics.create("t", 2)
    broker = start(topics, "a", "b")
    broken, sound = (broker.manager.log("t", number) for number in range(2))
    broken.row.status = RowStatus.OFFLINE
    broker.stop()
    for log, marked in ((broken, False), (sound, True)):
        parent = Path(log.directory).parent
        assert (parent / ".kafka_cleanshutdown").exists() == marked


def test_recovery_points_are_what_was_forced_to_disk(
    start: Start, topics: Topics, tmp_path: Path
) -> None:
    topics.create("t", segment_bytes=300)
    broker = start(topics)
    log = broker.manager.log("t", 0)
    points = tmp_path / "data" / "recovery-point-offset-checkpoint"
    for _ in range(4):
        log.append(batch(b"a" * 100), now_ms=1)
    broker.upkeep.write_checkpoints()
    # Finished segments are forced; the active one is not, until somebody asks.
    assert read_offsets(str(points)) == {("t", 0): 3}
    assert log.sync.flush() == 4
    broker.upkeep.write_checkpoints()
    assert read_offsets(str(points)) == {("t", 0): 4}
    broker.die()


def test_flush_messages_and_flush_ms_force_a_log_to_disk(
    start: Start, topics: Topics
) -> None:
    topics.create("by-count", flush_messages=3)
    topics.create("by-time", flush_ms=1_000)
    broker = start(topics)
    by_count, by_time = (broker.manager.log(n, 0) for n in ("by-count", "by-time"))
    for expected in (0, 0, 3, 3):
        by_count.append(batch(b"a"), now_ms=1)
        assert by_count.row.durable_end_offset == expected
    by_time.append(batch(b"a"), now_ms=1)
    assert broker.upkeep.run_flush(10_000) == 0
    assert broker.upkeep.run_flush(10_999) == 0
    assert broker.upkeep.run_flush(11_000) == 1
    assert by_time.row.durable_end_offset == 1
    broker.die()


def test_files_to_sync_are_those_of_the_range_and_new_names_with_them(
    start: Start, topics: Topics
) -> None:
    topics.create("t", segment_bytes=300)
    broker = start(topics)
    log = broker.manager.log("t", 0)

    def names(start_offset: int, end: int) -> list[str]:
        paths = (
            os.readlink(f"/proc/self/fd/{fd}")
            for fd in log.sync.segments_to_sync(start_offset, end)
        )
        return [os.path.basename(path) for path in paths]

    for _ in range(7):
        log.append(batch(b"a" * 100), now_ms=1)
    assert names(0, 7) == [f"{base:020d}.log" for base in (0, 1, 2, 3, 4, 5, 6)] + [
        "t-0",
        "data",
    ]
    assert names(5, 6) == [f"{5:020d}.log", "t-0", "data"]
    log.view.config = LogConfig()
    log.append(batch(b"a"), now_ms=1)
    assert names(7, 8) == [f"{6:020d}.log"]
    broker.die()


def test_a_new_name_is_forced_to_disk_though_its_directory_could_not_be_opened_at_once(
    start: Start, topics: Topics, monkeypatch: pytest.MonkeyPatch
) -> None:
    topics.create("t")
    broker = start(topics)
    log = broker.manager.log("t", 0)
    log.append(batch(b"a"), now_ms=1)
    real = os.open

    def without_the_last(path: str, *arguments: Any, **more: Any) -> int:
        if path == os.path.dirname(log.directory):
            raise OSError(errno.ENFILE, "Too many open files in system")
        return real(path, *arguments, **more)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", without_the_last)
        with pytest.raises(OSError, match="Too many"):
            log.sync.segments_to_sync(0, 1)
    opened = [
        os.readlink(f"/proc/self/fd/{fd}") for fd in log.sync.segments_to_sync(0, 1)
    ]
    assert [os.path.basename(path) for path in opened] == [
        f"{0:020d}.log",
        "t-0",
        "data",
    ]
    broker.die()


def test_no_log_is_opened_before_it_has_all_that_its_transactions_wrote(
    start: Start, topics: Topics
) -> None:
    topics.create("t")
    broker = start(topics)
    restored: list[bool] = []
    early = LogManager(
        broker.directories,
        broker.manager._table,
        topics,
        is_restored=lambda: bool(restored),
    )
    for way in (early.log, early.look):
        with pytest.raises(ApiError) as refused:
            way(topics.topic("t"), 0)
        assert refused.value.error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER
    restored.append(True)
    assert early.log("t", 0).lookup.latest() == 0
    early.close()
    broker.stop()


def test_who_asks_for_offsets_of_what_nobody_has_touched_makes_nothing(
    start: Start, topics: Topics, tmp_path: Path
) -> None:
    topic = topics.create("t", 2)
    broker = start(topics, "a", "b")
    untouched = broker.manager.look(topic, 0)
    ends = (
        untouched.earliest(),
        untouched.latest(),
        untouched.last_stable_offset(),
    )
    assert ends == (0, 0, 0)
    found = untouched.max_timestamp(), untouched.offset_for_timestamp(0)
    assert found == (None, None)
    assert untouched.leader_epoch == untouched.epochs.at(0) == 0
    for name in "ab":
        assert partition_directories(str(tmp_path / name)) == []
    broker.manager.log(topic, 1).append(batch(b"a"), now_ms=1)
    assert broker.manager.look(topic, 1).latest() == 1
    broker.stop()
    # A directory that nobody has loaded is no empty log.
    broker = start(topics.again(), "a", "b")
    again = broker.manager._topics.topic("t")
    assert broker.manager.look(again, 1).latest() == 1
    broker.manager.delete_topic(again)
    with pytest.raises(ApiError) as refused:
        broker.manager.look(again, 0)
    assert refused.value.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    broker.die()


def test_who_asks_for_sizes_of_what_nobody_has_touched_makes_nothing(
    start: Start, topics: Topics, tmp_path: Path
) -> None:
    topic = topics.create("t", 3)
    broker = start(topics, "a", "b")
    manager = broker.manager
    manager.log(topic, 0)
    manager.log(topic, 1).append(batch(b"a"), now_ms=1)
    directories = {name: partition_directories(str(tmp_path / name)) for name in "ab"}
    sizes = [manager.place_and_size(topic, partition) for partition in range(3)]
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    written = os.path.getsize(f"{b}/t-1/{0:020d}.log")
    assert sizes == [(a, 0), (b, written), (a, 0)]
    for name, found in directories.items():
        assert partition_directories(str(tmp_path / name)) == found
    manager.delete_topic(topic)
    for partition in range(3):
        with pytest.raises(ApiError) as refused:
            manager.place_and_size(topic, partition)
        assert refused.value.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    broker.die()


def test_who_looks_after_what_nobody_has_touched_makes_nothing(
    start: Start, topics: Topics, tmp_path: Path
) -> None:
    topics.create("untouched", 2, cleanup_policy="compact")
    topics.create("t", 2)
    broker = start(topics)
    broker.manager.log("t", 1).append(batch(b"a"), now_ms=1)
    broker.upkeep.run_retention(1)
    broker.upkeep.run_cleaner(1)
    broker.upkeep.run_flush(1)
    broker.upkeep.take_snapshots()
    broker.upkeep.write_checkpoints()
    broker.stop()
    assert partition_directories(str(tmp_path / "data")) == ["t-1"]
    points = read_offsets(str(tmp_path / "data" / "recovery-point-offset-checkpoint"))
    assert points == {("t", 1): 1}


def test_each_use_of_a_log_and_each_deletion_is_a_step(
    start: Start, topics: Topics
) -> None:
    topic = topics.create("t", 3)
    broker = start(topics)
    steps: list[None] = []
    manager = LogManager(
        broker.directories,
        broker.manager._table,
        topics,
        step=lambda: steps.append(None),
    )
    for _ in range(2):  # whether it is opened or is open already
        for partition in range(3):
            before = len(steps)
            manager.log(topic, partition)
            assert len(steps) == before + 1
            manager.look(topic, partition)
            assert len(steps) > before + 1
    before = len(steps)
    manager.delete_topic(topic)
    assert len(steps) == before + 3
    broker.die()


def test_old_segments_are_removed_when_their_delay_has_passed(
    start: Start, topics: Topics, tmp_path: Path
) -> None:
    topics.create("t", segment_bytes=300, retention_ms=1, file_delete_delay_ms=5_000)
    broker = start(topics)
    log = broker.manager.log("t", 0)
    for _ in range(5):
        log.append(batch(b"a" * 100, timestamp=1), now_ms=1)
    assert broker.upkeep.run_retention(1_000) == 5 * 3
    directory = tmp_path / "data" / "t-0"
    assert len(list(directory.glob("*.deleted"))) == 5 * 3
    broker.upkeep.remove_deleted(5_999)
    assert list(directory.glob("*.deleted"))
    broker.upkeep.remove_deleted(6_000)
    assert not list(directory.glob("*.deleted"))
    assert log.lookup.earliest() == log.lookup.latest() == 5
    broker.die()


def test_a_new_housekeeper_removes_what_a_dead_one_left(
    start: Start, topics: Topics, tmp_path: Path
) -> None:
    topics.create("t", segment_bytes=300, retention_ms=1)
    broker = start(topics)
    for _ in range(5):
        broker.manager.log("t", 0).append(batch(b"a" * 100, timestamp=1), now_ms=1)
    broker.upkeep.run_retention(1_000)
    successor = LogUpkeep(broker.manager, topics)
    successor.remove_deleted(2_000)
    assert list((tmp_path / "data" / "t-0").glob("*.deleted"))
    successor.remove_deleted(62_000)
    assert not list((tmp_path / "data" / "t-0").glob("*.deleted"))
    broker.die()


def test_dirty_logs_are_compacted_and_how_far_is_kept(
    start: Start, topics: Topics, tmp_path: Path
) -> None:
    for name in ("a", "b"):
        topics.create(name, cleanup_policy=("compact",), segment_bytes=300)
    broker = start(topics)
    for name, count in (("a", 4), ("b", 8)):
        log = broker.manager.log(name, 0)
        for number in range(count):
            log.append(batch((b"k", b"%d" % number * 100)), now_ms=1)
    assert broker.upkeep.run_cleaner(1) == 2
    assert broker.upkeep.run_cleaner(1) == 0
    points = read_offsets(str(tmp_path / "data" / "cleaner-offset-checkpoint"))
    assert points == {("a", 0): 3, ("b", 0): 7}
    assert [value[:1] for _, value in read_all(broker.manager.log("b", 0))] == [
        b"6",
        b"7",
    ]
    broker.die()


def test_what_replaced_processes_have_left_is_on_disk_once_it_is_loaded(
    start: Start, topics: Topics, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it: the row says so, and rolls force nothing to disk."""
    topics.create("t", segment_bytes=200)
    before = start(topics)
    for _ in range(30):
        before.manager.log("t", 0).append(batch(b"x"), now_ms=1)
    before.die()
    again = topics.again()
    broker = start(again, logs=[("t", 0, 0, 30)])
    forced = set()
    force = os.fdatasync

    def note(fd: int) -> None:
        forced.add(os.fstat(fd).st_ino)
        force(fd)

    monkeypatch.setattr(os, "fdatasync", note)
    log = broker.manager.log("t", 0)
    log.view.require_online()
    assert log.row.durable_end_offset == 30
    files = list((tmp_path / "data" / "t-0").glob("*.log"))
    assert len(files) > 2
    assert {file.stat().st_ino for file in files} <= forced
    broker.die()


def test_snapshots_are_taken_of_logs_that_have_grown(
    start: Start, topics: Topics, tmp_path: Path
) -> None:
    topics.create("t")
    broker = start(topics)
    log = broker.manager.log("t", 0)
    log.append(batch(b"a"), now_ms=1)
    assert broker.upkeep.take_snapshots() == 0
    for sequence in range(5):
        log.append(batch(b"a" * 1_000_000, producer=(1, 0, sequence)), now_ms=1)
    assert broker.upkeep.take_snapshots() == 1
    assert broker.upkeep.take_snapshots() == 0
    assert (tmp_path / "data" / "t-0" / f"{6:020d}.snapshot").exists()
    broker.die()


def test_one_failing_partition_does_not_stop_the_others(
    start: Start, topics: Topics
) -> None:
    for name in ("a", "b"):
        topics.create(name, segment_bytes=300, retention_ms=1)
    broker = start(topics)
    for name in ("a", "b"):
        for _ in range(3):
            log = broker.manager.log(name, 0)
            log.append(batch(b"a" * 100, timestamp=1), now_ms=1)
    broken = broker.manager.log("a", 0)
    broken.close()
    shutil.rmtree(broken.directory)
    assert broker.upkeep.run_retention(1_000) == 9
    assert broker.manager.log("b", 0).lookup.earliest() == 3
    broker.die()


def test_checkpoints_of_other_versions_or_with_odd_lines_are_refused(
    tmp_path: Path,
) -> None:
    path = tmp_path / "c"
    write_offsets(str(path), {("t", 0): 5, ("u", 1): 6})
    assert path.read_text() == "0\n2\nt 0 5\nu 1 6\n"
    assert read_offsets(str(path)) == {("t", 0): 5, ("u", 1): 6}
    for text in ("1\n0\n", "0\n2\nt 0 5\n", "0\n1\nt 0\n", "0\n1\nt 0 x\n", "0\n"):
        path.write_text(text)
        with pytest.raises(CheckpointError, match=str(path)):
            read_offsets(str(path))
    assert read_offsets(str(tmp_path / "absent")) == {}
