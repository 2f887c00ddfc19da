"""PositionEpochs: the leader epochs of the records read, and of the present leaders.

Every new leader of a partition gets a higher epoch, and a batch has the epoch of the
leader that wrote it. A new leader may lack records of the old one. Then it writes other
records at the same offsets, and a consumer that has passed these offsets would not
notice. So a consumer remembers the epoch of the records that it read last, and asks the
new leader where this epoch ended.

Source: KIP-320.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Final, NamedTuple

from mpbroker.client.cluster import TopicPartition

NO_EPOCH: Final = -1
_KEPT: Final = 8  # epochs kept for a partition; positions are near the last records
_NO_TOPIC_ID: Final = bytes(16)
# A leader must refuse its epoch this often before a lower one is accepted.
_REFUSALS: Final = 5

_log = logging.getLogger(__name__)


class _Led(NamedTuple):
    """A partition's leader, by the newest metadata."""

    leader: int
    epoch: int
    topic_id: bytes


class PositionEpochs:
    """Remembers each partition's leader, and the leader epochs of the records read."""

    def __init__(self) -> None:
        self._led: dict[TopicPartition, _Led] = {}
        # By partition and epoch: the first offset that was read, and the one after.
        self._read: dict[TopicPartition, dict[int, tuple[int, int]]] = {}
        # By partition: the epoch of the leader that has confirmed the records read.
        self._confirmed: dict[TopicPartition, int] = {}
        # By partition: how often the known leader has refused its own epoch.
        self._refused: dict[TopicPartition, int] = {}

    # -- leaders -----------------------------------------------------------------------

    def lead(
        self, partition: TopicPartition, leader: int, epoch: int, topic_id: bytes
    ) -> int:
        """Store a partition's leader as metadata names it; return the leader to use.

        If the metadata has an older epoch, because a broker does not know the newest
        leader yet, return the leader that was stored before.

        Args:
            partition: the partition.
            leader: the leader's node id; below 0 means none.
            epoch: the leader's epoch; NO_EPOCH if the broker did not tell it.
            topic_id: the topic's id; zeros if the broker did not tell it.
        """
        known = self._led.get(partition)
        if known is not None:
            if topic_id == _NO_TOPIC_ID:
                topic_id = known.topic_id
            if topic_id != known.topic_id:
                self._begin_anew(partition)  # another topic of the same name
            elif 0 <= epoch < known.epoch:
                if self._refused.get(partition, 0) < _REFUSALS:
                    return known.leader
                _log.warning(
                    "%s: its leader does not know epoch %d; going on with epoch %d:"
                    " was the topic deleted and created again?",
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
        """Count a refusal, by the known leader, of the epoch that metadata gave it.

        After several refusals `lead` accepts metadata with a lower epoch: without topic
        ids, a topic that was deleted and created again looks like outdated metadata.
        """
        self._refused[partition] = self._refused.get(partition, 0) + 1

    def leader_epoch(self, partition: TopicPartition) -> int:
        """Return the epoch of the known leader; NO_EPOCH if there is none."""
        led = self._led.get(partition)
        return NO_EPOCH if led is None else led.epoch

    # -- what was read -----------------------------------------------------------------

    def note(self, partition: TopicPartition, first: int, end: int, epoch: int) -> None:
        """Store the leader epoch of the records from ``first`` to before ``end``.

        Args:
            partition: the partition.
            first: the offset of the first of the records.
            end: the offset after the last of them.
            epoch: their leader epoch; below 0 means that it is not known.
        """
        if epoch < 0:
            return
        read = self._read.setdefault(partition, {})
        for other, (start, stop) in list(read.items()):
            # Epochs never fall along a log. So records of lower epochs from ``first``
            # on, and of higher epochs before ``end``, do not exist any more.
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
        """Return the leader epoch of the record before an offset.

        Return NO_EPOCH if it is not known, because no record was read there.
        """
        for epoch, (first, end) in self._read.get(partition, {}).items():
            if first < offset <= end:
                return epoch
        return NO_EPOCH

    def forget(self, partition: TopicPartition) -> None:
        """Forget the epochs of a partition's records, which do not exist any more."""
        self._read.pop(partition, None)

    def keep(self, partitions: Collection[TopicPartition]) -> None:
        """Forget the epochs of the records of all partitions but these."""
        for partition in self._read.keys() - set(partitions):
            del self._read[partition]

    # -- what must be asked ------------------------------------------------------------

    def is_in_doubt(self, partition: TopicPartition, offset: int) -> bool:
        """Return whether a new leader must be asked if it has the records read.

        Args:
            partition: the partition.
            offset: the position, which is the offset after the last record read.
        """
        epoch = self.before(partition, offset)
        led = self.leader_epoch(partition)
        confirmed = max(epoch, self._confirmed.get(partition, NO_EPOCH))
        return epoch >= 0 and led > confirmed

    def confirm(self, partition: TopicPartition) -> None:
        """Note that the known leader has the records that were read."""
        self._confirmed[partition] = self.leader_epoch(partition)
