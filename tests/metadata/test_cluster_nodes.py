"""The files by which a node's processes know the cluster."""

from __future__ import annotations

import os

import pytest

from mpbroker.base.java_hash import java_hash
from mpbroker.metadata.cluster_nodes import (
    GROUP_SHARD_COUNT,
    ClusterNodes,
    LiveNode,
    NodeEpoch,
    cluster_nodes_path,
    node_epoch_path,
    offline_partitions_path,
    read_node_epoch,
    read_nodes,
    write_node_epoch,
    write_nodes,
    write_offline,
)

SHARD = java_hash("team") % GROUP_SHARD_COUNT


@pytest.fixture
def path(tmp_path):
    made = cluster_nodes_path(str(tmp_path))
    os.mkdir(os.path.dirname(made))
    return made


def test_the_nodes_are_read_as_they_were_written(path):
    assert read_nodes(path) == []
    nodes = [
        LiveNode(1, "a", ["PLAINTEXT://one:9092"], [1, 2]),
        LiveNode(2, None, [], []),
    ]
    write_nodes(path, nodes)
    assert read_nodes(path) == nodes


def test_a_group_is_coordinated_by_the_node_with_its_shard(path, tmp_path):
    nodes = ClusterNodes(str(tmp_path), 1, ["PLAINTEXT"])
    assert nodes.coordinator("team") is None
    write_nodes(path, [LiveNode(1, None, [], [SHARD]), LiveNode(2, None, [])])
    assert nodes.coordinator("team") == 1
    write_nodes(path, [LiveNode(1, None, []), LiveNode(2, None, [], [SHARD])])
    assert nodes.coordinator("team") == 2
    write_nodes(path, [LiveNode(1, None, [], [(SHARD + 1) % GROUP_SHARD_COUNT])])
    assert nodes.coordinator("team") is None


def test_offline_partitions_are_read_whenever_they_were_written(path, tmp_path):
    one, other = b"1" * 16, b"2" * 16
    nodes = ClusterNodes(str(tmp_path), 1, ["PLAINTEXT"])
    assert not nodes.offline()
    place = offline_partitions_path(str(tmp_path))
    write_offline(place, {one.hex(): [0, 2]})
    assert nodes.offline() == {one: {0, 2}}
    write_offline(place, {other.hex(): [1]})
    assert nodes.offline() == {other: {1}}


def test_the_epoch_is_read_as_it_was_written(path, tmp_path):
    place = node_epoch_path(str(tmp_path))
    assert read_node_epoch(place) is None
    write_node_epoch(place, NodeEpoch(7, 1234))
    assert read_node_epoch(place) == NodeEpoch(7, 1234)


@pytest.mark.parametrize("text", ["", "{", "7", "[1]", '["a", 1]', "[1, null]"])
def test_an_epoch_that_cannot_be_read_is_none(path, tmp_path, text):
    place = node_epoch_path(str(tmp_path))
    with open(place, "w") as file:
        file.write(text)
    assert read_node_epoch(place) is None
