"""LeaderEpochs: the leader epochs of a partition, with the offset of each one's start.

The text file `leader-epoch-checkpoint` has the version 0, the number of entries, then
`epoch offset` lines. A directory that mpbroker made has one entry, `0 0`, because the
leader never changes. A directory that Apache Kafka made may have more, and new batches
get its last epoch: clients remember the epochs of batches, and reject a leader whose
epoch is older.

Source: Kafka's LeaderEpochFileCache; KIP-101, KIP-279.
"""

from typing import Final

from mpbroker.base.named_tuple import NamedTuple
from mpbroker.base.storage_errors import CheckpointError
from mpbroker.storage.files.checkpoints import parse_checkpoint

FILE_NAME: Final = "leader-epoch-checkpoint"
UNDEFINED: Final = -1


class EpochEntry(NamedTuple):
    """An epoch and the offset of its first batch."""

    epoch: int
    start_offset: int


class LeaderEpochs:
    """The leader epochs of one partition, in ascending order; at least one."""

    __slots__ = ("entries",)

    def __init__(self, entries: list[EpochEntry]) -> None:
        self.entries = entries or [EpochEntry(0, 0)]

    @property
    def latest(self) -> int:
        """The leader epoch that new batches get, which is the last one."""
        return self.entries[-1].epoch

    def at(self, offset: int) -> int:
        """Return the leader epoch of the batch at an offset."""
        earlier = [each.epoch for each in self.entries if each.start_offset <= offset]
        return earlier[-1] if earlier else self.entries[0].epoch

    def end_offset_for(self, epoch: int, log_end_offset: int) -> EpochEntry:
        """Return the largest leader epoch up to ``epoch``, and its end offset.

        This is the answer to a request OffsetForLeaderEpoch. An epoch ends where the
        next one starts; the latest one ends at ``log_end_offset``.

        Returns:
            (-1, -1) for an epoch that is negative or above the latest one.
        """
        if epoch == self.latest:
            return EpochEntry(epoch, log_end_offset)
        later = [entry for entry in self.entries if entry.epoch > epoch]
        if epoch < 0 or not later:
            return EpochEntry(UNDEFINED, UNDEFINED)
        earlier = [entry.epoch for entry in self.entries if entry.epoch <= epoch]
        found = earlier[-1] if earlier else epoch
        return EpochEntry(found, later[0].start_offset)


def read_leader_epochs(directory: str) -> LeaderEpochs:
    """Read a partition's leader epochs from its directory.

    If the file is missing or malformed, the result has the one entry `0 0`.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        with open(f"{directory}/{FILE_NAME}", encoding="ascii") as file:
            lines = parse_checkpoint(file.read(), fields=2)
        entries = [EpochEntry(int(epoch), int(start)) for epoch, start in lines]
    except (FileNotFoundError, UnicodeDecodeError, ValueError, CheckpointError):
        return LeaderEpochs([])
    return LeaderEpochs(entries)
