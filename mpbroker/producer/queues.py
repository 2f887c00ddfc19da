"""What waits for each partition of a topic; `RecordAccumulator` has the lock of all."""

from __future__ import annotations

from collections import deque
from typing import Final

from mpbroker.client.metadata import NO_NODE, Snapshot
from mpbroker.producer.batch import ProducerBatch
from mpbroker.producer.sticky import StickyPartitioner
from mpbroker.protocol.records.batch_header import BATCH_HEADER_SIZE

# How a batch's estimate of its compressed size follows what batches turn out to be:
# quickly up, since too large is refused, slowly down. Source: KIP-126.
_RATIO_UP: Final = 0.05
_RATIO_DOWN: Final = 0.005
_RATIO_MARGIN: Final = 1.05
_LEAST_RATIO: Final = 0.05


class PartitionQueue:
    """One partition's batches; ``open`` is the last of them while it takes more.

    ``leader`` and ``leader_epoch`` are by what ``snapshot`` says; see `follow`.
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
        self.transaction = 0  # whose ``open`` is
        self.is_muted = False
        self.snapshot: Snapshot | None = None
        self.leader = NO_NODE
        self.leader_epoch = -1

    def follow(self, snapshot: Snapshot) -> int:
        """Take on who leads the partition, if that may be news; return the leader."""
        if self.snapshot is not snapshot:
            self.leader = snapshot.leader(self.topic, self.partition)
            self.leader_epoch = snapshot.leader_epoch(self.topic, self.partition)
            self.snapshot = snapshot
        return self.leader


class TopicQueues:
    """The queues of a topic's partitions, and where records without keys go now."""

    __slots__ = ("current", "name", "queues", "ratio", "sticky")

    def __init__(self, name: str, sticky: StickyPartitioner) -> None:
        self.name = name
        self.queues: list[PartitionQueue] = []
        self.sticky = sticky
        self.current: PartitionQueue | None = None  # for records without keys
        self.ratio = 1.0  # compressed size by size, estimated

    def queue(self, partition: int) -> PartitionQueue:
        """Return a partition's queue."""
        while len(self.queues) <= partition:
            self.queues.append(PartitionQueue(self.name, len(self.queues)))
        return self.queues[partition]

    def limit(self, size: int) -> int:
        """Return how many bytes compress to ``size``, a little less by experience."""
        return int(size / (self.ratio * _RATIO_MARGIN))

    def learn_ratio(self, batch: ProducerBatch) -> None:
        """Take on how well a sealed batch was compressed."""
        if not batch.raw_size:
            return
        actual = (batch.size - BATCH_HEADER_SIZE) / batch.raw_size
        if actual > self.ratio:
            self.ratio = max(self.ratio + _RATIO_UP, actual)
        else:
            self.ratio = max(self.ratio - _RATIO_DOWN, actual, _LEAST_RATIO)
