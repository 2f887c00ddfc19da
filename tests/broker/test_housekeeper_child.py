"""A process beside the housekeeper, as it is forked."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace
from typing import Any

from mpbroker.broker.housekeeper_child import HousekeeperChild
from mpbroker.ipc import pulse
from mpbroker.ipc.layout import (
    CONTROL_WORDS,
    HOUSEKEEPER_PULSE,
    PULSE_STEPS,
    pulse_words,
)
from mpbroker.ipc.segment import Segment
from tests.support.footprint import open_files


class Idle(HousekeeperChild):
    """Says that it has begun, and waits."""

    NAME = "an idle child"
    TITLE = "idle"
    PASSING = ()

    def __init__(self, directory: str, told: int) -> None:
        parts: Any = SimpleNamespace(directories=[SimpleNamespace(path=directory)])
        super().__init__(parts)
        self._told = told

    @property
    def pid(self) -> int:
        return self._pid

    def _serve(self) -> None:
        pulse.step()
        os.write(self._told, b"x")
        signal.pause()


def test_a_child_keeps_no_file_of_the_data_directories(tmp_path):
    """A segment that the housekeeper deletes would keep its space on the disk."""
    data, other = tmp_path / "data", tmp_path / "other"
    data.mkdir()
    with (data / "segment.log").open("wb"), other.open("wb"):
        reader, writer = os.pipe()
        child = Idle(str(data), writer)
        child.look(0)
        try:
            assert os.read(reader, 1) == b"x"
            files = open_files(child.pid)
            assert str(other) in files
            assert not [path for path in files if path.startswith(f"{data}/")]
        finally:
            child.stop()
            os.close(reader)
            os.close(writer)


def test_the_steps_of_a_child_are_not_those_of_the_housekeeper(tmp_path):
    control = Segment.create("control", CONTROL_WORDS * 8)
    pulse.show_in_header(control, HOUSEKEEPER_PULSE)
    reader, writer = os.pipe()
    child = Idle(str(tmp_path), writer)
    child.look(0)
    try:
        assert os.read(reader, 1) == b"x"
        assert control.words[pulse_words(HOUSEKEEPER_PULSE) + PULSE_STEPS] == 0
    finally:
        pulse.hide()
        child.stop()
        os.close(reader)
        os.close(writer)
