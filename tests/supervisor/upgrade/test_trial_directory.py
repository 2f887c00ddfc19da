"""Where a newcomer tries itself goes when its maker dies, and not before."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mpbroker.cli.ctl.ctl_connection import ControlClient
from mpbroker.supervisor.upgrade.trial_directory import (
    TrialDirectory,
    remove_left_directories,
)
from tests.broker.load import children, kill, states
from tests.support.broker import Broker
from tests.support.children import fork, wait_until
from tests.support.footprint import open_files

NAME = "mpbroker-trial-*"


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "temporary"
    directory.mkdir()
    monkeypatch.setenv("TMPDIR", os.fspath(directory))
    return directory


def test_one_whose_maker_has_died_is_removed_and_a_living_ones_is_not(temporary):
    def make() -> None:
        Path(TrialDirectory().path, "file").touch()

    assert fork(make) == 0
    (left,) = temporary.glob(NAME)
    ours = TrialDirectory()
    remove_left_directories()
    assert list(temporary.glob(NAME)) == [Path(ours.path)]
    assert not left.exists()
    ours.remove()
    assert not list(temporary.glob(NAME))


def test_what_only_has_such_a_name_is_left_alone(temporary, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (temporary / "mpbroker-trial-link").symlink_to(elsewhere)
    (temporary / "mpbroker-trial-file").touch()
    before = set(temporary.iterdir())
    remove_left_directories()
    assert set(temporary.iterdir()) == before
    assert elsewhere.exists()


def test_one_that_is_taken_for_left_before_it_is_locked_is_made_again(
    temporary, monkeypatch
):
    mkdir: Callable[..., None] = os.mkdir
    paths = []

    def made_and_removed(path: str, mode: int) -> None:
        mkdir(path, mode)
        paths.append(path)
        if len(paths) < 3:
            remove_left_directories()

    monkeypatch.setattr(os, "mkdir", made_and_removed)
    ours = TrialDirectory()
    assert list(temporary.iterdir()) == [Path(ours.path)] == [Path(paths[2])]
    ours.remove()


def begin_endless_trial(broker: Broker, temporary: Path) -> Path:
    with ControlClient(os.fspath(broker.data_dir / "control.sock"), 30.0) as client:
        client.request("upgrade", argv=[str(shutil.which("sleep")), "1000"])
    (found,) = temporary.glob(NAME)
    return found


def test_a_broker_removes_what_another_left_that_was_killed_in_a_trial(
    make_broker: Any, temporary: Path
) -> None:
    broker = make_broker()
    left = begin_endless_trial(broker, temporary)
    broker.kill()
    assert left.exists()
    broker.start()
    wait_until(lambda: not left.exists())


def test_who_is_forked_during_a_trial_holds_nothing_of_it(
    make_broker: Any, temporary: Path
) -> None:
    broker = make_broker()
    before = children(broker)["handler", 0]
    held = len(list(open_files(before)))
    trial = begin_endless_trial(broker, temporary)
    kill(broker, "handler")
    wait_until(lambda: children(broker)["handler", 0] != before)
    wait_until(lambda: {child["state"] for child in states(broker)} == {"READY"})
    files = list(open_files(children(broker)["handler", 0]))
    assert os.fspath(trial) not in files
    assert len(files) == held
    assert trial.exists()
    broker.stop()
    assert not trial.exists()
