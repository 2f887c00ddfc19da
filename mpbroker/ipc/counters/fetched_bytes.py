"""Count the bytes that clients have fetched from each partition.

A fetch takes no lock, so each handler adds to words of its own, and its successors
continue with them; a reader adds up the words of all handlers. They lie behind the rows
in the partition segment. A page of them (512 rows of one handler) costs memory once
bytes of one of these partitions were fetched, or once a reader has read the page:

    +--------------------------+  0
    | partition rows           |  see layout.py
    +--------------------------+  FIRST
    | handler [0..H)           |  MAX_PARTITIONS words each, one for each partition row
    +--------------------------+

The bytes that were appended are counted in the row itself (``LogState.bytes_in``), and
committed with the append.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import add
from typing import Final

from mpbroker.ipc.layout import HANDLER_IDS, MAX_PARTITIONS, ROW_WORDS

FIRST: Final = MAX_PARTITIONS * ROW_WORDS
WORDS: Final = HANDLER_IDS * MAX_PARTITIONS


def first_word(handler: int) -> int:
    """Return the index of a handler's first word, which counts for partition row 0."""
    return FIRST + handler * MAX_PARTITIONS


def read_fetched_bytes(
    words: memoryview, rows: int, handlers: Iterable[int]
) -> list[int]:
    """Return the bytes fetched from each partition through some handlers.

    The result is in the order of the partitions' rows.

    Args:
        words: the partition segment, which has a row for each partition.
        rows: the number of rows in use; to read beyond them would allocate pages.
        handlers: ids; predecessors of the handlers are included.
    """
    total = [0] * rows
    for handler in handlers:
        first = first_word(handler)
        total = list(map(add, total, words[first : first + rows].tolist()))
    return total
