"""What the compiled core knows of a log: plans of its next append and its next read.

By these two objects the core (mpbroker/native) appends and reads without any Python.
It finds their ``__slots__`` by name, so a slot that is renamed here is renamed there.
Before it uses a plan the core compares it with the partition's row, for an append under
the row's lock. Where they differ, or where more is needed than bytes at the end of a
file, it leaves the work to PartitionLog and LogReader.
"""

from mpbroker.storage.files.log_segment import LogSegment
from mpbroker.storage.producers.producer_state import ProducerState

# Where in which segment the batch that starts at an offset stands.
Positions = dict[int, tuple[LogSegment, int]]


class AppendPlan:
    """Where the next batch goes, if nothing changes, and what it must fit into.

    PartitionLog keeps it up to date as it appends.
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
        # Here the core notes where waiting fetches will begin to read. None while
        # nobody reads the partition: with many partitions these notes are more memory
        # than all else that an append looks at.
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
        # This process's copy of the producers' state, None if it has none. The core
        # adds to it what it appends, and what others have appended.
        self.producers: ProducerState | None = None
        # Up to which offset, and to which position in the segment, ``producers`` is
        # complete; the core moves both on. -1: not known.
        self.producers_end = -1
        self.producers_position = -1


class ReadPlan:
    """The active segment as this process knows it, to read the newest records of.

    LogReader fills it after a read. Records that begin at an offset which ``positions``
    does not have are left to LogReader.
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
        # If there is no such file, no transaction was ever aborted in the segment.
        self.txn_index_path = b""
