"""RequestChannel: pass requests down to the handlers, and responses back up.

Kafka's RequestChannel is one object that two groups of threads share. In this broker a
processor and a handler each have an object of their own, over the same shared memory. A
slot (an entry in shared memory for one request in flight) identifies a request on both
sides; bytes are never copied between processes.
"""

import sys
import time
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from mpbroker.base.logger import get_logger
from mpbroker.base.named_tuple import NamedTuple
from mpbroker.ipc.arena import (
    ANSWER_AT,
    ANSWER_BYTES,
    BLOCK_BYTES,
    LARGE_ANSWERS_BYTES,
    PROGRESS_WORDS,
    SMALL_ANSWER_BYTES,
    ArenaLayout,
    ExtentAllocator,
    progress_words,
)
from mpbroker.ipc.compiled import core
from mpbroker.ipc.layout import (
    GENERATION_SHIFT,
    HANDLER_STARVED,
    HANDLER_STARVED_BYTES,
    MAX_PROCESSORS,
    PROCESSOR_COUNTERS,
    PROCESSOR_READ_ON,
    SLOT_ASIDE_OF,
    SLOT_BEFORE,
    SLOT_BEFORE_OF,
    SLOT_BLOCK,
    SLOT_COMPLETED,
    SLOT_CONNECTION,
    SLOT_DEADLINE,
    SLOT_DEQUEUED,
    SLOT_EXTENT,
    SLOT_EXTENT_LENGTH,
    SLOT_INTENT,
    SLOT_MUST_END,
    SLOT_PARKED,
    SLOT_PROGRESS,
    SLOT_PROGRESS_OFFSET,
    SLOT_READ_ON,
    SLOT_RECEIVED,
    SLOT_REQUEST_LENGTH,
    SLOT_REQUEST_OFFSET,
    SLOT_RESPONSE_KIND,
    SLOT_RESPONSE_LENGTH,
    SLOT_RESPONSE_OFFSET,
    SLOT_SESSION_CLAIM,
    SLOT_STATE,
    SLOT_WORDS,
    SLOTS,
    SLOTS_PER_PROCESSOR,
    STATE_HANDLER_MASK,
    STATE_HANDLER_SHIFT,
    STATE_MASK,
    ProcessorCounter,
    ResponseKind,
    SlotState,
    client_of,
    connection_row,
    handler_row,
    is_request_of,
    processor_row,
    slot_row,
    slots_in_use,
)
from mpbroker.ipc.response_parts import (
    FilePart,
    parts_size_bytes,
    write_parts,
)
from mpbroker.ipc.ring import RequestRing, ResponseRing
from mpbroker.ipc.segment import Segment

if TYPE_CHECKING:
    from mpbroker.native import _core

_LOG = get_logger(__name__)

_GENERATION_STEP: Final = 1 << 24
_KEEP_GENERATION: Final = ~(STATE_MASK | STATE_HANDLER_MASK)
_HELD: Final = int(SlotState.HELD)
_CLAIMED: Final = int(SlotState.CLAIMED)
_PARKED: Final = int(SlotState.PARKED)
_RESPONDING: Final = int(SlotState.RESPONDING)
_BYTES: Final = int(ResponseKind.BYTES)
_PARTS: Final = int(ResponseKind.PARTS)
_CLEAR_WORDS: Final = 16
# The most private memory for answers that find no room in the handler's region.
_MAX_UNPLACED_BYTES: Final = 64 * 1024 * 1024
# How often such answers are tried again: there may be room, or their clients have gone.
_LOOK_NS: Final = 100_000_000


class ProcessorEnd:
    """Publishes requests and takes responses: the processor's side of the channel."""

    def __init__(
        self, control: Segment, ring: RequestRing, responses: ResponseRing
    ) -> None:
        self._words = control.words
        self._ring = ring
        self._responses = responses
        self.unpublished: list[int] = []  # always this list: the core appends too
        # The ring was full at the last flush: stop reading, go on writing.
        self.is_blocked = False
        counters = processor_row(responses.processor) + PROCESSOR_COUNTERS
        self._waits_word = counters + ProcessorCounter.WAITS_FOR_RING
        self._zeros = memoryview(bytes(8 * _CLEAR_WORDS)).cast("q")
        # Both rings in C; None: there is no compiled core.
        self.compiled = None
        if ring.compiled is not None and responses.compiled is not None:
            self.compiled = (ring.compiled, responses.compiled)

    def send_request(
        self, slot: int, offset: int, length: int, progress: int, received_ns: int
    ) -> None:
        """Queue a request for the handlers; ``flush`` puts it into the request ring.

        The caller must have muted the connection.

        Args:
            slot: the request's slot.
            offset: where the request is in the arena (the shared memory for requests
                and answers), without its size field.
            length: its length in bytes.
            progress: where handlers note their progress, in the arena.
            received_ns: when it was received (CLOCK_MONOTONIC).
        """
        words = self._words
        row = SLOTS + slot * SLOT_WORDS
        words[row + SLOT_REQUEST_OFFSET] = offset
        words[row + SLOT_REQUEST_LENGTH] = length
        words[row + SLOT_RECEIVED] = received_ns
        words[row + SLOT_INTENT : row + SLOT_INTENT + _CLEAR_WORDS] = self._zeros
        words[row + SLOT_PROGRESS_OFFSET] = progress
        state = words[row + SLOT_STATE]
        words[row + SLOT_STATE] = (state & _KEEP_GENERATION) + _GENERATION_STEP | _HELD
        self.unpublished.append(slot)

    def answer_here(
        self,
        slot: int,
        offset: int,
        length: int,
        progress: int,
        received_ns: int,
        answer: tuple[int, int],
    ) -> None:
        """Note in a slot that the processor itself answers its request.

        If the processor dies after this call, its successor sends the answer.

        Args:
            slot: the request's slot.
            offset: where the request is in the arena (the shared memory for requests
                and answers), without its size field.
            length: its length in bytes.
            progress: where handlers would note their progress, in the arena.
            received_ns: when it was received (CLOCK_MONOTONIC).
            answer: offset and length of the answer in the arena.
        """
        self.send_request(slot, offset, length, progress, received_ns)
        self.forget(slot)
        words, row = self._words, SLOTS + slot * SLOT_WORDS
        words[row + SLOT_RESPONSE_KIND] = _BYTES
        words[row + SLOT_RESPONSE_OFFSET], words[row + SLOT_RESPONSE_LENGTH] = answer
        words[row + SLOT_DEQUEUED] = words[row + SLOT_COMPLETED] = received_ns
        words[row + SLOT_STATE] = (
            words[row + SLOT_STATE] & _KEEP_GENERATION | _RESPONDING
        )

    def end_wait(self, slot: int) -> None:
        """Mark a request in shared memory, so that handlers answer it soon.

        They do not let it wait, as a Fetch for more records.
        """
        words, row = self._words, SLOTS + slot * SLOT_WORDS
        words[row + SLOT_MUST_END] = words[row + SLOT_STATE] >> GENERATION_SHIFT

    def flush(self) -> int:
        """Put queued requests into the request ring; return how many had no room."""
        waiting = self.unpublished
        if waiting:
            del waiting[: self._ring.put(waiting)]
        if waiting and not self.is_blocked:
            self._words[self._waits_word] += 1
        # Even if no request waits here: the core may have published the last of them.
        self.is_blocked = bool(waiting)
        return len(waiting)

    def receive_responses(self, *, arm: bool) -> list[int]:
        """Take the slots of all answered requests from the response ring.

        Args:
            arm: if there are none, have the doorbell rung at the next answer.
        """
        return self._responses.pop(arm=arm)

    def answered(self) -> list[int]:
        """Return the slots on the response ring, without taking them from it.

        The requests in these slots are answered.
        """
        return self._responses.waiting()

    def forget(self, slot: int) -> bool:
        """Take back a queued request whose connection has ended.

        Return False if the request has been published already.
        """
        if slot in self.unpublished:
            self.unpublished.remove(slot)
            return True
        return False

    def response(self, slot: int) -> tuple[int, int, int]:
        """Return where the answer to a slot's request is.

        The result is its ResponseKind, its offset in the arena, and its length.
        """
        row = SLOTS + slot * SLOT_WORDS
        kind, offset, length = self._words[
            row + SLOT_RESPONSE_KIND : row + SLOT_RESPONSE_LENGTH + 1
        ].tolist()
        return kind, offset, length


class ReceivedRequest(NamedTuple):
    """Points to a request that a handler has taken, in shared memory."""

    slot: int
    connection: int
    body: memoryview  # header and body, without the size field
    received_ns: int


class _Unplaced(NamedTuple):
    """Holds an answer that waits in a handler's private memory for shared memory."""

    slot: int
    length: int
    answer: bytes | list[bytes | FilePart]


class HandlerEnd:
    """Takes, answers and parks requests: the handler's side of the channel.

    An answer is written into the block of the request's slot, or, if it is larger, into
    an extent: a piece of the handler's own region of shared memory. ``flush`` pushes
    all answers to their processors' queues. An answer for which the region has no room
    waits in private memory; processors close clients that take their answers slowly,
    until there is room (slow_clients.py). A connection has one answer at a time, so no
    connection can fill the region with several; one that produces to shared topics has
    at most five.
    """

    def __init__(
        self,
        handler: int,
        control: Segment,
        arena: Segment,
        arena_layout: ArenaLayout,
        ring: RequestRing,
        responses: Sequence[ResponseRing],
    ) -> None:
        self._handler = handler
        self._words = control.words
        self._arena = arena
        self._view = arena.view
        self._layout = arena_layout
        self._ring = ring
        self._responses = responses
        self._extents: ExtentAllocator = arena_layout.response_extents(handler)
        # slot -> (state word without state bits, start, length) of extents in use
        self._lent: dict[int, tuple[int, int, int]] = {}
        self._answered: dict[int, list[int]] = {}  # by processor, not yet pushed
        self._small_answers = self._extents.start + LARGE_ANSWERS_BYTES
        self._unplaced: list[_Unplaced] = []
        self._unplaced_bytes = 0
        self._next_look_ns = 0
        self._starved_word = handler_row(handler) + HANDLER_STARVED
        self._note_unplaced(0)
        self._claimed = (handler + 1) << STATE_HANDLER_SHIFT | _CLAIMED
        self._parked = (handler + 1) << STATE_HANDLER_SHIFT | _PARKED
        # The same in C, for answers that fit their block; None: no compiled core.
        self.compiled = None
        rings = tuple(ring.compiled for ring in responses if ring.compiled is not None)
        if core is not None and len(rings) == len(responses):
            region_bytes = arena_layout.processor_region_bytes
            self.compiled = core.HandlerEnd(
                control.view, arena.view, region_bytes, rings
            )
            # In place of the methods: one more call would cost all the time saved.
            self._answer = self.compiled.answer  # type: ignore[method-assign]
            self._push = self.compiled.flush  # type: ignore[method-assign]
        self._adopt_extents()

    def _adopt_extents(self) -> None:
        """Reserve the memory of a dead predecessor's answers that are not sent yet."""
        first = self._extents.start
        end = first + self._extents.size_bytes
        words = self._words
        taken = []
        for processor in range(MAX_PROCESSORS):
            for slot in slots_in_use(words, processor):
                row = slot_row(slot)
                state = words[row + SLOT_STATE]
                extent = words[row + SLOT_EXTENT]
                held = state & STATE_MASK in (_CLAIMED, _RESPONDING)
                if held and first <= extent < end:
                    length = words[row + SLOT_EXTENT_LENGTH]
                    taken.append((extent, length))
                    self._lent[slot] = (state >> 24, extent, length)
        self._extents.reserve(taken)

    @property
    def compiled_ring(self) -> "_core.RequestRing | None":
        """The request ring as an object of the C extension; None without that."""
        return self._ring.compiled

    # -- taking --------------------------------------------------------------------

    def receive_requests(
        self, max_requests: int, handlers: int, *, arm: bool
    ) -> list[int]:
        """Claim at most a fair share of the waiting requests; return their slots.

        Args:
            max_requests: the most requests to claim.
            handlers: how many handlers share the waiting requests.
            arm: if there are none, have this handler woken at the next request.
        """
        return self._ring.take(max_requests, self._handler, handlers, arm=arm)

    def request(self, slot: int) -> ReceivedRequest:
        row = SLOTS + slot * SLOT_WORDS
        words = self._words
        offset = words[row + SLOT_REQUEST_OFFSET]
        return ReceivedRequest(
            slot,
            words[row + SLOT_CONNECTION],
            self._view[offset : offset + words[row + SLOT_REQUEST_LENGTH]],
            words[row + SLOT_RECEIVED],
        )

    # -- answering ---------------------------------------------------------------------

    def send_bytes(self, slot: int, frame: bytes) -> None:
        """Answer with a whole frame, its size field included.

        Raises:
            OverflowError: the answer is larger than the handler's shared memory for
                answers.
        """
        if self.compiled is not None and self.compiled.send_bytes(slot, frame):
            return
        length = len(frame)
        if length <= ANSWER_BYTES:
            where = self._layout.block(slot) + ANSWER_AT
        else:
            extent = self._extent_for(slot, length)
            if extent is None:
                self._put_aside(_Unplaced(slot, length, frame))
                return
            where = extent
        self._view[where : where + length] = frame
        self._answer(slot, _BYTES, where, length)

    def written(self, slot: int, length: int) -> bytes:
        """Return the answer that the C code has written into the block of a slot."""
        at = self._layout.block(slot) + ANSWER_AT
        return bytes(self._arena.view[at : at + length])

    def send_written(self, slot: int, length: int) -> None:
        """Answer with the bytes that the C code has written into a slot's block."""
        self._answer(slot, _BYTES, self._layout.block(slot) + ANSWER_AT, length)

    def send_parts(self, slot: int, parts: list[bytes | FilePart]) -> None:
        """Answer with parts in this order: bytes or file ranges, none of them empty.

        Raises:
            OverflowError: the answer's bytes in memory, without the file ranges, are
                more than the handler's shared memory for answers.
        """
        length = parts_size_bytes(parts)
        extent = self._extent_for(slot, length)
        if extent is None:
            self._put_aside(_Unplaced(slot, length, parts))
            return
        table, total = write_parts(self._arena, extent, parts)
        self._answer(slot, _PARTS, table, total)

    def send_nothing(self, slot: int) -> None:
        """End a request whose client expects no answer (acks=0)."""
        self._answer(slot, ResponseKind.NONE, 0, 0)

    def close_connection(self, slot: int) -> None:
        self._answer(slot, ResponseKind.CLOSE, 0, 0)

    def _answer(self, slot: int, kind: int, offset: int, length: int) -> None:
        words = self._words
        row = SLOTS + slot * SLOT_WORDS
        words[row + SLOT_RESPONSE_KIND] = kind
        words[row + SLOT_RESPONSE_OFFSET] = offset
        words[row + SLOT_COMPLETED] = time.monotonic_ns()
        words[row + SLOT_RESPONSE_LENGTH] = length
        processor = slot // SLOTS_PER_PROCESSOR
        answered = self._answered.get(processor)
        if answered is None:
            self._answered[processor] = [slot]
        else:
            answered.append(slot)

    def flush(self) -> None:
        """Put all answers on the response rings of their processors.

        Before that, copy answers that have waited for shared memory, if there is room
        now.
        """
        if self._unplaced:
            self._place()
        self._push()

    def _push(self) -> None:
        if self._answered:
            answered, self._answered = self._answered, {}
            for processor, slots in answered.items():
                self._responses[processor].push(slots)

    @property
    def has_unplaced(self) -> bool:
        """Whether answers wait for room in this handler's region of shared memory."""
        return bool(self._unplaced)

    def _put_aside(self, unplaced: _Unplaced) -> None:
        """Let an answer wait for room in this handler's region of shared memory.

        If more than _MAX_UNPLACED_BYTES wait, close the connection of the largest
        answer.
        """
        self._unplaced.append(unplaced)
        self._unplaced_bytes += unplaced.length
        if self._unplaced_bytes > _MAX_UNPLACED_BYTES:
            largest = max(self._unplaced, key=lambda each: each.length)
            self._unplaced.remove(largest)
            self._give_up(largest)
        self._note_unplaced(self._words[self._starved_word] or time.monotonic_ns())

    def _give_up(self, unplaced: _Unplaced) -> None:
        self._unplaced_bytes -= unplaced.length
        _LOG.warning(
            "closed the connection of an answer of %d bytes: other answers, whose"
            " clients do not read them, take all the room",
            unplaced.length,
        )
        self.close_connection(unplaced.slot)

    def give_up_unplaced(self) -> None:
        """Close the connections whose answers still wait for room in shared memory."""
        waiting, self._unplaced = self._unplaced, []
        for unplaced in waiting:
            self._give_up(unplaced)
        self._note_unplaced(0)

    def _note_unplaced(self, since_ns: int) -> None:
        """Store since when answers wait for room, and how many bytes they have.

        Processors look at this, and close clients that read their answers slowly.

        Args:
            since_ns: since when (CLOCK_MONOTONIC); 0: no answer waits.
        """
        words, row = self._words, handler_row(self._handler)
        words[row + HANDLER_STARVED_BYTES] = self._unplaced_bytes
        words[self._starved_word] = since_ns

    def _place(self) -> None:
        """Copy waiting answers into this handler's shared memory, oldest first.

        An answer that finds no room waits on. Do nothing if no memory has been freed
        and the last attempt was less than 100 ms ago.
        """
        now = time.monotonic_ns()
        self._reclaim()
        if now < self._next_look_ns:
            return
        self._next_look_ns = now + _LOOK_NS
        before = len(self._unplaced)
        self._unplaced = [each for each in self._unplaced if not self._is_placed(each)]
        self._unplaced_bytes = sum(each.length for each in self._unplaced)
        if not self._unplaced:
            self._note_unplaced(0)
        elif len(self._unplaced) < before:
            self._note_unplaced(now)

    def _is_placed(self, unplaced: _Unplaced) -> bool:
        """Copy an answer to shared memory, or drop it if its client has disconnected.

        Return False if there is no room, and the answer must still wait.
        """
        slot, length, answer = unplaced
        connection = self._words[slot_row(slot) + SLOT_CONNECTION]
        if not is_request_of(self._words, connection_row(connection), slot):
            self.send_nothing(slot)
            return True
        extent = self._allocate(slot, length)
        if extent is None:
            return False
        if isinstance(answer, bytes):
            self._view[extent : extent + length] = answer
            self._answer(slot, _BYTES, extent, length)
        else:
            self._answer(slot, _PARTS, *write_parts(self._arena, extent, answer))
        return True

    def _extent_for(self, slot: int, length: int) -> int | None:
        if length > self._extents.size_bytes:
            raise OverflowError(
                f"an answer of {length} bytes; at most {self._extents.size_bytes}"
            )
        if slot in self._lent or len(self._lent) >= 256:
            self._reclaim()
        extent = self._allocate(slot, length)
        if extent is None and self._reclaim():
            extent = self._allocate(slot, length)
        return extent

    def _allocate(self, slot: int, length: int) -> int | None:
        extents, small_answers = self._extents, self._small_answers
        extent = None
        if length <= SMALL_ANSWER_BYTES:
            extent = extents.allocate(length, low=small_answers)
        if extent is None:
            # Only an answer too large for the large part may reach into the small one.
            is_huge = length > LARGE_ANSWERS_BYTES
            high = sys.maxsize if is_huge else small_answers
            extent = extents.allocate(length, high=high)
        if extent is None:
            return None
        words, row = self._words, SLOTS + slot * SLOT_WORDS
        words[row + SLOT_EXTENT] = extent
        words[row + SLOT_EXTENT_LENGTH] = length
        self._lent[slot] = (words[row + SLOT_STATE] >> 24, extent, length)
        return extent

    def _reclaim(self) -> bool:
        """Free the shared memory of answers that have been sent.

        Return whether there were any.
        """
        words, before = self._words, len(self._lent)
        for slot, (generation, extent, length) in list(self._lent.items()):
            state = words[SLOTS + slot * SLOT_WORDS + SLOT_STATE]
            if state >> 24 != generation or state & STATE_MASK not in (
                _CLAIMED,
                _RESPONDING,
            ):
                self._extents.free(extent, length)
                del self._lent[slot]
        if len(self._lent) == before:
            return False
        self._next_look_ns = 0
        return True

    def give_back_memory(self) -> None:
        """Give memory that large answers have used back to the kernel.

        To be called when this handler is idle. If an answer is still being sent, no
        memory is given back.
        """
        if self._lent:
            self._reclaim()
            if not self._lent:
                self._arena.give_back(self._extents.start, self._extents.size_bytes)

    # -- parking ---------------------------------------------------------------------

    def park(self, slot: int, deadline_ns: int) -> None:
        """Mark a request as one that waits, until ``deadline_ns`` (CLOCK_MONOTONIC).

        Its slot gets the state PARKED. If this process dies, another handler gets the
        request.
        """
        words, row = self._words, SLOTS + slot * SLOT_WORDS
        words[row + SLOT_DEADLINE] = deadline_ns
        if words[row + SLOT_PARKED] <= words[row + SLOT_DEQUEUED]:
            words[row + SLOT_PARKED] = time.monotonic_ns()
        words[row + SLOT_STATE] = (
            words[row + SLOT_STATE] & _KEEP_GENERATION | self._parked
        )

    def must_end(self, slot: int) -> bool:
        """Return whether the processor wants a request answered without waiting.

        The processor has then marked the request with ``end_wait``.
        """
        words, row = self._words, SLOTS + slot * SLOT_WORDS
        return bool(
            words[row + SLOT_MUST_END] == words[row + SLOT_STATE] >> GENERATION_SHIFT
        )

    def generation(self, slot: int) -> int:
        """Return a number that tells a slot's current request from its later ones."""
        return int(self._words[slot_row(slot) + SLOT_STATE] >> GENERATION_SHIFT)

    def read_on(self, slot: int) -> None:
        """Let the connection of a waiting request send its next one: pipelines.py."""
        self._words[slot_row(slot) + SLOT_READ_ON] = self.generation(slot)
        processor = slot // SLOTS_PER_PROCESSOR
        # Whatever the others store: the processor looks if the word has changed.
        word = processor_row(processor) + PROCESSOR_READ_ON
        self._words[word] = time.monotonic_ns()
        self._responses[processor].wake()

    def request_before(self, slot: int) -> tuple[int, int] | None:
        """Return slot and generation of the request that a connection sent before.

        None: all earlier requests were answered when this one was published.
        """
        words, row = self._words, slot_row(slot)
        if words[row + SLOT_ASIDE_OF] != self.generation(slot):
            return None
        before = words[row + SLOT_BEFORE] - 1
        return None if before < 0 else (before, words[row + SLOT_BEFORE_OF])

    def has_claimed(self, slot: int) -> bool:
        """Return whether this handler has taken a slot's request, and not parked it.

        It may have been executed already.
        """
        state = self._words[slot_row(slot) + SLOT_STATE]
        return state & ~_KEEP_GENERATION == self._claimed

    def client_of(self, connection: int) -> int:
        """Return a number for a connection's client: see client_of()."""
        return client_of(self._words, connection_row(connection))

    def note_wait(self, slot: int, now_ns: int) -> None:
        """Note the time from which a request waits for other processes or the disk."""
        self._words[slot_row(slot) + SLOT_PARKED] = now_ns

    def unpark(self, slot: int) -> None:
        words, row = self._words, SLOTS + slot * SLOT_WORDS
        words[row + SLOT_STATE] = (
            words[row + SLOT_STATE] & _KEEP_GENERATION | self._claimed
        )

    def deadline_ns(self, slot: int) -> int:
        """Return the deadline until which a request may wait, set before a redelivery.

        A handler that has died or retired had parked the request. 0: none had.
        """
        return self._words[slot_row(slot) + SLOT_DEADLINE]

    def put_back(self, slots: Sequence[int]) -> None:
        """Put a retiring handler's parked requests on the ring, for other handlers."""
        for slot in slots:
            self.unpark(slot)  # the ring must not have parked requests
        self._ring.put_back(slots)

    def give_back(self, slot: int) -> None:
        """Put a request that this handler has taken on the ring again, for others."""
        self._ring.put_back([slot], wake_all=False)

    def session_claim(self, slot: int) -> int:
        return self._words[slot_row(slot) + SLOT_SESSION_CLAIM]

    def set_session_claim(self, slot: int, claim: int) -> None:
        self._words[slot_row(slot) + SLOT_SESSION_CLAIM] = claim

    def progress(self, slot: int) -> list[int]:
        """Return what handlers that have died have noted about a request, as words.

        For a Produce this is a word for each partition that is done, such as its base
        offset. For other requests the words are the intent, as `note_intent` stored it.
        Return an empty list if nothing was noted.
        """
        words, row = self._words, SLOTS + slot * SLOT_WORDS
        done = words[row + SLOT_PROGRESS]
        if not done:
            return []
        where = words[row + SLOT_PROGRESS_OFFSET] >> 3
        return self._arena.words[where : where + done].tolist()

    def progress_capacity(self, slot: int) -> int:
        """Return how many words of a request's memory are for notes of its execution.

        `note_intent` and `note_progress` store what is about to be appended, and what
        has been. If the handler dies, the next one goes on from there. The words are
        enough for a Produce, whose length limits for how many partitions it can have
        records.
        """
        words, row = self._words, SLOTS + slot * SLOT_WORDS
        in_block = words[row + SLOT_PROGRESS_OFFSET] - words[row + SLOT_BLOCK]
        if 0 <= in_block < BLOCK_BYTES:
            return PROGRESS_WORDS
        return progress_words(words[row + SLOT_REQUEST_LENGTH] + 4)

    def note_intent(self, slot: int, words: Sequence[int]) -> None:
        """Store in a request's memory the words that describe the changes it will make.

        If this handler dies, the next one finds them with `progress`. Words beyond
        `progress_capacity` are left out.
        """
        row = slot_row(slot)
        fitting = array("q", words[: self.progress_capacity(slot)])
        where = self._words[row + SLOT_PROGRESS_OFFSET] >> 3
        self._arena.words[where : where + len(fitting)] = fitting
        self._words[row + SLOT_PROGRESS] = len(fitting)  # the commit

    def note_progress(self, slot: int, ordinal: int, word: int) -> None:
        """Note a Produce's result for a partition to which it appends nothing.

        Args:
            slot: the request's slot.
            ordinal: the partition's place in the request.
            word: the result as a word; see `progress`.
        """
        where = self._words[slot_row(slot) + SLOT_PROGRESS_OFFSET] >> 3
        self._arena.words[where + ordinal] = word
