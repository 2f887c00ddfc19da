"""Processor: one process's connections, from their first byte to their last.

A turn, in Kafka's order: new connections, responses, poll, receives, sends,
disconnects, and the publishing of what was received. It never blocks on anything but
its poll: when the request ring is full it stops reading and goes on writing; when no
slot or extent is free, the connection waits in a queue and the others go on.

Source: Kafka SocketServer.Processor.run.
"""

import contextlib
import logging
import socket
import struct
import time
from collections import deque
from typing import Final

from mpbroker.ipc.arena import REQUEST_PART_BYTES, ArenaLayout, progress_offset
from mpbroker.ipc.doorbell import Doorbell
from mpbroker.ipc.fdpass import FdsDroppedError, recv_fds
from mpbroker.ipc.layout import (
    HEADER,
    HEADER_PHASE,
    PROCESSOR_COUNTERS,
    PROCESSOR_HANDED,
    PROCESSOR_INCARNATION,
    PROCESSOR_READY,
    PROCESSOR_REGISTERED,
    SLOTS_PER_PROCESSOR,
    ConnectionState,
    Phase,
    ProcessorCounter,
    ResponseKind,
    processor_row,
)
from mpbroker.ipc.response_parts import read_parts
from mpbroker.ipc.ring import RequestRing, ResponseRing
from mpbroker.ipc.segment import Segment
from mpbroker.network.channel import Channel, ChannelEvent, next_state
from mpbroker.network.channel_selector import (
    HANG_UP,
    READABLE,
    WRITABLE,
    ChannelSelector,
)
from mpbroker.network.connection_rows import ConnectionRows
from mpbroker.network.errors import FrameLengthError, SegmentGoneError
from mpbroker.network.request_channel import ProcessorEnd
from mpbroker.network.request_reader import (
    ReadResult,
    RequestReader,
    stalled_longest,
)
from mpbroker.network.response_sender import ResponseSender, SendResult

_LOG = logging.getLogger(__name__)

# Kafka's ConnectionQueueSize: the acceptor's credit, and so many a turn at most.
NEW_CONNECTIONS: Final = 20
HAND_OVER: Final = struct.Struct("=iqq")  # listener, accept sequence, accepted ns

_SIZE_BYTES: Final = 4
_IDLE_POLL_S: Final = 1.0
_BLOCKED_POLL_S: Final = 0.001  # the ring is full: nobody rings when it is not
_HOUSEKEEPING_NS: Final = 1_000_000_000
_STALLED_NS: Final = 10_000_000_000
_QUIET_NS: Final = 5_000_000_000  # so long a silent connection keeps its slot
_READING: Final = ConnectionState.READING
_SENDING: Final = ConnectionState.SENDING
_BYTES: Final = int(ResponseKind.BYTES)
_PARTS: Final = int(ResponseKind.PARTS)
_NONE: Final = int(ResponseKind.NONE)


class Processor:
    """The network side of one processor id.

    Args:
        processor: its id.
        control: the control segment.
        arena: requests and answers.
        arena_layout: where in it.
        ring: the request ring.
        doorbell: its own.
        handover: the Unix socket through which acceptors pass connections.
        max_request_bytes: socket.request.max.bytes.
        max_idle_ns: connections.max.idle.ms; 0 or less: for ever.
    """

    def __init__(
        self,
        processor: int,
        control: Segment,
        arena: Segment,
        arena_layout: ArenaLayout,
        ring: RequestRing,
        doorbell: Doorbell,
        handover: socket.socket,
        max_request_bytes: int,
        max_idle_ns: int,
    ) -> None:
        self._words = control.words
        self._row = processor_row(processor)
        self._words[self._row + PROCESSOR_COUNTERS] = 0  # a predecessor's connections
        self._arena = arena
        self._selector = ChannelSelector()
        self._requests = ProcessorEnd(
            control, ring, ResponseRing(control, processor, doorbell)
        )
        self._reader = RequestReader(
            processor, control, arena, arena_layout, self._selector, max_request_bytes
        )
        self._sender = ResponseSender(control, arena, self._selector)
        self._rows = ConnectionRows(processor, control)
        self._handover = handover
        self._handover_fd = handover.fileno()
        self._max_idle_ns = max_idle_ns
        self._channels: dict[int, Channel] = {}
        self._first_slot = processor * SLOTS_PER_PROCESSOR
        # The connection of each request in flight, by slot within the processor.
        self._in_flight: list[Channel | None] = [None] * SLOTS_PER_PROCESSOR
        self._waiting: deque[Channel] = deque()  # for a slot or an extent
        self._postponed: deque[Channel] = deque()  # readable while the ring was full
        self._unfinished: deque[Channel] = deque()  # answers that used up their turn
        self._new_connections = False
        self._busy = True
        self._now = time.monotonic_ns()
        self._next_housekeeping = self._now + _HOUSEKEEPING_NS
        self._draining = False
        self._selector.watch_doorbell(doorbell)
        self._selector.watch(self._handover_fd)

    # -- the loop ----------------------------------------------------------------

    def run(self) -> None:
        """Serve until the broker drains and the last answer is out."""
        words = self._words
        # Descriptors that a dead predecessor took along cannot come any more: give
        # the acceptor its credit back.
        words[self._row + PROCESSOR_REGISTERED] = words[self._row + PROCESSOR_HANDED]
        words[self._row + PROCESSOR_READY] = words[self._row + PROCESSOR_INCARNATION]
        while not self._draining or self._channels:
            self.turn()

    def turn(self) -> None:
        """Do everything that can be done now, or wait a while for something."""
        if self._new_connections:
            self._configure_new_connections()
        responses = self._requests.receive_responses(arm=False)
        if responses:
            self._process_responses(responses)
            self._requests.flush()
            self._busy = True
        if self._unfinished:
            self._finish_sending()
        if self._postponed or self._waiting:
            self._retry_reading()
        events = self._poll()
        self._now = now = time.monotonic_ns()
        for fd, event in events:
            channel = self._channels.get(fd)
            if channel is None:
                if fd == self._handover_fd:
                    self._new_connections = True
                continue
            if event & HANG_UP:
                channel.closing = True
            if event & READABLE:
                channel.readable = True
                if channel.state == _READING and not channel.waiting:
                    self._receive(channel)
            if event & WRITABLE and channel.state == _SENDING and channel.outgoing:
                self._continue_sending(channel)
        self._requests.flush()
        if now >= self._next_housekeeping:
            self._housekeep()
        if self._words[HEADER + HEADER_PHASE] >= Phase.DRAINING:
            self._drain()

    def _poll(self) -> list[tuple[int, int]]:
        if self._requests.is_blocked:
            return self._selector.poll(_BLOCKED_POLL_S)
        if self._busy or self._new_connections:
            self._busy = False
            events = self._selector.poll(0)
            if events:
                self._busy = True
            return events
        responses = self._requests.receive_responses(arm=True)
        if responses:
            self._process_responses(responses)
            self._requests.flush()
            self._busy = True
            return self._selector.poll(0)
        started = time.monotonic_ns()
        events = self._selector.poll(_IDLE_POLL_S)
        self._count(ProcessorCounter.IDLE_NS, time.monotonic_ns() - started)
        self._busy = bool(events)
        return events

    # -- new connections ---------------------------------------------------------

    def _configure_new_connections(self) -> None:
        """Register what the acceptor has passed, at most its credit a turn."""
        self._new_connections = False
        for _ in range(NEW_CONNECTIONS):
            try:
                message, fds = recv_fds(self._handover, HAND_OVER.size, 1)
            except BlockingIOError:
                return
            except FdsDroppedError as error:
                _LOG.warning("a new connection was lost: %s", error)
                self._words[self._row + PROCESSOR_REGISTERED] += 1
                continue
            if not message:
                return
            for fd in fds:
                listener, sequence, _ = HAND_OVER.unpack(message)
                self._register(socket.socket(fileno=fd), listener, sequence)
            self._words[self._row + PROCESSOR_REGISTERED] += 1
        self._new_connections = True  # maybe more; but those we have come first

    def _register(self, sock: socket.socket, listener: int, sequence: int) -> None:
        sock.setblocking(False)
        connection = None if self._draining else self._rows.take()
        if connection is None:
            _LOG.warning("no room for another connection: closed")
            sock.close()
            return
        channel = Channel(sock, connection, self._rows.word(connection))
        try:
            self._rows.describe(connection, sock, listener, sequence, self._now)
            self._selector.register(channel)
        except OSError:  # it has gone already
            self._rows.release(connection)
            sock.close()
            return
        channel.active_ns = self._now
        self._channels[channel.fd] = channel
        self._words[self._row + PROCESSOR_COUNTERS] = len(self._channels)
        # No read here: registration makes epoll report a socket that has bytes.

    # -- requests ----------------------------------------------------------------

    def _receive(self, channel: Channel) -> None:
        if self._requests.is_blocked:
            self._wait(channel, self._postponed)
            return
        channel.active_ns = self._now
        try:
            result = self._reader.read(channel)
        except FrameLengthError as error:
            _LOG.info("%s: closed: %s", self._rows.name(channel.connection), error)
            self._close(channel, ProcessorCounter.CLOSED_BAD_FRAME)
            return
        if result == ReadResult.WHOLE:
            self._publish(channel)
        elif result == ReadResult.DRAINED:
            self._reader.rest(channel)
        elif result == ReadResult.CLOSED:
            self._close(channel, ProcessorCounter.CLOSED_BY_PEER)
        else:
            self._starve(channel)

    def _publish(self, channel: Channel) -> None:
        slot = channel.slot
        if channel.extent:
            offset = channel.extent + _SIZE_BYTES
            length = channel.extent_length - _SIZE_BYTES
            progress = progress_offset(channel.extent, channel.extent_length)
        else:
            offset = channel.block + channel.start + _SIZE_BYTES
            length = channel.frame_end - channel.start - _SIZE_BYTES
            progress = channel.block + REQUEST_PART_BYTES
        # Mute first: a handler may answer before put() returns.
        channel.state = next_state(channel.state, ChannelEvent.REQUEST_PUBLISHED)
        self._rows.set_state(channel.row, channel.state, self._now)
        self._in_flight[slot - self._first_slot] = channel
        self._requests.send_request(slot, offset, length, progress, self._now)
        words, row = self._words, self._row + PROCESSOR_COUNTERS
        words[row + ProcessorCounter.REQUESTS] += 1
        words[row + ProcessorCounter.BYTES_IN] += length + _SIZE_BYTES

    def _starve(self, channel: Channel) -> None:
        """No slot or extent is free: wait for one, and see that one gets free."""
        if channel.slot < 0:
            self._count(ProcessorCounter.WAITS_FOR_SLOT, 1)
            self._reader.spill(self._channels.values())
        else:
            self._count(ProcessorCounter.WAITS_FOR_EXTENT, 1)
            stalled = stalled_longest(self._channels.values(), _STALLED_NS)
            if stalled is not None:
                _LOG.info(
                    "%s: closed: it stalled with %d of %d bytes of a request sent,"
                    " and others need the memory",
                    self._rows.name(stalled.connection),
                    stalled.extent_have,
                    stalled.extent_length,
                )
                self._close(stalled, ProcessorCounter.CLOSED_IDLE)
        self._wait(channel, self._waiting)

    def _wait(self, channel: Channel, queue: deque[Channel]) -> None:
        if not channel.waiting:
            channel.waiting = True
            queue.append(channel)

    def _retry_reading(self) -> None:
        """Give those that waited their turn, in order."""
        for queue in (self._postponed, self._waiting):
            for _ in range(len(queue)):
                if self._requests.is_blocked:
                    return
                channel = queue.popleft()
                channel.waiting = False
                if channel.sock.fileno() >= 0 and channel.state == _READING:
                    self._receive(channel)
                    if channel.waiting:
                        break  # still no room for the first of the queue

    # -- responses ---------------------------------------------------------------

    def _process_responses(self, slots: list[int]) -> None:
        for slot in slots:
            channel = self._in_flight[slot - self._first_slot]
            if channel is None:  # its connection has gone, or a predecessor's had
                self._reader.release_request(slot)
                self._reader.release_slot(slot)
                continue
            kind, offset, length = self._requests.response(slot)
            channel.state = next_state(channel.state, ChannelEvent.RESPONSE_TAKEN)
            if kind == _BYTES:
                result = self._sender.send_bytes(channel, offset, length)
            elif kind == _PARTS:
                result = self._send_parts(channel, offset)
            elif kind == _NONE:
                result = SendResult.SENT
            else:
                self._close(channel, ProcessorCounter.CLOSED_BY_HANDLER)
                continue
            words, row = self._words, self._row + PROCESSOR_COUNTERS
            words[row + ProcessorCounter.BYTES_OUT] += length
            self._sent(channel, result)

    def _send_parts(self, channel: Channel, offset: int) -> SendResult:
        try:
            return self._sender.send_parts(channel, read_parts(self._arena, offset))
        except SegmentGoneError as error:
            _LOG.warning("%s: closed: %s", self._rows.name(channel.connection), error)
            return SendResult.CLOSED

    def _finish_sending(self) -> None:
        for _ in range(len(self._unfinished)):
            channel = self._unfinished.popleft()
            if channel.state == _SENDING and channel.outgoing:
                self._continue_sending(channel)
        self._busy = True

    def _continue_sending(self, channel: Channel) -> None:
        channel.active_ns = self._now
        try:
            result = self._sender.resume(channel)
        except SegmentGoneError as error:
            _LOG.warning("%s: closed: %s", self._rows.name(channel.connection), error)
            result = SendResult.CLOSED
        self._sent(channel, result)

    def _sent(self, channel: Channel, result: SendResult) -> None:
        if result == SendResult.BLOCKED:
            return
        if result == SendResult.MORE:
            self._unfinished.append(channel)
            return
        if result == SendResult.CLOSED:
            self._close(channel, ProcessorCounter.CLOSED_BY_PEER)
            return
        slot = channel.slot
        self._in_flight[slot - self._first_slot] = None
        self._reader.finish_request(channel)
        channel.state = next_state(channel.state, ChannelEvent.RESPONSE_SENT)
        self._rows.set_state(channel.row, channel.state, self._now)
        if channel.readable or channel.start < channel.end:
            self._receive(channel)
        else:
            self._reader.rest(channel)

    # -- the end of connections --------------------------------------------------

    def _close(self, channel: Channel, reason: ProcessorCounter) -> None:
        self._count(reason, 1)
        del self._channels[channel.fd]
        self._words[self._row + PROCESSOR_COUNTERS] = len(self._channels)
        slot = channel.slot
        if slot >= 0 and channel.state != _READING:
            self._in_flight[slot - self._first_slot] = None
            if channel.state == _SENDING or self._requests.forget(slot):
                self._reader.release_request(slot)
                self._reader.release_slot(slot)
        self._reader.detach(channel)
        channel.outgoing = []
        self._rows.release(channel.connection)
        with contextlib.suppress(OSError):
            self._selector.close(channel)

    def _housekeep(self) -> None:
        """Once a second: idle connections, memory, draining."""
        self._next_housekeeping = self._now + _HOUSEKEEPING_NS
        expired = self._now - self._max_idle_ns if self._max_idle_ns > 0 else 0
        quiet = max(expired, self._now - _QUIET_NS)
        for channel in list(self._channels.values()):
            # Kafka closes a connection with a request in progress too; we do not.
            if channel.active_ns < quiet and channel.state == _READING:
                self._reader.leave_if_empty(channel)
                if channel.active_ns < expired:
                    self._close(channel, ProcessorCounter.CLOSED_IDLE)
        if not self._busy:
            self._reader.give_back_memory()
            self._sender.close_unused()

    def _drain(self) -> None:
        """Close what is idle; what is in flight is answered first."""
        self._draining = True
        for channel in list(self._channels.values()):
            if channel.state == _READING:
                self._close(channel, ProcessorCounter.CLOSED_BY_HANDLER)

    def _count(self, counter: ProcessorCounter, amount: int) -> None:
        self._words[self._row + PROCESSOR_COUNTERS + counter] += amount
