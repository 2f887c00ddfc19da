"""The arena: the bytes of requests and responses, in one sparse memfd, mapped once.

    +---------------------------------+
    | region of processor 0           |
    |   blocks: 8192 x 16 KiB         |  one a slot: request, progress, answer
    |   extents, in 64 KiB pages      |  frames that do not fit a block; the last part
    |                                 |  is kept for small ones
    +---------------------------------+
    | region of processor 1 ...       |
    +---------------------------------+
    | region of handler 0             |
    |   extents, in 4 KiB pages       |  answers that do not fit a block; the last part
    |                                 |  is kept for small ones
    +---------------------------------+

A slot is the entry of one request in flight; an extent is a range of bytes for one
frame. A region has one owner, the process with that id, and the allocator of the region
is private to this process: no allocator state is in shared memory. A successor rebuilds
it from the slots: all memory is free that no slot refers to. Request and response parts
never overlap, since a handler that dies half-way through its answer must leave the
request intact.
"""

import sys
from bisect import insort
from collections.abc import Iterable
from typing import Final

from mpbroker.ipc.layout import (
    HANDLER_IDS,
    MAX_PARTITIONS,
    MAX_PROCESSORS,
    SLOTS_PER_PROCESSOR,
)
from mpbroker.ipc.segment import Segment

# A block: 13 KiB of request, then a progress word for each partition that a produce
# request of that length can name (none takes less than 67 bytes), then the answer.
# An extent: the frame, then its progress words.
BLOCK_BYTES: Final = 16 * 1024
REQUEST_PART_BYTES: Final = 13 * 1024
PROGRESS_WORDS: Final = 200
ANSWER_AT: Final = REQUEST_PART_BYTES + PROGRESS_WORDS * 8
ANSWER_BYTES: Final = BLOCK_BYTES - ANSWER_AT
BLOCKS_BYTES: Final = SLOTS_PER_PROCESSOR * BLOCK_BYTES

REQUEST_PAGE_BYTES: Final = 64 * 1024
RESPONSE_PAGE_BYTES: Final = 4 * 1024
HANDLER_REGION_BYTES: Final = 64 * 1024 * 1024

# The last part of a processor's region is kept for frames up to this length, so that
# large frames that come slowly never keep small ones from being read. A Java producer
# sends requests of 1 MiB at most (max.request.size) unless it is told otherwise; the
# page above that is for the headers.
SMALL_FRAME_BYTES: Final = 1024 * 1024 + REQUEST_PAGE_BYTES
_SMALL_FRAMES_BYTES: Final = 64 * 1024 * 1024

# The same for answers, at the end of a handler's region. The largest answer of the
# default settings (fetch.max.bytes, 55 MiB) fits beside that part.
SMALL_ANSWER_BYTES: Final = 64 * 1024
LARGE_ANSWERS_BYTES: Final = HANDLER_REGION_BYTES - 8 * 1024 * 1024

_MIN_PARTITION_BYTES: Final = 64


def progress_offset(extent: int, frame_bytes: int) -> int:
    """Return the arena offset of the progress words behind a frame in an extent.

    An extent is a range of the arena for a frame that is too long for a slot's block. A
    handler stores one progress word for each partition of the request that is done.

    Args:
        extent: the arena offset of the extent.
        frame_bytes: the length of the frame.
    """
    return (extent + frame_bytes + 7) & ~7


def progress_words(frame_bytes: int) -> int:
    """Return the number of progress words for a frame that is too long for a block.

    It is the number of partitions that a frame of this length can name at most.
    """
    return min(frame_bytes // _MIN_PARTITION_BYTES + 1, MAX_PARTITIONS)


def extent_bytes(frame_bytes: int) -> int:
    """Return the bytes that a frame too long for a block takes in the arena.

    Its progress words, one for each partition that it may name, are included.
    """
    return frame_bytes + 8 + progress_words(frame_bytes) * 8


class ArenaLayout:
    """Byte offsets of the arena's regions, one for each processor and handler.

    Args:
        max_request_bytes: socket.request.max.bytes.
        queued_bytes: a processor's share of queued.max.request.bytes, the limit for
            frames that do not fit a block; 0 or less: room for two frames of the
            largest size at a time, and 64 MiB more.
    """

    def __init__(self, max_request_bytes: int, queued_bytes: int = 0) -> None:
        largest = extent_bytes(max_request_bytes)
        wanted = 2 * largest + (64 << 20)
        if queued_bytes > 0:
            wanted = max(queued_bytes, largest)
        page = REQUEST_PAGE_BYTES
        self.extents_bytes = -(-wanted // page) * page
        # The largest frame must fit beside the part for small ones.
        spare = min(wanted // 4, wanted - largest, _SMALL_FRAMES_BYTES)
        self._large_bytes = self.extents_bytes - spare // page * page
        self.processor_region_bytes = BLOCKS_BYTES + self.extents_bytes
        self._handlers = MAX_PROCESSORS * self.processor_region_bytes
        self.size_bytes = self._handlers + HANDLER_IDS * HANDLER_REGION_BYTES

    def create(self) -> Segment:
        return Segment.create("mpbroker-arena", self.size_bytes)

    def block(self, slot: int) -> int:
        """Return the arena offset of a slot's block of 16 KiB."""
        processor, local = divmod(slot, SLOTS_PER_PROCESSOR)
        return processor * self.processor_region_bytes + local * BLOCK_BYTES

    def request_extents(self, processor: int) -> "ExtentAllocator":
        start = processor * self.processor_region_bytes + BLOCKS_BYTES
        return ExtentAllocator(start, self.extents_bytes, REQUEST_PAGE_BYTES)

    def small_frames(self, processor: int) -> int:
        """Return the arena offset from which a processor's memory is for small frames.

        This last part reaches to the end of the processor's region. Small frames here
        are those just too long for a block; large ones may not take the part from them.
        """
        start = processor * self.processor_region_bytes + BLOCKS_BYTES
        return start + self._large_bytes

    def handler_of(self, offset: int) -> int:
        """Return the id of the handler whose answers are at this arena offset.

        The result is negative if the offset is in the memory of a processor.
        """
        return (offset - self._handlers) // HANDLER_REGION_BYTES

    def response_extents(self, handler: int) -> "ExtentAllocator":
        start = self._handlers + handler * HANDLER_REGION_BYTES
        return ExtentAllocator(start, HANDLER_REGION_BYTES, RESPONSE_PAGE_BYTES)


class ExtentAllocator:
    """A first-fit allocator of extents (ranges of whole pages) of the arena.

    Its free list is private to the process that owns this region of the arena.
    """

    def __init__(self, start: int, size_bytes: int, page_bytes: int) -> None:
        self.start = start
        self.size_bytes = size_bytes
        self._page = page_bytes
        self._free: list[tuple[int, int]] = [(start, size_bytes)]

    @property
    def is_unused(self) -> bool:
        return self._free == [(self.start, self.size_bytes)]

    def rounded(self, length: int) -> int:
        return -(-length // self._page) * self._page

    def allocate(
        self, length: int, low: int = 0, high: int = sys.maxsize
    ) -> int | None:
        """Return the offset of ``length`` free bytes; None if no gap is long enough.

        Args:
            length: bytes.
            low: no byte before this offset is taken.
            high: no byte from this offset on is taken.
        """
        wanted = self.rounded(length)
        for index, (start, size) in enumerate(self._free):
            first, end = max(start, low), start + size
            if min(end, high) - first >= wanted:
                last = first + wanted
                gaps = (start, first - start), (last, end - last)
                self._free[index : index + 1] = [gap for gap in gaps if gap[1]]
                return first
        return None

    def free(self, start: int, length: int) -> None:
        """Free bytes that ``allocate`` has returned.

        Args:
            start: the offset that ``allocate`` returned.
            length: the length in bytes that was passed to it.
        """
        size = self.rounded(length)
        insort(self._free, (start, size))
        self._join(self._free.index((start, size)))

    def reserve(self, taken: Iterable[tuple[int, int]]) -> None:
        """Rebuild the free list after a restart: all is free except ``taken``.

        Args:
            taken: the start (an offset) and the length in bytes of each extent in use.
        """
        self._free = []
        position = self.start
        for start, length in sorted(taken):
            if start > position:
                self._free.append((position, start - position))
            position = max(position, start + self.rounded(length))
        end = self.start + self.size_bytes
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
