"""The file that tells a node's exporter what the node's groups have committed."""

from __future__ import annotations

import os
from pathlib import Path

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpbroker.coordinator import group_positions
from mpbroker.coordinator.group_positions import (
    GroupPositions,
    Position,
    read_positions,
)
from mpbroker.coordinator.timers import Timers
from mpbroker.exporter.group_lag import NodeGroupLag

FILE = "cluster-group-positions"


class Node:
    """A coordinator's offsets, and the timers that write them."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.committed: list[Position] = []
        self.timers = Timers()
        self.now_ms = 0
        GroupPositions(str(home), lambda: self.committed, self.timers).look(0)

    def wait(self, ms: int = 60_000) -> None:
        self.now_ms += ms
        self.timers.expire(self.now_ms)

    def read(self) -> list[Position]:
        return read_positions(str(self.home)).found


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_offsets_are_written_as_they_change(node: Node) -> None:
    assert node.read() == []
    node.committed = [("g", "t", 0, 5), ("g", "t", 1, 6), ("h", "t", 0, 7)]
    node.wait()
    assert node.read() == node.committed
    node.committed = [("g", "t", 1, 8)]
    node.wait()
    assert node.read() == node.committed


def test_nothing_is_written_before_the_next_look(node: Node) -> None:
    node.committed = [("g", "t", 0, 5)]
    node.wait(999)
    assert node.read() == []


def test_what_has_not_changed_is_not_written_again(node: Node) -> None:
    before = os.stat(node.home / FILE).st_ino
    node.wait()
    node.wait()
    assert os.stat(node.home / FILE).st_ino == before


def test_a_start_clears_what_a_process_before_it_has_written(tmp_path: Path) -> None:
    first = Node(tmp_path)
    first.committed = [("g", "t", 0, 5)]
    first.wait()
    assert first.read()
    assert Node(tmp_path).read() == []


def test_too_many_are_counted(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_positions, "MAX_POSITIONS", 2)
    node.committed = [("g", "t", number, 5) for number in range(7)]
    node.wait()
    assert read_positions(str(node.home)) == (node.committed[:2], 5)
    lag = NodeGroupLag(str(node.home))
    lag.catch_up()
    assert list(lag.committed()) == node.committed[:2]
    assert lag.hidden == 5


def test_a_file_that_cannot_be_written_is_tried_again(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    node.committed = [("g", "t", 0, 5)]
    os.unlink(node.home / FILE)
    os.mkdir(node.home / FILE)
    node.wait()
    node.wait()
    assert caplog.text.count("metrics show old offsets of groups") == 1
    os.rmdir(node.home / FILE)
    node.wait()
    assert node.read() == node.committed


@given(
    st.binary()
    | st.recursive(st.integers(0, 1 << 40) | st.text(), st.lists).map(msgpack.packb)
)
def test_a_damaged_file_is_as_none(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    home = tmp_path_factory.mktemp("home")
    (home / FILE).write_bytes(content)
    assert read_positions(str(home)).found == []
