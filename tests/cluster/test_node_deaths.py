"""A node's writer and reader, killed at any step: what is sent again is there once."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from mpbroker.cluster.database import ClusterDatabase
from mpbroker.cluster.sequencer import Sequencer
from tests.cluster.dying_node import PATIENCE_S, POINTS, SENT, open_log
from tests.storage.batches import read_all

EXPECTED = [(number, b"%d" % number) for number in range(len(SENT))]


class Site:
    """A database and a directory, in which nodes run one after the other."""

    def __init__(self, url: str, directory: Path) -> None:
        self.url = url
        self.directory = directory
        self.topic = uuid.uuid4()
        (directory / "store").mkdir()
        asyncio.run(self._create())

    async def _create(self) -> None:
        async with ClusterDatabase(self.url) as database:
            await Sequencer(database).create_partitions(self.topic, 1)

    def run_node(self, point: str = "") -> tuple[int, list[str]]:
        """Run a node to its end; return its exit code, and what was acknowledged."""
        command = [sys.executable, "-m", "tests.cluster.dying_node", self.url]
        done = subprocess.run(
            [*command, self.directory, str(self.topic), point],
            stdout=subprocess.PIPE,
            text=True,
            timeout=2 * PATIENCE_S,
            cwd=Path(__file__).parents[2],
        )
        return done.returncode, done.stdout.splitlines()


@pytest.mark.parametrize("point", POINTS)
def test_a_killed_node_s_successor_goes_on(cluster_url, tmp_path, point):
    site = Site(cluster_url, tmp_path)
    code, acknowledged = site.run_node(point)
    assert code == -signal.SIGKILL
    # The client sends everything again, and gets the same offsets.
    assert acknowledged == [f"{offset} 0" for offset in range(len(acknowledged))]
    assert site.run_node() == (0, ["0 0", "1 0", "2 0"])
    log = open_log(tmp_path)
    log.view.require_online()
    assert read_all(log) == EXPECTED
    log.close()
