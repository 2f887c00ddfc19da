"""What a read of a log's newest records has to know beside its partition's row.

Made by a LogReader after it has read, and used by native/server/fetch.c: which compares
it with the row, and leaves the read to the LogReader if they differ, or if the records
asked for begin where ``positions`` does not say.
"""

from mpbroker.storage.files.log_segment import LogSegment


class ReadPlan:
    """The active segment as one process knows it. Its slots are read in C."""

    __slots__ = (
        "active_base",
        "leader_epoch",
        "positions",
        "row",
        "segment",
        "structure",
        "txn_index_path",
    )

    def __init__(self, row: int, positions: dict[int, tuple[LogSegment, int]]) -> None:
        self.row = row
        self.positions = positions
        self.segment: LogSegment | None = None  # None: not to be used
        self.active_base = -1
        self.structure = -1
        self.leader_epoch = -1  # -1: not known yet, as long as nobody has named any
        # No such file: no transaction was ever aborted in the segment.
        self.txn_index_path = b""
