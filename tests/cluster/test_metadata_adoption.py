"""A node's first copy of the cluster's metadata, and what its broker brings along."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import uuid
from pathlib import Path

import pytest

from mpbroker.cluster import metadata_adoption
from mpbroker.cluster.database import ClusterDatabase
from mpbroker.cluster.errors import ClusterError
from mpbroker.cluster.metadata_adoption import adopt_metadata
from mpbroker.cluster.shared_metadata_log import SharedMetadataLog
from mpbroker.metadata.metadata_image import first_records
from mpbroker.metadata.metadata_log import is_copy, metadata_log_path
from tests.cluster.conftest import execute
from tests.support.children import Child, kill_at_line, lines_of
from tests.support.metadata import start

NODE = 1
FILES = (metadata_adoption.__file__,)
BEGIN_ANEW = (
    "WITH gone AS (DELETE FROM mpbroker.metadata_record)"
    " UPDATE mpbroker.metadata_head SET end_offset = 0"
)


def adopt(
    url: str, log_dir: Path, directory: int = 7, node: int = NODE, **options: bool
) -> None:
    """Do as the start of a node does."""

    async def call() -> None:
        async with ClusterDatabase(url) as database:
            await adopt_metadata(
                SharedMetadataLog(database),
                str(log_dir),
                uuid.UUID(int=directory),
                node,
                **{"is_member": True, **options},
            )

    asyncio.run(call())


def broker_of_its_own(log_dir: Path) -> None:
    """Make the log of a broker that has been in no cluster."""
    log_dir.mkdir(exist_ok=True)
    before = start(log_dir, broker_id=NODE)
    before.create_topic("orders", 3, {"retention.ms": "1000"})
    before.create_topic("gone", 1)
    before.delete_topic("gone")
    before.alter_broker_config("", lambda _: {"log.retention.ms": "5000"})
    before.allocate_producer_id()


def state(log_dir: Path) -> list:
    """Return what a log adds up to."""
    return list(start(log_dir, broker_id=NODE).image.records())


def test_the_first_nodes_agree_on_how_the_log_begins(cluster_url, tmp_path):
    for number, name in enumerate("ab"):
        (tmp_path / name).mkdir()
        adopt(cluster_url, tmp_path / name, number, number, is_member=False)
        assert is_copy(tmp_path / name)
    assert state(tmp_path / "a") == state(tmp_path / "b") == [first_records()]


def test_the_first_node_brings_its_topics_and_settings(cluster_url, tmp_path):
    broker_of_its_own(tmp_path)
    own = state(tmp_path)
    adopt(cluster_url, tmp_path)
    assert state(tmp_path) == own
    # The next node has them, too, and they stay where they are.
    other = tmp_path / "other"
    adopt(cluster_url, other, 8, 2, is_member=False)
    assert state(other) == own
    image = start(other, broker_id=2).image
    assert image.topics["orders"].leader == NODE
    # A second time, nothing is done: the copy is followed from now on.
    execute(cluster_url, BEGIN_ANEW)
    adopt(cluster_url, tmp_path)
    assert state(tmp_path) == own


def test_a_second_node_with_topics_of_its_own_is_refused_unchanged(
    cluster_url, tmp_path
):
    adopt(cluster_url, tmp_path / "first", 8, 2, is_member=False)
    broker_of_its_own(tmp_path / "second")
    own = state(tmp_path / "second")
    with pytest.raises(ClusterError, match=r"1 topic\(s\) \(orders\) of its own.*mirr"):
        adopt(cluster_url, tmp_path / "second")
    assert not is_copy(tmp_path / "second")
    assert state(tmp_path / "second") == own


def test_a_directory_that_was_restored_gets_the_cluster_s_present(
    cluster_url, tmp_path
):
    broker_of_its_own(tmp_path / "first")
    shutil.copytree(tmp_path / "first", tmp_path / "restored")
    adopt(cluster_url, tmp_path / "first")
    adopt(cluster_url, tmp_path / "restored")
    assert is_copy(tmp_path / "restored")
    assert state(tmp_path / "restored") == state(tmp_path / "first")


def test_a_copy_that_was_removed_is_made_anew(cluster_url, tmp_path):
    broker_of_its_own(tmp_path)
    adopt(cluster_url, tmp_path)
    before = state(tmp_path)
    shutil.rmtree(os.path.dirname(metadata_log_path(str(tmp_path))))
    adopt(cluster_url, tmp_path)
    assert state(tmp_path) == before


def test_a_copy_that_a_refused_node_left_is_made_anew(cluster_url, tmp_path):
    adopt(cluster_url, tmp_path, is_member=False)
    left = state(tmp_path)
    execute(cluster_url, BEGIN_ANEW)  # another cluster
    broker_of_its_own(tmp_path / "other")
    adopt(cluster_url, tmp_path / "other", 8)
    adopt(cluster_url, tmp_path, is_member=False)
    assert state(tmp_path) == state(tmp_path / "other") != left


def test_a_node_that_is_killed_while_it_brings_its_topics_goes_on(
    cluster_url, tmp_path
):
    broker_of_its_own(tmp_path / "counted")
    lines = lines_of(lambda: adopt(cluster_url, tmp_path / "counted"), FILES)
    assert lines > 30
    for number in range(1, lines, 8):
        execute(cluster_url, BEGIN_ANEW)
        log_dir = tmp_path / str(number)
        broker_of_its_own(log_dir)
        own = state(log_dir)

        def die(log_dir: Path = log_dir, number: int = number) -> None:
            kill_at_line(number, FILES)
            adopt(cluster_url, log_dir)

        assert Child(die).wait() == -signal.SIGKILL
        adopt(cluster_url, log_dir)
        assert is_copy(log_dir)
        assert state(log_dir) == own
        adopt(cluster_url, tmp_path / f"{number}-other", 8, 2, is_member=False)
        assert state(tmp_path / f"{number}-other") == own
