"""KeyMap: the newest offset of each key in the dirty part of a log, in bounded memory.

Keys are kept as 16-byte hashes, as in Kafka. Two keys with the same hash would count as
one key; that is less likely than a wrong bit in memory.

``new_key_map`` returns the compiled map of ``_cleaner.c``, if it was built. The
compiled map also walks over the records of plain batches, many at a time.

Source: Kafka's SkimpyOffsetMap.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    Spans = list[tuple[int, int, int]]

_HASH_BYTES: Final = 16
# A bytes object of 16 bytes, an int, and their share of a dict two thirds full: 191
# bytes, measured on CPython 3.11 with a million entries.
_BYTES_PER_KEY: Final = 192


class KeyMap:
    """A map from keys to their newest offsets; it refuses new keys when it is full.

    Args:
        max_keys: the number of keys that it has room for.

    Attributes:
        latest_offset: all records up to this offset are in the map; -1: none.
    """

    def __init__(self, max_keys: int) -> None:
        self._max_keys = max(1, max_keys)
        from hashlib import blake2b  # imported here: OpenSSL costs every start 4 ms

        self._hash = blake2b
        self._offsets: dict[bytes, int] = {}
        self.latest_offset = -1

    def __len__(self) -> int:
        return len(self._offsets)

    def put(self, key: bytes, offset: int) -> bool:
        """Store a key's newest offset; False: the map has no room for a new key."""
        digest = self._hash(key, digest_size=_HASH_BYTES).digest()
        if len(self._offsets) >= self._max_keys and digest not in self._offsets:
            return False
        self._offsets[digest] = offset
        return True

    def get(self, key: bytes) -> int:
        """Return a key's newest offset; -1: the map does not have the key."""
        digest = self._hash(key, digest_size=_HASH_BYTES).digest()
        return self._offsets.get(digest, -1)

    def map_batches(self, chunk: bytes, at: int, start: int) -> tuple[int, bool]:
        """Store the keys of a chunk's plain batches, up to the first other batch.

        Only the compiled map, which replaces this class where it was built, does so.
        This class stores no key, and returns ``at``: the caller reads each batch.

        Args:
            chunk: bytes of a log.
            at: the index in ``chunk`` at which a batch begins.
            start: records below this offset do not count.

        Returns:
            The index of the first batch of which not all keys were stored, and whether
            the map is full.
        """
        return at, False

    def filter_batches(
        self, chunk: bytes, at: int, last_offset: int
    ) -> tuple[int, bytes, Spans]:
        """Return copies of a chunk's plain batches, with only the records to keep.

        Only the compiled map, which replaces this class where it was built, does so.
        This class copies no batch, and returns ``at``: the caller copies each batch.

        Args:
            chunk: bytes of a log.
            at: the index in ``chunk`` at which a batch begins.
            last_offset: a batch that ends at this offset, and keeps no record, is left
                to the caller.

        Returns:
            The index of the first batch that is left to the caller; the copies; and
            (size in bytes, last offset, largest timestamp in ms) of each copy.
        """
        return at, b"", []


new_key_map: Callable[[int], KeyMap] = KeyMap
BYTES_PER_KEY = _BYTES_PER_KEY
try:
    from mpbroker.native import _cleaner  # type: ignore[attr-defined, unused-ignore]
except ImportError:  # no compiler where this was installed
    pass
else:
    if not os.environ.get("MPBROKER_PURE_PYTHON"):
        new_key_map = _cleaner.KeyMap
        BYTES_PER_KEY = _cleaner.BYTES_PER_KEY
