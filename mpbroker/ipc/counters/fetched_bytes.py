"""How many bytes of each partition were given to clients, in words that outlive whoever
gave them.

Whoever fetches takes no lock, so a handler adds to words of its own, which its
successors go on with; a reader adds up those of all handlers. They lie behind the rows
in the partition segment. A page of them (512 rows of a handler) costs memory once a
partition there was fetched from, or somebody has read how much that was:

    +--------------------------+  0
    | partition rows           |  see layout.py
    +--------------------------+  FIRST
    | handler [0..H)           |  MAX_PARTITIONS words each, one a partition row
    +--------------------------+

What was appended is in the row itself (``LogState.bytes_in``): committed with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import add
from typing import Final

from mpbroker.ipc.layout import HANDLER_IDS, MAX_PARTITIONS, ROW_WORDS

FIRST: Final = MAX_PARTITIONS * ROW_WORDS
WORDS: Final = HANDLER_IDS * MAX_PARTITIONS


def first_word(handler: int) -> int:
    """Where a handler's words are: the one of row 0."""
    return FIRST + handler * MAX_PARTITIONS


def read_fetched_bytes(
    words: memoryview, rows: int, handlers: Iterable[int]
) -> list[int]:
    """Add up what handlers, the living and those before them, have given of each row.

    Args:
        words: of the partition segment.
        rows: how many are in use; a look beyond would touch, and so make, pages.
    """
    total = [0] * rows
    for handler in handlers:
        first = first_word(handler)
        total = list(map(add, total, words[first : first + rows].tolist()))
    return total
