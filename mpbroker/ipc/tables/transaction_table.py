"""Which producer may write to which partition now: the open transactions, shared.

The coordinator opens and closes; whoever appends a transactional batch looks, under
the partition row's lock. The coordinator closes before it takes the same lock for the
marker that ends the transaction; so nothing of a transaction comes behind its marker.

    word  field     written by       notes
    0     count     the coordinator  entries in use; a bound, not a promise
    1     awaits    the supervisor,  1: nobody opens a partition, for it may lack
                    the coordinator  markers that a power cut took (``restored``)
    2     tries     the coordinator, how often restoring was begun, but by those that
                    the supervisor   were replaced on purpose
    3     since     the supervisor   monotonic ns from which on nobody opens one
    16..  entries   the coordinator  key, value: a table with open addressing
          key                        producer id + 1; 0 never used, -1 given back
          value                      partition row << 16 | producer epoch

An entry is put by its key and taken back by its key, each one aligned store, the value
before it. It outlives the coordinator: its successor reads the log and then makes the
table what the log says (``keep_only``), and meanwhile producers write on.

Source: KIP-890, whose verification guard this stands for.
"""

import os
import time
from collections.abc import Iterable
from struct import Struct
from typing import Final, NamedTuple

from mpbroker.ipc.segment import Segment

CAPACITY: Final = 1 << 17
# Beyond this, probing gets long; a transaction that wants more is told to wait.
MAX_ENTRIES: Final = CAPACITY * 3 // 4
_ENTRIES: Final = 16
_MASK: Final = CAPACITY - 1
_AWAITS: Final = 1
_TRIES: Final = 2
_SINCE: Final = 3
_MOST_TRIES: Final = 3
_INHERITED: Final = Struct("=3q")  # from _AWAITS on
_NEVER_USED: Final = 0
_GIVEN_BACK: Final = -1
_EPOCH_BITS: Final = 16
_EPOCH_MASK: Final = (1 << _EPOCH_BITS) - 1


def _start(producer_id: int, row: int) -> int:
    return ((producer_id * 0x9E3779B1) ^ (row * 0x85EBCA6B)) >> 7 & _MASK


class Closed(NamedTuple):
    """Nobody reads or writes a partition, and why."""

    for_s: float
    coordinators: int  # that have begun to open them

    def __str__(self) -> str:
        return (
            f"all partitions are closed for {self.for_s:.0f} s (NOT_LEADER_OR_FOLLOWER)"
            ": after an unclean stop transactions are loaded first, and their ends"
            " written that a power cut may have taken; that is done by coordinator"
            f" {self.coordinators} of at most {_MOST_TRIES}"
        )


class TransactionTable:
    """The open transactions, as any process sees them."""

    def __init__(self, segment: Segment) -> None:
        self._words = segment.words
        # For native/ipc/transaction_table.c: bytes, first entry's word, capacity, bits
        # of an epoch.
        self.place: Final = (segment.view, _ENTRIES, CAPACITY, _EPOCH_BITS)

    @staticmethod
    def create_segment() -> Segment:
        size = (_ENTRIES + 2 * CAPACITY) * 8
        return Segment.create("mpbroker-transactions", size)

    def __len__(self) -> int:
        return self._words[0]

    def contains(self, producer_id: int, epoch: int, row: int) -> bool:
        """Say whether a producer's transaction is open in a partition, at an epoch."""
        words, key = self._words, producer_id + 1
        value = row << _EPOCH_BITS | epoch
        at = _start(producer_id, row)
        for _ in range(CAPACITY):
            word = _ENTRIES + 2 * at
            found = words[word]
            if found == _NEVER_USED:
                return False
            # Twice the key: in between the entry may have become another one.
            if found == key and words[word + 1] == value and words[word] == key:
                return True
            at = (at + 1) & _MASK
        return False

    def await_restoring(self) -> None:
        """Nobody shall read or write a partition until ``restored`` is called."""
        self._words[_SINCE] = time.monotonic_ns()
        self._words[_AWAITS] = 1

    def inherit(self, fd: int) -> None:
        """Go on waiting as the table of a generation before us did; in its segment."""
        found = os.pread(fd, _INHERITED.size, 8 * _AWAITS)
        awaits, _, since = _INHERITED.unpack(found)
        if awaits:
            self._words[_SINCE] = since or time.monotonic_ns()
            self._words[_AWAITS] = 1

    def closed(self) -> Closed | None:
        """For how long nobody has opened a partition; None: everybody may."""
        words = self._words
        if not words[_AWAITS]:
            return None
        return Closed((time.monotonic_ns() - words[_SINCE]) / 1e9, words[_TRIES])

    def is_restored(self) -> bool:
        """Whether logs have all the ends of transactions that they had."""
        return not self._words[_AWAITS]

    def begin_restoring(self) -> bool:
        """A coordinator begins to load; False: too many have died of it. By the owner.

        Then nobody is to wait for it any longer.
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
        """A coordinator was replaced on purpose; it has not died of loading."""
        self._words[_TRIES] = max(0, self._words[_TRIES] - 1)

    def restored(self) -> None:
        """Everybody may read and write. By the owner."""
        self._words[_AWAITS] = 0

    def has_room(self, count: int) -> bool:
        """Whether so many more entries fit."""
        return self._words[0] + count <= MAX_ENTRIES

    def open(self, producer_id: int, epoch: int, row: int) -> bool:
        """Let a producer write to a partition; False: the table is full. By the owner.

        An entry at another epoch is replaced.
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
        words[0] += 1  # first: a death in between makes the count too large, not small
        words[free + 1] = value
        words[free] = key
        return True

    def close(self, producer_id: int, row: int) -> None:
        """A producer may write to a partition no more. By the owner."""
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
        words[_ENTRIES + 2 * at] = _GIVEN_BACK
        words[0] -= 1
        # What nobody has to pass by any more is as if it had never been used.
        if words[_ENTRIES + 2 * ((at + 1) & _MASK)] != _NEVER_USED:
            return
        while words[_ENTRIES + 2 * at] == _GIVEN_BACK:
            words[_ENTRIES + 2 * at] = _NEVER_USED
            at = (at - 1) & _MASK

    def keep_only(self, entries: Iterable[tuple[int, int, int]]) -> None:
        """Make the table these: (producer id, epoch, row). By a new owner."""
        words = self._words
        wanted = {(producer, row): epoch for producer, epoch, row in entries}
        used = 0
        # The count is never too small: mostly there is nothing to be looked at.
        keys = words[_ENTRIES : _ENTRIES + 2 * CAPACITY : 2] if words[0] else words[:0]
        for at, key in enumerate(keys.tolist()):
            if key > 0:
                word = _ENTRIES + 2 * at
                row = words[word + 1] >> _EPOCH_BITS
                epoch = words[word + 1] & _EPOCH_MASK
                if wanted.get((key - 1, row)) == epoch:
                    used += 1
                else:
                    words[word] = _GIVEN_BACK
        words[0] = used
        for (producer, row), epoch in wanted.items():
            self.open(producer, epoch, row)
