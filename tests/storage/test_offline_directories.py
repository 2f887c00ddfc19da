"""Status, readiness and metrics know which log directories are offline."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mpbroker.ipc.layout import HEADER, HEADER_DIRECTORIES_OFFLINE
from mpbroker.metadata.meta_properties import open_data_directories
from mpbroker.storage.log_directory import LogDirectory
from mpbroker.storage.offline_directories import (
    OfflineDirectories,
    not_there_at_start,
    offline_directories,
)
from mpbroker.storage.used_directories import forget, note_use
from tests.support.dead_disk import kill_disk, revive_disk


@pytest.fixture
def words() -> memoryview:
    return memoryview(bytearray(1024)).cast("q")


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    made = [str(tmp_path / name) for name in ("home", "b", "c")]
    open_data_directories(made, 1)
    return made


def test_a_disk_that_fails_is_told_once_and_so_is_its_return(
    words: memoryview, paths: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    state = {"log_dirs": paths}
    directories = [*map(LogDirectory, paths)]
    for housekeeper in (OfflineDirectories(words, directories) for _ in range(2)):
        housekeeper.look(1)
        assert offline_directories(words, state) == []
        kill_disk(Path(paths[1]))
        housekeeper.look(2)
        OfflineDirectories(words, directories).look(3)  # it was killed meanwhile
        assert offline_directories(words, state) == [paths[1]]
        revive_disk(Path(paths[1]))
        housekeeper.look(4)
        housekeeper.look(5)
        assert offline_directories(words, state) == []
        offline, back = caplog.messages
        assert f"{paths[1]} is offline" in offline
        assert f"{paths[1]} can be read again" in back
        caplog.clear()
    assert not words[HEADER + HEADER_DIRECTORIES_OFFLINE]


def test_what_was_not_there_at_the_start_is_offline_until_it_is_given_up(
    words: memoryview, paths: list[str]
) -> None:
    home, other, unusable = paths
    note_use(home, other)
    shutil.rmtree(other)
    state = {"log_dirs": [home], **not_there_at_start([home, unusable], [home])}
    assert offline_directories(words, state) == [unusable, other]
    forget(home, other)
    assert offline_directories(words, state) == [unusable]


def test_an_empty_disk_in_the_place_of_another_is_there_and_the_other_is_not(
    words: memoryview, paths: list[str]
) -> None:
    home, other, _ = paths
    note_use(home, other)
    shutil.rmtree(other)
    open_data_directories(paths, 1)
    state = {"log_dirs": paths, **not_there_at_start(paths, paths)}
    assert offline_directories(words, state) == [other]
    forget(home, other)
    assert offline_directories(words, state) == []


def test_an_older_state_tells_of_none(words: memoryview) -> None:
    assert offline_directories(words, {}) == []
