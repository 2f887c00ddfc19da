"""What waits for each partition of a topic; `RecordAccumulator` has the lock of all."""

from __future__ import annotations

from collections import deque

from mpbroker.client.metadata import NO_NODE, Snapshot
from mpbroker.producer.batch import ProducerBatch
from mpbroker.producer.sticky import StickyPartitioner


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
    )

    def __init__(self, topic: str, partition: int) -> None:
        self.topic = topic
        self.partition = partition
        self.batches: deque[ProducerBatch] = deque()
        self.open: ProducerBatch | None = None
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
