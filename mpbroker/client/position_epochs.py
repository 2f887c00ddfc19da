"""Which leaders' epochs wrote what a consumer has read, and which lead now.

Every leader of a partition has an epoch, above those before; a batch carries that of
the leader who wrote it. One that did not have all records of the leader before writes
others at the same offsets, and a reader who was past that place would not notice. Who
remembers the epoch of what it read last can ask where that epoch ended.

Source: KIP-320.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from mpbroker.client.cluster import TopicPartition

NO_EPOCH: Final = -1
_KEPT: Final = 8  # epochs of a partition: positions are near what was read last
_NO_TOPIC_ID: Final = bytes(16)


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
            ids = known.topic_id, topic_id
            if ids[0] != ids[1] and _NO_TOPIC_ID not in ids:
                self._read.pop(partition, None)  # another topic of that name
                self._confirmed.pop(partition, None)
            elif 0 <= epoch < known.epoch:
                return known.leader
        self._led[partition] = _Led(leader, epoch, topic_id)
        return leader

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
        known = read.get(epoch)
        if known is not None:
            # Epochs never fall along a log, so what lies between is of this one too.
            first, end = min(first, known[0]), max(end, known[1])
        read[epoch] = first, end
        if len(read) > _KEPT:
            del read[min(read)]

    def before(self, partition: TopicPartition, offset: int) -> int:
        """Return the epoch of what comes before an offset; NO_EPOCH if not known."""
        for epoch, (first, end) in self._read.get(partition, {}).items():
            if first < offset <= end:
                return epoch
        return NO_EPOCH

    def forget(self, partition: TopicPartition) -> None:
        """Forget what was read: it is not there any more."""
        self._read.pop(partition, None)

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
