"""A log directory that is taken away takes its partitions with it, and says so."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mpbroker.metadata.meta_properties import (
    open_data_directories,
    read_meta_properties,
)
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.storage.cleaning.replica_moves import ReplicaMoves
from mpbroker.storage.files import checkpoints
from mpbroker.storage.files.checkpoints import checkpoints_locked
from mpbroker.storage.files.log_files import LOG_DIRECTORIES_FILE
from mpbroker.storage.log_manager import LogManager
from mpbroker.storage.used_directories import (
    look_at_start,
    lost_directories,
    may_lack_partitions,
    note_use,
    refresh,
    use_noted,
)
from tests.storage.batches import read_all
from tests.storage.broker_rig import Broker, Start, Topics
from tests.storage.test_replica_moves import expected, fill, finish, move
from tests.support import children
from tests.support.children import Child


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    """Three log directories with ids, of which the first is the home."""
    made = [str(tmp_path / name) for name in ("home", "a disk", "c")]
    open_data_directories(made, 1)
    return made


def use(path: str, name: str = "t-0") -> None:
    (Path(path) / name).mkdir()


def id_of(path: str) -> str:
    found = read_meta_properties(path)
    assert found is not None
    return found.directory_id


def test_one_directory_needs_no_file(paths: list[str]) -> None:
    use(paths[0])
    look_at_start(paths[:1], paths[:1])
    refresh(paths[:1])
    assert not (Path(paths[0]) / LOG_DIRECTORIES_FILE).exists()
    assert not may_lack_partitions(paths[:1])


def test_a_directory_is_lost_if_it_had_partitions(paths: list[str]) -> None:
    home, other, empty = paths
    use(home)
    use(other)
    refresh(paths)
    assert lost_directories(paths) == {}
    assert lost_directories([home]) == {id_of(other): other}
    assert may_lack_partitions([home]) and not may_lack_partitions([home, other])
    # Its own place does not matter, and what it has lost is gone.
    moved = f"{other}2"
    Path(other).rename(moved)
    assert lost_directories([home, moved, empty]) == {}
    refresh([home, moved, empty])
    assert lost_directories([home]) == {id_of(moved): moved}
    shutil.rmtree(f"{moved}/t-0")
    refresh([home, moved, empty])
    assert lost_directories([home]) == {}


def test_an_empty_disk_in_the_place_of_another_is_told_from_it(
    paths: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    home, other, _ = paths
    note_use(home, other)
    before = id_of(other)
    shutil.rmtree(other)
    open_data_directories(paths, 1)
    look_at_start(paths, paths)
    assert lost_directories(paths) == {before: other}
    (told,) = caplog.messages
    assert other in told and before in told and f"{home}/{LOG_DIRECTORIES_FILE}" in told
    # As an operator is told to do.
    file = Path(home) / LOG_DIRECTORIES_FILE
    kept = [line for line in file.read_text().splitlines() if before not in line]
    file.write_text("\n".join(kept))
    assert not may_lack_partitions(paths)


def test_a_disk_that_has_failed_stays_in_the_file(
    paths: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    home, other, _ = paths
    use(other)
    refresh(paths)
    (Path(other) / "meta.properties").unlink()
    (Path(other) / "meta.properties").mkdir()  # it cannot be read
    refresh(paths)
    assert other in lost_directories(paths).values()
    # It is in log.dirs, and the start has said that it cannot be used.
    look_at_start([home], paths)
    assert not caplog.messages


def test_what_cannot_be_known_is_not_believed(
    paths: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    home = paths[0]
    file = Path(home) / LOG_DIRECTORIES_FILE
    file.mkdir()
    assert may_lack_partitions(paths)
    file.rmdir()
    file.write_text("0\n1\nid-without-path\n")
    assert lost_directories(paths) == {}
    assert "malformed line 'id-without-path'" in caplog.text


def started(start: Start, topics: Topics, paths: list[str]) -> Broker:
    """Start a broker as ProcessParts does."""
    broker = start(topics, *(Path(path).name for path in paths))
    look_at_start(paths, paths)
    broker.manager.lacks_directory = may_lack_partitions(paths)
    return broker


def refused(manager: LogManager, topics: Topics) -> ErrorCode:
    topic = topics.topic("t")
    assert topic is not None
    with pytest.raises(ApiError) as raised:
        manager.log(topic, 0)
    return raised.value.error_code


@pytest.mark.parametrize("comes_by", ["creation", "move"])
def test_a_partition_of_a_lost_directory_is_refused_at_once(
    start: Start, topics: Topics, paths: list[str], comes_by: str
) -> None:
    """Nothing but the first record is written before the power goes."""
    home, other, _ = paths
    topics.create("t")
    if comes_by == "creation":
        for number in range(3):
            use(home, f"full-{number}")
    broker = started(start, topics, [home, other])
    fill(broker.manager.log("t", 0), 0, 1)
    if comes_by == "move":
        move(broker, topics, Path(other))
        finish(ReplicaMoves(broker.manager, topics), Path(home).parent)
    assert (Path(other) / "t-0").is_dir()
    broker.die()
    known = topics.again()
    broker = started(start, known, [home])
    assert refused(broker.manager, known) == ErrorCode.KAFKA_STORAGE_ERROR
    fill(broker.manager.log(known.create("new"), 0), 0, 1)
    broker.stop()
    known = known.again()
    broker = started(start, known, [home, other])
    assert read_all(broker.manager.log("t", 0)) == expected(1)
    broker.stop()


def test_a_directory_that_was_emptied_may_go(
    start: Start, topics: Topics, paths: list[str]
) -> None:
    home, other, _ = paths
    topics.create("t")
    use(other)
    broker = started(start, topics, [home, other])
    move(broker, topics, Path(home))
    finish(ReplicaMoves(broker.manager, topics), Path(home).parent)
    broker.stop()
    known = topics.again()
    broker = started(start, known, [home])
    fill(broker.manager.log("t", 0), 0, 1)
    broker.stop()


def test_a_writer_may_be_killed_at_any_line(paths: list[str]) -> None:
    home, other, empty = paths
    files = ("mpbroker/storage/used_directories.py",)
    note_use(home, other)
    before = lost_directories([home])
    lines = children.lines_of(lambda: note_use(home, empty), files)
    after = lost_directories([home])
    assert len(after) == 2
    for number in range(1, lines + 1):
        refresh(paths)
        note_use(home, other)
        assert lost_directories([home]) == before

        def work(number: int = number) -> None:
            children.kill_at_line(number, files)
            note_use(home, empty)

        Child(work).wait()
        assert lost_directories([home]) in (before, after)
        note_use(home, empty)
        assert lost_directories([home]) == after


def test_a_lock_that_is_held_for_too_long_is_not_waited_for(paths, monkeypatch):
    """A stopped housekeeper had it; a handler waited with the requests of all."""
    monkeypatch.setattr(checkpoints, "LOCK_PATIENCE_S", 0.0)
    with checkpoints_locked(paths[0]):
        with pytest.raises(BlockingIOError), checkpoints_locked(paths[0]):
            pytest.fail("two have the lock")
        with use_noted(paths[0], paths[1]):
            use(paths[1])  # the partition is made all the same
    with checkpoints_locked(paths[0]):
        pass
