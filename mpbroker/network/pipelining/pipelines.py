"""Pipelines: let a connection have up to five requests at the cluster's writer.

A Produce to a shared topic is answered behind the commit of an object, perhaps 250 ms
later. With one request in flight, a producer would send four requests a second, so its
connection may send more of them meanwhile:

    parked      a handler has parked a Produce, and the writer has it in its buffer: now
                no later request can overtake it. The handler stores "read on" in the
                slot and rings the doorbell
    set aside   the processor sets the request aside: it keeps its slot, and the
                connection gets another one when its next request comes
    read        only a Produce is published. Any other request, or a sixth, waits until
                all others are answered
    answered    an answer that is ready before an older one waits in its slot
    ended       when no older request is left, the connection is as any other

So the order of a connection's requests is that in which the writer gets them, whichever
handlers have them. If the writer dies, handlers give their requests to the next one in
any order; each says which request comes before it, and the next writer waits for that
one (cluster/produce_server.py).

From the first byte of a second request on, the row says PIPELINED, since it has room
for one slot. If the processor dies then, its successor closes the connection, and the
client sends the requests again. Before that byte, the row is that of any other request
in flight, and a successor goes on with it. A handler's death changes nothing: a slot
that was set aside names the generation of its connection's row, so that another handler
finds the sender (layout.is_request_of).

Nothing is read ahead while slots or the request ring are short, while the client is
throttled, or while connections leave this processor. Connections that do not produce to
shared topics never come here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from mpbroker.ipc.layout import (
    CONNECTION_MUTED_UNTIL,
    CONNECTION_SLOT,
    CONNECTION_STATE,
    GENERATION_SHIFT,
    PROCESSOR_READ_ON,
    PROCESSOR_SLOTS_USED,
    SLOT_ASIDE_OF,
    SLOT_ASIDE_ROW,
    SLOT_BEFORE,
    SLOT_BEFORE_OF,
    SLOT_READ_ON,
    SLOT_STATE,
    SLOT_WORDS,
    SLOTS_PER_PROCESSOR,
    ConnectionState,
    processor_row,
    slot_row,
)
from mpbroker.network.channel import Channel, Pipeline
from mpbroker.network.connection_rows import ConnectionRows
from mpbroker.network.request_reader import RequestReader

# As many as an idempotent producer sends: max.in.flight.requests.per.connection.
_MOST_IN_FLIGHT: Final = 5
_IN_FLIGHT: Final = ConnectionState.IN_FLIGHT
_PIPELINED: Final = ConnectionState.PIPELINED
_SIZE_BYTES: Final = 4
_PRODUCE: Final = b"\0\0"  # the API key at the beginning of a request


class Pipelines:
    """Sets requests aside that wait for the cluster's writer, and keeps their order.

    Args:
        processor: the processor's id.
        words: the words of the control segment.
        arena: the bytes of requests and answers.
        reader: gives connections their slots.
        rows: the connections' records in shared memory.
        in_flight: the connection of each request in flight, by slot of this processor.
    """

    def __init__(
        self,
        processor: int,
        words: memoryview,
        arena: memoryview,
        reader: RequestReader,
        rows: ConnectionRows,
        in_flight: list[Channel | None],
    ) -> None:
        self._words = words
        self._arena = arena
        self._reader = reader
        self._rows = rows
        self._in_flight = in_flight
        self._first_slot = processor * SLOTS_PER_PROCESSOR
        self._used_word = processor_row(processor) + PROCESSOR_SLOTS_USED
        self._read_on_word = processor_row(processor) + PROCESSOR_READ_ON
        self._seen = 0  # the word when it was looked at last

    def waiting(self) -> Iterator[Channel]:
        """Yield the connections whose last request waits, so that they are read on.

        To be called when the doorbell has rung.
        """
        words = self._words
        if words[self._read_on_word] == self._seen:
            return
        self._seen = words[self._read_on_word]
        first = slot_row(self._first_slot)
        end = first + words[self._used_word] * SLOT_WORDS
        states = words[first + SLOT_STATE : end : SLOT_WORDS].tolist()
        wanted = words[first + SLOT_READ_ON : end : SLOT_WORDS].tolist()
        for index, (state, generation) in enumerate(zip(states, wanted, strict=True)):
            if generation != state >> GENERATION_SHIFT:
                continue
            channel = self._in_flight[index]
            slot = self._first_slot + index
            # It may be answered by now, or set aside already.
            if channel is not None and slot == channel.slot and self._waits(channel):
                yield channel

    def _waits(self, channel: Channel) -> bool:
        """Return whether a connection's last request has no answer yet."""
        pipeline = channel.pipeline
        if pipeline is None:
            return channel.state == _IN_FLIGHT
        return not pipeline.is_reading and channel.slot not in pipeline.answered

    def set_aside(self, channel: Channel) -> None:
        """Set a connection's request in flight aside, so that the next can be read."""
        pipeline = channel.pipeline
        if pipeline is None:
            pipeline = channel.pipeline = Pipeline()
            channel.state = _PIPELINED
        pipeline.ahead.append(channel.slot)
        pipeline.is_reading = True
        self._reader.set_aside(channel)
        if pipeline.is_noted:
            self._words[channel.row + CONNECTION_SLOT] = 0

    def note(self, channel: Channel, now_ns: int) -> None:
        """Let a connection's row say PIPELINED, before a second request is received."""
        pipeline = channel.pipeline
        if pipeline is None or pipeline.is_noted:
            return
        pipeline.is_noted = True
        self._rows.set_state(channel.row, _PIPELINED, now_ns)
        self._note_place(channel, pipeline.ahead[0], 0)
        self._words[channel.row + CONNECTION_SLOT] = 0

    def may_read(self, channel: Channel) -> bool:
        """Return whether a connection's next request may be read behind the others."""
        pipeline = channel.pipeline
        return (
            pipeline is not None
            and pipeline.is_reading
            and not pipeline.has_stopped
            and len(pipeline.ahead) < _MOST_IN_FLIGHT
            and not self._words[channel.row + CONNECTION_MUTED_UNTIL]
        )

    def is_produce(self, channel: Channel) -> bool:
        """Return whether the whole frame that a channel has received is a Produce."""
        at = channel.extent or channel.block + channel.start
        at += _SIZE_BYTES
        return bytes(self._arena[at : at + len(_PRODUCE)]) == _PRODUCE

    def published(self, channel: Channel) -> None:
        """Note that a connection's next request is in flight behind the others.

        To be called before the request ring is flushed.
        """
        if channel.pipeline is not None:  # it is None if the connection was closed
            channel.pipeline.is_reading = False
            before = channel.pipeline.ahead[-1]
            self._note_place(channel, channel.slot, before + 1)

    def _note_place(self, channel: Channel, slot: int, before: int) -> None:
        """Note in a request's slot its connection, and the request before it.

        If that is noted already, since it was in flight behind others, do nothing.

        Args:
            channel: the connection.
            slot: the slot of the request.
            before: 1 + the slot of the request before it; 0: that one was answered.
        """
        words, row = self._words, slot_row(slot)
        generation = words[row + SLOT_STATE] >> GENERATION_SHIFT
        if words[row + SLOT_ASIDE_OF] == generation:
            return
        words[row + SLOT_BEFORE] = before
        if before:
            state = words[slot_row(before - 1) + SLOT_STATE]
            words[row + SLOT_BEFORE_OF] = state >> GENERATION_SHIFT
        state = words[channel.row + CONNECTION_STATE]
        words[row + SLOT_ASIDE_ROW] = state >> GENERATION_SHIFT
        words[row + SLOT_ASIDE_OF] = generation  # the commit

    def slots(self, channel: Channel) -> Sequence[int]:
        """Return the slots of a connection's requests in flight, the oldest first."""
        pipeline = channel.pipeline
        if pipeline is None:
            return [channel.slot]
        last = [] if pipeline.is_reading else [channel.slot]
        return [*pipeline.ahead, *last]

    def answered(self, channel: Channel, slot: int) -> None:
        """Note that the answer to a request is there, perhaps before an older one's."""
        if channel.pipeline is not None:
            channel.pipeline.answered.add(slot)

    def has_turn(self, channel: Channel) -> bool:
        """Return whether an answer is there that must be sent next."""
        pipeline = channel.pipeline
        return (
            pipeline is not None
            and not channel.outgoing
            and pipeline.ahead[0] in pipeline.answered
        )

    def finish(self, channel: Channel, now_ns: int) -> None:
        """Free the oldest request of a connection, whose answer was sent.

        When no older request is left than the last one, the connection is no longer
        PIPELINED: it is READING, or IN_FLIGHT with its last request. If that is
        answered already, it is in state SENDING, and the answer is to be sent.
        """
        pipeline = channel.pipeline
        assert pipeline is not None
        slot = pipeline.ahead.popleft()
        pipeline.answered.discard(slot)
        self._in_flight[slot - self._first_slot] = None
        if not pipeline.ahead:
            self._end(channel, pipeline, now_ns)
        self._reader.release_request(slot)
        self._reader.release_slot(slot)

    def _end(self, channel: Channel, pipeline: Pipeline, now_ns: int) -> None:
        channel.pipeline = None
        state = ConnectionState.READING if pipeline.is_reading else _IN_FLIGHT
        self._rows.finish(
            channel.row, channel.base, channel.start, channel.sent, now_ns, state
        )
        if not pipeline.is_noted:
            # After the commit: a successor frees a slot that no row names.
            self._words[channel.row + CONNECTION_SLOT] = 0
        channel.state = state
        if channel.slot in pipeline.answered:
            channel.state = ConnectionState.SENDING
