"""Describe the partitions of topics for Metadata, and keep the descriptions.

One node leads all partitions, so a description changes only when a topic gets more
partitions or another epoch after a restart. Topics with equal epochs share one list.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from mpbroker.metadata.topics import Topic
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages.metadata import MetadataResponsePartition
from mpbroker.storage.files.leader_epochs import UNDEFINED

_MAX_TOPICS: Final = 20_000


class DescribedPartitions:
    """The descriptions that one process keeps, of up to 20,000 topics.

    Args:
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

    def _alike(self, epochs: tuple[int, ...]) -> list[MetadataResponsePartition]:
        """Return the descriptions of partitions with these epochs, shared by topics."""
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
