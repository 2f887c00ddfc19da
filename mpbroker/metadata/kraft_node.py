"""Check that a metadata log of Apache Kafka is the log of a single node.

mpbroker goes on with such a log as a single node. If a node was one of several, the
newest records of its partitions may be on another node, and the other voters decide on
the end of its metadata log. Such a directory is refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, Final

from mpbroker.base.storage_errors import LogDirectoryError
from mpbroker.metadata.kraft_schema import KRAFT_VOTERS
from mpbroker.metadata.metadata_image import MetadataImage, MetadataRecord

QUORUM_STATE: Final = "quorum-state"

_FIX: Final = (
    "mpbroker is a single node. Reassign all partitions to this node, remove the other"
    " brokers and voters, and start again; or name an empty directory in log.dirs, and"
    " copy the topics from broker to broker, such as with MirrorMaker 2"
)


class SingleNodeCheck:
    """Checks, while a metadata log is replayed, that no other node has replicas.

    Args:
        directory: the directory `__cluster_metadata-0`.
        node_id: this broker's node.id.
    """

    def __init__(self, directory: str, node_id: int) -> None:
        self._directory = directory
        self._node_id = node_id
        self._elsewhere: dict[str, dict[int, list[int]]] = {}

    def replay(self, record: MetadataRecord) -> None:
        """Note whether a record places a replica of a partition on another node."""
        kind = record["type"]
        if kind == "RemoveTopicRecord":
            self._elsewhere.pop(record["topicId"], None)
        elif kind in ("PartitionRecord", "PartitionChangeRecord"):
            replicas = record.get("replicas")
            if replicas is None:
                return
            partitions = self._elsewhere.setdefault(record["topicId"], {})
            partitions.pop(record["partitionId"], None)
            if replicas != [self._node_id]:
                partitions[record["partitionId"]] = replicas
            if not partitions:
                del self._elsewhere[record["topicId"]]

    def finish(
        self, image: MetadataImage, quorum: Mapping[int, Mapping[str, Any]]
    ) -> None:
        """Check the whole log, after its last record was replayed.

        Args:
            image: the state that the records give.
            quorum: see MetadataBatches.quorum.

        Raises:
            LogDirectoryError: another node is a voter, or has replicas.
        """
        voters = self._voters(quorum)
        if voters and voters != [self._node_id]:
            raise LogDirectoryError(
                f"log.dirs: {self._directory} is of a controller quorum with the voters"
                f" {_listed(voters)}, and node.id is {self._node_id}; {_FIX}"
            )
        for topic in image.topics.values():
            for partition, replicas in self._elsewhere.get(topic.id_text, {}).items():
                raise LogDirectoryError(
                    f"log.dirs: {self._directory}: {topic.name}-{partition} has the"
                    f" replicas {_listed(replicas)}, and node.id is {self._node_id};"
                    f" {_FIX}"
                )

    def _voters(self, quorum: Mapping[int, Mapping[str, Any]]) -> list[int]:
        """Return the voters' ids, from the log or from the file `quorum-state`."""
        if KRAFT_VOTERS in quorum:
            return [voter["voterId"] for voter in quorum[KRAFT_VOTERS]["voters"]]
        path = os.path.join(self._directory, QUORUM_STATE)
        try:
            with open(path, encoding="utf-8") as file:
                state = json.load(file)
            voters = state.get("currentVoters") or ()
            return [int(voter["voterId"]) for voter in voters]
        except FileNotFoundError:
            return []
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise LogDirectoryError(
                f"log.dirs: cannot read {path}: {error!r}"
            ) from None


def _listed(ids: list[int]) -> str:
    return ", ".join(map(str, ids)) or "none"
