"""The processes that use partition rows, and how far each has let go of deleted ones.

The row of a deleted partition may be another partition's only when no process can use
it for the old one: an open log, a parked fetch, a sync that runs, an open transaction.
No request pays for finding that out. Instead each process that uses rows has one word:
the position in the metadata log up to which it has seen all deletions, and has let go
of their rows (partitions' records in shared memory). A row is free when the words of
all processes have passed the position of its deletion.

    value of a word
    0          there is no such process
    1          it begins: it may use every row that ever was
    position + 2

The supervisor stores 1 before each fork, and 0 when a process is gone for good. In
between the process itself writes. A dead process keeps its word, and its successor
begins with 1: what both of them have left behind is let go of by the successor.

The words are in the rows of handlers and of the coordinator, and for the housekeeper
and the exporter in the header (layout.py).
"""

from __future__ import annotations

from typing import Final

from mpbroker.ipc.layout import (
    HANDLER_IDS,
    HANDLER_PASSED,
    HANDLER_WORDS,
    HANDLERS,
    HEADER,
    HEADER_EXPORTER_PASSED,
    HEADER_HOUSEKEEPER_PASSED,
    HOUSEKEEPER,
    handler_row,
)

# Ids of users: those of handlers and the coordinator, HOUSEKEEPER, and this one.
EXPORTER: Final = HOUSEKEEPER + 1
_NONE: Final = 0
_BEGINS: Final = 1
_FIRST: Final = 2
NEVER: Final = 1 << 62


def _word(user: int) -> int:
    if user < HANDLER_IDS:
        return handler_row(user) + HANDLER_PASSED
    if user == HOUSEKEEPER:
        return HEADER + HEADER_HOUSEKEEPER_PASSED
    return HEADER + HEADER_EXPORTER_PASSED


def begins(words: memoryview, user: int) -> None:
    """Note that a process is about to begin, and may use every partition row.

    A row is a partition's record in shared memory. Only for the supervisor, before the
    fork.
    """
    words[_word(user)] = _BEGINS


def is_gone(words: memoryview, user: int) -> None:
    """Note that a process has ended for good, and uses no partition row any more.

    A row is a partition's record in shared memory. Only for the supervisor.
    """
    words[_word(user)] = _NONE


def note_passed(words: memoryview, user: int, position: int) -> None:
    """Store up to which position of the metadata log this process has let go of rows.

    It uses no row of a partition whose deletion is below the position.
    """
    words[_word(user)] = position + _FIRST


def passed(words: memoryview) -> int:
    """Return up to which position of the metadata log no process uses old rows.

    Old rows are those of partitions whose deletion is below this position.
    """
    first, end = HANDLERS + HANDLER_PASSED, HANDLERS + HANDLER_IDS * HANDLER_WORDS
    noted = words[first:end:HANDLER_WORDS].tolist()
    noted += [words[_word(user)] for user in (HOUSEKEEPER, EXPORTER)]
    return min((word for word in noted if word != _NONE), default=NEVER) - _FIRST
