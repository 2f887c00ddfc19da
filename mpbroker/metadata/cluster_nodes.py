"""The live nodes of a cluster, in a small file that all processes of a node read.

The process that talks to the database writes it when something has changed, beside the
metadata log. All others look at it when a client asks for the nodes, or for the node
that coordinates a group. A second file has the node's own epoch, for the coordinator.
A third one has the partitions of live nodes that are offline.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from mpbroker.base.java_hash import java_hash
from mpbroker.base.named_tuple import NamedTuple
from mpbroker.metadata.metadata_log import metadata_log_path

# A group belongs to one of so many shards. The schema of the database has their rows.
GROUP_SHARD_COUNT: Final = 50
_FILE_NAME: Final = "cluster-nodes.json"
_EPOCH_FILE_NAME: Final = "cluster-node-epoch.json"
# A file of its own: a version of mpbroker that knows of no such partitions reads the
# file of live nodes, too, in an upgrade.
_OFFLINE_FILE_NAME: Final = "cluster-offline-partitions.json"
_ADOPTED_FILE_NAME: Final = "groups-are-in-database"
# Hosts in listeners by which no other machine can reach a node.
_NO_HOSTS: Final = ("", "0.0.0.0", "[::]")


class LiveNode(NamedTuple):
    """A live node of a cluster: its lease in the database has not expired.

    Attributes:
        node_id: the setting node.id of the node.
        rack: the setting broker.rack of the node; None: it is not set.
        listeners: NAME://HOST:PORT of each listener, as other machines can use it.
        shards: the shards of groups that it coordinates.
    """

    node_id: int
    rack: str | None
    listeners: Sequence[str]
    shards: Sequence[int] = ()


class NodeEpoch(NamedTuple):
    """A node in one of its epochs: each join of the cluster begins another one."""

    node_id: int
    epoch: int


class NodeAddress(NamedTuple):
    """The address of a node, for the clients of one listener."""

    node_id: int
    host: str
    port: int
    rack: str | None


def cluster_nodes_path(log_dir: str) -> str:
    """Return the path of the file of live nodes in a node's first data directory."""
    return os.path.join(os.path.dirname(metadata_log_path(log_dir)), _FILE_NAME)


def offline_partitions_path(log_dir: str) -> str:
    """Return the path of the file with the live nodes' partitions that are offline."""
    return os.path.join(os.path.dirname(metadata_log_path(log_dir)), _OFFLINE_FILE_NAME)


def write_nodes(path: str, nodes: Sequence[LiveNode]) -> None:
    """Replace the file; raises OSError."""
    _replace(
        path,
        [[*each[:2], list(each.listeners), list(each.shards)] for each in nodes],
    )


def _replace(path: str, content: object) -> None:
    with open(path + ".tmp", "w", encoding="utf-8") as file:
        file.write(json.dumps(content))
    # Readers see one content or the other. Nothing is lost with it in a power cut.
    os.replace(path + ".tmp", path)


def read_nodes(path: str) -> list[LiveNode]:
    """Return the live nodes in the file; none if it is absent or damaged."""
    try:
        with open(path, encoding="utf-8") as file:
            return [LiveNode(*each) for each in json.load(file)]
    except (OSError, ValueError):
        return []


def write_offline(path: str, partitions: Mapping[str, Sequence[int]]) -> None:
    """Replace the file of offline partitions; raises OSError.

    Args:
        path: the path of the file.
        partitions: the partition numbers, by the topic's id in hexadecimal digits.
    """
    _replace(path, dict(partitions))


def _read_offline(path: str) -> Mapping[bytes, Collection[int]]:
    """Return the offline partitions by topic id; none if the file is absent."""
    try:
        with open(path, encoding="utf-8") as file:
            return {
                bytes.fromhex(topic_id): frozenset(numbers)
                for topic_id, numbers in json.load(file).items()
            }
    except (OSError, ValueError):
        return {}


def node_epoch_path(log_dir: str) -> str:
    """Return the path of the file with the node's epoch."""
    return os.path.join(os.path.dirname(metadata_log_path(log_dir)), _EPOCH_FILE_NAME)


def adopted_groups_path(log_dir: str) -> str:
    """Return the path of the mark that this broker's groups are in the database."""
    return os.path.join(os.path.dirname(metadata_log_path(log_dir)), _ADOPTED_FILE_NAME)


def write_node_epoch(path: str, node: NodeEpoch) -> None:
    """Tell the node's other processes its epoch; raises OSError."""
    _replace(path, list(node))


def read_node_epoch(path: str) -> NodeEpoch | None:
    """Return the epoch that was written last; None if there is no such file.

    It may have ended: in a directory that was copied, or that another start has left.
    The database refuses it then.
    """
    try:
        with open(path, encoding="utf-8") as file:
            node_id, epoch = json.load(file)
            return NodeEpoch(int(node_id), int(epoch))
    except (OSError, ValueError, TypeError):
        return None


class ClusterNodes:
    """What is to be told to clients about the cluster's other nodes.

    Args:
        log_dir: the node's first data directory, which has the files.
        node_id: the id of this node, which is left out.
        listener_names: the names of this node's listeners. A client gets the addresses
            of the other nodes' listeners that have the name of its own listener.
    """

    def __init__(
        self, log_dir: str, node_id: int, listener_names: Sequence[str]
    ) -> None:
        self._path = cluster_nodes_path(log_dir)
        self._offline_path = offline_partitions_path(log_dir)
        self._node_id = node_id
        self._names = listener_names
        self._seen: tuple[int, int] | None = None
        self._offline_seen: tuple[int, int] | None = None
        self._offline: Mapping[bytes, Collection[int]] = {}
        self._by_name: Mapping[str, Sequence[NodeAddress]] = {}
        self._coordinators: Mapping[int, int] = {}

    def others(self, listener: int) -> Sequence[NodeAddress]:
        """Return the addresses of the other nodes for the clients of a listener.

        Args:
            listener: the index of the listener in ``listener_names``.
        """
        self._look()
        return self._by_name.get(self._names[listener], ())

    def coordinator(self, group_id: str) -> int | None:
        """Return the live node that coordinates a group; None: there is none now."""
        self._look()
        return self._coordinators.get(java_hash(group_id) % GROUP_SHARD_COUNT)

    def offline(self) -> Mapping[bytes, Collection[int]]:
        """Return the partitions of live nodes that have no leader now, by topic id."""
        seen = _version_of(self._offline_path)
        if seen is not None and seen != self._offline_seen:
            self._offline = _read_offline(self._offline_path)
            self._offline_seen = seen
        return self._offline

    def _look(self) -> None:
        seen = _version_of(self._path)
        if seen is None or seen == self._seen:
            return
        by_name: dict[str, list[NodeAddress]] = {}
        coordinators: dict[int, int] = {}
        for node in read_nodes(self._path):
            coordinators.update(dict.fromkeys(node.shards, node.node_id))
            if node.node_id == self._node_id:
                continue
            for text in node.listeners:
                name, _, address = text.partition("://")
                host, _, port = address.rpartition(":")
                if host in _NO_HOSTS or not port.isdigit() or port == "0":
                    continue
                place = host.strip("[]"), int(port)
                by_name.setdefault(name, []).append(
                    NodeAddress(node.node_id, *place, node.rack)
                )
        self._by_name, self._coordinators, self._seen = by_name, coordinators, seen


def _version_of(path: str) -> tuple[int, int] | None:
    """Return a value that changes with each content of a file; None: there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None  # this node has just begun
    return found.st_ino, found.st_mtime_ns
