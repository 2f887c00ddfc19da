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
    LostDirectories,
    NotForgottenError,
    UsedDirectory,
    forget,
    look_at_start,
    lost_directories,
    may_lack_partitions,
    note_use,
    refresh,
    use_noted,
    used_directories,
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
    assert other in told and before in told and "mpbroker log-dirs forget" in told
    # As an operator is told to do.
    assert forget(home, other) == UsedDirectory(before, other, False)
    assert not may_lack_partitions(paths)


# -- directories that are given up -----------------------------------------------------


def test_a_directory_is_given_up_by_its_path_or_its_id(
    paths: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    home, other, third = paths
    note_use(home, other)
    note_use(home, third)
    ids = id_of(other), id_of(third)
    shutil.rmtree(other)
    shutil.rmtree(third)
    are_lost = LostDirectories([home])
    assert are_lost()
    forget(home, ids[0])
    assert are_lost()
    forget(home, f"{third}/")
    assert not are_lost()
    assert used_directories(home) == []
    refresh([home])
    assert len(caplog.messages) == 2
    for told, path, id_ in zip(caplog.messages, (other, third), ids, strict=True):
        assert path in told and id_ in told
    caplog.clear()
    look_at_start([home], [home])
    refresh([home])
    assert caplog.messages == []
    assert not may_lack_partitions([home])


def test_what_cannot_be_given_up_is_refused(paths: list[str]) -> None:
    home, other, _ = paths
    note_use(home, other)
    before = (Path(home) / LOG_DIRECTORIES_FILE).read_bytes()
    with pytest.raises(NotForgottenError, match=r"is there, with directory\.id="):
        forget(home, other)
    for unknown in ("/nowhere", home, "", "~"):
        with pytest.raises(NotForgottenError, match=f"these are, .*: {other}"):
            forget(home, unknown)
    assert (Path(home) / LOG_DIRECTORIES_FILE).read_bytes() == before
    Path(other).rename(f"{other}2")
    forget(home, other)
    with pytest.raises(NotForgottenError, match=r"these are, .*: none"):
        forget(home, other)


def test_one_of_two_directories_of_one_place_is_given_up_by_its_id(
    paths: list[str],
) -> None:
    home, other, _ = paths
    ids = []
    for _ in range(2):
        note_use(home, other)
        ids.append(id_of(other))
        shutil.rmtree(other)
        open_data_directories(paths, 1)
    with pytest.raises(NotForgottenError, match="name one by its directory"):
        forget(home, other)
    forget(home, ids[0])
    assert [*lost_directories(paths)] == ids[1:]


def test_a_directory_that_comes_back_has_no_say_in_what_has_begun_anew(
    paths: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    home, other, _ = paths
    for name in ("anew-0", "only-here-0"):
        use(other, name)
    refresh(paths)
    key = id_of(other)
    Path(other).rename(f"{other}2")
    forget(home, other)
    use(home, "anew-0")
    Path(f"{other}2").rename(other)
    look_at_start(paths, paths)
    assert (Path(other) / "only-here-0").is_dir()
    assert (Path(home) / "anew-0").is_dir()
    (stray,) = Path(other).glob("anew-0*")
    assert stray.name.endswith("-stray")
    assert any("anew-0" in told and stray.name in told for told in caplog.messages)
    assert used_directories(home) == [UsedDirectory(key, other, True)]
    look_at_start(paths, paths)
    assert (Path(other) / "only-here-0").is_dir()


def test_whoever_gives_up_a_directory_may_be_killed_at_any_line(
    paths: list[str],
) -> None:
    home, other, _ = paths
    files = ("mpbroker/storage/used_directories.py",)
    note_use(home, other)
    lost = {id_of(other): other}
    shutil.rmtree(other)
    file = Path(home) / LOG_DIRECTORIES_FILE
    before = file.read_bytes()
    lines = children.lines_of(lambda: forget(home, other), files)
    assert lost_directories([home]) == {}
    for number in range(1, lines + 1):
        file.write_bytes(before)

        def work(number: int = number) -> None:
            children.kill_at_line(number, files)
            forget(home, other)

        Child(work).wait()
        assert lost_directories([home]) in ({}, lost)


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
    broker.manager.lacks_directory = LostDirectories(paths)
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
    assert refused(broker.manager, known) == ErrorCode.NOT_LEADER_OR_FOLLOWER
    fill(broker.manager.log(known.create("new"), 0), 0, 1)
    broker.stop()
    known = known.again()
    broker = started(start, known, [home, other])
    assert read_all(broker.manager.log("t", 0)) == expected(1)
    broker.stop()


def test_a_partition_of_a_directory_that_is_given_up_begins_anew(
    start: Start, topics: Topics, paths: list[str]
) -> None:
    """In a broker that runs, too."""
    home, other, _ = paths
    topics.create("t")
    for number in range(3):
        use(home, f"full-{number}")
    broker = started(start, topics, [home, other])
    fill(broker.manager.log("t", 0), 0, 1)
    broker.die()
    Path(other).rename(f"{other}2")
    known = topics.again()
    broker = started(start, known, [home])
    assert refused(broker.manager, known) == ErrorCode.NOT_LEADER_OR_FOLLOWER
    forget(home, other)
    assert read_all(broker.manager.log("t", 0)) == []
    fill(broker.manager.log("t", 0), 0, 2)
    assert read_all(broker.manager.log("t", 0)) == expected(2)
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
