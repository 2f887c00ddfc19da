"""Log directories without room are told once when it begins, and once when it ends."""

from __future__ import annotations

import errno
import logging
import os

import pytest

from mpbroker.ipc.layout import HEADER, HEADER_DIRECTORIES_FULL
from mpbroker.storage.full_directories import (
    FullDirectories,
    full_directories,
    has_room,
)

HEADER_WORDS = 64


@pytest.fixture
def words() -> memoryview:
    return memoryview(bytearray((HEADER + HEADER_WORDS) * 8)).cast("Q")


def refuse(fd: int, offset: int, size: int) -> None:
    raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))


def test_appends_that_fail_are_told_once_and_the_room_after_them_once(
    words, tmp_path, caplog
):
    caplog.set_level(logging.WARNING)
    path = str(tmp_path)
    handler, housekeeper = (FullDirectories(words, ["/none", path]) for _ in range(2))
    for now_ms in range(0, 60_000, 1000):
        for _ in range(50):
            assert handler.note(f"{path}/topic-0")
        housekeeper.look(now_ms)
        assert full_directories(words, ["/none", path]) == [path]
    assert [each.levelname for each in caplog.records] == ["ERROR"]
    housekeeper.look(60_000)  # it may be that producers wait before they try again
    assert full_directories(words, ["/none", path]) == [path]
    housekeeper.look(63_000)
    housekeeper.look(64_000)
    assert full_directories(words, ["/none", path]) == []
    assert [each.levelname for each in caplog.records] == ["ERROR", "WARNING"]
    assert "has room again" in caplog.text


def test_a_new_housekeeper_goes_on_where_a_killed_one_was(words, tmp_path, caplog):
    path = str(tmp_path)
    first = FullDirectories(words, [path])
    first.note(f"{path}/topic-0")
    first.look(1000)
    caplog.clear()
    second = FullDirectories(words, [path])
    second.look(2000)
    assert full_directories(words, [path]) == [path]
    second.look(6000)
    assert not words[HEADER + HEADER_DIRECTORIES_FULL]
    assert len(caplog.records) == 1


def test_a_directory_that_is_none_of_the_log_directories_is_not_noted(words):
    assert not FullDirectories(words, ["/data"]).note("/elsewhere/topic-0")


def test_a_quota_that_is_used_up_is_no_room(tmp_path):
    assert has_room(str(tmp_path))
    assert not has_room(str(tmp_path), refuse)
    assert not has_room(str(tmp_path / "gone"))
    assert os.listdir(tmp_path) == []
