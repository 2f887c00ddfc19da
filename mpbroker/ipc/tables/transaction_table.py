"""The open transactions: the partitions that each producer may write to now, shared.

The coordinator opens and closes entries. A handler that appends a transactional batch
looks for the entry, under the partition row's lock. The coordinator closes the entry
before it takes the same lock for the marker that ends the transaction, so no record of
a transaction follows its marker.

    word  field     written by       notes
    0     count     the coordinator  upper bound of the entries in use
    1     awaits    the supervisor,  1: all partitions are closed, because they may lack
                    the coordinator  markers lost in a power cut (``restored``)
    2     tries     the coordinator, how often restoring was begun, without coordinators
                    the supervisor   that were replaced on purpose
    3     since     the supervisor   monotonic ns since when they are closed
    16..  entries   the coordinator  key, value: a table with open addressing
          key                        producer id + 1; 0 never used, -1 removed
          value                      partition row << 16 | producer epoch

One aligned store to its key adds or removes an entry; the value is written before. The
entries outlive the coordinator: while its successor reads the log, producers go on
writing, and then the successor makes the table agree with the log (``keep_only``).

Source: KIP-890; this table takes the place of its verification guard.
"""

import os
import time
from collections.abc import Callable, Iterable
from struct import Struct
from typing import Final

from mpbroker.base.named_tuple import NamedTuple
from mpbroker.ipc.segment import Segment

CAPACITY: Final = 1 << 17
# With more entries, probing takes long; a transaction that needs more has to wait.
MAX_ENTRIES: Final = CAPACITY * 3 // 4
_ENTRIES: Final = 16
_MASK: Final = CAPACITY - 1
_AWAITS: Final = 1
_TRIES: Final = 2
_SINCE: Final = 3
_MOST_TRIES: Final = 3
_INHERITED: Final = Struct("=3q")  # the words from _AWAITS on
_NEVER_USED: Final = 0
_GIVEN_BACK: Final = -1
_EPOCH_BITS: Final = 16
_EPOCH_MASK: Final = (1 << _EPOCH_BITS) - 1


def _start(producer_id: int, row: int) -> int:
    return ((producer_id * 0x9E3779B1) ^ (row * 0x85EBCA6B)) >> 7 & _MASK


class Closed(NamedTuple):
    """Says for how long all partitions have been closed for reads and writes, and why.

    Attributes:
        for_s: the time for which they have been closed, in seconds.
        coordinators: the number of coordinators that have begun to restore them.
    """

    for_s: float
    coordinators: int

    def __str__(self) -> str:
        return (
            f"all partitions are closed for {self.for_s:.0f} s (NOT_LEADER_OR_FOLLOWER)"
            ": after an unclean stop transactions are loaded first, and markers are"
            " written again that a power cut may have lost; this is attempt"
            f" {self.coordinators} of at most {_MOST_TRIES}"
        )


class TransactionTable:
    """The table of open transactions, as one process sees it."""

    def __init__(self, segment: Segment) -> None:
        self._words = segment.words
        # For native/ipc/transaction_table.c: the bytes, the first entry's word, the
        # capacity, and the number of bits of an epoch.
        self.place: Final = (segment.view, _ENTRIES, CAPACITY, _EPOCH_BITS)

    @staticmethod
    def create_segment() -> Segment:
        size = (_ENTRIES + 2 * CAPACITY) * 8
        return Segment.create("mpbroker-transactions", size)

    def __len__(self) -> int:
        return self._words[0]

    def contains(self, producer_id: int, epoch: int, row: int) -> bool:
        """Return whether a producer's transaction is open in a partition.

        Args:
            producer_id: the producer.
            epoch: the producer's epoch.
            row: the index of the partition's row.
        """
        words, key = self._words, producer_id + 1
        value = row << _EPOCH_BITS | epoch
        at = _start(producer_id, row)
        for _ in range(CAPACITY):
            word = _ENTRIES + 2 * at
            found = words[word]
            if found == _NEVER_USED:
                return False
            # The key is read twice: between the reads the entry may have been replaced.
            if found == key and words[word + 1] == value and words[word] == key:
                return True
            at = (at + 1) & _MASK
        return False

    def await_restoring(self) -> None:
        """Close all partitions, for reads and writes, until ``restored`` is called."""
        # The time first: a reader that sees the partitions closed also reads the time.
        self._words[_SINCE] = time.monotonic_ns()
        self._words[_AWAITS] = 1

    def inherit(self, fd: int) -> None:
        """Close all partitions if they were closed in the table before an upgrade.

        Args:
            fd: the memory segment of that table.
        """
        found = os.pread(fd, _INHERITED.size, 8 * _AWAITS)
        awaits, _, since = _INHERITED.unpack(found)
        if awaits:
            self._words[_SINCE] = since or time.monotonic_ns()
            self._words[_AWAITS] = 1

    def closed(self) -> Closed | None:
        """Return for how long all partitions have been closed; None: they are open."""
        words = self._words
        if not words[_AWAITS]:
            return None
        return Closed((time.monotonic_ns() - words[_SINCE]) / 1e9, words[_TRIES])

    def is_restored(self) -> bool:
        """Return whether all partitions are open for reads and writes."""
        return not self._words[_AWAITS]

    def begin_restoring(self) -> bool:
        """Count a coordinator's try to load transactions after an unclean stop.

        Until they are loaded, all partitions are closed: they take no records.

        If three coordinators have died while loading, this opens all partitions, though
        the ends of some transactions (markers) may be missing in their logs. Only the
        coordinator calls it.

        Returns:
            Whether to load; False: too many coordinators have tried.
        """
        words = self._words
        if not words[_AWAITS]:
            return True
        words[_TRIES] += 1
        if words[_TRIES] <= _MOST_TRIES:
            return True
        self.restored()
        return False

    def forget_try(self) -> None:
        """Take back `begin_restoring`, as the coordinator was replaced on purpose."""
        self._words[_TRIES] = max(0, self._words[_TRIES] - 1)

    def restored(self) -> None:
        """Open all partitions for reads and writes. Only for the coordinator."""
        self._words[_AWAITS] = 0

    def has_room(self, count: int) -> bool:
        """Return whether ``count`` more entries fit into the table.

        An entry lets the transaction of one producer write to one partition.
        """
        return self._words[0] + count <= MAX_ENTRIES

    def open(self, producer_id: int, epoch: int, row: int) -> bool:
        """Add an entry: let a producer's transaction write to a partition.

        An entry with another epoch is replaced. Only for the coordinator.

        Returns:
            False if the table is full.
        """
        words, key = self._words, producer_id + 1
        value = row << _EPOCH_BITS | epoch
        at, free = _start(producer_id, row), -1
        for _ in range(CAPACITY):
            word = _ENTRIES + 2 * at
            found = words[word]
            if found == key and words[word + 1] >> _EPOCH_BITS == row:
                words[word + 1] = value
                return True
            if found in (_GIVEN_BACK, _NEVER_USED) and free < 0:
                free = word
            if found == _NEVER_USED:
                break
            at = (at + 1) & _MASK
        if free < 0 or words[0] >= MAX_ENTRIES:
            return False
        words[0] += 1  # first: a death in between makes the count too large
        words[free + 1] = value
        words[free] = key  # last: only now do handlers find the entry
        return True

    def close(self, producer_id: int, row: int) -> None:
        """Remove an entry: the producer may not write to the partition any more.

        Only for the coordinator.
        """
        words, key = self._words, producer_id + 1
        at = _start(producer_id, row)
        for _ in range(CAPACITY):
            word = _ENTRIES + 2 * at
            found = words[word]
            if found == _NEVER_USED:
                return
            if found == key and words[word + 1] >> _EPOCH_BITS == row:
                self._give_back(at)
                return
            at = (at + 1) & _MASK

    def _give_back(self, at: int) -> None:
        words = self._words
        # The key first: a death in between makes the count too large, never too small.
        words[_ENTRIES + 2 * at] = _GIVEN_BACK
        words[0] -= 1
        # Removed entries at the end of a chain count as never used: no search has to
        # pass them any more.
        if words[_ENTRIES + 2 * ((at + 1) & _MASK)] != _NEVER_USED:
            return
        while words[_ENTRIES + 2 * at] == _GIVEN_BACK:
            words[_ENTRIES + 2 * at] = _NEVER_USED
            at = (at - 1) & _MASK

    def close_rows(self, is_gone: Callable[[int], bool]) -> None:
        """Remove the entries of deleted partitions, by their rows in shared memory.

        Only for the coordinator, before other partitions get these rows.
        """
        words = self._words
        # The count is never too small, so with 0 there are no entries to read.
        if not words[0]:
            return
        keys = words[_ENTRIES : _ENTRIES + 2 * CAPACITY : 2].tolist()
        for at, key in enumerate(keys):
            if key > 0 and is_gone(words[_ENTRIES + 2 * at + 1] >> _EPOCH_BITS):
                self._give_back(at)

    def keep_only(self, entries: Iterable[tuple[int, int, int]]) -> None:
        """Replace the open transactions in the table by those found in the log.

        Only for a coordinator that has just read the log of transactions.

        Args:
            entries: producer id, producer epoch and partition row of each.
        """
        words = self._words
        wanted = {(producer, row): epoch for producer, epoch, row in entries}
        used = 0
        # The count is never too small, so with 0 there are no entries to read.
        keys = words[_ENTRIES : _ENTRIES + 2 * CAPACITY : 2] if words[0] else words[:0]
        for at, key in enumerate(keys.tolist()):
            if key > 0:
                word = _ENTRIES + 2 * at
                row = words[word + 1] >> _EPOCH_BITS
                epoch = words[word + 1] & _EPOCH_MASK
                if wanted.get((key - 1, row)) == epoch:
                    used += 1
                else:
                    self._give_back(at)
        words[0] = used
        for (producer, row), epoch in wanted.items():
            self.open(producer, epoch, row)
