"""Make rows, slots and responses for connections from another layout of memory.

Rows and slots are the entries of connections and requests in shared memory.
connection_export.py has described the connections. This runs before the first child is
forked, so no process reads the rows and slots meanwhile. The result is what a dead
processor would have left: its successor finds rows that it owns, asks the keeper for
the sockets and carries on (see succession.py). The caller publishes the requests that
handlers must execute (``in_hand``) before anything new.
"""

import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from mpbroker.ipc.arena import (
    ANSWER_AT,
    ANSWER_BYTES,
    PROGRESS_WORDS,
    REQUEST_PART_BYTES,
    ArenaLayout,
    ExtentAllocator,
    extent_bytes,
    progress_offset,
    progress_words,
)
from mpbroker.ipc.layout import (
    CONNECTION_ACTIVE,
    CONNECTION_EXTENT,
    CONNECTION_EXTENT_LENGTH,
    CONNECTION_OPENED,
    CONNECTION_POSITION,
    CONNECTION_SENT,
    CONNECTION_SLOT,
    GENERATION_SHIFT,
    POSITION_SHIFT,
    PROCESSOR_SLOTS_USED,
    SLOT_BLOCK,
    SLOT_CONNECTION,
    SLOT_DEADLINE,
    SLOT_EXTENT,
    SLOT_EXTENT_LENGTH,
    SLOT_PROGRESS,
    SLOT_PROGRESS_OFFSET,
    SLOT_RECEIVED,
    SLOT_REQUEST_LENGTH,
    SLOT_REQUEST_OFFSET,
    SLOT_RESPONSE_KIND,
    SLOT_RESPONSE_LENGTH,
    SLOT_RESPONSE_OFFSET,
    SLOT_STATE,
    SLOTS_PER_PROCESSOR,
    ConnectionState,
    ResponseKind,
    SlotState,
    processor_row,
    slot_row,
)
from mpbroker.ipc.response_parts import FilePart, parts_size_bytes, write_parts
from mpbroker.ipc.segment import Segment
from mpbroker.network.channel_selector import end_connection
from mpbroker.network.connection_rows import ConnectionRows
from mpbroker.network.moves.tcp_counters import socket_cookie
from mpbroker.supervisor.upgrade.connection_export import AnswerRecord, ConnectionRecord

_SIZE: Final = 4
_NEW: Final = 1 << GENERATION_SHIFT
_PARTS: Final = int(ResponseKind.PARTS)
_BYTES: Final = int(ResponseKind.BYTES)
_FILE_FIELDS: Final = 4

# Copies a range of the arena that the records name.
ReadRange = Callable[[int, int], bytes]


class _Home:
    """The part of shared memory that a processor not forked yet will have.

    It has rows of connections, slots of requests and space for long requests (extents).
    """

    def __init__(self, processor: int, control: Segment, layout: ArenaLayout) -> None:
        self.rows = ConnectionRows(processor, control)
        self.extents = layout.request_extents(processor)
        self.first_slot = processor * SLOTS_PER_PROCESSOR
        self.slots = 0
        self.used_word = processor_row(processor) + PROCESSOR_SLOTS_USED


class ConnectionImport:
    """Puts connections that the old program has described into new shared memory.

    Args:
        control: the new control segment, with rows and slots.
        arena: the new arena, for the bytes of requests and responses.
        layout: the new arena's layout.
        processors: the ids of the processors that will be forked, by listener.
        handlers: the ids of the handlers that will be forked; responses are put into
            their parts of the arena.
        read: returns a range of the old arena, by offset and length in bytes.

    Attributes:
        in_hand: the slots of the requests that handlers are still to execute.
    """

    def __init__(
        self,
        control: Segment,
        arena: Segment,
        layout: ArenaLayout,
        processors: Mapping[int, Sequence[int]],
        handlers: Sequence[int],
        read: ReadRange,
    ) -> None:
        self._words = control.words
        self._arena = arena
        self._layout = layout
        self._read = read
        self._homes = {
            listener: [_Home(number, control, layout) for number in numbers]
            for listener, numbers in processors.items()
        }
        self._answers = [layout.response_extents(handler) for handler in handlers]
        self.in_hand: list[int] = []

    def add(self, record: ConnectionRecord, now_ns: int) -> bool:
        """Put a connection into the new memory; False: it did not fit and is closed.

        Args:
            record: the description of the connection.
            now_ns: the time of the monotonic clock.
        """
        homes = self._homes.get(record.listener, [])
        sock = socket.socket(fileno=record.fd)
        try:
            if homes:
                homes.append(homes.pop(0))
                home = homes[-1]
                row = home.rows.take()
                if row is not None and self._describe(home, row, sock, record, now_ns):
                    if self._fill(home, row, record):
                        return True
                    home.rows.release(row)
            end_connection(sock)
            return False
        finally:
            sock.detach()

    def _describe(
        self,
        home: _Home,
        row: int,
        sock: socket.socket,
        record: ConnectionRecord,
        now_ns: int,
    ) -> bool:
        try:
            home.rows.describe(
                row,
                sock,
                socket_cookie(sock),
                record.listener,
                record.sequence,
                now_ns,
            )
        except OSError:  # the client has disconnected meanwhile
            home.rows.release(row)
            return False
        words, word = self._words, home.rows.word(row)
        words[word + CONNECTION_OPENED] = record.opened_ns or now_ns
        words[word + CONNECTION_ACTIVE] = record.active_ns or now_ns
        words[word + CONNECTION_POSITION] = record.base << POSITION_SHIFT
        words[word + CONNECTION_SENT] = record.sent
        return True

    def _fill(self, home: _Home, row: int, record: ConnectionRecord) -> bool:
        """Put a connection's received bytes and request into a slot of shared memory.

        A slot is the entry of one request in flight.

        Returns:
            False: there is no room.
        """
        offset, length = record.received
        if not length:
            return True
        if home.slots == SLOTS_PER_PROCESSOR:
            return False
        slot = home.first_slot + home.slots
        block = self._layout.block(slot)
        place = self._place(home, record, block)
        if place is None:
            return False
        where, extent = place
        self._arena.view[where : where + length] = self._read(offset, length)
        home.slots += 1
        words, word = self._words, slot_row(slot)
        words[home.used_word] = home.slots
        words[word + SLOT_CONNECTION] = row
        words[word + SLOT_BLOCK] = block
        words[word + SLOT_REQUEST_OFFSET] = block
        words[word + SLOT_STATE] = _NEW | SlotState.HELD
        connection = home.rows.word(row)
        words[connection + CONNECTION_EXTENT] = extent
        words[connection + CONNECTION_EXTENT_LENGTH] = (
            self._frame_bytes(record) if extent else 0
        )
        words[connection + CONNECTION_SLOT] = slot + 1
        if record.request is None:
            return True
        if not self._fill_request(slot, where, record):
            words[word + SLOT_STATE] = _NEW  # FREE
            return False
        home.rows.set_state(
            connection,
            ConnectionState.IN_FLIGHT
            if record.answer is None
            else ConnectionState.SENDING,
            words[connection + CONNECTION_ACTIVE],
        )
        return True

    def _frame_bytes(self, record: ConnectionRecord) -> int:
        """Return the length of a connection's first request, with its size field.

        The size field has been received.
        """
        if record.request is not None:
            return record.request.frame_bytes
        size = self._read(record.received[0], _SIZE)
        return int.from_bytes(size, "big") + _SIZE

    def _place(
        self, home: _Home, record: ConnectionRecord, block: int
    ) -> tuple[int, int] | None:
        """Choose where in shared memory a connection's received bytes are put.

        Returns:
            Their offset; and the offset of the space reserved for them (an extent), or
            0 if the block of the request's slot (entry) is large enough. None: there is
                no room.
        """
        length = record.received[1]
        if length <= REQUEST_PART_BYTES:
            return block, 0
        frame = self._frame_bytes(record)
        if length > frame:
            return None  # more was read ahead than this layout's blocks can hold
        extent = home.extents.allocate(extent_bytes(frame))
        return None if extent is None else (extent, extent)

    # -- what is under way -------------------------------------------------------------

    def _fill_request(self, slot: int, where: int, record: ConnectionRecord) -> bool:
        request = record.request
        assert request is not None
        words, word = self._words, slot_row(slot)
        block, frame = words[word + SLOT_BLOCK], request.frame_bytes
        if where == block:
            progress, capacity = block + REQUEST_PART_BYTES, PROGRESS_WORDS
        else:
            progress = progress_offset(where, frame)
            capacity = progress_words(frame)
        if len(request.progress) > capacity:
            return False
        words[word + SLOT_REQUEST_OFFSET] = where + _SIZE
        words[word + SLOT_REQUEST_LENGTH] = frame - _SIZE
        words[word + SLOT_RECEIVED] = request.received_ns
        words[word + SLOT_DEADLINE] = request.deadline_ns
        words[word + SLOT_PROGRESS_OFFSET] = progress
        for number, value in enumerate(request.progress):
            self._arena.words[(progress >> 3) + number] = value
        words[word + SLOT_PROGRESS] = len(request.progress)
        if record.answer is None:
            self.in_hand.append(slot)
            return True
        return self._fill_answer(slot, record.answer)

    def _fill_answer(self, slot: int, answer: AnswerRecord) -> bool:
        parts: list[bytes | FilePart] = [
            FilePart(*part)  # type: ignore[arg-type]
            if len(part) == _FILE_FIELDS
            else self._read(*part)  # type: ignore[arg-type]
            for part in answer.parts
        ]
        words, word = self._words, slot_row(slot)
        where = length = 0
        if answer.kind == _BYTES:
            (data,) = parts
            assert isinstance(data, bytes)
            length = len(data)
            where = words[word + SLOT_BLOCK] + ANSWER_AT
            if length > ANSWER_BYTES:
                extent = self._answer_extent(slot, length)
                if extent is None:
                    return False
                where = extent
            self._arena.view[where : where + length] = data
        elif answer.kind == _PARTS:
            extent = self._answer_extent(slot, parts_size_bytes(parts))
            if extent is None:
                return False
            where, length = write_parts(self._arena, extent, parts)
        words[word + SLOT_RESPONSE_KIND] = answer.kind
        words[word + SLOT_RESPONSE_OFFSET] = where
        words[word + SLOT_RESPONSE_LENGTH] = length
        words[word + SLOT_STATE] = _NEW | SlotState.RESPONDING
        return True

    def _answer_extent(self, slot: int, length: int) -> int | None:
        """Return where in shared memory a response can be put: a handler's space.

        It is an offset. The handler reserves the space when it starts. None: there is
        no room.
        """
        for _ in self._answers:
            region: ExtentAllocator = self._answers.pop(0)
            self._answers.append(region)
            extent = region.allocate(length)
            if extent is not None:
                words, word = self._words, slot_row(slot)
                words[word + SLOT_EXTENT] = extent
                words[word + SLOT_EXTENT_LENGTH] = length
                return extent
        return None
