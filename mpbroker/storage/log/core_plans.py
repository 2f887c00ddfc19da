"""Plans by which the compiled core appends to a log and reads from it.

With these two objects the core (mpbroker/native) appends and reads without any Python.
It finds their ``__slots__`` by name, so a slot that is renamed here is renamed there.
Before the core uses a plan it compares it with the partition's row; for an append it
holds the row's lock. If they differ, or if an append needs more than bytes written to
the end of a file, it leaves the work to PartitionLog and LogReader.
"""

from mpbroker.storage.files.log_segment import LogSegment
from mpbroker.storage.producers.producer_state import ProducerState

# By offset: the segment and the position in it of the batch that starts there.
Positions = dict[int, tuple[LogSegment, int]]


class AppendPlan:
    """The position of the next batch, if nothing changes, and the limits it must obey.

    PartitionLog keeps it up to date as it appends.

    Args:
        row: the number of the partition's row.
        positions: PartitionView.positions; None until this process has readers.
    """

    __slots__ = (
        "active_base",
        "epoch",
        "index_interval",
        "max_entries",
        "max_size",
        "max_time_entries",
        "positions",
        "producers",
        "producers_end",
        "producers_position",
        "roll_after",
        "row",
        "segment",
        "structure",
    )

    def __init__(self, row: int, positions: Positions | None) -> None:
        self.row = row
        # The core notes here the positions where waiting fetches will begin to read.
        # None while no fetch has read the partition: with many partitions these notes
        # take more memory than all other data of an append.
        self.positions = positions
        self.segment: LogSegment | None = None  # None: the plan must not be used
        self.active_base = -1
        self.structure = -1
        self.max_size = 0  # segment.bytes
        self.max_entries = 0
        self.max_time_entries = 0
        self.index_interval = 0
        self.epoch = 0  # the leader epoch to write into the batch
        self.roll_after = 0  # ms: a batch with a later timestamp starts a segment
        # This process's copy of the producers' state; None: it has none. The core
        # applies its own batches to it, and those that other processes have appended.
        self.producers: ProducerState | None = None
        # The offset, and the position in the segment, up to which ``producers`` is
        # complete. The core moves both forward. -1: not known.
        self.producers_end = -1
        self.producers_position = -1


class ReadPlan:
    """The active segment as this process knows it, for reads of the newest records.

    LogReader fills it after a read. A read from an offset that is not in ``positions``
    is left to LogReader.

    Args:
        row: the number of the partition's row.
        positions: PartitionView.positions.
    """

    __slots__ = (
        "active_base",
        "leader_epoch",
        "positions",
        "row",
        "segment",
        "structure",
        "txn_index_path",
    )

    def __init__(self, row: int, positions: Positions) -> None:
        self.row = row
        self.positions = positions
        self.segment: LogSegment | None = None  # None: the plan must not be used
        self.active_base = -1
        self.structure = -1
        self.leader_epoch = -1  # -1: not read yet, because no fetch has named an epoch
        # If this file does not exist, no transaction was ever aborted in the segment.
        self.txn_index_path = b""
