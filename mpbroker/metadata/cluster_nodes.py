"""The live nodes of a cluster, in a small file that all processes of a node read.

The process that talks to the database writes it when something has changed, beside the
metadata log. All others look at it when a client asks for the nodes, or for the node
that coordinates a group. A second file has the node's own epoch, for the coordinator.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Final

from mpbroker.base.java_hash import java_hash
from mpbroker.base.named_tuple import NamedTuple
from mpbroker.metadata.metadata_log import metadata_log_path

# A group belongs to one of so many shards. The schema of the database has their rows.
GROUP_SHARD_COUNT: Final = 50
_FILE_NAME: Final = "cluster-nodes.json"
_EPOCH_FILE_NAME: Final = "cluster-node-epoch.json"
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
    """The addresses of the cluster's other nodes, for responses to clients.

    Args:
        path: the path of the file of live nodes.
        node_id: the id of this node, which is left out.
        listener_names: the names of this node's listeners. A client gets the addresses
            of the other nodes' listeners that have the name of its own listener.
    """

    def __init__(self, path: str, node_id: int, listener_names: Sequence[str]) -> None:
        self._path = path
        self._node_id = node_id
        self._names = listener_names
        self._seen: tuple[int, int] | None = None
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

    def _look(self) -> None:
        try:
            found = os.stat(self._path)
        except OSError:
            return  # this node has just begun
        seen = found.st_ino, found.st_mtime_ns
        if seen == self._seen:
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
