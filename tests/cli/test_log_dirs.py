"""`mpbroker log-dirs`: an operator gives up a directory that is gone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from mpbroker.cli.exit_codes import ExitCode
from mpbroker.metadata.meta_properties import open_data_directories
from mpbroker.storage.used_directories import lost_directories, note_use


@pytest.fixture
def home(tmp_path: Path) -> str:
    home, *others = (str(tmp_path / name) for name in ("home", "b", "c"))
    open_data_directories([home, *others], 1)
    for other in others:
        note_use(home, other)
    shutil.rmtree(others[0])
    return home


def test_directories_are_listed_with_their_state(mpbroker, home, tmp_path):
    found = mpbroker("log-dirs", "list", "--data-dir", home, "--format", "json")
    assert [(each["path"], each["is_there"]) for each in json.loads(found.out)] == [
        (str(tmp_path / "b"), False),
        (str(tmp_path / "c"), True),
    ]
    assert b"NOT THERE" in mpbroker("log-dirs", "list", "--data-dir", home).out


def test_a_lost_directory_is_given_up_after_a_question(mpbroker, home, tmp_path):
    other = str(tmp_path / "b")
    command = ("log-dirs", "forget", "--data-dir", home, other)
    present = [home, str(tmp_path / "c")]
    assert mpbroker(*command, stdin=b"n\n").code != ExitCode.OK
    assert lost_directories(present)
    result = mpbroker(*command, "--yes")
    assert result.code == ExitCode.OK
    assert f"{other} with directory.id=" in result.out.decode()
    assert not lost_directories(present)


def test_a_directory_that_is_there_and_a_wrong_home_are_refused(
    mpbroker, home, tmp_path
):
    forget = ("log-dirs", "forget", "--yes", "--data-dir")
    result = mpbroker(*forget, home, str(tmp_path / "c"))
    assert result.code == ExitCode.ERROR and "is there" in result.err
    result = mpbroker(*forget, str(tmp_path), str(tmp_path / "b"))
    assert result.code == ExitCode.ERROR and "no meta.properties" in result.err
