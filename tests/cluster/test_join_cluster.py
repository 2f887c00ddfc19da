"""What a node needs at its start, and what it is told if that is not there."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path

import pytest

from mpbroker.base.errors import MpbrokerError
from mpbroker.cluster.database import ClusterDatabase
from mpbroker.cluster.join_cluster import NodeSettings, join, main, node_directory
from mpbroker.cluster.live_nodes import SEEN_AFTER_S, live_nodes
from mpbroker.cluster.membership import Membership, NodeDescription, read_nodes
from mpbroker.cluster.shared_metadata_log import SharedMetadataLog
from mpbroker.metadata.cluster_nodes import cluster_nodes_path
from mpbroker.metadata.cluster_nodes import read_nodes as read_live_nodes
from mpbroker.metadata.kraft_records import encode_record
from mpbroker.metadata.meta_properties import (
    MetaProperties,
    read_meta_properties,
    uuid_to_text,
    write_meta_properties,
)
from mpbroker.metadata.metadata_image import topic_record
from mpbroker.metadata.metadata_log import recover_metadata_log
from tests.cluster.conftest import execute
from tests.support.metadata import PlainCell

CLUSTER = "here"  # of the template, and its store


@pytest.fixture
def settings(cluster_url: str, tmp_path: Path) -> NodeSettings:
    """The settings of a node with two new directories."""
    (tmp_path / "store").mkdir()
    store = f"file://{tmp_path}/store"
    execute(cluster_url, "UPDATE mpbroker.cluster SET storage_url = $1", store)
    directories = [str(tmp_path / name) for name in "ab"]
    return NodeSettings(cluster_url, store, directories, 7, "rack", ["P://h:1"])


def test_new_directories_become_the_cluster_s(settings):
    asyncio.run(join(settings))
    first, second = map(read_meta_properties, settings.log_dirs)
    assert first.cluster_id == second.cluster_id == CLUSTER
    assert first.node_id == second.node_id == 7
    # And again: it is the same node, with another epoch.
    asyncio.run(join(settings))

    async def ask():
        async with ClusterDatabase(settings.database) as database:
            return await read_nodes(database)

    (node,) = asyncio.run(ask())
    assert (node.id, node.rack, node.listeners) == (7, "rack", ["P://h:1"])
    assert node.is_live and node.epoch == 2


def test_a_second_node_of_one_id_is_refused_and_may_do_what_it_is_told(
    settings, tmp_path
):
    asyncio.run(join(settings))
    other = settings._replace(log_dirs=[str(tmp_path / "c")])
    with pytest.raises(MpbrokerError, match=r"node 7 is running .*set another node.id"):
        asyncio.run(join(other))
    asyncio.run(join(other._replace(node_id=8)))


def test_all_nodes_know_each_other_before_a_new_one_serves(
    settings, tmp_path, monkeypatch
):
    """Also of those that start at the same moment."""
    waits = []

    async def others_look(seconds):
        waits.append(seconds)
        async with ClusterDatabase(settings.database) as database:
            seen = [each.node_id for each in await live_nodes(database)]
            assert seen == [7, 8]
            third = NodeDescription(uuid.uuid4(), ["P://h:3"], "1", 9)
            await Membership(database, third).join()

    monkeypatch.setattr(asyncio, "sleep", others_look)
    asyncio.run(join(settings))
    assert not waits  # it was the only one
    directory = str(tmp_path / "c")
    other = settings._replace(log_dirs=[directory], node_id=8, listeners=["P://h:2"])
    asyncio.run(join(other))
    assert waits == [SEEN_AFTER_S]
    assert [
        (node.node_id, node.listeners)
        for node in read_live_nodes(cluster_nodes_path(directory))
    ] == [(7, ["P://h:1"]), (8, ["P://h:2"]), (9, ["P://h:3"])]


def test_a_node_that_was_away_gets_the_changes_to_its_metadata(settings):
    assert asyncio.run(join(settings)) == b""
    append_metadata(settings.database, [encode_record(topic_record("t", bytes(16)))])
    # Not written by the process that joins, which may outlive a start that is killed.
    assert asyncio.run(join(settings)) != b""
    news = asyncio.run(join(settings))
    directory = settings.log_dirs[0]
    image = recover_metadata_log(directory, PlainCell(), 0, news=news)
    assert list(image.topics) == ["t"]
    assert asyncio.run(join(settings)) == b""


def test_a_node_that_is_too_old_for_the_metadata_is_refused(settings):
    asyncio.run(join(settings))
    append_metadata(settings.database, [b"\x01\x7f\x7f"])
    with pytest.raises(MpbrokerError, match=r"newer mpbroker.*upgrade this one"):
        asyncio.run(join(settings))


def append_metadata(url: str, records: list[bytes]) -> None:
    """Change the metadata, as another node does."""

    async def append() -> None:
        async with ClusterDatabase(url) as database:
            log = SharedMetadataLog(database)
            assert await log.append(len(await log.read(0)), records)

    asyncio.run(append())


@pytest.mark.parametrize(
    ("old", "says"),
    [
        (
            MetaProperties("other", 7, ""),
            f"holds cluster {CLUSTER}, and the directories",
        ),
        (MetaProperties(CLUSTER, 8, ""), "belongs to node.id=8, but node.id is 7"),
        (MetaProperties(CLUSTER, 7, ""), "has no directory.id"),
    ],
)
def test_directories_of_another_broker_are_refused(settings, old, says):
    write_meta_properties(settings.log_dirs[0], old)
    with pytest.raises(MpbrokerError, match=says):
        asyncio.run(join(settings))


@pytest.mark.parametrize(
    ("statement", "change", "says"),
    [
        ("", {"storage": "s3://other"}, "cluster's objects are in file:.*, not in s3"),
        ("DELETE FROM mpbroker.migration WHERE version > 5", {}, "cluster migrate'"),
        ("UPDATE mpbroker.cluster SET usable_from = 99", {}, "upgrade mpbroker"),
        (
            "UPDATE mpbroker.cluster SET storage_url = 'file:///nowhere/at/all'",
            {"storage": "file:///nowhere/at/all"},
            "cannot be used",
        ),
    ],
)
def test_what_does_not_fit_is_told(settings, statement, change, says):
    if statement:
        execute(settings.database, statement)
    with pytest.raises(MpbrokerError, match=says):
        asyncio.run(join(settings._replace(**change)))
    assert not Path(settings.log_dirs[0]).exists()


def test_an_empty_database_is_told(settings, empty_url, capsys):
    import orjson

    given = settings._replace(database=empty_url)._asdict()
    assert main(orjson.dumps(given)) == 1
    said = capsys.readouterr().err
    assert said.startswith("cluster.database.url: ")
    assert "run 'mpbroker cluster init'" in said


def test_a_node_is_known_by_its_first_directory(tmp_path):
    directory = uuid.uuid4()
    text = uuid_to_text(directory.bytes)
    write_meta_properties(str(tmp_path), MetaProperties(CLUSTER, 1, text))
    assert node_directory([str(tmp_path), "/other"]) == directory
