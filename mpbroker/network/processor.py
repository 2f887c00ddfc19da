"""Processor: serve one process's connections, from their first byte to their last.

A processor works in turns. Each has Kafka's order: new connections, responses, poll,
receives, sends, disconnects, and the publication of received requests. A processor
blocks only in its poll. When the request ring is full, the processor stops reading and
continues to write. A connection needs a slot (the entry of one request in flight), and
for a large request an extent of shared memory. If none is free, the connection waits in
a queue and the others continue.

A processor may be killed at any line. Its successor gets the sockets from the keeper
and continues their connections, before it does anything else (see succession.py).

Source: Kafka SocketServer.Processor.run.
"""

import math
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Final

from mpbroker.base.logger import get_logger
from mpbroker.base.named_tuple import NamedTuple
from mpbroker.ipc.arena import (
    REQUEST_PART_BYTES,
    SMALL_FRAME_BYTES,
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
    PROCESSOR_READ_ON,
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
from mpbroker.ipc.ring import NotificationRing, RequestRing, ResponseRing
from mpbroker.ipc.segment import Segment
from mpbroker.network.channel import Channel, ChannelEvent, next_state
from mpbroker.network.channel_selector import (
    HANG_UP,
    READABLE,
    URGENT,
    WRITABLE,
    ChannelSelector,
    end_connection,
)
from mpbroker.network.compiled_turn import compiled_turn
from mpbroker.network.connection_rows import ConnectionRows
from mpbroker.network.connections import Connections
from mpbroker.network.errors import FrameLengthError, SegmentGoneError
from mpbroker.network.fair_queue import FairQueue
from mpbroker.network.moves.arrivals import Arrivals, LateLock, NewConnection
from mpbroker.network.moves.departures import ALL, Departures
from mpbroker.network.moves.hand_over import HAND_OVER, HandOver, KeeperLink, Offers
from mpbroker.network.moves.succession import Resumption
from mpbroker.network.polls import Polls
from mpbroker.network.request_channel import ProcessorEnd
from mpbroker.network.request_reader import ReadResult, RequestReader
from mpbroker.network.response_sender import ResponseSender, SendResult
from mpbroker.network.slow_clients import PATIENCE_NS
from mpbroker.network.throttles import Throttles
from mpbroker.network.waits import Waits

if TYPE_CHECKING:
    from mpbroker.network.pipelining.pipelines import Pipelines

_LOG = get_logger(__name__)

# Kafka's ConnectionQueueSize: the acceptor's credit, and the most new ones in a turn.
NEW_CONNECTIONS: Final = 20
# At most this many leave in a turn, so that the other connections are not delayed.
_DEPARTURES_A_TURN: Final = 256

_SIZE_BYTES: Final = 4
_IDLE_POLL_S: Final = 1.0
_BLOCKED_POLL_S: Final = 0.001  # the ring is full: no doorbell tells when it is not
_STARVED_POLL_S: Final = 0.25  # connections wait for memory that slow clients hold
_BEHIND_POLL_S: Final = 0.005  # handlers have too many notices, or slots are short
_SPILL_PAUSE: Final = 9
_HOUSEKEEPING_NS: Final = 1_000_000_000
_QUIET_NS: Final = 5_000_000_000  # how long a silent connection keeps its slot
_READING: Final = ConnectionState.READING
_IN_FLIGHT: Final = ConnectionState.IN_FLIGHT
_SENDING: Final = ConnectionState.SENDING
_PIPELINED: Final = ConnectionState.PIPELINED
_SLOTS: Final = 2  # in Processor._starved_ns
_BYTES: Final = int(ResponseKind.BYTES)
_PARTS: Final = int(ResponseKind.PARTS)
_NONE: Final = int(ResponseKind.NONE)
_MOVED_IN: Final = ProcessorCounter.MOVED_IN


class ProcessorParts(NamedTuple):
    """Holds the parts of the broker that a processor shares with other processes.

    Attributes:
        control: the control segment: shared memory with the records of connections,
            slots and processes.
        arena: the shared memory that has the requests and the answers.
        arena_layout: says where requests and answers are in the arena.
        ring: the ring of published requests, which handlers take.
        doorbell: the processor's own doorbell.
        handovers: both ends of every processor's Unix socket, by id: a processor gets
            connections from its own socket, and gives connections away through others.
        keeper: the way to the process with a duplicate of every socket, which needs
            them all again after its restart.
        notices: the rings for notices to the handlers, by the handlers' ids.
    """

    control: Segment
    arena: Segment
    arena_layout: ArenaLayout
    ring: RequestRing
    doorbell: Doorbell
    handovers: Sequence[tuple[socket.socket, socket.socket]]
    keeper: KeeperLink
    notices: Sequence[NotificationRing]


class Processor:
    """Serves the connections of one processor: receives requests, sends answers.

    Args:
        processor: the processor's id.
        parts: what the processor shares with other processes.
        max_request_bytes: socket.request.max.bytes.
        max_idle_ns: connections.max.idle.ms, in ns. 0 or less: idle connections are
            not closed.
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
        self._late_lock = LateLock(control)
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
        self._waits = Waits(
            processor, self._words, self._requests, self._in_flight, parts.notices
        )
        self._connections.left_behind = self._waits.end
        self._make_queues()
        self._costs = NetworkCosts(processor, control.words)
        self._polls = Polls(processor, control.words)
        self._selector.watch_doorbell(parts.doorbell)
        self._compiled = compiled_turn(
            processor, control, arena, self._selector, self._connections, self._requests
        )
        self._may_stay = False  # in the core, as long as all requests are plain
        self._new_connections = self._has_errands = self._draining = False
        self._busy = True
        self._now = time.monotonic_ns()
        self._next_housekeeping = self._now + _HOUSEKEEPING_NS
        self._selector.watch(self._handover_fd)

    def _make_queues(self) -> None:
        """Make the queues of channels that cannot go on in this turn; all are empty."""
        # Queues of channels. `_waiting`: for a slot. `_homeless`: for a slot or an
        # extent to move their bytes there. `_small` and `_large`: for an extent.
        # `_postponed`: they were readable while the ring was full.
        self._waiting = FairQueue(self._words)
        self._homeless: deque[Channel] = deque()
        self._small, self._large = self._reader.queues
        self._next_spill_ns = 0
        self._owes_spill = False  # it was too early to look for slots of others
        # Since when no small frame got an extent for which it had waited, no large one
        # did, and nobody got a slot; 0: none waits. One time for both frames would let
        # small ones that are served now and then keep slow clients from being closed
        # for a large one.
        self._starved_ns = [0, 0, 0]
        self._postponed = FairQueue(self._words)
        self._retried = deque((self._waiting, self._postponed))  # whose turn it is
        self._throttles = Throttles(self._words)
        # Channels whose answers have reached the limit of bytes for one turn.
        self._unfinished: deque[Channel] = deque()

    # -- the loop ----------------------------------------------------------------

    def run(self) -> None:
        """Serve until the broker drains and the last answer is out.

        Also return when this processor retires and has given all its connections away.
        """
        words = self._words
        self.take_over()
        self._waits.take_over()
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
        """Do everything that can be done now. If there is nothing, wait for events."""
        if self._new_connections or self._arrivals.has_early:
            self._configure_new_connections()
        if self._unfinished:
            self._finish_sending()
        starved = self._small or self._large or self._homeless
        waiting = starved or self._postponed or self._waiting or self._throttles
        if starved or self._waiting or any(self._starved_ns):
            self._make_room()
        if not self._reader.has_plenty and self._waits.are_due(self._now):
            self._share_slots()
        if self._waits.is_behind:
            self._waits.go_on()
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
        """Handle the events of a poll: sockets, hand-overs, and the doorbell.

        The doorbell tells of answers and of changes in shared memory.
        """
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
                if channel.state == _IN_FLIGHT:
                    self._waits.end(channel.slot)
                elif channel.state == _PIPELINED:
                    for slot in self._pipelines.slots(channel):
                        self._waits.end(slot)
                if event & URGENT:
                    self._selector.end_reading(channel)
            if event & READABLE:
                channel.readable = True
                if channel.state == _READING and not channel.waiting:
                    self._receive(channel)
                elif channel.state == _PIPELINED:
                    self._receive_behind(channel)
            if event & WRITABLE and channel.outgoing:
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
        """Poll in the C code, which itself receives and answers the usual requests.

        Args:
            may_stay: whether the C code may go on until it meets something it cannot
                handle.

        Returns:
            The events that Python must handle: (fd, events).
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
        longest_s = _STARVED_POLL_S if any(self._starved_ns) else _IDLE_POLL_S
        if self._waiting and self._reader.free_slots:
            return 0.0
        owes_spill = self._waiting and self._owes_spill
        if self._waits.is_behind or self._arrivals.has_early or owes_spill:
            longest_s = _BEHIND_POLL_S
        return self._throttles.poll_s(longest_s, time.monotonic_ns())

    def _look(self) -> None:
        """Check the shared words that may have changed when the doorbell rang.

        They tell of a new keeper, of an order to give connections to other processors,
        or of requests behind which connections may send more.
        """
        self._offers.look(self._channels.values())
        self._departures.look()
        self._has_errands = self._offers.is_under_way or self._departures.is_under_way
        if self._words[self._row + PROCESSOR_READ_ON]:
            self._read_on()

    def _read_on(self) -> None:
        for channel in self._pipelines.waiting():
            if self._may_read_behind() and not channel.closing:
                self._pipelines.set_aside(channel)
                self._receive_behind(channel)

    def _do_errands(self) -> None:
        """Send a new keeper duplicates of sockets; give connections away as ordered.

        The keeper has a duplicate of each client's socket; departures.py explains the
        orders.
        """
        self._offers.send()
        if self._departures.is_under_way:
            self._depart()
        self._has_errands = self._offers.is_under_way or self._departures.is_under_way

    # -- a predecessor's connections ---------------------------------------------

    def take_over(self) -> None:
        """Continue the connections of this processor's last process, which has died.

        The keeper sends their sockets. If one does not come, free the connection's
        record, or let it wait a little longer.
        """
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
        """Register the connections that other processes have sent to this processor.

        They are new, or another processor had them before. In one turn read at most
        NEW_CONNECTIONS messages.
        """
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
        if not self._arrivals.is_late(new):
            self._register_here(new, is_late=False)
        elif not self._late_lock.try_acquire():
            self._arrivals.put_back(new)
        else:
            try:
                if self._connections.is_elsewhere(new.sock):
                    new.sock.close()  # another processor has got it meanwhile
                else:
                    self._register_here(new, is_late=True)
            finally:
                self._late_lock.release()

    def _register_here(self, new: NewConnection, *, is_late: bool) -> None:
        if self._departures.left == ALL:
            message = HAND_OVER.pack(HandOver.AGAIN, new.listener, new.sequence, 0)
            if self._departures.forward(message, new.sock, new.listener):
                return
        if self._draining:
            end_connection(new.sock)
        else:
            self._connections.open(new, self._now, is_late=is_late)

    # -- requests ----------------------------------------------------------------

    def _receive(
        self, channel: Channel, *, stays: bool = False, has_turn: bool = False
    ) -> None:
        """Read a request from a channel and publish it, or let the channel wait.

        Args:
            channel: a connection without a request in flight (state READING).
            stays: whether it is read although connections are being given away.
            has_turn: whether it may take a slot for which others wait.
        """
        if self._draining or (self._departures.left and not stays):
            return  # at the end of the turn it is given away, or read after all
        if self._requests.is_blocked:
            self._wait(channel, self._postponed)
            return
        if self._throttles.holds(channel, self._now):
            self._reader.pause(channel)
            return
        if self._waiting and channel.slot < 0 and not (stays or has_turn):
            self._wait_for_slot(channel)
            return
        result = self._read(channel)
        if result == ReadResult.WHOLE:
            self._publish(channel)
        elif result == ReadResult.DRAINED:
            self._reader.rest(channel)
        elif result == ReadResult.CLOSED:
            self._connections.close(channel, ProcessorCounter.CLOSED_BY_PEER)
        elif result is not None:
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
        if channel.closing or not self._reader.has_plenty:
            self._waits.published(channel, self._reader.free_slots)
        words, row = self._words, self._row + PROCESSOR_COUNTERS
        words[row + ProcessorCounter.REQUESTS] += 1
        words[row + ProcessorCounter.BYTES_IN] += length + _SIZE_BYTES

    def _read(self, channel: Channel) -> ReadResult | None:
        """Read more of a channel's request; None: it is closed, the length is bad."""
        channel.active_ns = self._now
        try:
            return self._reader.read(channel)
        except FrameLengthError as error:
            _LOG.info("%s: closed: %s", self._rows.name(channel.connection), error)
            self._connections.close(channel, ProcessorCounter.CLOSED_BAD_FRAME)
            return None

    def _starve(self, channel: Channel) -> None:
        """Let a channel wait in a queue for a slot, or for memory (an extent).

        If it lacks a slot, move parts of frames out of other channels' slots first. If
        it had waited for an extent before, it stays the first of its queue.
        """
        if channel.slot < 0:
            self._spill()
            self._wait_for_slot(channel)
        elif channel is self._reader.next:
            channel.waiting = True
            self._reader.queue(channel.wanted).appendleft(channel)
        else:
            self._connections.count(ProcessorCounter.WAITS_FOR_EXTENT, 1)
            self._wait(channel, self._reader.queue(channel.wanted))

    def _wait_for_slot(self, channel: Channel) -> None:
        self._connections.count(ProcessorCounter.WAITS_FOR_SLOT, 1)
        self._wait(channel, self._waiting)

    def _spill(self) -> None:
        """Free slots of connections that send no request just now, but not too often.

        All connections are looked at, in vain if all slots have requests. The pause
        behind it is nine times as long, since thousands may lack a slot at once.
        """
        began = time.monotonic_ns()
        self._owes_spill = began < self._next_spill_ns
        if not self._owes_spill:
            self._reader.spill(self._channels.values())
            now = time.monotonic_ns()
            self._next_spill_ns = now + _SPILL_PAUSE * (now - began)

    def _make_room(self) -> None:
        """Close slow clients, if others have waited for memory or slots too long.

        Small frames have waited for PATIENCE_NS, and none of them has got any in this
        time; or so have large ones, or those that wait for a slot.
        """
        for is_large in (False, True):
            homeless = [
                extent_bytes(each.extent_length)
                for each in self._homeless
                if (each.extent_length > SMALL_FRAME_BYTES) == is_large
            ]
            waits = bool(homeless or self._reader.queues[is_large])
            if self._has_waited(is_large, waits):
                wanted = self._reader.wanted_bytes(is_large) + sum(homeless)
                self._connections.close_slow_senders(wanted, is_large)
        if self._has_waited(_SLOTS, bool(self._waiting)):
            self._connections.close_slow_slot_holders(self._waiting, self._now)

    def _has_waited(self, kind: int, waits: bool) -> bool:
        """Return whether a kind of connections has waited too long; begin a new wait.

        Args:
            kind: the index of the kind in ``_starved_ns``.
            waits: whether any of them waits.
        """
        since = self._starved_ns[kind]
        if waits and since and self._now - since <= PATIENCE_NS:
            return False
        self._starved_ns[kind] = self._now if waits else 0
        return waits and since > 0

    def _share_slots(self) -> None:
        """Take back slots that connections hold between two requests.

        If few slots are free even then, have waiting requests, such as Fetches,
        answered early.
        """
        began = time.monotonic_ns()
        for channel in self._channels.values():
            if channel.state == _READING and not channel.waiting:
                self._reader.leave_if_empty(channel)
        self._waits.make_room(self._reader.free_slots)
        self._waits.pause(began)

    def _wait(self, channel: Channel, queue: deque[Channel] | FairQueue) -> None:
        if not channel.waiting:
            channel.waiting = True
            queue.append(channel)

    def _retry_reading(self) -> None:
        """Read again from channels that could not be read before.

        They have waited for a slot, for memory for a large request (an extent), for
        room in the request ring, or for the end of a throttle time.
        """
        for channel in self._throttles.due(self._now):
            if self._connections.is_here(channel) and channel.state == _READING:
                self._receive(channel)
        self._house_adopted()
        for is_large in (False, True):
            self._retry_with_extents(is_large)
        self._retry_in_turn()

    def _retry_in_turn(self) -> None:
        """Read from channels that have waited for a slot, or for room in the ring.

        The two queues take turns, since one that is never empty would keep the other
        waiting.
        """
        if self._waiting and not self._reader.free_slots:
            self._spill()
        for _ in range(len(self._postponed) + len(self._waiting)):
            has_slot = self._reader.free_slots > 0
            ready = [
                queue
                for queue in self._retried
                if queue and (has_slot or queue is not self._waiting)
            ]
            if self._requests.is_blocked or not ready:
                return
            self._retried.rotate()
            channel = ready[0].popleft()
            channel.waiting = False
            if ready[0] is self._waiting:
                self._starved_ns[_SLOTS] = self._now
            if self._connections.is_here(channel) and channel.state == _READING:
                self._receive(channel, has_turn=ready[0] is self._waiting)

    def _house_adopted(self) -> None:
        """Move parts of frames of adopted channels into this processor's memory.

        Small frames have memory that large ones may not take, so one of a kind without
        room lets only those of the other kind go first.
        """
        without_room: list[Channel] = []
        is_full = [False, False]  # for small frames, and for large ones
        while self._homeless and not all(is_full):
            channel = self._homeless.popleft()
            if not self._connections.is_here(channel):
                continue
            is_large = channel.extent_length > SMALL_FRAME_BYTES
            if is_full[is_large] or not self._reader.house(channel):
                is_full[is_large] = True
                without_room.append(channel)
                continue
            self._starved_ns[is_large] = self._now
            channel.waiting = False
            self._receive(channel)
        self._homeless.extendleft(reversed(without_room))

    def _retry_with_extents(self, is_large: bool) -> None:
        """Read from the channels that wait for extents, until no extent is free."""
        queue = self._reader.queues[is_large]
        while queue and not self._requests.is_blocked:
            channel = queue.popleft()
            channel.waiting = False
            if not (self._connections.is_here(channel) and channel.state == _READING):
                continue
            self._reader.next = channel
            self._receive(channel, has_turn=True)
            self._reader.next = None
            if channel.waiting:
                return  # still for an extent; or for a slot, since its own was needed
            self._starved_ns[is_large] = self._now

    # -- responses ---------------------------------------------------------------

    def _take_responses(self, *, arm: bool) -> bool:
        """Take answered requests from the response ring, and send the answers.

        Return whether there were any.

        Args:
            arm: whether the doorbell must ring for the next response, if none waits
                now.
        """
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
        """Process the answers that the C code could not send to their end.

        Args:
            answers: channel, slot, and how many bytes of the answer the C code has
                sent. -1: it has sent the whole answer, and Python must read from the
                channel.
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
        if channel.state == _PIPELINED:
            self._pipelines.answered(channel, slot)
            self._send_in_turn(channel)
            return
        channel.state = next_state(channel.state, ChannelEvent.RESPONSE_TAKEN)
        self._send(channel, sent)

    def _send(self, channel: Channel, already: int) -> None:
        """Send the answer to a channel's request, without its first ``already`` bytes.

        A handler may also have ordered to send nothing, or to close the connection.
        """
        slot = channel.slot
        if channel.pipeline is not None:
            slot = channel.pipeline.ahead[0]
        kind, offset, length = self._requests.response(slot)
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
            self._metrics.record(slot, time.monotonic_ns())
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
            if channel.outgoing:
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
        if channel.pipeline is not None:
            self._sent_in_turn(channel, channel.pipeline.ahead[0], result)
            return
        slot = channel.slot
        self._metrics.record(slot, time.monotonic_ns())
        if result == SendResult.CLOSED:
            self._connections.close(channel, ProcessorCounter.CLOSED_BY_PEER)
            return
        self._in_flight[slot - self._first_slot] = None
        self._reader.finish_request(channel, self._now)
        channel.state = next_state(channel.state, ChannelEvent.RESPONSE_SENT)
        if not (channel.readable or channel.start < channel.end):
            self._reader.rest(channel)
        elif self._waiting and not self._reader.has_plenty:
            # Otherwise a client that sends its requests without waiting for the answers
            # would keep its slots for as long as it likes.
            self._reader.give_up_slot(channel)
            self._wait_for_slot(channel)
        else:
            self._receive(channel)

    # -- connections with several requests in flight: pipelines.py ----------------

    @cached_property
    def _pipelines(self) -> "Pipelines":
        # Only here: a broker without shared topics needs none of it.
        from mpbroker.network.pipelining.pipelines import Pipelines

        return Pipelines(
            self._first_slot // SLOTS_PER_PROCESSOR,
            self._words,
            self._arena.view,
            self._reader,
            self._rows,
            self._in_flight,
        )

    def _may_read_behind(self) -> bool:
        return not (
            self._draining
            or self._departures.left
            or self._requests.is_blocked
            or not self._reader.has_plenty
        )

    def _receive_behind(self, channel: Channel) -> None:
        """Read the next request of a channel with requests in flight; publish it.

        If it is no Produce, or finds no memory, nothing more is read before all
        requests are answered. Then the channel is read as any other.
        """
        pipeline = channel.pipeline
        if pipeline is None or not self._pipelines.may_read(channel):
            return
        if not self._may_read_behind():
            pipeline.has_stopped = True
            return
        if not (channel.spilled or pipeline.is_noted or self._has_bytes(channel)):
            return
        self._pipelines.note(channel, self._now)
        result = self._read(channel)
        if result == ReadResult.WHOLE and self._pipelines.is_produce(channel):
            self._publish(channel)
            self._pipelines.published(channel)
        elif result not in (None, ReadResult.DRAINED):
            pipeline.has_stopped = True

    def _has_bytes(self, channel: Channel) -> bool:
        return bool(channel.readable and self._selector.has_bytes(channel))

    def _send_in_turn(self, channel: Channel) -> None:
        """Send a channel's oldest answer, if it is there and none is being sent."""
        if self._pipelines.has_turn(channel):
            self._send(channel, 0)

    def _sent_in_turn(self, channel: Channel, slot: int, result: SendResult) -> None:
        """Go on after a channel's oldest answer with the next one, and with reading."""
        self._metrics.record(slot, time.monotonic_ns())
        if result == SendResult.CLOSED:
            self._connections.close(channel, ProcessorCounter.CLOSED_BY_PEER)
            return
        channel.active_ns = self._now
        self._pipelines.finish(channel, self._now)
        if channel.state == _PIPELINED:
            self._receive_behind(channel)
            self._send_in_turn(channel)
        elif channel.state == _SENDING:
            self._send(channel, 0)
        elif channel.state == _READING:
            self._receive(channel)

    # -- connections that are given away -----------------------------------------

    def _depart(self) -> None:
        """Give connections to other processors, as many as the supervisor has ordered.

        Only those without a request in flight can go; at most _DEPARTURES_A_TURN go in
        a turn.
        """
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
        """Read from the connections that could not be given away in this turn."""
        for channel in self._connections.unread(reading):
            self._receive(channel, stays=True)
            self._busy = True  # their requests are still to be published

    def _has_retired(self) -> bool:
        """Return whether this processor has no connection left, and no slot in use.

        A slot is the entry of a request. Those lent to connections that were given away
        count, too.
        """
        if self._channels or self._new_connections or not self._departures.is_finished:
            return False
        self._reader.take_back_lent()
        return self._reader.is_unused

    # -- the end of connections --------------------------------------------------

    def _housekeep(self) -> None:
        """Do what is due once a second.

        Close idle connections and slow readers, repeat notices to handlers about
        requests that must not wait, ask for sockets that did not come, and give unused
        memory back.
        """
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
        self._waits.repeat()
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
        """Begin to end: read no more requests, and close the idle connections.

        Connections with a request in flight are closed after the answer, in a later
        turn.
        """
        self._draining, self._compiled = True, None  # the core would continue to read
        self._connections.close_reading()
