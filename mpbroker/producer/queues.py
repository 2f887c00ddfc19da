"""The queues of batches, one for a partition; `RecordAccumulator` has their lock."""

from __future__ import annotations

from collections import deque
from typing import Final

from mpbroker.client.metadata import NO_NODE, Snapshot
from mpbroker.producer.batch import ProducerBatch
from mpbroker.producer.sticky import StickyPartitioner
from mpbroker.protocol.records.batch_header import BATCH_HEADER_SIZE

# How the estimated compression ratio follows that of sealed batches: it rises fast,
# because brokers refuse batches that are too large, and falls slowly. Source: KIP-126.
_RATIO_UP: Final = 0.05
_RATIO_DOWN: Final = 0.005
_RATIO_MARGIN: Final = 1.05
_LEAST_RATIO: Final = 0.05


class PartitionQueue:
    """The batches of one partition.

    Attributes:
        open: the last batch, while it takes more records; else None.
        transaction: the number of the transaction that ``open`` belongs to.
        is_muted: whether no batch may be drained now.
        leader: the leader's node id by ``snapshot``; see `follow`.
        leader_epoch: the leader's epoch by ``snapshot``.
    """

    __slots__ = (
        "batches",
        "is_muted",
        "leader",
        "leader_epoch",
        "open",
        "partition",
        "snapshot",
        "topic",
        "transaction",
    )

    def __init__(self, topic: str, partition: int) -> None:
        self.topic = topic
        self.partition = partition
        self.batches: deque[ProducerBatch] = deque()
        self.open: ProducerBatch | None = None
        self.transaction = 0
        self.is_muted = False
        self.snapshot: Snapshot | None = None
        self.leader = NO_NODE
        self.leader_epoch = -1

    def follow(self, snapshot: Snapshot) -> int:
        """Return the node id of the partition's leader, by the newest metadata."""
        if self.snapshot is not snapshot:
            self.leader = snapshot.leader(self.topic, self.partition)
            self.leader_epoch = snapshot.leader_epoch(self.topic, self.partition)
            self.snapshot = snapshot
        return self.leader


class TopicQueues:
    """The batch queues of a topic's partitions, and the one for records without keys.

    Attributes:
        current: the queue that records without keys go to now.
        ratio: the estimated size of a compressed batch, divided by its size before.
    """

    __slots__ = ("current", "name", "queues", "ratio", "sticky")

    def __init__(self, name: str, sticky: StickyPartitioner) -> None:
        self.name = name
        self.queues: list[PartitionQueue] = []
        self.sticky = sticky
        self.current: PartitionQueue | None = None
        self.ratio = 1.0

    def queue(self, partition: int) -> PartitionQueue:
        """Return a partition's queue; make it if there is none."""
        while len(self.queues) <= partition:
            self.queues.append(PartitionQueue(self.name, len(self.queues)))
        return self.queues[partition]

    def limit(self, size: int) -> int:
        """Estimate how many uncompressed bytes compress to at most ``size`` bytes."""
        return int(size / (self.ratio * _RATIO_MARGIN))

    def learn_ratio(self, batch: ProducerBatch) -> None:
        """Adapt the estimated ratio to that of a sealed batch."""
        if not batch.raw_size:
            return
        actual = (batch.size - BATCH_HEADER_SIZE) / batch.raw_size
        if actual > self.ratio:
            self.ratio = max(self.ratio + _RATIO_UP, actual)
        else:
            self.ratio = max(self.ratio - _RATIO_DOWN, actual, _LEAST_RATIO)
