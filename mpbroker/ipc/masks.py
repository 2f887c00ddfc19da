"""Sets of process ids in shared memory: a bit for each id, over MASK_WORDS words.

A set is one number to Python: bit n is id n. In shared memory each word has MASK_BITS
bits of it, because a word is signed. No store covers both words, so a set is changed
under the lock that guards it, or by changing words of which each is right by itself.
"""

from __future__ import annotations

from typing import Final

from mpbroker.ipc.layout import MASK_BITS, MASK_WORDS

_WORD: Final = (1 << MASK_BITS) - 1
assert MASK_WORDS == 2


def read_mask(words: memoryview, at: int) -> int:
    """Return the set of ids in the words from ``at`` on, a bit for each id."""
    return words[at] | words[at + 1] << MASK_BITS


def write_mask(words: memoryview, at: int, mask: int) -> None:
    """Store a set of ids, which has a bit for each, in the words from ``at`` on."""
    words[at] = mask & _WORD
    words[at + 1] = mask >> MASK_BITS


def lowest_of(mask: int) -> int:
    """Return the lowest id of a set, which must not be empty."""
    return (mask & -mask).bit_length() - 1
