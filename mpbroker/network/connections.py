"""Begin and end the connections of one processor.

A connection begins in a processor's process when it is new, or when the process
continues the connection of another processor. It ends there when one side closes it,
when it is given away, or when no processor can continue it. The Processor does
everything in between.
"""

import contextlib
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from mpbroker.base.logger import DEBUG, get_logger
from mpbroker.ipc.arena import ArenaLayout
from mpbroker.ipc.layout import (
    CONNECTIONS_PER_PROCESSOR,
    PROCESSOR_COUNTERS,
    SLOT_COMPLETED,
    SLOT_EXTENT,
    SLOT_EXTENT_LENGTH,
    SLOT_RESPONSE_LENGTH,
    SLOTS_PER_PROCESSOR,
    ConnectionSecurity,
    ConnectionState,
    ProcessorCounter,
    client_of,
    processor_row,
    slot_row,
    starved_handlers,
)
from mpbroker.ipc.limits_page import Limits
from mpbroker.ipc.segment import Segment
from mpbroker.network.channel import Channel, Pipeline
from mpbroker.network.channel_selector import (
    ChannelSelector,
    end_connection,
    has_ended,
)
from mpbroker.network.connection_quotas import excess_connections
from mpbroker.network.connection_rows import (
    ConnectionRows,
    has_cookie,
    is_private,
    progress,
)
from mpbroker.network.moves.arrivals import NewConnection
from mpbroker.network.moves.succession import Resumption, restore
from mpbroker.network.moves.tcp_counters import (
    StreamCounts,
    are_relied_on,
    socket_cookie,
    stream_counts,
)
from mpbroker.network.request_channel import ProcessorEnd
from mpbroker.network.request_reader import RequestReader
from mpbroker.network.slow_clients import PATIENCE_NS, Transfer, slowest
from mpbroker.network.waits import fair_level

_LOG = get_logger(__name__)

_READING: Final = ConnectionState.READING
_IN_FLIGHT: Final = ConnectionState.IN_FLIGHT
_SENDING: Final = ConnectionState.SENDING
# A processor that gives a connection away sends its socket at once; if it dies before,
# the keeper sends it.
_ON_ITS_WAY_NS: Final = 3_000_000_000
_COMPLAINT_NS: Final = 10_000_000_000
# The last rows are for clients that have few connections: see _has_its_share().
_SPARE_ROWS: Final = CONNECTIONS_PER_PROCESSOR // 8
_SHARED_ROWS: Final = CONNECTIONS_PER_PROCESSOR - _SPARE_ROWS
# Made at import, since there may be no descriptor when a connection is lost.
_NO_SOCKET: Final = socket.socket()
_NO_SOCKET.close()


class Connections:
    """Opens, continues and ends the connections of one processor.

    Attributes:
        by_fd: the connections that may send requests, by descriptor.
        unready: the connections that have not authenticated, by descriptor; see
            unready_channels.py.
        security: goes into the rows (records in shared memory) of new connections. If
            it is PRIVATE, they must authenticate first.
        opened: called with each new connection; None: nothing is called.
        left_behind: called with the slot of a request in flight whose connection ends.
        max_request_bytes: socket.request.max.bytes.
        in_flight: the connection of each request in flight, by slot of this processor.
    """

    def __init__(
        self,
        processor: int,
        control: Segment,
        selector: ChannelSelector,
        rows: ConnectionRows,
        reader: RequestReader,
        requests: ProcessorEnd,
        arena_layout: ArenaLayout,
    ) -> None:
        self._words = control.words
        self._arena_layout = arena_layout
        self._counters = processor_row(processor) + PROCESSOR_COUNTERS
        self._selector = selector
        self._rows = rows
        self._reader = reader
        self._requests = requests
        self.max_request_bytes = reader.max_request_bytes
        self._first_slot = processor * SLOTS_PER_PROCESSOR
        self._cookies: set[int] = set()  # of their sockets
        self._clients: Counter[int] = Counter()  # connections by client
        self._next_complaint_ns = 0
        self.by_fd: dict[int, Channel] = {}
        self.unready: dict[int, Channel] = {}
        self.security = ConnectionSecurity.NONE
        self.opened: Callable[[Channel], None] | None = None
        self.left_behind: Callable[[int], None] = lambda slot: None
        self.in_flight: list[Channel | None] = [None] * SLOTS_PER_PROCESSOR
        self._words[self._counters] = 0  # the predecessor's number of connections
        self._expected: dict[int, int] = {}  # by row: until when its socket must come

    def is_here(self, channel: Channel) -> bool:
        """Return whether this processor serves a connection, and reads its requests.

        Return False if it was closed or given away, or has not authenticated yet.
        """
        return self.by_fd.get(channel.fd) is channel

    def unread(self, reading: Iterable[Channel]) -> Iterator[Channel]:
        """Yield those connections that are still here and may have bytes to read.

        Connections that wait in one of the processor's queues, as for memory, are left
        out.

        Args:
            reading: connections without a request in flight (state READING).
        """
        for channel in reading:
            if (
                self.is_here(channel)
                and not channel.waiting
                and (
                    channel.readable
                    or channel.start < channel.end
                    or channel.spilled  # perhaps whole frames
                )
            ):
                yield channel

    def has(self, sock: socket.socket) -> bool:
        """Return whether a socket's connection is open in this processor already."""
        return socket_cookie(sock) in self._cookies

    def is_elsewhere(self, sock: socket.socket) -> bool:
        """Return whether any processor has registered the connection of a socket.

        Then a record in shared memory (a row) has the socket's kernel cookie.
        """
        return has_cookie(self._words, socket_cookie(sock))

    def count(self, counter: ProcessorCounter, amount: int) -> None:
        self._words[self._counters + counter] += amount

    def count_of(self, counter: ProcessorCounter) -> int:
        return int(self._words[self._counters + counter])

    # -- begin ---------------------------------------------------------------------

    def open(self, new: NewConnection, now_ns: int, *, is_late: bool) -> None:
        """Register a new connection in a row; close it if its client can have none.

        A row is a connection's record in shared memory. A late connection on which
        bytes have passed is closed too: its row was given up, so its progress is
        unknown. Nothing is done with one that has ended meanwhile.

        Args:
            new: the connection.
            now_ns: monotonic.
            is_late: whether it may have had a row before.
        """
        sock = new.sock
        sock.setblocking(False)
        if is_late and has_ended(sock):
            # What nobody has read must not be taken for the first bytes of another.
            sock.close()
            return
        if is_late and self._has_begun(sock):
            # It had a row that was given up, so the progress of its streams is unknown.
            self.count(ProcessorCounter.LOST, 1)
            end_connection(sock)
            return
        connection = self._rows.take()
        if connection is None:
            self.refuse(sock, now_ns)
            return
        channel = Channel(sock, connection, self._rows.word(connection))
        channel.cookie = socket_cookie(sock)
        try:
            self._rows.describe(
                connection,
                sock,
                channel.cookie,
                new.listener,
                new.sequence,
                now_ns,
                self.security,
            )
        except OSError:  # the client has closed it already
            end_connection(sock)
            self._rows.release(connection)
            return
        if self._rows.free < _SPARE_ROWS and self._has_its_share(channel):
            self.refuse(sock, now_ns, "; the last ones are for clients with fewer")
            self._rows.release(connection)
            return
        is_ready = self.security == ConnectionSecurity.NONE
        self._add(channel, now_ns, self.by_fd if is_ready else self.unready)
        if _LOG.isEnabledFor(DEBUG):
            _LOG.debug("%s: connected", self._rows.name(connection))
        # No read here: registration makes epoll report a socket that has bytes.
        if self.opened is not None:
            self.opened(channel)

    def _has_begun(self, sock: socket.socket) -> bool:
        """Return whether a connection has received or sent any bytes.

        Return False if this is unknown.
        """
        if sock.family == socket.AF_UNIX or not are_relied_on(self._words):
            return False
        counts = stream_counts(sock)
        return counts is not None and bool(counts.received or counts.sent)

    def admit(self, channel: Channel) -> None:
        """Let a connection that has authenticated send requests."""
        self.by_fd[channel.fd] = self.unready.pop(channel.fd)

    def _has_its_share(self, channel: Channel) -> bool:
        """Return whether a new connection's client has an equal share of the rows.

        One client may have 7/8 of them if there are no others. When these are in use,
        only clients with less than an equal share get more, so that one client cannot
        keep all others out. A client is an IPv4 address, or an IPv6 network of 64 bits.
        """
        client = client_of(self._words, channel.row)
        held = self._clients[client]
        others = len(self._clients) - (held > 0)
        return held >= _SHARED_ROWS // (others + 1)

    def refuse(self, sock: socket.socket, now_ns: int, why: str = "") -> None:
        """Close a new connection because shared memory has no record for it.

        Log this now and then.

        Args:
            sock: the connection's socket.
            now_ns: the time (CLOCK_MONOTONIC).
            why: follows the numbers in the log.
        """
        self.count(ProcessorCounter.CLOSED_EXCESS, 1)
        if now_ns >= self._next_complaint_ns:
            self._next_complaint_ns = now_ns + _COMPLAINT_NS
            _LOG.warning(
                "new connections are closed: this processor has %d, and can have %d%s."
                " Raise num.network.threads, or lower max.connections.per.ip",
                len(self._cookies),
                CONNECTIONS_PER_PROCESSOR,
                why,
            )
        end_connection(sock)

    def adopt(
        self, connection: int, sock: socket.socket, answered: frozenset[int], now: int
    ) -> tuple[Channel, Resumption, int] | None:
        """Continue a connection that another process has served before.

        That process has given the connection away or has died. Its state is found from
        its row (its record in shared memory) and the kernel's counters.

        Args:
            connection: the index of the connection's row.
            sock: the connection's socket.
            answered: slots whose answers are still on the response ring.
            now: the time in ns (CLOCK_MONOTONIC).

        Returns:
            The channel, the next action, and how many bytes of the current answer are
            sent. None if the connection cannot be continued; it is closed then.
        """
        sock.setblocking(False)
        counts = None
        if (
            sock.family != socket.AF_UNIX
            and not is_private(self._words, connection)
            and are_relied_on(self._words)
        ):
            counts = stream_counts(sock)
        if counts is None:
            end_connection(sock)
            self.abandon(connection, answered)
            return None
        channel = Channel(sock, connection, self._rows.word(connection))
        channel.cookie = socket_cookie(sock)
        resumption, already = restore(channel, self._words, counts, answered)
        self._add(channel, now, self.by_fd)
        self._rows.hold(connection, channel.fd)
        if resumption == Resumption.IMPOSSIBLE:
            _LOG.warning(
                "%s: closed: its row and the kernel's counters of bytes received and"
                " sent do not agree",
                self._rows.name(connection),
            )
            self.close(channel, ProcessorCounter.LOST)
            return None
        if resumption != Resumption.READ:
            self.in_flight[channel.slot - self._first_slot] = channel
        return channel, resumption, already

    def expect(self, connection: int, now_ns: int) -> None:
        """Note that the socket of an own connection must come within 3 seconds.

        The keeper or another processor sends it.
        """
        self._expected[connection] = now_ns + _ON_ITS_WAY_NS

    def miss(
        self, connection: int, answered: frozenset[int], now_ns: int, *, lacks: bool
    ) -> None:
        """Decide about a connection whose socket did not come: wait, or give it up.

        To give it up means to free its row, the record in shared memory.

        Args:
            connection: the index of the row.
            answered: slots whose answers are still on the response ring.
            now_ns: the time (CLOCK_MONOTONIC).
            lacks: whether sockets came, but no descriptor was free for them. Then the
                keeper sends them again. Only a row without a request in flight waits
                for that, since an answer would have no connection.
        """
        if lacks and self._rows.is_reading(connection):
            self._rows.await_socket(connection)
        if self._rows.is_on_its_way(connection):
            self.expect(connection, now_ns)
        else:
            self.abandon(connection, answered)

    def give_up_expected(self, now_ns: int) -> bool:
        """Free the records (rows) of connections whose sockets did not come in time.

        Their sockets are lost: the processors that had them and the keeper have died.

        Returns:
            Whether a row was freed.
        """
        lost = self.count_of(ProcessorCounter.LOST)
        for connection, until_ns in list(self._expected.items()):
            if now_ns > until_ns:
                del self._expected[connection]
                if self._rows.is_on_its_way(connection):
                    self.abandon(connection, frozenset())
        return self.count_of(ProcessorCounter.LOST) != lost

    def _add(self, channel: Channel, now_ns: int, where: dict[int, Channel]) -> None:
        self._selector.register(channel)
        channel.active_ns = channel.extent_ns = now_ns
        where[channel.fd] = channel
        self._cookies.add(channel.cookie)
        self._clients[client_of(self._words, channel.row)] += 1
        self._words[self._counters] = len(self.by_fd) + len(self.unready)

    # -- end -----------------------------------------------------------------------

    def close_reading(self) -> None:
        """Close all connections without a request in flight."""
        for channel in list(self.by_fd.values()):
            if channel.state == _READING:
                self.close(channel, ProcessorCounter.CLOSED_BY_HANDLER)

    def close_slow_senders(self, wanted: int, is_large: bool) -> None:
        """Close connections that send requests slowly, to free memory for others.

        Args:
            wanted: for how many bytes of memory other connections wait. No more are
                closed than needed for that.
            is_large: whether it is for frames above SMALL_FRAME_BYTES.
        """
        sending = self._reader.transfers(self.by_fd.values(), is_large)
        for slow in slowest(sending, wanted):
            self._close_slow(slow, "the memory")

    def close_slow_slot_holders(self, waiting: Iterable[Channel], now_ns: int) -> None:
        """Close slow connections of clients with too many slots, for those that wait.

        A connection holds a slot while it sends a large request or reads an answer. No
        more are closed than their clients hold above their share of 7/8 of the slots in
        use.

        Args:
            waiting: the connections that wait for a slot.
            now_ns: the time (CLOCK_MONOTONIC).
        """
        words = self._words
        holding = [each for each in self.by_fd.values() if each.slot >= 0]
        held = Counter(client_of(words, each.row) for each in holding)
        wanted = held + Counter(client_of(words, each.row) for each in waiting)
        level = fair_level(wanted.values(), len(holding) - len(holding) // 8)
        transfers: dict[int, list[Transfer]] = {}
        for each in self._slot_transfers(holding, now_ns):
            transfers.setdefault(client_of(words, each.channel.row), []).append(each)
        for client, slow_ones in transfers.items():
            for slow in slowest(slow_ones, held[client] - level):
                self._close_slow(slow, "the slot")

    def _slot_transfers(
        self, channels: Sequence[Channel], now_ns: int
    ) -> Iterator[Transfer]:
        """Yield partly received requests and partly sent answers; each holds 1 slot."""
        for transfer in self._reader.transfers(channels, is_large=False):
            yield transfer._replace(memory=1)
        for channel in channels:
            is_first = not (channel.is_receiving and channel.extent)
            if channel.sending_slot >= 0 and is_first:
                yield self._answer(channel, now_ns, 1)

    def _close_slow(self, slow: Transfer, needed: str) -> None:
        is_answer = slow.channel.sending_slot >= 0
        _LOG.info(
            "%s: closed: it %s %d of %d bytes of %s in %.1f s,"
            " and other connections need %s",
            self._rows.name(slow.channel.connection),
            "took" if is_answer else "sent",
            slow.done,
            slow.length,
            "an answer" if is_answer else "a request",
            slow.held_ns / 1e9,
            needed,
        )
        self.close(slow.channel, ProcessorCounter.CLOSED_IDLE)

    def close_slow_readers(self, now_ns: int) -> None:
        """Close connections that read answers slowly, if others wait for the memory.

        This begins when answers of a handler have waited for PATIENCE_NS. It also
        closes connections with a request in flight whose clients have hung up, since
        their answers may be among those that wait.
        """
        for handler, wanted in starved_handlers(
            self._words, now_ns - PATIENCE_NS
        ).items():
            for channel in list(self.by_fd.values()):
                # Its answer may be one of those that wait.
                if channel.closing and channel.state == _IN_FLIGHT:
                    self.close(channel, ProcessorCounter.CLOSED_BY_PEER)
            for slow in slowest(self._readers(handler, now_ns), wanted):
                self._close_slow(slow, "the memory")

    def _readers(self, handler: int, now_ns: int) -> Iterator[Transfer]:
        """Yield the partly sent answers whose bytes are in a handler's shared memory.

        The memory is free for other answers only when these are sent.
        """
        words = self._words
        for channel in self.by_fd.values():
            if channel.sending_slot < 0:
                continue
            row = slot_row(channel.sending_slot)
            if self._arena_layout.handler_of(words[row + SLOT_EXTENT]) == handler:
                yield self._answer(channel, now_ns, words[row + SLOT_EXTENT_LENGTH])

    def _answer(self, channel: Channel, now_ns: int, memory: int) -> Transfer:
        row = slot_row(channel.sending_slot)
        length = self._words[row + SLOT_RESPONSE_LENGTH]
        left = sum(part.length for part in channel.outgoing) - channel.part_sent
        held_ns = now_ns - self._words[row + SLOT_COMPLETED]
        return Transfer(channel, length - left, length, held_ns, memory)

    def close(self, channel: Channel, reason: ProcessorCounter) -> None:
        """End a connection, and free its record, slot and memory."""
        self.count(reason, 1)
        if _LOG.isEnabledFor(DEBUG):
            _LOG.debug(
                "%s: ended: %s", self._rows.name(channel.connection), reason.name
            )
        # First: a row may become free only when its socket cannot be used any more.
        # Otherwise the keeper would take it for a connection that never had a row.
        with contextlib.suppress(OSError):
            self._selector.close(channel)
        self.forget(channel)
        self._release(channel)

    def rests(self, channel: Channel, since_ns: int) -> bool:
        """Return whether a client has been silent since ``since_ns``, by its own fault.

        A client that waits for an answer is not at fault. A client that does not read
        an answer is at fault if the answer was ready before ``since_ns``, and no byte
        of it was read after that.
        """
        if channel.active_ns >= since_ns:
            return False
        if channel.sending_slot >= 0:
            slot = channel.sending_slot
            return bool(self._words[slot_row(slot) + SLOT_COMPLETED] < since_ns)
        return channel.state == _READING

    def obey(self, limits: Limits) -> int:
        """Close this processor's share of the connections above max.connections.

        Connections with a request in flight stay; see excess_connections().

        Args:
            limits: the limits that are valid now.

        Returns:
            connections.max.idle.ms of these limits, in ns.
        """
        excess = set(excess_connections(self._words, limits))
        for channel in list(self.by_fd.values()) if excess else ():
            if channel.connection in excess and channel.state == _READING:
                self.close(channel, ProcessorCounter.CLOSED_EXCESS)
        return limits.broker.max_idle_ms * 1_000_000

    def forget(self, channel: Channel) -> None:
        """Remove a connection from this processor's tables, without closing it."""
        if self.by_fd.pop(channel.fd, None) is None:
            del self.unready[channel.fd]
        self._cookies.discard(channel.cookie)
        client = client_of(self._words, channel.row)
        self._clients[client] -= 1
        if not self._clients[client]:
            del self._clients[client]
        self._words[self._counters] = len(self.by_fd) + len(self.unready)

    def abandon(self, connection: int, answered: frozenset[int]) -> None:
        """Free the row, slot and memory of a connection whose socket is lost.

        The row is its record in shared memory, the slot the entry of its request in
        flight.

        Args:
            connection: the index of the row.
            answered: slots whose answers are still on the response ring.
        """
        self.count(ProcessorCounter.LOST, 1)
        channel = Channel(_NO_SOCKET, connection, self._rows.word(connection))
        base, start, sent = progress(self._words, connection)
        counts = StreamCounts(base + start, sent, True)
        restore(channel, self._words, counts, answered)
        self._release(channel)

    def _release(self, channel: Channel) -> None:
        """Free a connection's slot, memory and row (its record in shared memory).

        If a handler still executes its request, the request keeps its slot, and
        ``left_behind`` is called.
        """
        if channel.pipeline is not None:
            self._release_ahead(channel, channel.pipeline)
        slot = channel.slot
        if slot >= 0 and channel.state != _READING:
            self.in_flight[slot - self._first_slot] = None
            if channel.state == _SENDING or self._requests.forget(slot):
                self._reader.release_request(slot)
                self._reader.release_slot(slot)
            else:
                self.left_behind(slot)
        self._reader.detach(channel)
        channel.outgoing = []
        self._rows.release(channel.connection)

    def _release_ahead(self, channel: Channel, pipeline: Pipeline) -> None:
        """Free the requests of a connection that were set aside: pipelines.py.

        After that the connection has one request, as any other.
        """
        for slot in pipeline.ahead:
            self.in_flight[slot - self._first_slot] = None
            if slot in pipeline.answered:
                self._reader.release_request(slot)
                self._reader.release_slot(slot)
            else:
                self.left_behind(slot)
        if pipeline.is_reading:
            channel.state = _READING
        else:
            is_answered = channel.slot in pipeline.answered
            channel.state = _SENDING if is_answered else _IN_FLIGHT
        channel.pipeline = None
