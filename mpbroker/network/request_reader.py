"""Read requests from sockets straight into shared memory, and frame them there.

A connection that becomes readable gets a free slot, and its bytes go into the slot's
own block. When a whole frame is in the block, it is published in place; bytes that a
client pipelined behind it stay in the block until it is answered. A frame that cannot
fit the block moves to an extent of its exact length, and the rest is received there
without reading ahead. So all bytes that we have received are in shared memory, at a
place that the connection's row names, and the kernel counts them.

There are many slots, but a client may open thousands of connections and send a part of
a frame on each. When slots run short, such parts are moved to private memory (at most a
block each) until the rest arrives. Only these are lost with their processor.
"""

import sys
import time
from collections import deque
from collections.abc import Container, Iterable, Iterator
from enum import IntEnum
from struct import Struct
from typing import Final

from mpbroker.base.logger import get_logger
from mpbroker.ipc.arena import (
    BLOCK_BYTES,
    REQUEST_PART_BYTES,
    SMALL_FRAME_BYTES,
    ArenaLayout,
    ExtentAllocator,
    extent_bytes,
)
from mpbroker.ipc.layout import (
    CONNECTION_COPY_SHIFT,
    CONNECTION_EXTENT,
    CONNECTION_EXTENT_LENGTH,
    CONNECTION_OWNER,
    CONNECTION_POSITION,
    CONNECTION_SLOT,
    CONNECTION_STATE,
    POSITION_SHIFT,
    PROCESSOR_SLOTS_USED,
    SLOT_BLOCK,
    SLOT_CONNECTION,
    SLOT_REQUEST_LENGTH,
    SLOT_REQUEST_OFFSET,
    SLOT_STATE,
    SLOT_WORDS,
    SLOTS,
    SLOTS_PER_PROCESSOR,
    STATE_HANDLER_MASK,
    STATE_MASK,
    ConnectionState,
    SlotState,
    connection_row,
    processor_row,
    slot_row,
    slots_in_use,
)
from mpbroker.ipc.segment import Segment
from mpbroker.network.channel import Channel
from mpbroker.network.channel_selector import ChannelSelector
from mpbroker.network.connection_rows import ConnectionRows, live_rows
from mpbroker.network.errors import FrameLengthError
from mpbroker.network.frame_length import explain_bad_length
from mpbroker.network.slow_clients import Transfer

_LOG = get_logger(__name__)
_SIZE: Final = Struct(">i")
_SIZE_BYTES: Final = 4
_HELD: Final = int(SlotState.HELD)
_KEEP_GENERATION: Final = ~(STATE_MASK | STATE_HANDLER_MASK)
# Connections keep empty slots as long as so many are free. With fewer, each turn is
# made in Python, which takes four times as long.
_PLENTY_OF_SLOTS: Final = SLOTS_PER_PROCESSOR // 8
# Blocks whose memory an idle processor keeps; that of the others is given back.
_WARM_BLOCKS: Final = 64


class ReadResult(IntEnum):
    """The result of an attempt to read one whole frame."""

    WHOLE = 0  # the frame is in the channel's slot, ready to be published
    DRAINED = 1  # the socket has no more bytes now
    STARVED = 2  # no slot or extent is free: try again when one is
    CLOSED = 3  # the client has closed the connection


class RequestReader:
    """The receiving half of a processor: slots, extents and framing."""

    def __init__(
        self,
        processor: int,
        control: Segment,
        arena: Segment,
        arena_layout: ArenaLayout,
        selector: ChannelSelector,
        rows: ConnectionRows,
        max_request_bytes: int,
    ) -> None:
        self._words = control.words
        self._rows = rows
        self._arena = arena
        self._view = arena.view
        self._arena_layout = arena_layout
        self._selector = selector
        self.max_request_bytes = max_request_bytes
        self._first_slot = processor * SLOTS_PER_PROCESSOR
        self._extents: ExtentAllocator = arena_layout.request_extents(processor)
        self._small_frames = arena_layout.small_frames(processor)
        # Channels that wait for an extent, for small frames and for large ones. Each
        # queue is served in order: no channel takes what an earlier one waits for,
        # except the channel whose turn it is.
        self.queues: tuple[deque[Channel], deque[Channel]] = (deque(), deque())
        self.next: Channel | None = None
        self._free: list[int] = []
        self._processor = processor
        self._used_word = processor_row(processor) + PROCESSOR_SLOTS_USED
        self._lowest_free = 0
        self._extents_used = False
        # For connections that were given away: row, slot, extent and its length.
        self._lent: list[tuple[int, int, int, int]] = []
        self.staying: Container[int] = ()  # connections that may not be given away
        self.adopt_slots()

    def adopt_slots(self) -> None:
        """Take the FREE slots; reserve all others and the extents that they name."""
        words = self._words
        taken: list[tuple[int, int]] = []
        free = []
        named = self._slots_named_by_rows(taken)
        for slot in slots_in_use(words, self._processor):
            row = slot_row(slot)
            state = words[row + SLOT_STATE] & STATE_MASK
            if state == SlotState.FREE or (
                state == SlotState.HELD and slot not in named
            ):
                words[row + SLOT_STATE] &= _KEEP_GENERATION
                free.append(slot)
            elif state != SlotState.HELD:  # it has a request
                extent = request_extent(words, slot)
                if extent is not None:
                    taken.append((extent[0], extent_bytes(extent[1])))
        self._extents.reserve(taken)
        self._extents_used = bool(taken)
        untouched = self._first_slot + words[self._used_word]
        free.extend(range(untouched, self._first_slot + SLOTS_PER_PROCESSOR))
        free.reverse()  # the lowest is taken first, so few blocks are in use
        self._free = free
        self._lowest_free = len(free)

    def _slots_named_by_rows(self, taken: list[tuple[int, int]]) -> set[int]:
        """Return our slots that rows name; add the extents that they name."""
        words = self._words
        named = set()
        for connection in live_rows(words):
            row = connection_row(connection)
            slot = words[row + CONNECTION_SLOT] - 1
            extent = words[row + CONNECTION_EXTENT]
            length = words[row + CONNECTION_EXTENT_LENGTH]
            is_ours, extent_is_ours = self._owns(slot), self._owns_extent(extent)
            if is_ours:
                named.add(slot)
            if extent_is_ours:
                taken.append((extent, extent_bytes(length)))
            if words[row + CONNECTION_OWNER] != self._processor + 1 and (
                is_ours or extent_is_ours
            ):
                self._lent.append((connection, slot, extent, length))
        return named

    def _owns(self, slot: int) -> bool:
        return 0 <= slot - self._first_slot < SLOTS_PER_PROCESSOR

    def _owns_extent(self, extent: int) -> bool:
        return 0 <= extent - self._extents.start < self._extents.size_bytes

    # -- reading ---------------------------------------------------------------------

    def read(self, channel: Channel) -> ReadResult:
        """Receive until there is one whole frame, or there are no more bytes.

        Raises:
            FrameLengthError: the size field is not valid; close the connection.
        """
        while True:
            if not channel.extent:
                result = self._frame(channel)
                if result is not None:
                    return result
            if channel.extent:
                result = self._read_extent(channel)
            else:
                result = self._read_block(channel)
            if result is not None:
                return result

    def _frame(self, channel: Channel) -> ReadResult | None:
        """Look for a whole frame in the block, or make room for the rest of it.

        Returns:
            WHOLE, STARVED, or None: more bytes are needed, and there is room for them.
        """
        start, have = channel.start, channel.end - channel.start
        if have < _SIZE_BYTES:
            if start + _SIZE_BYTES > REQUEST_PART_BYTES:
                self._move_to_front(channel)
            return None
        at = channel.block + start
        (size,) = _SIZE.unpack_from(self._view, at)
        if not 0 <= size <= self.max_request_bytes:
            head = bytes(self._view[at : at + _SIZE_BYTES])
            raise FrameLengthError(explain_bad_length(head, self.max_request_bytes))
        length = size + _SIZE_BYTES
        if length <= have:
            channel.frame_end = start + length
            return ReadResult.WHOLE
        if start + length <= REQUEST_PART_BYTES:
            return None
        # If the bytes moved to the front would overlap themselves, a death half-way
        # would leave neither copy whole.
        if length > REQUEST_PART_BYTES or have > start:
            is_moved = self._move_to_extent(channel, length)
            return None if is_moved else ReadResult.STARVED
        self._move_to_front(channel)
        return None

    def _read_block(self, channel: Channel) -> ReadResult | None:
        if not channel.readable:
            return ReadResult.DRAINED
        if channel.slot < 0 and not self._take_slot(channel):
            return ReadResult.STARVED
        block, end = channel.block, channel.end
        count = self._selector.receive(
            channel, self._view[block + end : block + REQUEST_PART_BYTES]
        )
        if count <= 0:
            return ReadResult.DRAINED if count == 0 else ReadResult.CLOSED
        channel.end = end + count
        return None

    def _read_extent(self, channel: Channel) -> ReadResult | None:
        have = channel.extent_have
        if have == channel.extent_length:
            return ReadResult.WHOLE
        if not channel.readable:
            return ReadResult.DRAINED
        view = self._view[
            channel.extent + have : channel.extent + channel.extent_length
        ]
        count = self._selector.receive(channel, view)
        if count <= 0:
            return ReadResult.DRAINED if count == 0 else ReadResult.CLOSED
        if count == len(view):
            channel.readable = True  # there may be bytes behind the frame
        channel.extent_have = have + count
        return None

    def _move_to_extent(self, channel: Channel, length: int) -> bool:
        extent = None
        if not self.queue(length) or channel is self.next:
            extent = self._allocate(length)
        if extent is None:
            channel.wanted = length
            return False
        have = channel.end - channel.start
        at = channel.block + channel.start
        self._view[extent : extent + have] = self._view[at : at + have]
        words, row = self._words, channel.row
        channel.extent_length = words[row + CONNECTION_EXTENT_LENGTH] = length
        channel.extent_have = have
        channel.extent_ns = time.monotonic_ns()
        # Last: from this store on, the row says that the bytes are in the extent.
        channel.extent = words[row + CONNECTION_EXTENT] = extent
        self._place(channel, 0, 0)
        return True

    def queue(self, length: int) -> deque[Channel]:
        """Return the queue of channels that wait for extents of this class."""
        return self.queues[length > SMALL_FRAME_BYTES]

    def _allocate(self, length: int) -> int | None:
        """Return an extent for a frame; small ones have a part that large ones lack."""
        wanted, small_frames = extent_bytes(length), self._small_frames
        extent = None
        if length <= SMALL_FRAME_BYTES:
            extent = self._extents.allocate(wanted, low=small_frames)
        if extent is None and not (length <= SMALL_FRAME_BYTES and self.queues[1]):
            extent = self._extents.allocate(wanted, high=small_frames)
        if extent is not None:
            self._extents_used = True
        return extent

    def wanted_bytes(self) -> int:
        """Return the bytes for which channels wait."""
        return sum(
            extent_bytes(channel.wanted) for queue in self.queues for channel in queue
        )

    def transfers(self, channels: Iterable[Channel]) -> Iterator[Transfer]:
        """Yield the partly received frames whose extents others could use."""
        now = time.monotonic_ns()
        high = sys.maxsize if self.queues[0] else self._small_frames
        for channel in channels:
            if (
                channel.state == ConnectionState.READING
                and self._owns_extent(channel.extent)
                and channel.extent < high
            ):
                yield Transfer(
                    channel,
                    channel.extent_have,
                    channel.extent_length,
                    now - channel.extent_ns,
                    extent_bytes(channel.extent_length),
                )

    def _move_to_front(self, channel: Channel) -> None:
        have = channel.end - channel.start
        block, at = channel.block, channel.block + channel.start
        self._view[block : block + have] = self._view[at : at + have]
        self._place(channel, 0, have)

    def _place(self, channel: Channel, start: int, end: int) -> None:
        """Note that the first byte not consumed is at ``start`` in the block."""
        channel.base += channel.start - start
        channel.start, channel.end = start, end
        words, row = self._words, channel.row
        copy = row + (words[row + CONNECTION_STATE] >> CONNECTION_COPY_SHIFT & 1)
        words[copy + CONNECTION_POSITION] = channel.base << POSITION_SHIFT | start

    # -- slots -------------------------------------------------------------------------

    def _take_slot(self, channel: Channel) -> bool:
        if not self._free:
            return False
        slot, block = self._hold_slot(channel.connection)
        channel.slot = slot
        channel.block = block
        spilled = channel.spilled
        if spilled:
            self._view[block : block + len(spilled)] = spilled
            channel.spilled = b""
        # First the place in the block: a row without a slot has no bytes at any place.
        self._place(channel, 0, len(spilled))
        self._words[channel.row + CONNECTION_SLOT] = slot + 1
        return True

    def _hold_slot(self, connection: int) -> tuple[int, int]:
        """Take a free slot for a connection; return it and its block's offset."""
        slot = self._free.pop()
        self._lowest_free = min(self._lowest_free, len(self._free))
        words, row = self._words, slot_row(slot)
        if slot - self._first_slot >= words[self._used_word]:
            words[self._used_word] = slot - self._first_slot + 1
        block = self._arena_layout.block(slot)
        words[row + SLOT_CONNECTION] = connection
        words[row + SLOT_BLOCK] = block
        words[row + SLOT_REQUEST_OFFSET] = block
        words[row + SLOT_STATE] = words[row + SLOT_STATE] & _KEEP_GENERATION | _HELD
        return slot, block

    def release_slot(self, slot: int) -> None:
        """Free a slot whose connection has ended or has no bytes in it."""
        row = slot_row(slot)
        self._words[row + SLOT_STATE] &= _KEEP_GENERATION  # FREE
        self._free.append(slot)

    def release_request(self, slot: int) -> None:
        """Free the extent of an answered slot's request, if it has one."""
        extent = request_extent(self._words, slot)
        if extent is not None:
            self._extents.free(extent[0], extent_bytes(extent[1]))

    def detach(self, channel: Channel) -> None:
        """Release everything that a connection holds except a request in flight."""
        if channel.state == ConnectionState.READING and self._owns_extent(
            channel.extent
        ):
            self._extents.free(channel.extent, extent_bytes(channel.extent_length))
        channel.extent = 0
        self._words[channel.row + CONNECTION_EXTENT] = 0
        slot, channel.slot = channel.slot, -1
        # A handler that still executes its request finds the client: client_quotas.py.
        had = -(slot + 1) if channel.state == ConnectionState.IN_FLIGHT else 0
        self._words[channel.row + CONNECTION_SLOT] = had
        if self._owns(slot) and channel.state == ConnectionState.READING:
            self.release_slot(slot)

    def finish_request(self, channel: Channel, now_ns: int) -> None:
        """Consume the frame that was answered; keep bytes pipelined behind it."""
        words = self._words
        extent = channel.extent
        if extent:
            channel.base += channel.start + channel.extent_length
            # While it is with the handlers its slot names the extent as well.
            channel.extent = words[channel.row + CONNECTION_EXTENT] = 0
            channel.start = channel.end = 0
        elif channel.frame_end < channel.end:
            channel.start = channel.frame_end
        else:
            channel.base += channel.end
            channel.start = channel.end = 0
        self._rows.finish(
            channel.row, channel.base, channel.start, channel.sent, now_ns
        )
        # HELD lets the handler free its extent, however long we keep the slot. Not
        # before the commit: HELD means that the slot's request was never published.
        state = SLOTS + channel.slot * SLOT_WORDS + SLOT_STATE
        words[state] = words[state] & _KEEP_GENERATION | _HELD
        if extent:
            self._extents.free(extent, extent_bytes(channel.extent_length))

    def rest(self, channel: Channel) -> None:
        """Take an empty slot from a connection that waits for its next request.

        It keeps the slot as long as plenty are free: the request may come soon.
        """
        if not self.has_plenty:
            self.leave_if_empty(channel)

    @property
    def has_plenty(self) -> bool:
        """Whether connections may keep empty slots."""
        return len(self._free) >= _PLENTY_OF_SLOTS

    def leave_if_empty(self, channel: Channel) -> None:
        """Free a connection's slot if it is empty."""
        if channel.slot >= 0 and channel.start == channel.end and not channel.extent:
            slot, channel.slot = channel.slot, -1
            # First: a successor frees a HELD slot that no row names.
            self._words[channel.row + CONNECTION_SLOT] = 0
            self.release_slot(slot)

    def spill(self, channels: Iterable[Channel]) -> None:
        """Free the slots that hold only a part of a frame."""
        for channel in channels:
            if (
                channel.slot >= 0
                and channel.state == ConnectionState.READING
                and not channel.extent
                and not channel.waiting
            ):
                block = channel.block
                channel.spilled = bytes(
                    self._view[block + channel.start : block + channel.end]
                )
                channel.base += channel.start
                channel.start = channel.end = 0
                self.leave_if_empty(channel)

    # -- connections that come from other processors, or go there ----------------------

    def house(self, channel: Channel) -> bool:
        """Copy the part of a frame into our own region; False: no room yet.

        One store to the row replaces the old place by the new one.
        """
        slot = channel.slot
        if slot >= 0 and not self._owns(slot):
            if channel.start == channel.end and not channel.extent:
                channel.slot = -1
                self._words[channel.row + CONNECTION_SLOT] = 0
                return True
            if not self._free:
                return False
            old = channel.block
            channel.slot, channel.block = self._hold_slot(channel.connection)
            # At the same place in the block, so that only one word changes.
            first, end, new = channel.start, channel.end, channel.block
            self._view[new + first : new + end] = self._view[old + first : old + end]
            self._words[channel.row + CONNECTION_SLOT] = channel.slot + 1
        if channel.extent and not self._owns_extent(channel.extent):
            new_extent = self._allocate(channel.extent_length)
            if new_extent is None:
                return False
            old, have = channel.extent, channel.extent_have
            self._view[new_extent : new_extent + have] = self._view[old : old + have]
            channel.extent = self._words[channel.row + CONNECTION_EXTENT] = new_extent
        return True

    def can_leave(self, channel: Channel) -> bool:
        """Return whether another process can continue with the part of a frame."""
        self.leave_if_empty(channel)
        return not channel.spilled or self._take_slot(channel)

    def lend(self, channel: Channel) -> None:
        """Keep a given connection's slot and extent as long as its row names them."""
        if self._owns(channel.slot) or self._owns_extent(channel.extent):
            self._lent.append(
                (
                    channel.connection,
                    channel.slot,
                    channel.extent,
                    channel.extent_length,
                )
            )

    def take_back_lent(self) -> None:
        """Free lent slots and extents whose bytes the new owners have fetched."""
        words, lent = self._words, self._lent
        self._lent = []
        for connection, slot, extent, length in lent:
            row = connection_row(connection)
            if self._owns(slot) and words[row + CONNECTION_SLOT] != slot + 1:
                self.release_slot(slot)
                slot = -1
            if self._owns_extent(extent) and words[row + CONNECTION_EXTENT] != extent:
                self._extents.free(extent, extent_bytes(length))
                extent = 0
            if self._owns(slot) or self._owns_extent(extent):
                self._lent.append((connection, slot, extent, length))

    @property
    def is_unused(self) -> bool:
        """Whether no slot is in use, and nothing is lent to other processors."""
        return len(self._free) == SLOTS_PER_PROCESSOR and not self._lent

    def give_back_memory(self) -> None:
        """Return the memory that a burst has used, if no slot is in use."""
        if len(self._free) == SLOTS_PER_PROCESSOR:
            touched = SLOTS_PER_PROCESSOR - self._lowest_free
            if touched > _WARM_BLOCKS:
                self._free.sort(reverse=True)
                first = self._arena_layout.block(self._first_slot)
                self._arena.give_back(
                    first + _WARM_BLOCKS * BLOCK_BYTES,
                    (SLOTS_PER_PROCESSOR - _WARM_BLOCKS) * BLOCK_BYTES,
                )
                self._lowest_free = SLOTS_PER_PROCESSOR
        if self._extents_used and self._extents.is_unused:
            self._extents_used = False
            self._arena.give_back(self._extents.start, self._extents.size_bytes)


def request_extent(words: memoryview, slot: int) -> tuple[int, int] | None:
    """Return offset and length of a slot's request in an extent, with its size field.

    None: it is in the slot's own block.
    """
    row = slot_row(slot)
    offset = words[row + SLOT_REQUEST_OFFSET]
    if 0 <= offset - words[row + SLOT_BLOCK] < BLOCK_BYTES:
        return None
    return offset - _SIZE_BYTES, words[row + SLOT_REQUEST_LENGTH] + _SIZE_BYTES
