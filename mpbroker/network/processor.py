"""Processor: one process's connections, from their first byte to their last.

A turn has Kafka's order: new connections, responses, poll, receives, sends,
disconnects, and the publication of received requests. A processor blocks only in its
poll. When the request ring is full it stops reading and continues to write; when no
slot or extent is free, the connection waits in a queue and the others continue.

A processor may be killed at any line. Its successor gets the sockets from the keeper
and continues their connections, before it does anything else (see succession.py).

Source: Kafka SocketServer.Processor.run.
"""

import math
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from mpbroker.base.logger import get_logger
from mpbroker.ipc.arena import (
    REQUEST_PART_BYTES,
    ArenaLayout,
    extent_bytes,
    progress_offset,
)
from mpbroker.ipc.black_box import EventKind, note
from mpbroker.ipc.counters.network_costs import NetworkCosts
from mpbroker.ipc.counters.request_metrics import RequestMetrics
from mpbroker.ipc.doorbell import Doorbell
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
from mpbroker.ipc.limits_page import LimitsPage
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
from mpbroker.network.compiled_turn import compiled_turn
from mpbroker.network.connection_rows import ConnectionRows
from mpbroker.network.connections import Connections
from mpbroker.network.errors import FrameLengthError, SegmentGoneError
from mpbroker.network.moves.arrivals import Arrivals, NewConnection
from mpbroker.network.moves.departures import ALL, Departures
from mpbroker.network.moves.hand_over import HAND_OVER, HandOver, KeeperLink, Offers
from mpbroker.network.moves.succession import Resumption
from mpbroker.network.polls import Polls
from mpbroker.network.request_channel import ProcessorEnd
from mpbroker.network.request_reader import ReadResult, RequestReader
from mpbroker.network.response_sender import ResponseSender, SendResult
from mpbroker.network.slow_clients import PATIENCE_NS
from mpbroker.network.throttles import Throttles

_LOG = get_logger(__name__)

# Kafka's ConnectionQueueSize: the acceptor's credit, and the most new ones in a turn.
NEW_CONNECTIONS: Final = 20
# At most so many leave in a turn, so that all other connections are not delayed.
_DEPARTURES_A_TURN: Final = 256

_SIZE_BYTES: Final = 4
_IDLE_POLL_S: Final = 1.0
_BLOCKED_POLL_S: Final = 0.001  # the ring is full: no doorbell tells when it is not
_STARVED_POLL_S: Final = 0.25  # connections wait for memory that slow clients hold
_HOUSEKEEPING_NS: Final = 1_000_000_000
_QUIET_NS: Final = 5_000_000_000  # a silent connection keeps its slot for so long
_READING: Final = ConnectionState.READING
_SENDING: Final = ConnectionState.SENDING
_BYTES: Final = int(ResponseKind.BYTES)
_PARTS: Final = int(ResponseKind.PARTS)
_NONE: Final = int(ResponseKind.NONE)
_MOVED_IN: Final = ProcessorCounter.MOVED_IN


class ProcessorParts(NamedTuple):
    """The parts of the broker that a processor shares with other processes.

    Attributes:
        control: the control segment.
        arena: has the requests and the answers.
        arena_layout: their places in the arena.
        ring: the request ring.
        doorbell: the processor's own doorbell.
        handovers: both ends of every processor's Unix socket, by id: a processor gets
            its own connections from one, and gives them away to others.
        keeper: has a duplicate of every socket, and needs them all again if it dies.
    """

    control: Segment
    arena: Segment
    arena_layout: ArenaLayout
    ring: RequestRing
    doorbell: Doorbell
    handovers: Sequence[tuple[socket.socket, socket.socket]]
    keeper: KeeperLink


class Processor:
    """The network side of one processor id.

    Args:
        processor: its id.
        parts: what it shares with other processes.
        max_request_bytes: socket.request.max.bytes.
        max_idle_ns: connections.max.idle.ms; 0 or less: for ever.
    """

    _make_selector: Callable[[], ChannelSelector] = ChannelSelector

    def __init__(
        self,
        processor: int,
        parts: ProcessorParts,
        max_request_bytes: int,
        max_idle_ns: int,
    ) -> None:
        control, arena, handovers = parts.control, parts.arena, parts.handovers
        self._words = control.words
        self._row = processor_row(processor)
        self._arena = arena
        self._selector = self._make_selector()
        self._requests = ProcessorEnd(
            control, parts.ring, ResponseRing(control, processor, parts.doorbell)
        )
        self._rows = ConnectionRows(processor, control)
        self._reader = RequestReader(
            processor,
            control,
            arena,
            parts.arena_layout,
            self._selector,
            self._rows,
            max_request_bytes,
        )
        self._sender = ResponseSender(arena, self._selector)
        self._metrics = RequestMetrics(processor, control, arena)
        self._keeper = parts.keeper
        self._offers = Offers(control, parts.keeper)
        self._arrivals = Arrivals(processor, control, handovers[processor][1])
        self._handover_fd = handovers[processor][1].fileno()
        self._departures = Departures(
            processor,
            control,
            {number: ends[0] for number, ends in enumerate(handovers)},
            self._rows,
            self._selector,
        )
        self._max_idle_ns = max_idle_ns
        self.limits: LimitsPage | None = None  # limits that may change meanwhile
        self._connections = Connections(
            processor,
            control,
            self._selector,
            self._rows,
            self._reader,
            self._requests,
            parts.arena_layout,
        )
        self._channels = self._connections.by_fd
        self._first_slot = processor * SLOTS_PER_PROCESSOR
        self._in_flight = self._connections.in_flight
        # Channels that wait for a slot; that wait for a slot or an extent to move their
        # bytes there; that wait for an extent; and that were readable while the ring
        # was full.
        self._waiting: deque[Channel] = deque()
        self._homeless: deque[Channel] = deque()
        self._small, self._large = self._reader.queues
        self._starved_ns = 0  # since when none of them got an extent; 0: none waits
        self._postponed: deque[Channel] = deque()
        self._throttles = Throttles(control.words)
        self._costs = NetworkCosts(processor, control.words)
        self._polls = Polls(processor, control.words)
        # Channels whose answers have reached the limit of bytes for one turn.
        self._unfinished: deque[Channel] = deque()
        self._selector.watch_doorbell(parts.doorbell)
        self._compiled = compiled_turn(
            processor, control, arena, self._selector, self._connections, self._requests
        )
        self._may_stay = False  # in the core, as long as all requests are plain
        self._new_connections = self._has_errands = False
        self._busy = True
        self._now = time.monotonic_ns()
        self._next_housekeeping = self._now + _HOUSEKEEPING_NS
        self._draining = False
        self._selector.watch(self._handover_fd)

    # -- the loop ----------------------------------------------------------------

    def run(self) -> None:
        """Serve until the broker drains and the last answer is out."""
        words = self._words
        self.take_over()
        self._look()
        # Connections that a dead predecessor had taken cannot come any more: give the
        # acceptor its credit back.
        words[self._row + PROCESSOR_REGISTERED] = words[self._row + PROCESSOR_HANDED]
        words[self._row + PROCESSOR_READY] = words[self._row + PROCESSOR_INCARNATION]
        note(EventKind.SERVING, words[self._row + PROCESSOR_INCARNATION])
        self._may_stay = True
        while not (self._draining and not self._channels):
            if self._departures.left == ALL and self._has_retired():
                return
            self.turn()

    def turn(self) -> None:
        """Do everything that can be done now, or wait a while for events."""
        if self._new_connections or self._arrivals.has_early:
            self._configure_new_connections()
        if self._unfinished:
            self._finish_sending()
        starved = self._small or self._large or self._homeless
        waiting = starved or self._postponed or self._waiting or self._throttles
        if starved or self._starved_ns:
            self._make_room()
        # If the ring has room, waiting channels are read before this process sleeps.
        if waiting and not self._requests.flush():
            self._retry_reading()
            self._requests.flush()
        if self._may_use_core():
            events = self._poll_in_core(may_stay=self._may_stay and not waiting)
        else:
            self._take_responses(arm=False)
            events = self._poll()
        self._process(events)
        self._requests.flush()
        if self._has_errands:
            self._do_errands()
        if self._now >= self._next_housekeeping:
            self._housekeep()
        if self._words[HEADER + HEADER_PHASE] >= Phase.DRAINING:
            self._drain()

    def _process(self, events: list[tuple[int, int]]) -> None:
        """Do what the events of sockets and of the doorbell ask for."""
        for fd, event in events:
            channel = self._channels.get(fd)
            if channel is None:
                if fd == self._handover_fd:
                    self._new_connections = True
                elif fd == self._selector.doorbell_fd:
                    self._look()
                continue
            if event & HANG_UP:
                channel.closing = True
            if event & READABLE:
                channel.readable = True
                if channel.state == _READING and not channel.waiting:
                    self._receive(channel)
            if event & WRITABLE and channel.state == _SENDING and channel.outgoing:
                self._continue_sending(channel)

    def _may_use_core(self) -> bool:
        return (
            self._compiled is not None
            and self._reader.has_plenty
            and not self._requests.is_blocked
            and not self._has_errands
        )

    def _poll(self) -> list[tuple[int, int]]:
        is_waiting_for_room = self._requests.is_blocked or self._has_errands
        wait_s = _BLOCKED_POLL_S if is_waiting_for_room else self._wait_s()
        started = time.monotonic_ns()
        events = self._selector.poll(wait_s)
        self._now = time.monotonic_ns()
        self._polls.count(self._selector.last_poll, self._now - started)
        if not is_waiting_for_room:
            self._busy = bool(events)
            if wait_s:
                self._connections.count(ProcessorCounter.IDLE_NS, self._now - started)
        return events

    def _poll_in_core(self, *, may_stay: bool) -> list[tuple[int, int]]:
        """Poll in the core, which handles plain requests itself; return other events.

        Args:
            may_stay: the core may go on until there is something it cannot handle.
        """
        assert self._compiled is not None
        done = self._compiled.turn(math.ceil(self._wait_s() * 1e3), may_stay)
        events, answers, self._now, waited, self._busy = done
        self._connections.count(ProcessorCounter.IDLE_NS, waited)
        self._process_unusual(answers)
        return events

    def _wait_s(self) -> float:
        """Return how long to wait for events; 0.0 while there is work to do."""
        if self._busy or self._new_connections or self._take_responses(arm=True):
            return 0.0
        longest_s = _STARVED_POLL_S if self._starved_ns else _IDLE_POLL_S
        return self._throttles.poll_s(longest_s, time.monotonic_ns())

    def _look(self) -> None:
        """Check, after the doorbell rang, for a new keeper and for move orders."""
        self._offers.look(self._channels.values())
        self._departures.look()
        self._has_errands = self._offers.is_under_way or self._departures.is_under_way

    def _do_errands(self) -> None:
        """Leave sockets with a new keeper; give connections away."""
        self._offers.send()
        if self._departures.is_under_way:
            self._depart()
        self._has_errands = self._offers.is_under_way or self._departures.is_under_way

    # -- a predecessor's connections ---------------------------------------------

    def take_over(self) -> None:
        """Continue the connections of a dead predecessor."""
        rows = list(self._rows.owned())
        if not rows:
            return
        # Only this process takes answers from our ring: those on it now stay there.
        answered = frozenset(self._requests.answered())
        socks = self._arrivals.wait_for(rows, self._keeper, self._selector)
        for connection in rows:
            sock = socks.pop(connection, None)
            if sock is not None:
                self._adopt(connection, sock, answered, ProcessorCounter.RESUMED)
            else:
                lacks = self._arrivals.lacks
                self._connections.miss(connection, answered, self._now, lacks=lacks)
                self._keeper.ask()  # it may have a socket that we have given up
        self._requests.flush()

    def _adopt(
        self,
        connection: int,
        sock: socket.socket,
        answered: frozenset[int],
        reason: ProcessorCounter,
    ) -> None:
        adopted = self._connections.adopt(connection, sock, answered, self._now)
        if adopted is None:
            return
        channel, resumption, already = adopted
        self._connections.count(reason, 1)
        if resumption == Resumption.READ:
            self._rows.set_state(channel.row, _READING, self._now)
            if self._reader.house(channel):
                self._receive(channel)
            else:
                self._wait(channel, self._homeless)
        elif resumption == Resumption.SEND:
            self._send(channel, already)

    # -- new connections ---------------------------------------------------------

    def _configure_new_connections(self) -> None:
        """Register connections passed to us, at most the acceptor's credit a turn."""
        arrived, more = self._arrivals.receive(NEW_CONNECTIONS)
        self._new_connections = more  # there may be more, for the next turn
        for each in arrived:
            if self._connections.has(each.sock):
                each.sock.close()  # the keeper has sent it too early
            elif isinstance(each, NewConnection):
                self._register(each)
            elif not self._arrivals.is_ours(each):
                each.sock.close()
            else:
                self._adopt(each.connection, each.sock, frozenset(), _MOVED_IN)
            self._offers.came(each.sock, each.accepted_ns)
        self._has_errands |= self._offers.send()

    def _register(self, new: NewConnection) -> None:
        if new.is_late and self._connections.is_elsewhere(new.sock):
            new.sock.close()  # another processor has got it meanwhile
            return
        if self._departures.left == ALL:
            message = HAND_OVER.pack(HandOver.AGAIN, new.listener, new.sequence, 0)
            if self._departures.forward(message, new.sock, new.listener):
                return
        if self._draining:
            self._connections.refuse(new.sock)
        else:
            self._connections.open(new, self._now)

    # -- requests ----------------------------------------------------------------

    def _receive(self, channel: Channel, *, stays: bool = False) -> None:
        if self._draining or (self._departures.left and not stays):
            return  # at the end of the turn it is given away, or read after all
        if self._requests.is_blocked:
            self._wait(channel, self._postponed)
            return
        if self._throttles.holds(channel, self._now):
            self._reader.rest(channel)
            return
        channel.active_ns = self._now
        try:
            result = self._reader.read(channel)
        except FrameLengthError as error:
            _LOG.info("%s: closed: %s", self._rows.name(channel.connection), error)
            self._connections.close(channel, ProcessorCounter.CLOSED_BAD_FRAME)
            return
        if result == ReadResult.WHOLE:
            self._publish(channel)
        elif result == ReadResult.DRAINED:
            self._reader.rest(channel)
        elif result == ReadResult.CLOSED:
            self._connections.close(channel, ProcessorCounter.CLOSED_BY_PEER)
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
        """Wait for a slot or an extent; try to free a slot."""
        if channel.slot < 0:
            self._connections.count(ProcessorCounter.WAITS_FOR_SLOT, 1)
            self._reader.spill(self._channels.values())
            self._wait(channel, self._waiting)
        elif channel is self._reader.next:
            channel.waiting = True
            self._reader.queue(channel.wanted).appendleft(channel)
        else:
            self._connections.count(ProcessorCounter.WAITS_FOR_EXTENT, 1)
            self._wait(channel, self._reader.queue(channel.wanted))

    def _make_room(self) -> None:
        """Close slow senders if others wait for memory, and none has got any lately."""
        if not (self._small or self._large or self._homeless):
            self._starved_ns = 0
        elif not self._starved_ns:
            self._starved_ns = self._now
        elif self._now - self._starved_ns > PATIENCE_NS:
            self._starved_ns = self._now
            wanted = self._reader.wanted_bytes()
            wanted += sum(extent_bytes(each.extent_length) for each in self._homeless)
            self._connections.close_slow_senders(wanted)

    def _wait(self, channel: Channel, queue: deque[Channel]) -> None:
        if not channel.waiting:
            channel.waiting = True
            queue.append(channel)

    def _retry_reading(self) -> None:
        """Read from the channels that waited, in order."""
        for channel in self._throttles.due(self._now):
            if self._connections.is_here(channel) and channel.state == _READING:
                self._receive(channel)
        for _ in range(len(self._homeless)):
            channel = self._homeless.popleft()
            if not self._connections.is_here(channel):
                continue
            if not self._reader.house(channel):
                self._homeless.appendleft(channel)
                break
            channel.waiting = False
            self._receive(channel)
        for queue in self._reader.queues:
            self._retry_with_extents(queue)
        for queue in (self._postponed, self._waiting):
            for _ in range(len(queue)):
                if self._requests.is_blocked:
                    return
                channel = queue.popleft()
                channel.waiting = False
                if self._connections.is_here(channel) and channel.state == _READING:
                    self._receive(channel)
                    if channel.waiting and queue is self._waiting:
                        break  # still no room for the first of the queue

    def _retry_with_extents(self, queue: deque[Channel]) -> None:
        """Read from the channels that waited for an extent, as far as there are any."""
        while queue and not self._requests.is_blocked:
            channel = queue.popleft()
            channel.waiting = False
            if not (self._connections.is_here(channel) and channel.state == _READING):
                continue
            self._reader.next = channel
            self._receive(channel)
            self._reader.next = None
            if queue and queue[0] is channel:
                return
            self._starved_ns = self._now

    # -- responses ---------------------------------------------------------------

    def _take_responses(self, *, arm: bool) -> bool:
        """Process the waiting responses; return whether there were any."""
        slots = self._requests.receive_responses(arm=arm)
        if not slots:
            return False
        self._now = time.monotonic_ns()
        if self._compiled is None or not self._reader.has_plenty:
            for slot in slots:
                self._process_response(slot, 0)
        else:
            may_receive = not (self._requests.is_blocked or self._departures.left)
            self._process_unusual(self._compiled.answer(slots, self._now, may_receive))
        self._requests.flush()
        self._busy = True
        return True

    def _process_unusual(self, answers: list[tuple[Channel, int, int]]) -> None:
        """Process answers that the core has left: (channel, slot, bytes sent).

        -1 bytes sent: the whole answer is sent, and the channel may be read.
        """
        for channel, slot, sent in answers:
            if sent >= 0:
                self._process_response(slot, sent)
            elif channel.sock.fileno() >= 0 and channel.state == _READING:
                self._receive(channel)

    def _process_response(self, slot: int, sent: int) -> None:
        channel = self._in_flight[slot - self._first_slot]
        self._metrics.taken(slot, self._now)
        if channel is None:  # its connection has ended, perhaps in a predecessor
            self._metrics.record(slot, self._now)
            self._reader.release_request(slot)
            self._reader.release_slot(slot)
            return
        channel.state = next_state(channel.state, ChannelEvent.RESPONSE_TAKEN)
        self._send(channel, sent)

    def _send(self, channel: Channel, already: int) -> None:
        """Send the answer in a channel's slot, after the bytes sent ``already``."""
        kind, offset, length = self._requests.response(channel.slot)
        channel.sent += length
        if kind == _BYTES:
            result = self._sender.send_bytes(
                channel, offset + already, length - already
            )
        elif kind == _PARTS:
            result = self._send_parts(channel, offset, already)
        elif kind == _NONE:
            result = SendResult.SENT
        else:
            self._metrics.record(channel.slot, time.monotonic_ns())
            self._connections.close(channel, ProcessorCounter.CLOSED_BY_HANDLER)
            return
        self._connections.count(ProcessorCounter.BYTES_OUT, length)
        self._sent(channel, result)

    def _send_parts(self, channel: Channel, offset: int, sent: int) -> SendResult:
        try:
            parts = read_parts(self._arena, offset)
            return self._sender.send_parts(channel, parts, sent)
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
        slot = channel.slot
        self._metrics.record(slot, time.monotonic_ns())
        if result == SendResult.CLOSED:
            self._connections.close(channel, ProcessorCounter.CLOSED_BY_PEER)
            return
        self._in_flight[slot - self._first_slot] = None
        self._reader.finish_request(channel, self._now)
        channel.state = next_state(channel.state, ChannelEvent.RESPONSE_SENT)
        if channel.readable or channel.start < channel.end:
            self._receive(channel)
        else:
            self._reader.rest(channel)

    # -- connections that are given away -----------------------------------------

    def _depart(self) -> None:
        """Give away connections without a request in flight, as ordered."""
        departures = self._departures
        reading = [each for each in self._channels.values() if each.state == _READING]
        left, staying = departures.left, self._reader.staying
        limit = _DEPARTURES_A_TURN if left == ALL else min(left, _DEPARTURES_A_TURN)
        free = [each for each in reading if each.connection not in staying]
        ready = [each for each in free[:limit] if self._reader.can_leave(each)]
        gone = departures.give(ready)
        for channel in gone:
            self._reader.lend(channel)
            self._connections.forget(channel)
        self._connections.count(ProcessorCounter.MOVED_OUT, len(gone))
        departures.send()
        self._stay(reading)
        departures.note_progress(len(self._channels))

    def _stay(self, reading: Iterable[Channel]) -> None:
        """Continue connections that have been answered and are not given away now."""
        for channel in self._connections.unread(reading):
            self._receive(channel, stays=True)
            self._busy = True  # their requests are still to be published

    def _has_retired(self) -> bool:
        """Return whether all connections are given away, and nothing is left to do."""
        if self._channels or self._new_connections or not self._departures.is_finished:
            return False
        self._reader.take_back_lent()
        return self._reader.is_unused

    # -- the end of connections --------------------------------------------------

    def _housekeep(self) -> None:
        """Close idle connections and give memory back. Runs once a second."""
        self._next_housekeeping = self._now + _HOUSEKEEPING_NS
        self._costs.beat(self._now)
        self._polls.look(self._now)
        if self.limits is not None:
            self._max_idle_ns = self._connections.obey(self.limits.read())
        expired = self._now - self._max_idle_ns if self._max_idle_ns > 0 else 0
        quiet = max(expired, self._now - _QUIET_NS)
        for channel in list(self._channels.values()):
            # Kafka closes a connection with a request in progress too; we do not.
            if channel.active_ns < quiet and channel.state == _READING:
                self._reader.leave_if_empty(channel)
            if self._connections.rests(channel, expired):
                self._connections.close(channel, ProcessorCounter.CLOSED_IDLE)
        self._connections.close_slow_readers(self._now)
        self._reader.take_back_lent()
        for connection in self._arrivals.ask_again(self._rows, self._keeper):
            self._connections.expect(connection, self._now)
        had_all = self._arrivals.had_all() and not self._new_connections
        if had_all and self._connections.give_up_expected(self._now):
            self._keeper.ask()
        if not self._busy:
            self._reader.give_back_memory()
            self._sender.close_unused()

    def _drain(self) -> None:
        """Close idle connections; requests in flight are answered first."""
        self._draining, self._compiled = True, None  # the core would continue to read
        self._connections.close_reading()
