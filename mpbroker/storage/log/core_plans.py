"""Plans by which the compiled core appends to a log and reads from it.

With these two objects the core (mpbroker/native) appends and reads without any Python.
It finds their ``__slots__`` by name, so a slot that is renamed here must be renamed
there. Before the core uses a plan it compares it with the row (the partition's entry in
shared memory); for an append it holds the row's lock. If plan and row differ, or if an
append needs more than bytes written to the end of a file, the core leaves the work to
PartitionLog and LogReader.
"""

from mpbroker.storage.files.log_segment import LogSegment
from mpbroker.storage.producers.producer_state import ProducerState

# By base offset of a batch: its segment, and its position (in bytes) in the log file.
Positions = dict[int, tuple[LogSegment, int]]


class AppendPlan:
    """What the compiled core must know to append the next batch of a partition's log.

    It has the active segment, its limits and the producers' state. PartitionLog keeps
    it up to date as it appends itself.

    Args:
        row: the number of the partition's row (its entry in shared memory).
        positions: the dict PartitionView.positions, in which the core notes where
            batches begin; None until a fetch in this process has read the partition.
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
    """What the compiled core must know to find the newest records of a log for a fetch.

    LogReader fills it after a read of its own. The core leaves a read from an offset
    that is not in ``positions`` to LogReader.

    Args:
        row: the number of the partition's row (its entry in shared memory).
        positions: the dict PartitionView.positions: where batches begin, by offset.
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
