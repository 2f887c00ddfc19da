"""Keep the newest objects of this node in memory, besides in the store.

A node copies its own objects into its local logs, too. With the objects in memory it
does not read them from the store for that, so a record can be read sooner after its
acknowledgement.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Sequence
from typing import Final, Protocol

_REMEMBERED_BYTES: Final = 32 << 20


class Store(Protocol):
    """A store of objects, such as ``ObjectStore``."""

    def put_async(self, key: str, content: bytes) -> Awaitable[None]: ...

    def get_ranges_async(
        self, key: str, ranges: Sequence[tuple[int, int]]
    ) -> Awaitable[list[memoryview]]: ...


class RecentObjects:
    """A store that keeps the newest objects of this node in memory, too.

    Args:
        store: the store that has all objects.
        remembered_bytes: the most bytes in memory; a single object may be larger.
    """

    def __init__(self, store: Store, remembered_bytes: int = _REMEMBERED_BYTES) -> None:
        self._store = store
        self._limit = remembered_bytes
        self._contents: OrderedDict[str, bytes] = OrderedDict()
        self._size = 0

    async def put_async(self, key: str, content: bytes) -> None:
        """Put an object into the store, and keep it in memory.

        The errors are those of the store.
        """
        await self._store.put_async(key, content)
        self._size += len(content) - len(self._contents.pop(key, b""))
        self._contents[key] = content
        while self._size > self._limit and len(self._contents) > 1:
            self._size -= len(self._contents.popitem(last=False)[1])

    async def get_ranges_async(
        self, key: str, ranges: Sequence[tuple[int, int]]
    ) -> list[memoryview]:
        """Return some ranges of an object, from memory or from the store.

        The errors are those of the store.

        Args:
            ranges: the first position and the size of each range, in bytes.
        """
        content = self._contents.get(key)
        if content is None:
            return await self._store.get_ranges_async(key, ranges)
        view = memoryview(content)
        return [view[start : start + size] for start, size in ranges]
