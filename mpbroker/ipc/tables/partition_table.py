"""The shared row of every partition: the lock for appends, and the committed state.

An append commits by one store: the new LogState is written to the copy that is not
valid, then the version word makes this copy the valid one. A process that dies before
that store has appended nothing: the next append overwrites the bytes it left past
``active_size``, and the index entries past their counts.

A request that must not be executed twice is named in the row (intent) before its
records are written. A process that takes the lock of a dead owner first checks whether
that append was committed, that is, whether the log end has passed its base offset, and
notes the result in the request's slot. So a redelivered request is answered, but not
appended again.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

from mpbroker.ipc.counters import fetched_bytes
from mpbroker.ipc.layout import (
    MAX_PARTITIONS,
    MAX_SLOTS,
    ROW_COPIES,
    ROW_COPY_WORDS,
    ROW_DURABLE_END,
    ROW_INTENT,
    ROW_LOG_START_OFFSET,
    ROW_MUTEX,
    ROW_STATUS,
    ROW_STRUCTURE,
    ROW_SYNC_OWNER,
    ROW_SYNC_WAITERS,
    ROW_VERSION,
    ROW_WORDS,
    SLOT_INTENT,
    SLOT_INTENT_BASE,
    SLOT_PROGRESS,
    SLOT_PROGRESS_OFFSET,
    RowStatus,
    slot_row,
)
from mpbroker.ipc.robust_mutex import (
    RobustMutex,
    owner_died,
    pthread_mutex_unlock,
    spin_lock,
)
from mpbroker.ipc.segment import Segment

TABLE_BYTES: Final = (fetched_bytes.FIRST + fetched_bytes.WORDS) * 8
_INTENT_ROW_MASK: Final = 0xFFFF_FFFF


class LogState(NamedTuple):
    """The state of a partition that an append changes and commits as a whole."""

    log_end_offset: int = 0
    active_base_offset: int = 0
    active_size: int = 0  # bytes of the active segment
    index_entries: int = 0  # of the active segment's offset index
    time_index_entries: int = 0
    bytes_since_index: int = 0
    max_timestamp: int = -1  # ms, of the active segment
    max_timestamp_offset: int = -1
    first_unstable_offset: int = -1  # -1: none, all is stable
    segment_created_ms: int = 0
    bytes_in: int = 0  # of all batches appended since the shared memory was created


_STATE_WORDS: Final = len(LogState._fields)
assert _STATE_WORDS <= ROW_COPY_WORDS


class PartitionTable:
    """Rows 0 to MAX_PARTITIONS in one sparse segment.

    Args:
        segment: the rows.
        control: has the slot table, where intents are settled; None if there are no
            requests (tools, unit tests).
        arena: has the progress words of slots; None if there are no requests.
    """

    def __init__(
        self,
        segment: Segment,
        control: Segment | None = None,
        arena: Segment | None = None,
    ) -> None:
        self._segment = segment
        self._control = control
        self._arena = arena
        self._rows: dict[int, PartitionRow] = {}

    @classmethod
    def create(
        cls, control: Segment | None = None, arena: Segment | None = None
    ) -> "PartitionTable":
        """Make a table of zeroed rows. A row's mutex is made by ``initialise_row``."""
        return cls(cls.create_segment(), control, arena)

    @staticmethod
    def create_segment() -> Segment:
        return Segment.create("mpbroker-partitions", TABLE_BYTES)

    @property
    def segment(self) -> Segment:
        return self._segment

    def row(self, index: int) -> "PartitionRow":
        row = self._rows.get(index)
        if row is None:
            if not 0 <= index < MAX_PARTITIONS:
                raise IndexError(f"partition row {index} not in 0..{MAX_PARTITIONS}")
            row = PartitionRow(index, self._segment, self._control, self._arena)
            self._rows[index] = row
        return row

    def status(self, index: int) -> int:
        """Return a row's status, without making a PartitionRow."""
        return self._segment.words[index * ROW_WORDS + ROW_STATUS]

    def initialise_row(self, index: int) -> None:
        """Make a row's mutex. To be called by the process that assigns the row.

        It holds the metadata mutex, and has not published the partition yet. So if it
        dies half-way, the next process can repeat this: no other process uses the row.
        """
        RobustMutex.initialise(self._segment, index * ROW_WORDS + ROW_MUTEX)


class PartitionRow:
    """One partition's shared words, for the process that holds this object."""

    __slots__ = (
        "_arena",
        "_argument",
        "_control",
        "_intended",
        "base",
        "index",
        "words",
    )

    def __init__(
        self,
        index: int,
        segment: Segment,
        control: Segment | None,
        arena: Segment | None,
    ) -> None:
        self.index = index
        self.words = segment.words
        self.base = index * ROW_WORDS
        self._argument = RobustMutex(segment, self.base + ROW_MUTEX).argument
        self._control = control
        self._arena = arena
        # The append that this process has begun: the row of its slot, the number of
        # the partition within the request, and the base offset.
        self._intended: tuple[int, int, int] | None = None

    def lock(self) -> None:
        """Take the row's mutex; settle the intent if its last owner died."""
        result = spin_lock(self._argument)
        if result:
            owner_died(self._argument, result)
            self._settle_intent()

    def unlock(self) -> None:
        pthread_mutex_unlock(self._argument)

    @contextmanager
    def locked(self) -> Iterator[None]:
        self.lock()
        try:
            yield
        finally:
            pthread_mutex_unlock(self._argument)

    def settle(self) -> None:
        """Take and release the lock, so that a dead owner's intent is settled now."""
        self.lock()
        self.unlock()

    def settle_and_unlock(self) -> None:
        """Settle the intent and release the lock, which the caller holds."""
        self._settle_intent()
        self.unlock()

    # -- the committed copy ------------------------------------------------------

    def snapshot(self) -> LogState:
        """Read the committed copy without the lock; retry if it changed meanwhile."""
        words, base = self.words, self.base
        while True:
            version = words[base + ROW_VERSION]
            start = base + ROW_COPIES + (version & 1) * ROW_COPY_WORDS
            state = words[start : start + _STATE_WORDS].tolist()
            if words[base + ROW_VERSION] == version:
                return LogState._make(state)

    @property
    def log_end_offset(self) -> int:
        """The committed log end offset."""
        words, base = self.words, self.base
        while True:
            version = words[base + ROW_VERSION]
            end = words[base + ROW_COPIES + (version & 1) * ROW_COPY_WORDS]
            # The same version: no process has rewritten this copy while we read it.
            if words[base + ROW_VERSION] == version:
                return end

    def publish(self, state: LogState) -> None:
        """Commit a new state with the last store. The caller holds the lock."""
        words, base = self.words, self.base
        version = words[base + ROW_VERSION] + 1
        word = base + ROW_COPIES + (version & 1) * ROW_COPY_WORDS
        for value in state:
            words[word] = value
            word += 1
        words[base + ROW_VERSION] = version

    # -- exactly once --------------------------------------------------------------

    def set_intent(self, slot: int, ordinal: int, base_offset: int) -> None:
        """Note that ``slot`` is about to append to its partition number ``ordinal``."""
        if slot < 0:
            return
        assert self._control is not None
        slots, row = self._control.words, slot_row(slot)
        slots[row + SLOT_INTENT_BASE] = base_offset
        slots[row + SLOT_INTENT] = (ordinal + 1) << 32 | (self.index + 1)
        self.words[self.base + ROW_INTENT] = slot + 1
        self._intended = (row, ordinal, base_offset)

    def clear_intent(self) -> None:
        """Note in its slot that the append is done. Under the lock, after publish."""
        intended = self._intended
        if intended is None:
            return
        # The stores of _settle_intent, in the same order. Other than a successor, this
        # process knows that the append was committed.
        row, ordinal, base_offset = intended
        self._intended = None
        self._note_done(row, ordinal, base_offset)
        assert self._control is not None
        self._control.words[row + SLOT_INTENT] = 0
        self.words[self.base + ROW_INTENT] = 0

    def abandon_intent(self) -> None:
        """Settle the intent of an append that failed in a live process.

        It may have failed before or after its commit.
        """
        self._intended = None
        if self.words[self.base + ROW_INTENT]:
            self._settle_intent()

    def _settle_intent(self) -> None:
        # Idempotent: a process that dies in here leaves the row's intent, and the next
        # owner gets the same result. That is why PROGRESS is set to an absolute number.
        slot = self.words[self.base + ROW_INTENT] - 1
        if slot < 0:
            return
        if self._control is not None and slot < MAX_SLOTS:
            slots, row = self._control.words, slot_row(slot)
            intent = slots[row + SLOT_INTENT]
            if intent & _INTENT_ROW_MASK == self.index + 1:
                ordinal = (intent >> 32) - 1
                base_offset = slots[row + SLOT_INTENT_BASE]
                if self.log_end_offset > base_offset:
                    self._note_done(row, ordinal, base_offset)
                slots[row + SLOT_INTENT] = 0
        self.words[self.base + ROW_INTENT] = 0

    def _note_done(self, row: int, ordinal: int, base_offset: int) -> None:
        assert self._control is not None
        slots = self._control.words
        where = slots[row + SLOT_PROGRESS_OFFSET]
        if self._arena is not None and where:
            self._arena.words[(where >> 3) + ordinal] = base_offset
        slots[row + SLOT_PROGRESS] = ordinal + 1

    # -- the owner of a sync ---------------------------------------------------------

    def begin_sync(self, process: int, waiter: int = 0) -> int | None:
        """Become the owner of the log's sync, unless another process is.

        Every fdatasync of the log is between this and ``end_sync``. The kernel reports
        a failed write once to each open file that was there, and to no file that is
        opened after some process was told. So only one process at a time may ask, and
        the next one may only when the answer is in the row.

        Args:
            process: the id of this process.
            waiter: a bit to set in the waiters if another process is the owner: the
                handler is told when that sync has ended.

        Returns:
            The log end offset, up to which a sync from now on is made; None: another
            process, or this one, is making a sync.
        """
        words, base = self.words, self.base
        self.lock()  # faster than ``with self.locked()``, twice for each sync
        try:
            if words[base + ROW_SYNC_OWNER]:
                words[base + ROW_SYNC_WAITERS] |= waiter
                return None
            words[base + ROW_SYNC_OWNER] = process + 1
            return self.log_end_offset
        finally:
            self.unlock()

    def end_sync(self, durable_end: int, *, failed: bool = False) -> int:
        """Publish the result of a sync, and be its owner no longer.

        If this process is killed before this, the supervisor releases the sync, and the
        next one covers the range again.

        Args:
            durable_end: all below this offset is on disk; 0: nothing was synced.
            failed: a file could not be synced. The partition goes offline: a page that
                could not be written may be lost although the next sync succeeds.

        Returns:
            The waiters, a bit for each handler, which the caller tells.
        """
        words, base = self.words, self.base
        self.lock()
        try:
            status = words[base + ROW_STATUS]
            if failed:
                if status != RowStatus.DELETED:
                    words[base + ROW_STATUS] = RowStatus.OFFLINE
            elif (
                status != RowStatus.OFFLINE
                and durable_end > words[base + ROW_DURABLE_END]
            ):
                words[base + ROW_DURABLE_END] = durable_end
            waiters = words[base + ROW_SYNC_WAITERS]
            words[base + ROW_SYNC_WAITERS] = 0
            words[base + ROW_SYNC_OWNER] = 0
        finally:
            self.unlock()
        return waiters

    def forget_sync(self, process: int) -> None:
        """Release the sync that a dead process was the owner of, if it was."""
        words, owner = self.words, self.base + ROW_SYNC_OWNER
        with self.locked():
            if words[owner] == process + 1:
                words[owner] = 0

    def owns_sync(self, process: int) -> bool:
        """Return whether a process is the owner of the log's sync."""
        return self.words[self.base + ROW_SYNC_OWNER] == process + 1

    # -- single words ----------------------------------------------------------------

    @property
    def status(self) -> int:
        return self.words[self.base + ROW_STATUS]

    @status.setter
    def status(self, value: RowStatus) -> None:
        self.words[self.base + ROW_STATUS] = value

    @property
    def log_start_offset(self) -> int:
        return self.words[self.base + ROW_LOG_START_OFFSET]

    @log_start_offset.setter
    def log_start_offset(self, value: int) -> None:
        self.words[self.base + ROW_LOG_START_OFFSET] = value

    @property
    def structure_version(self) -> int:
        return self.words[self.base + ROW_STRUCTURE]

    @structure_version.setter
    def structure_version(self, value: int) -> None:
        self.words[self.base + ROW_STRUCTURE] = value

    @property
    def durable_end_offset(self) -> int:
        return self.words[self.base + ROW_DURABLE_END]

    @durable_end_offset.setter
    def durable_end_offset(self, value: int) -> None:
        self.words[self.base + ROW_DURABLE_END] = value
