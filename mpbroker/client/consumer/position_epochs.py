"""Which leaders' epochs wrote what a consumer has read, and which lead now.

Every leader of a partition has an epoch, above those before; a batch carries that of
the leader who wrote it. One that did not have all records of the leader before writes
others at the same offsets, and a reader who was past that place would not notice. Who
remembers the epoch of what it read last can ask where that epoch ended.

Source: KIP-320.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Final, NamedTuple

from mpbroker.client.cluster import TopicPartition

NO_EPOCH: Final = -1
_KEPT: Final = 8  # epochs of a partition: positions are near what was read last
_NO_TOPIC_ID: Final = bytes(16)
_REFUSALS: Final = 5  # of an epoch by the leader, before a lower one is believed

_log = logging.getLogger(__name__)


class _Led(NamedTuple):
    """Who leads a partition, by the newest answer about it."""

    leader: int
    epoch: int
    topic_id: bytes


class PositionEpochs:
    """See the module."""

    def __init__(self) -> None:
        self._led: dict[TopicPartition, _Led] = {}
        # By partition and epoch: the offsets of it that were read, from and up to.
        self._read: dict[TopicPartition, dict[int, tuple[int, int]]] = {}
        # By partition: the leader's epoch that has confirmed what was read.
        self._confirmed: dict[TopicPartition, int] = {}
        # By partition: how often the leader known has not known its own epoch.
        self._refused: dict[TopicPartition, int] = {}

    # -- leaders -----------------------------------------------------------------------

    def lead(
        self, partition: TopicPartition, leader: int, epoch: int, topic_id: bytes
    ) -> int:
        """Take on what metadata says, and return the leader.

        That is the one known before where the answer is older: of a broker that has not
        heard of it yet.

        Args:
            partition: of the topic.
            leader: its node id; below 0 is none.
            epoch: NO_EPOCH: the broker does not tell.
            topic_id: zeros likewise.
        """
        known = self._led.get(partition)
        if known is not None:
            if topic_id == _NO_TOPIC_ID:
                topic_id = known.topic_id
            if topic_id != known.topic_id:
                self._begin_anew(partition)  # another topic of that name
            elif 0 <= epoch < known.epoch:
                if self._refused.get(partition, 0) < _REFUSALS:
                    return known.leader
                _log.warning(
                    "%s: its leader does not know epoch %d; going on in epoch %d:"
                    " the topic was deleted and made again?",
                    partition,
                    known.epoch,
                    epoch,
                )
                self._begin_anew(partition)
            else:
                self._refused.pop(partition, None)
        self._led[partition] = _Led(leader, epoch, topic_id)
        return leader

    def _begin_anew(self, partition: TopicPartition) -> None:
        self._read.pop(partition, None)
        self._confirmed.pop(partition, None)
        self._refused.pop(partition, None)

    def refuse(self, partition: TopicPartition) -> None:
        """Note that the leader known does not know its epoch.

        Metadata that says a lower one all the while is right in the end: without ids of
        topics, one that was made again cannot be told from news that are old.
        """
        self._refused[partition] = self._refused.get(partition, 0) + 1

    def leader_epoch(self, partition: TopicPartition) -> int:
        """Return the epoch of the leader that is known; NO_EPOCH if it is not."""
        led = self._led.get(partition)
        return NO_EPOCH if led is None else led.epoch

    # -- what was read -----------------------------------------------------------------

    def note(self, partition: TopicPartition, first: int, end: int, epoch: int) -> None:
        """Note that the records from ``first`` to before ``end`` are of an epoch."""
        if epoch < 0:
            return
        read = self._read.setdefault(partition, {})
        for other, (start, stop) in list(read.items()):
            # What was read of others there is there no more: epochs never fall.
            if other < epoch and stop > first:
                read[other] = start, first
                if start >= first:
                    del read[other]
            elif other > epoch and start < end:
                del read[other]
        known = read.pop(epoch, None)  # the oldest note stays first
        if known is not None and known[0] <= end and first <= known[1]:
            first, end = min(first, known[0]), max(end, known[1])
        read[epoch] = first, end
        if len(read) > _KEPT:
            del read[next(iter(read))]

    def before(self, partition: TopicPartition, offset: int) -> int:
        """Return the epoch of what comes before an offset; NO_EPOCH if not known."""
        for epoch, (first, end) in self._read.get(partition, {}).items():
            if first < offset <= end:
                return epoch
        return NO_EPOCH

    def forget(self, partition: TopicPartition) -> None:
        """Forget what was read: it is not there any more."""
        self._read.pop(partition, None)

    def keep(self, partitions: Collection[TopicPartition]) -> None:
        """Forget what was read of all other partitions."""
        for partition in self._read.keys() - set(partitions):
            del self._read[partition]

    # -- what must be asked ------------------------------------------------------------

    def is_in_doubt(self, partition: TopicPartition, offset: int) -> bool:
        """Return whether another leader than wrote what was read leads by now."""
        epoch = self.before(partition, offset)
        led = self.leader_epoch(partition)
        confirmed = max(epoch, self._confirmed.get(partition, NO_EPOCH))
        return epoch >= 0 and led > confirmed

    def confirm(self, partition: TopicPartition) -> None:
        """Note that the leader known now has what was read."""
        self._confirmed[partition] = self.leader_epoch(partition)
