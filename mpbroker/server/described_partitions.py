"""Describe the partitions of topics for Metadata, and keep the descriptions.

One node leads all partitions of a topic. If this node leads them, their descriptions
change only when the topic gets more partitions, or another epoch after a restart.
Topics with equal epochs share one list.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from mpbroker.metadata.topics import Topic
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages.metadata import MetadataResponsePartition
from mpbroker.storage.files.leader_epochs import UNDEFINED

NO_LEADER: Final = -1
_MAX_TOPICS: Final = 20_000


def partitions_elsewhere(
    topic: Topic, *, is_live: bool
) -> list[MetadataResponsePartition]:
    """Return the descriptions of partitions that another node of the cluster has.

    They have no leader epoch, since only that node knows it.

    Args:
        topic: the topic.
        is_live: whether that node is live. If not, the partitions have no leader and
            the error LEADER_NOT_AVAILABLE.
    """
    place = [topic.leader]
    return [
        MetadataResponsePartition(
            error_code=ErrorCode.NONE if is_live else ErrorCode.LEADER_NOT_AVAILABLE,
            partition_index=index,
            leader_id=topic.leader if is_live else NO_LEADER,
            leader_epoch=UNDEFINED,
            replica_nodes=place,
            isr_nodes=place,
            offline_replicas=[] if is_live else place,
        )
        for index in range(len(topic.partitions))
    ]


class DescribedPartitions:
    """Keeps the descriptions of the partitions of up to 20,000 topics.

    Args:
        node_id: this node's id, which leads all these partitions.
        leader_epoch: returns the leader epoch of a partition of a topic; UNDEFINED:
            it cannot be read now.
    """

    def __init__(self, node_id: int, leader_epoch: Callable[[Topic, int], int]) -> None:
        self._node_id = node_id
        self._leader_epoch = leader_epoch
        self._by_epochs: dict[tuple[int, ...], list[MetadataResponsePartition]] = {}
        self._by_topic: dict[bytes, list[MetadataResponsePartition]] = {}

    def partitions(self, topic: Topic) -> list[MetadataResponsePartition]:
        """Return the descriptions of a topic's partitions; callers must not edit them.

        A description without a leader epoch is not kept, so the epoch is read again.
        """
        known = self._by_topic.get(topic.topic_id)
        if known is None or len(known) != len(topic.partitions):
            epochs = tuple(
                self._leader_epoch(topic, index)
                for index in range(len(topic.partitions))
            )
            known = self._alike(epochs)
            if UNDEFINED not in epochs:
                if len(self._by_topic) >= _MAX_TOPICS:
                    self._by_topic.clear()
                    self._by_epochs.clear()
                self._by_topic[topic.topic_id] = known
        return known

    def are_kept(self, topic: Topic) -> bool:
        """Return whether the descriptions of all of a topic's partitions are kept.

        If not, one of them may lack its leader epoch.
        """
        known = self._by_topic.get(topic.topic_id)
        return known is not None and len(known) == len(topic.partitions)

    def _alike(self, epochs: tuple[int, ...]) -> list[MetadataResponsePartition]:
        """Return partitions' descriptions with these leader epochs, kept or new.

        Topics with equal epochs share one list.
        """
        known = self._by_epochs.get(epochs)
        if known is None:
            node = [self._node_id]
            known = self._by_epochs[epochs] = [
                MetadataResponsePartition(
                    error_code=ErrorCode.NONE,
                    partition_index=index,
                    leader_id=self._node_id,
                    leader_epoch=epoch,
                    replica_nodes=node,
                    isr_nodes=node,
                )
                for index, epoch in enumerate(epochs)
            ]
        return known
