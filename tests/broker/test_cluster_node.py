"""Brokers with cluster.database.url: each has its node id and its lease."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import uuid

import psutil
import pytest

from mpbroker.cluster.database import ClusterDatabase
from mpbroker.cluster.membership import Node, read_nodes
from mpbroker.cluster.migrations import create_cluster
from mpbroker.cluster.object_writer import object_path
from mpbroker.metadata.meta_properties import read_meta_properties
from tests.cluster.conftest import (  # noqa: F401 - fixtures
    cluster_template,
    empty_url,
    execute,
    shared_server,
)
from tests.support.broker import Broker, BrokerFailedError
from tests.support.children import wait_until

ABANDON = (
    "INSERT INTO mpbroker.object (key, node, state, changed)"
    " VALUES ($1, 1, 'd', now() - interval '1 hour')"
)
CLUSTER = "mYhw9BQMSnKFQAzjYFnoWg"


@pytest.fixture
def store(tmp_path):
    path = tmp_path / "store"
    path.mkdir()
    return f"file://{path}"


@pytest.fixture
def settings(empty_url, store):  # noqa: F811
    """The settings of a node, of a cluster that is new."""
    make_cluster(empty_url, store)
    return {
        "cluster.database.url": empty_url,
        "diskless.storage.url": store,
        "log.initial.task.delay.ms": "0",
        "num.io.threads": "1",
    }


def make_cluster(url: str, store: str) -> None:
    async def make() -> None:
        async with ClusterDatabase(url) as database:
            await create_cluster(database, CLUSTER, store)

    asyncio.run(make())


def read_nodes_of(url: str) -> list[Node]:
    async def ask() -> list[Node]:
        async with ClusterDatabase(url) as database:
            return await read_nodes(database)

    return asyncio.run(ask())


def nodes(settings) -> list[Node]:
    return read_nodes_of(settings["cluster.database.url"])


def keepers(broker) -> list[int]:
    """Return the processes that keep a broker's lease."""
    found = []
    for each in psutil.Process(broker.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # a zombie is one, too
            if "cluster-node" in " ".join(each.cmdline()):
                found.append(each.pid)
    return found


def test_a_broker_has_its_place_as_long_as_it_runs(tmp_path, settings):
    data = tmp_path / "data"
    # What a writer has left behind, and another node has given up.
    dead = uuid.uuid4()
    execute(settings["cluster.database.url"], ABANDON, dead)
    left = tmp_path / "store" / object_path(dead)
    left.parent.mkdir()
    left.write_bytes(b"records")
    with Broker(data, {**settings, "node.id": "7", "broker.rack": "a"}) as broker:
        (keeper,) = wait_until(lambda: keepers(broker))
        told = [f"PLAINTEXT://{broker.bootstrap}"]
        wait_until(lambda: nodes(settings)[0].listeners == told)
        (node,) = nodes(settings)
        assert (node.id, node.rack, node.is_live) == (7, "a", True)
        assert read_meta_properties(str(data)).cluster_id == CLUSTER
        # The lease outlives its keeper, and so does the broker.
        os.kill(keeper, signal.SIGKILL)
        wait_until(lambda: nodes(settings)[0].epoch > node.epoch)
        assert keepers(broker) != [keeper]
        # Renewed, and not only claimed at the start.
        end = "UPDATE mpbroker.node SET lease_until = clock_timestamp()"
        execute(settings["cluster.database.url"], end)
        wait_until(lambda: nodes(settings)[0].is_live)
        command = [sys.executable, "-m", "mpbroker", "cluster", "status"]
        url = settings["cluster.database.url"]
        said = subprocess.run(
            [*command, "--database", url, "--format", "json"],
            capture_output=True,
            check=True,
        )
        (shown,) = json.loads(said.stdout)["nodes"]
        assert shown["is_live"] and shown["listeners"] == told
        wait_until(lambda: not left.exists())
        other = Broker(tmp_path / "other", {**settings, "node.id": "7"})
        with pytest.raises(BrokerFailedError, match=r"node 7 is running .*set another"):
            other.start()
    # It has left: others need not wait for the end of its lease.
    assert [node.is_live for node in nodes(settings)] == [False]


def test_the_library_is_named_where_it_is_missing(tmp_path, settings):
    (tmp_path / "asyncpg.py").write_text(
        "raise ModuleNotFoundError('x', name='asyncpg')\n"
    )
    broker = Broker(tmp_path / "data", settings, environ={"PYTHONPATH": str(tmp_path)})
    with pytest.raises(BrokerFailedError, match=r"pip install 'mpbroker-server\[clus"):
        broker.start()
