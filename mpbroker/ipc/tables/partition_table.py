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

import errno
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from mpbroker.base.named_tuple import NamedTuple
from mpbroker.ipc.counters import fetched_bytes
from mpbroker.ipc.layout import (
    HANDLER_IDS,
    HANDLER_INCARNATION,
    HEADER,
    HEADER_DIRECTORIES_OFFLINE,
    HEADER_OFFLINE_CHANGES,
    MASK_BITS,
    MAX_PARTITIONS,
    MAX_SLOTS,
    ROW_BYTES_IN_BEFORE,
    ROW_BYTES_OUT_BEFORE,
    ROW_COPIES,
    ROW_COPY_WORDS,
    ROW_DURABLE_END,
    ROW_INDEX_SYNC,
    ROW_INTENT,
    ROW_LOG_START_OFFSET,
    ROW_MUTEX,
    ROW_STATUS,
    ROW_STRUCTURE,
    ROW_SYNC_IN_DOUBT,
    ROW_SYNC_OWNER,
    ROW_SYNC_WAITERS,
    ROW_VERSION,
    ROW_WAITERS,
    ROW_WORDS,
    SLOT_INTENT,
    SLOT_INTENT_BASE,
    SLOT_PROGRESS,
    SLOT_PROGRESS_OFFSET,
    RowStatus,
    handler_row,
    slot_row,
)
from mpbroker.ipc.masks import read_mask, write_mask
from mpbroker.ipc.robust_mutex import (
    MUTEX_WORDS,
    RobustMutex,
    owner_died,
    pthread_mutex_unlock,
    spin_lock,
    try_lock,
)
from mpbroker.ipc.segment import Segment

TABLE_BYTES: Final = (fetched_bytes.FIRST + fetched_bytes.WORDS) * 8
_INTENT_ROW_MASK: Final = 0xFFFF_FFFF


class LogState(NamedTuple):
    """The state of a partition's log that an append changes and commits as a whole."""

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
    """The rows of all partitions, MAX_PARTITIONS in one sparse memory segment.

    A row is a partition's record: its lock, and the state of its log.

    Args:
        segment: the rows.
        control: the control segment with the slots, where a committed append of a
            request is noted; None if there are no requests (tools, unit tests).
        arena: the arena with the progress words of requests; None if there are no
            requests.
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
        """Make a table without partitions.

        A row's mutex is made by ``initialise_row``.
        """
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
            _check(index)
            row = PartitionRow(index, self._segment, self._control, self._arena)
            self._rows[index] = row
        return row

    def status(self, index: int) -> int:
        """Return the RowStatus of the partition whose row has this index."""
        return self._segment.words[index * ROW_WORDS + ROW_STATUS]

    @property
    def offline_changes(self) -> int:
        """A number that changes when partitions go offline, or a directory's state.

        Whoever keeps what it found out about offline partitions reads this before, and
        compares it later.
        """
        control = self._control
        return 0 if control is None else control.words[HEADER + HEADER_OFFLINE_CHANGES]

    @property
    def offline_directories(self) -> int:
        """A bit for each log directory that the housekeeper cannot read any more."""
        control = self._control
        if control is None:
            return 0
        return control.words[HEADER + HEADER_DIRECTORIES_OFFLINE]

    def initialise_row(self, index: int) -> None:
        """Make the mutex of a new partition's row, before others use the row.

        It holds the metadata mutex, and has not published the partition yet. So if it
        dies half-way, the next process can repeat this: no other process uses the row.

        Raises:
            IndexError: the table has no such row; behind it are words of others.
        """
        _check(index)
        RobustMutex.initialise(self._segment, index * ROW_WORDS + ROW_MUTEX)

    def reuse_row(self, index: int) -> None:
        """Reset the row of a deleted partition, for use by another partition.

        The process that gives the row to the new partition calls this, like
        ``initialise_row``. No other process uses the row any more (row_users.py). If
        the caller is killed half-way, the next process repeats this.
        """
        row = self.row(index)
        # Taking the lock settles the intent of a dead owner. The mutex itself stays.
        with row.locked():
            words, base = row.words, row.base
            bytes_in = row.snapshot().bytes_in
            # The broker's counters of bytes never decrease. Those of a topic begin at
            # 0, so the bytes before are subtracted from them.
            words[base + ROW_BYTES_IN_BEFORE] = bytes_in
            words[base + ROW_BYTES_OUT_BEFORE] = self._fetched_bytes(index)
            row.publish(LogState(bytes_in=bytes_in))
            words[base + ROW_LOG_START_OFFSET] = 0
            words[base + ROW_DURABLE_END] = 0
            words[base + ROW_SYNC_OWNER] = 0
            words[base + ROW_SYNC_IN_DOUBT] = 0
            words[base + ROW_INDEX_SYNC] = 0
            write_mask(words, base + ROW_WAITERS, 0)
            write_mask(words, base + ROW_SYNC_WAITERS, 0)
            words[base + ROW_STRUCTURE] += 2
            words[base + ROW_STATUS] = RowStatus.UNLOADED

    def _fetched_bytes(self, index: int) -> int:
        if self._control is None:
            return 0
        words, control = self._segment.words, self._control.words
        return sum(
            words[fetched_bytes.first_word(handler) + index]
            for handler in range(HANDLER_IDS)
            if control[handler_row(handler) + HANDLER_INCARNATION]
        )


def note_offline_change(words: memoryview) -> None:
    """Note that a partition or a log directory went offline, or came back.

    Args:
        words: the control segment. The change was stored before.
    """
    words[HEADER + HEADER_OFFLINE_CHANGES] = time.monotonic_ns()


def rows_made(words: memoryview) -> int:
    """Return how many rows were ever made usable, in their order, of a table's words.

    Such a row has a mutex that was initialised. No row beyond the first unused one is
    read: that would allocate its page.
    """
    row = 0
    while row < MAX_PARTITIONS and any(
        words[row * ROW_WORDS : row * ROW_WORDS + MUTEX_WORDS]
    ):
        row += 1
    return row


def _check(index: int) -> None:
    if not 0 <= index < MAX_PARTITIONS:
        raise IndexError(f"partition row {index} not in 0..{MAX_PARTITIONS}")


class PartitionRow:
    """The row of one partition (its record in shared memory), as a process sees it."""

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
        """Take the partition's mutex; if its owner died, settle the owner's intent.

        An intent is the note of an append under way. To settle it means: note in the
        request's slot that the append is done if it was committed, then delete the
        intent.
        """
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
        """Take and release the partition's lock, to settle a dead owner's intent.

        So it is noted now whether the owner's append was committed: see `lock`.
        """
        self.lock()
        self.unlock()

    def try_settle(self, slot: int) -> bool:
        """Settle a dead process's intent for an append, without waiting for the lock.

        To settle means to note whether the append was committed (see `lock`). Another
        process that takes the dead owner's lock does so before all else, and may then
        keep the lock for as long as a disk hangs.

        Args:
            slot: the slot of the request that the dead process was executing.

        Returns:
            Whether the intent is settled; False: another process has just taken the
            lock, and has not settled it yet.
        """
        result = try_lock(self._argument)
        if result == errno.EBUSY:
            return self.words[self.base + ROW_INTENT] != slot + 1
        if result:
            owner_died(self._argument, result)
            self._settle_intent()
        self.unlock()
        return True

    def settle_and_unlock(self) -> None:
        """Note whether the append of a dead owner was committed, and release the lock.

        The caller holds the lock: the C code has taken it, and left this to Python.
        """
        self._settle_intent()
        self.unlock()

    # -- the committed copy ------------------------------------------------------

    def snapshot(self) -> LogState:
        """Return the committed state of the partition's log, read without the lock.

        If the state changed meanwhile, it is read again.
        """
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
        """Commit a new state of the partition's log. The caller holds the lock."""
        words, base = self.words, self.base
        version = words[base + ROW_VERSION] + 1
        word = base + ROW_COPIES + (version & 1) * ROW_COPY_WORDS
        for value in state:
            words[word] = value
            word += 1
        # Last, as one aligned store: it makes the other copy the valid one.
        words[base + ROW_VERSION] = version

    # -- exactly once --------------------------------------------------------------

    def set_intent(self, slot: int, ordinal: int, base_offset: int) -> None:
        """Note, before an append, which request makes it and at which offset.

        Args:
            slot: the request's slot; negative: nothing is noted.
            ordinal: the index of this partition in the request.
            base_offset: the log end offset, where the append will begin.
        """
        if slot < 0:
            return
        assert self._control is not None
        slots, row = self._control.words, slot_row(slot)
        slots[row + SLOT_INTENT_BASE] = base_offset
        slots[row + SLOT_INTENT] = (ordinal + 1) << 32 | (self.index + 1)
        # Last: a process that takes a dead owner's lock looks here first, and then
        # finds the slot's words complete.
        self.words[self.base + ROW_INTENT] = slot + 1
        self._intended = (row, ordinal, base_offset)

    def clear_intent(self) -> None:
        """Note in the request's slot that an append is done; delete its intent.

        The intent is the note of `set_intent`. The caller holds the lock, and has
        published the new state.
        """
        intended = self._intended
        if intended is None:
            return
        # The stores of _settle_intent, in the same order. Unlike a successor, this
        # process knows that the append was committed.
        row, ordinal, base_offset = intended
        self._intended = None
        self._note_done(row, ordinal, base_offset)
        assert self._control is not None
        self._control.words[row + SLOT_INTENT] = 0
        self.words[self.base + ROW_INTENT] = 0

    def abandon_intent(self) -> None:
        """Settle the note of this process's append, which has failed: see `lock`.

        The append may have failed before or after its commit.
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
        # Last: it says that the word of this partition is valid.
        slots[row + SLOT_PROGRESS] = ordinal + 1

    # -- the owner of a sync ---------------------------------------------------------

    def begin_sync(self, process: int, waiter: int = 0) -> int | None:
        """Become the owner of the log's sync, unless a process is its owner already.

        Every fdatasync of the log is between this and ``end_sync``. The kernel reports
        a failed write once to each file that was open then. It does not report it to a
        file that is opened after a process was told of the failure. So only one process
        at a time may sync, and the next one only when the result is in the row.

        Args:
            process: the id of this process.
            waiter: the bit of this handler: if another process is the owner, the
                handler is told when that sync has ended. 0: do not tell it.

        Returns:
            The log end offset, up to which a sync that begins now makes the log
            durable; None: another process, or this one, is making a sync.
        """
        words, base = self.words, self.base
        self.lock()  # faster than ``with self.locked()``, twice for each sync
        try:
            if words[base + ROW_SYNC_OWNER]:
                waiters = read_mask(words, base + ROW_SYNC_WAITERS)
                write_mask(words, base + ROW_SYNC_WAITERS, waiters | waiter)
                return None
            words[base + ROW_SYNC_OWNER] = process + 1
            return self.log_end_offset
        finally:
            self.unlock()

    def end_sync(self, durable_end: int, *, failed: bool = False) -> int:
        """Publish the result of a sync, and release the ownership of the log's sync.

        If this process is killed before this, the supervisor releases the sync. The
        next sync covers the range again, and reads it back from the disk.

        Args:
            durable_end: all records below this offset are on disk; 0: nothing was
                synced.
            failed: a file could not be synced. The partition goes offline: a page that
                could not be written may be lost although the next sync succeeds.

        Returns:
            The handlers that wait for the sync, a bit for each; the caller tells them.
        """
        words, base = self.words, self.base
        self.lock()
        try:
            status = words[base + ROW_STATUS]
            if failed:
                if status != RowStatus.DELETED:
                    self.status = RowStatus.OFFLINE
            elif (
                status != RowStatus.OFFLINE
                and durable_end > words[base + ROW_DURABLE_END]
            ):
                words[base + ROW_DURABLE_END] = durable_end
            waiters = read_mask(words, base + ROW_SYNC_WAITERS)
            if waiters:
                write_mask(words, base + ROW_SYNC_WAITERS, 0)
            words[base + ROW_SYNC_OWNER] = 0
        finally:
            self.unlock()
        return waiters

    def forget_sync(self, process: int) -> None:
        """Release the log's sync, if a dead process is its owner.

        The kernel may have reported an error to the dead process, and does not report
        it again to a file that is opened later. So the next owner must not rely on its
        fdatasync alone.

        This takes no lock, because the lock's owner may wait for a disk. No other
        process changes the word as long as it names the dead one. A process that looks
        at the word now waits for a notice, which the supervisor sends after this.
        """
        words, owner = self.words, self.base + ROW_SYNC_OWNER
        if words[owner] == process + 1:
            words[self.base + ROW_SYNC_IN_DOUBT] = 1  # before there may be a next owner
            words[owner] = 0

    @property
    def is_sync_in_doubt(self) -> bool:
        """Return whether a process was killed while it synced the log or its indexes.

        Call this when no process of the broker is alive: else a sync may be running.
        """
        words, base = self.words, self.base
        return bool(
            words[base + ROW_SYNC_OWNER]
            or words[base + ROW_SYNC_IN_DOUBT]
            or words[base + ROW_INDEX_SYNC]
        )

    def owns_sync(self, process: int) -> bool:
        """Return whether a process is the one that may sync the log to disk now."""
        return self.words[self.base + ROW_SYNC_OWNER] == process + 1

    # -- the handlers that wait for a change ------------------------------------------

    def add_waiter(self, handler: int) -> None:
        """Note that a handler wants a notice at the partition's next change."""
        word = self.base + ROW_WAITERS + handler // MASK_BITS
        with self.locked():
            self.words[word] |= 1 << handler % MASK_BITS

    def take_waiters(self) -> int:
        """Return the handlers that want a notice of a change, and forget them.

        The result has a bit for each.
        """
        words, at = self.words, self.base + ROW_WAITERS
        if not (words[at] or words[at + 1]):
            return 0
        with self.locked():
            waiters = read_mask(words, at)
            write_mask(words, at, 0)
        return waiters

    # -- single words ----------------------------------------------------------------

    @property
    def status(self) -> int:
        return self.words[self.base + ROW_STATUS]

    @status.setter
    def status(self, value: RowStatus) -> None:
        self.words[self.base + ROW_STATUS] = value
        # Afterwards: who has read the old number may have seen the old status.
        if value == RowStatus.OFFLINE and self._control is not None:
            note_offline_change(self._control.words)

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
