"""What an append has to know beside its partition's row, for the compiled core.

Kept by a PartitionLog as it appends, and read by native/storage/append.c: which
compares it with the row under the row's lock, and leaves the append to the PartitionLog
if they differ, or if the append is more than bytes at the end of a file.
"""

from mpbroker.storage.files.log_segment import LogSegment
from mpbroker.storage.producers.producer_state import ProducerState


class AppendPlan:
    """The last append's segment and limits. A plain object: its slots are read in C."""

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

    def __init__(
        self, row: int, positions: dict[int, tuple[LogSegment, int]] | None
    ) -> None:
        self.row = row
        # Where waiting fetches will begin to read; None while nobody reads here: of
        # many partitions that is more memory than anything else an append looks at.
        self.positions = positions
        self.segment: LogSegment | None = None  # None: not to be used
        self.active_base = -1
        self.structure = -1
        self.max_size = 0  # segment.bytes
        self.max_entries = 0
        self.max_time_entries = 0
        self.index_interval = 0
        self.epoch = 0  # of the leader, for the batch
        self.roll_after = 0  # ms: a batch with a later timestamp starts a segment
        # This process's copy of the producers' state, None if it has none; the core
        # adds to it what it appends, and what others have appended.
        self.producers: ProducerState | None = None
        # How far this process knows all producers, moved on by the core if it stood at
        # the batch. -1: not known.
        self.producers_end = -1
        self.producers_position = -1
