"""Describe the partitions of topics for Metadata, and keep the descriptions.

One node leads all partitions of a topic. If this node leads them, their descriptions
change only when the topic gets more partitions, another epoch after a restart, or when
partitions go offline or come back. Topics with equal epochs share one list.
"""

from __future__ import annotations

from typing import Final, Protocol

from mpbroker.metadata.topics import Topic
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages.metadata import MetadataResponsePartition
from mpbroker.storage.files.leader_epochs import UNDEFINED

NO_LEADER: Final = -1
_MAX_TOPICS: Final = 20_000
# Stands for the leader epoch of a partition that is offline.
_OFFLINE: Final = -2


def described_partition(
    index: int, place: list[int], epoch: int, *, is_live: bool
) -> MetadataResponsePartition:
    """Return a partition's description.

    Args:
        index: the partition number.
        place: the id of the one node that has the partition.
        epoch: the leader epoch.
        is_live: whether that node can serve the partition. If not, it has no leader.
    """
    return MetadataResponsePartition(
        error_code=ErrorCode.NONE if is_live else ErrorCode.LEADER_NOT_AVAILABLE,
        partition_index=index,
        leader_id=place[0] if is_live else NO_LEADER,
        leader_epoch=epoch if is_live else UNDEFINED,
        replica_nodes=place,
        isr_nodes=place if is_live else [],
        offline_replicas=[] if is_live else place,
    )


class Partitions(Protocol):
    """Tells what is described of this node's partitions, such as the LogManager."""

    def offline_version(self) -> object:
        """Return a value that changes when other partitions are offline than before."""

    def is_offline(self, topic: Topic, partition: int, /) -> bool:
        """Return whether a partition is offline."""

    def leader_epoch(self, topic: Topic, partition: int, /) -> int:
        """Return a partition's leader epoch; UNDEFINED: it cannot be read now."""


class DescribedPartitions:
    """Keeps the descriptions of the partitions of up to 20,000 topics.

    Args:
        node_id: this node's id, which leads all these partitions that are not offline.
        logs: tells which are offline, and the leader epochs of the others.
    """

    def __init__(self, node_id: int, logs: Partitions) -> None:
        self._node_id = node_id
        self._logs = logs
        self._offline_version: object = None
        self._by_epochs: dict[tuple[int, ...], list[MetadataResponsePartition]] = {}
        self._by_topic: dict[bytes, list[MetadataResponsePartition]] = {}
        self._with_offline: set[bytes] = set()  # the ids of topics

    def partitions(self, topic: Topic) -> list[MetadataResponsePartition]:
        """Return the descriptions of a topic's partitions; callers must not edit them.

        A description without a leader epoch is not kept, so the epoch is read again. A
        partition that is offline has no leader, the error LEADER_NOT_AVAILABLE, and no
        leader epoch: its file cannot be read.
        """
        version = self._logs.offline_version()
        if version != self._offline_version:
            self._forget()
            self._offline_version = version
        known = self._by_topic.get(topic.topic_id)
        if known is None or len(known) != len(topic.partitions):
            epochs = tuple(
                self._epoch(topic, index) for index in range(len(topic.partitions))
            )
            known = self._alike(epochs)
            if UNDEFINED not in epochs:
                if len(self._by_topic) >= _MAX_TOPICS:
                    self._forget()
                self._by_topic[topic.topic_id] = known
                if _OFFLINE in epochs:
                    self._with_offline.add(topic.topic_id)
        return known

    def may_be_repeated(self, topic: Topic) -> bool:
        """Return whether the descriptions of a topic hold until something changes.

        If not, a partition may lack its leader epoch, or is offline.
        """
        known = self._by_topic.get(topic.topic_id)
        return (
            known is not None
            and len(known) == len(topic.partitions)
            and topic.topic_id not in self._with_offline
        )

    def _epoch(self, topic: Topic, index: int) -> int:
        if self._logs.is_offline(topic, index):
            return _OFFLINE
        return self._logs.leader_epoch(topic, index)

    def _forget(self) -> None:
        self._by_topic.clear()
        self._by_epochs.clear()
        self._with_offline.clear()

    def _alike(self, epochs: tuple[int, ...]) -> list[MetadataResponsePartition]:
        """Return partitions' descriptions with these leader epochs, kept or new.

        Topics with equal epochs share one list.
        """
        known = self._by_epochs.get(epochs)
        if known is None:
            node = [self._node_id]
            known = self._by_epochs[epochs] = [
                described_partition(index, node, epoch, is_live=epoch != _OFFLINE)
                for index, epoch in enumerate(epochs)
            ]
        return known
