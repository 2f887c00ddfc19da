"""Read requests from sockets straight into shared memory, and frame them there.

A connection that becomes readable gets a free slot, the entry of one request in flight,
and its bytes go into the slot's own block of memory. When a whole frame is in the
block, it is published in place; bytes that a client pipelined behind it stay in the
block until the frame is answered. A frame that cannot fit the block moves to an extent
(other shared memory) of its exact length, and the rest is received there without
reading ahead. So all bytes that the processor has received are in shared memory, at a
place that the connection's row (its record) names, and the kernel counts them.

There are many slots, but a client may open thousands of connections and send a part of
a frame on each. When slots run short, such parts are moved to private memory (at most a
block each) until the rest arrives. So are requests that were pipelined behind others,
until it is their turn. Only these bytes are lost when their processor dies.
"""

import sys
import time
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
    CONNECTION_MUTED_UNTIL,
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
from mpbroker.network.fair_queue import FairQueue
from mpbroker.network.frame_length import explain_bad_length
from mpbroker.network.slow_clients import Transfer

_LOG = get_logger(__name__)
_SIZE: Final = Struct(">i")
_SIZE_BYTES: Final = 4
_HELD: Final = int(SlotState.HELD)
_KEEP_GENERATION: Final = ~(STATE_MASK | STATE_HANDLER_MASK)
# Connections keep empty slots as long as so many are free. With fewer, each turn is
# made in Python, which takes four times as long.
PLENTY_OF_SLOTS: Final = SLOTS_PER_PROCESSOR // 8
# How many blocks an idle processor keeps in memory. It gives back the others' memory.
_WARM_BLOCKS: Final = 64


class ReadResult(IntEnum):
    """Names the results of an attempt to read one whole frame."""

    WHOLE = 0  # the frame is in the channel's slot, ready to be published
    DRAINED = 1  # the socket has no more bytes now
    STARVED = 2  # no slot or extent is free: try again when one is
    CLOSED = 3  # the client has closed the connection


class RequestReader:
    """Receives requests into shared memory, and finds the ends of their frames."""

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
        # queue is served in its order: no channel takes what an earlier one waits for,
        # except the channel whose turn it is.
        self.queues = FairQueue(control.words), FairQueue(control.words)
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
        """Find this processor's free slots, and the memory that is in use.

        This is done after a restart, from shared memory: the extents (memory for large
        requests) in use are reserved. A slot that neither a request nor a connection
        uses any more is freed.
        """
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
        """Return the slots of this processor that connections use.

        The connections' rows, their records in shared memory, name them.

        Args:
            taken: offset and length are added to it for each extent that the rows name.
        """
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
        """Receive bytes until one frame is whole, or no more have come.

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
        """Look for a whole frame in a channel's block, or make room for its rest.

        Returns:
            WHOLE if the frame is whole, STARVED if there is no room for the rest. None
            if there is room for the bytes that are still needed.

        Raises:
            FrameLengthError: the size field is not valid; close the connection.
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
        if channel.slot < 0 and (channel.readable or channel.spilled):
            was_spilled = bool(channel.spilled)
            if not self._take_slot(channel):
                return ReadResult.STARVED
            if was_spilled:
                return None  # it may have waited for an extent, and for no more bytes
        if not channel.readable:
            return ReadResult.DRAINED
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

    def queue(self, length: int) -> FairQueue:
        """Return the queue of channels that wait for an extent for a frame of a length.

        Args:
            length: the length of the request's frame in bytes. There is a queue for
                frames up to SMALL_FRAME_BYTES, and one for larger ones.
        """
        return self.queues[length > SMALL_FRAME_BYTES]

    def _allocate(self, length: int) -> int | None:
        """Allocate an extent (shared memory) for a frame; return its offset.

        The offset is in the arena. Return None if there is no room. A part of this
        processor's memory is reserved for frames up to SMALL_FRAME_BYTES. The rest is
        for larger ones. Small ones may use it too, unless a larger one waits.

        Args:
            length: the frame's length in bytes.
        """
        wanted, small_frames = extent_bytes(length), self._small_frames
        extent = None
        if length <= SMALL_FRAME_BYTES:
            extent = self._extents.allocate(wanted, low=small_frames)
        if extent is None and not (length <= SMALL_FRAME_BYTES and self.queues[1]):
            extent = self._extents.allocate(wanted, high=small_frames)
        if extent is not None:
            self._extents_used = True
        return extent

    def wanted_bytes(self, is_large: bool) -> int:
        """Return how many bytes of memory the channels in one of the queues need.

        This is shared memory (extents) for requests too large for the block of a slot.

        Args:
            is_large: whether it is the queue for frames above SMALL_FRAME_BYTES.
        """
        return sum(extent_bytes(channel.wanted) for channel in self.queues[is_large])

    def transfers(
        self, channels: Iterable[Channel], is_large: bool
    ) -> Iterator[Transfer]:
        """Yield partly received requests whose memory others may use for theirs.

        Args:
            channels: the connections to look at.
            is_large: whether the others' frames are larger than SMALL_FRAME_BYTES, so
                that they may not use the memory reserved for small ones.
        """
        now = time.monotonic_ns()
        high = self._small_frames if is_large else sys.maxsize
        for channel in channels:
            if (
                channel.is_receiving
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
        """Note a new place of a channel's bytes in its block, also in shared memory.

        Args:
            channel: the connection; its bytes have been moved to this place.
            start: bytes from the block's start to the current frame.
            end: bytes from the block's start to the first free byte.
        """
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
        """Take a free slot for a connection; return it and the offset of its block.

        The block is the shared memory that belongs to the slot.
        """
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
        """Free a slot, the entry of one request, that no connection needs any more."""
        row = slot_row(slot)
        self._words[row + SLOT_STATE] &= _KEEP_GENERATION  # FREE
        self._free.append(slot)

    def release_request(self, slot: int) -> None:
        """Free an answered request's extent: its memory if it was a large one."""
        extent = request_extent(self._words, slot)
        if extent is not None:
            self._extents.free(extent[0], extent_bytes(extent[1]))

    def detach(self, channel: Channel) -> None:
        """Free the slot and memory of an ending connection.

        A request in flight keeps its slot, and its extent if it is a large one.
        """
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
        """Remove an answered request from a channel; keep bytes pipelined behind it.

        The new position is stored in shared memory, for a successor of this process.
        """
        words = self._words
        extent = channel.extent
        if extent:
            channel.base += channel.start + channel.extent_length
            # While the handlers have the request, its slot names the extent, too.
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

    def set_aside(self, channel: Channel) -> None:
        """Let a channel receive its next request while the last one is in flight.

        The request keeps its slot and, if it is a large one, its extent. Bytes that
        were pipelined behind it go into another slot with the next ones. The row still
        names the request's slot.
        """
        if channel.extent:
            channel.base += channel.start + channel.extent_length
            # Its slot names the extent, too.
            channel.extent = self._words[channel.row + CONNECTION_EXTENT] = 0
        else:
            at, end = channel.block + channel.frame_end, channel.block + channel.end
            channel.spilled = bytes(self._view[at:end])
            channel.base += channel.frame_end
        channel.start = channel.end = 0
        channel.slot = -1

    def rest(self, channel: Channel) -> None:
        """Free a connection's slot, if it has no bytes in it and few slots are free.

        Otherwise the connection keeps the slot: its next request may come soon.
        """
        if not self.has_plenty:
            self.leave_if_empty(channel)

    def pause(self, channel: Channel) -> None:
        """Free a connection's slot if few are free: it is not read for a while.

        If the slot has bytes of it, they are moved to private memory. A connection that
        receives into an extent (memory for a large request) keeps its slot.
        """
        if not self.has_plenty and self._may_give_up_slot(channel):
            self.give_up_slot(channel)

    def _may_give_up_slot(self, channel: Channel) -> bool:
        return self._owns(channel.slot) and channel.is_receiving and not channel.extent

    @property
    def has_plenty(self) -> bool:
        """Whether a connection may keep its slot between requests.

        It may while PLENTY_OF_SLOTS or more are free.
        """
        return len(self._free) >= PLENTY_OF_SLOTS

    @property
    def free_slots(self) -> int:
        """How many of this processor's slots are free."""
        return len(self._free)

    def leave_if_empty(self, channel: Channel) -> None:
        """Free a connection's slot if it has none of the connection's bytes."""
        if channel.slot >= 0 and channel.start == channel.end and not channel.extent:
            slot, channel.slot = channel.slot, -1
            # First: a successor frees a HELD slot that no row names.
            self._words[channel.row + CONNECTION_SLOT] = 0
            self.release_slot(slot)

    def spill(self, channels: Iterable[Channel]) -> None:
        """Free the slots that hold only a part of a frame, or nothing.

        The part is moved to this process's private memory, and so is what a throttled
        client has pipelined. Connections that wait in a queue keep their slots; but
        those that wait for an extent do not if there is no other slot, since they may
        wait for long, and thousands may.

        Args:
            channels: the connections to look at.
        """
        for channel in channels:
            is_throttled = self._words[channel.row + CONNECTION_MUTED_UNTIL] > 0
            if (is_throttled or not channel.waiting) and self._may_give_up_slot(
                channel
            ):
                self.give_up_slot(channel)
        if self._free:
            return
        for channel in (*self.queues[0], *self.queues[1]):
            if channel.waiting and self._may_give_up_slot(channel):
                self.give_up_slot(channel)

    def give_up_slot(self, channel: Channel) -> None:
        """Free a connection's slot; move the bytes in it to private memory.

        The connection has no extent (memory for a large request).
        """
        block = channel.block
        channel.spilled = bytes(self._view[block + channel.start : block + channel.end])
        channel.base += channel.start
        channel.start = channel.end = 0
        self.leave_if_empty(channel)

    # -- connections that come from other processors, or go there ----------------------

    def house(self, channel: Channel) -> bool:
        """Copy a partly received frame from another processor's memory to this one's.

        One store to the connection's record replaces the old place by the new one.

        Returns:
            True if the frame is in this processor's memory now, or was there already.
            False if there is no room yet: call again later.
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
        """Return whether another processor could continue a connection.

        A part of a frame in private memory is first copied to a slot, in shared memory.
        Return False if no slot is free for that.
        """
        self.leave_if_empty(channel)
        return not channel.spilled or self._take_slot(channel)

    def lend(self, channel: Channel) -> None:
        """Remember the slot and memory of a connection that was given away.

        The new owner copies the bytes, and then names another place in the connection's
        record. After that `take_back_lent` frees the old one.
        """
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
        """Free the slots and memory of given connections that were copied.

        The new owner of a connection copies its bytes, and then names another slot in
        the connection's record.
        """
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
        """Whether no slot is in use, also not by connections given to others."""
        return len(self._free) == SLOTS_PER_PROCESSOR and not self._lent

    def give_back_memory(self) -> None:
        """Give the memory that a burst has used back to the kernel.

        Blocks are given back if no slot is in use, extents if no extent is in use.
        """
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
    """Return where a slot's request is, if it is too large for the slot's block.

    The result is offset and length of its extent in the arena, the shared memory of
    requests and answers. Both include the size field in front of the request. Return
    None if the request is in the block.
    """
    row = slot_row(slot)
    offset = words[row + SLOT_REQUEST_OFFSET]
    if 0 <= offset - words[row + SLOT_BLOCK] < BLOCK_BYTES:
        return None
    return offset - _SIZE_BYTES, words[row + SLOT_REQUEST_LENGTH] + _SIZE_BYTES
