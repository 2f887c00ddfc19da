"""Where the bytes of requests and responses lie: one sparse memfd, mapped once.

    +---------------------------------+
    | region of processor 0           |
    |   blocks: 8192 x 16 KiB         |  slot's own: 15 KiB request, 1 KiB response
    |   extents, in 64 KiB pages      |  frames that do not fit a block
    +---------------------------------+
    | region of processor 1 ...       |
    +---------------------------------+
    | region of handler 0             |
    |   extents, in 4 KiB pages       |  answers that do not fit a block
    +---------------------------------+

A region has one owner, the process of that role, and its allocator is private to it:
no allocator state is in shared memory. A successor rebuilds it from the slots ("all
is free but what a slot refers to"). Request and response parts never overlap: a
handler that dies half-way through its answer must leave the request intact.
"""

from bisect import insort
from collections.abc import Iterable
from typing import Final

from mpbroker.ipc.layout import MAX_HANDLERS, MAX_PROCESSORS, SLOTS_PER_PROCESSOR
from mpbroker.ipc.segment import Segment

BLOCK_BYTES: Final = 16 * 1024
REQUEST_PART_BYTES: Final = 15 * 1024
RESPONSE_PART_BYTES: Final = 1024
BLOCKS_BYTES: Final = SLOTS_PER_PROCESSOR * BLOCK_BYTES

REQUEST_PAGE_BYTES: Final = 64 * 1024
RESPONSE_PAGE_BYTES: Final = 4 * 1024
HANDLER_REGION_BYTES: Final = 64 * 1024 * 1024

# So many bytes of progress words fit a block's response part before the answer does
# (see SLOT_PROGRESS_OFFSET); requests with more partitions get an extent.
PROGRESS_WORDS: Final = 32
ANSWER_BYTES: Final = RESPONSE_PART_BYTES - PROGRESS_WORDS * 8


class ArenaLayout:
    """Byte offsets of every region, for one setting of socket.request.max.bytes."""

    def __init__(self, max_request_bytes: int) -> None:
        page = REQUEST_PAGE_BYTES
        # Two of the largest frames at a time, and room beside them: a third waits.
        self.extents_bytes = -(-2 * (max_request_bytes + 4) // page) * page + (64 << 20)
        self.processor_region_bytes = BLOCKS_BYTES + self.extents_bytes
        self._handlers = MAX_PROCESSORS * self.processor_region_bytes
        self.size_bytes = self._handlers + MAX_HANDLERS * HANDLER_REGION_BYTES

    def create(self) -> Segment:
        return Segment.create("mpbroker-arena", self.size_bytes)

    def block(self, slot: int) -> int:
        """Where a slot's block begins."""
        processor, local = divmod(slot, SLOTS_PER_PROCESSOR)
        return processor * self.processor_region_bytes + local * BLOCK_BYTES

    def request_extents(self, processor: int) -> "ExtentAllocator":
        start = processor * self.processor_region_bytes + BLOCKS_BYTES
        return ExtentAllocator(start, self.extents_bytes, REQUEST_PAGE_BYTES)

    def response_extents(self, handler: int) -> "ExtentAllocator":
        start = self._handlers + handler * HANDLER_REGION_BYTES
        # The first page stays unused, so that offset 0 always means "none".
        return ExtentAllocator(start, HANDLER_REGION_BYTES, RESPONSE_PAGE_BYTES)


class ExtentAllocator:
    """First fit over a range of bytes, in whole pages. Private to one process."""

    def __init__(self, start: int, size_bytes: int, page_bytes: int) -> None:
        self._start = start
        self._size = size_bytes
        self._page = page_bytes
        self._free: list[tuple[int, int]] = [(start, size_bytes)]

    @property
    def largest_bytes(self) -> int:
        """The longest extent that could be had right now."""
        return max((length for _, length in self._free), default=0)

    @property
    def is_unused(self) -> bool:
        return self._free == [(self._start, self._size)]

    def rounded(self, length: int) -> int:
        return -(-length // self._page) * self._page

    def allocate(self, length: int) -> int | None:
        """Return where ``length`` bytes begin, or None if no gap is long enough."""
        wanted = self.rounded(length)
        for index, (start, size) in enumerate(self._free):
            if size >= wanted:
                if size == wanted:
                    del self._free[index]
                else:
                    self._free[index] = (start + wanted, size - wanted)
                return start
        return None

    def free(self, start: int, length: int) -> None:
        """Give an extent back; ``length`` as it was asked for."""
        size = self.rounded(length)
        insort(self._free, (start, size))
        self._join(self._free.index((start, size)))

    def reserve(self, taken: Iterable[tuple[int, int]]) -> None:
        """Rebuild: all is free but these (start, length)."""
        self._free = []
        position = self._start
        for start, length in sorted(taken):
            if start > position:
                self._free.append((position, start - position))
            position = max(position, start + self.rounded(length))
        end = self._start + self._size
        if end > position:
            self._free.append((position, end - position))

    def _join(self, index: int) -> None:
        free = self._free
        if index + 1 < len(free) and sum(free[index]) == free[index + 1][0]:
            free[index] = (free[index][0], free[index][1] + free[index + 1][1])
            del free[index + 1]
        if index and sum(free[index - 1]) == free[index][0]:
            free[index - 1] = (free[index - 1][0], free[index - 1][1] + free[index][1])
            del free[index]
