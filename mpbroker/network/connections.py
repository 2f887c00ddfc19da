"""The connections of one processor: their beginning and their end here.

A connection begins here when it is new, or when another processor's connection is
continued. It ends when one side closes it, when it is given away, or when no processor
can continue it. The Processor does everything in between.
"""

import contextlib
import socket
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from mpbroker.base.logger import DEBUG, get_logger
from mpbroker.ipc.arena import ArenaLayout
from mpbroker.ipc.layout import (
    PROCESSOR_COUNTERS,
    SLOT_COMPLETED,
    SLOT_EXTENT,
    SLOT_EXTENT_LENGTH,
    SLOT_RESPONSE_LENGTH,
    SLOTS_PER_PROCESSOR,
    ConnectionSecurity,
    ConnectionState,
    ProcessorCounter,
    processor_row,
    slot_row,
    starved_handlers,
)
from mpbroker.ipc.limits_page import Limits
from mpbroker.ipc.segment import Segment
from mpbroker.network.channel import Channel
from mpbroker.network.channel_selector import ChannelSelector, end_connection
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

_LOG = get_logger(__name__)

_READING: Final = ConnectionState.READING
_IN_FLIGHT: Final = ConnectionState.IN_FLIGHT
_SENDING: Final = ConnectionState.SENDING
# A processor that gives a connection away sends its socket at once; if it dies before,
# the keeper sends it.
_ON_ITS_WAY_NS: Final = 3_000_000_000
# Made at import, since there may be no descriptor when a connection is lost.
_NO_SOCKET: Final = socket.socket()
_NO_SOCKET.close()


class Connections:
    """The connections of one processor.

    Attributes:
        by_fd: the connections that may send requests.
        unready: the connections that have not authenticated; see unready_channels.py.
        security: goes into the rows of new connections; PRIVATE: they begin unready.
        opened: called with each new connection.
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
        self.by_fd: dict[int, Channel] = {}
        self.unready: dict[int, Channel] = {}
        self.security = ConnectionSecurity.NONE
        self.opened: Callable[[Channel], None] | None = None
        self.in_flight: list[Channel | None] = [None] * SLOTS_PER_PROCESSOR
        self._words[self._counters] = 0  # the predecessor's number of connections
        self._expected: dict[int, int] = {}  # by row: until when its socket must come

    def is_here(self, channel: Channel) -> bool:
        """Return whether a connection is neither closed nor given away."""
        return self.by_fd.get(channel.fd) is channel

    def unread(self, reading: Iterable[Channel]) -> Iterator[Channel]:
        """Yield READING connections that are still here and may have bytes to read."""
        for channel in reading:
            if (
                self.is_here(channel)
                and not channel.waiting
                and (channel.readable or channel.start < channel.end)
            ):
                yield channel

    def has(self, sock: socket.socket) -> bool:
        """Return whether a socket is a duplicate of one of these sockets."""
        return socket_cookie(sock) in self._cookies

    def is_elsewhere(self, sock: socket.socket) -> bool:
        """Return whether any processor has a row for this socket."""
        return has_cookie(self._words, socket_cookie(sock))

    def count(self, counter: ProcessorCounter, amount: int) -> None:
        self._words[self._counters + counter] += amount

    def count_of(self, counter: ProcessorCounter) -> int:
        return int(self._words[self._counters + counter])

    # -- begin ---------------------------------------------------------------------

    def open(self, new: NewConnection, now_ns: int) -> None:
        """Give a new connection a row; close it if no row is free."""
        sock = new.sock
        sock.setblocking(False)
        if new.is_late and self._has_begun(sock):
            # It had a row that was given up, so the progress of its streams is unknown.
            self.count(ProcessorCounter.LOST, 1)
            end_connection(sock)
            return
        connection = self._rows.take()
        if connection is None:
            self.refuse(sock)
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
        is_ready = self.security == ConnectionSecurity.NONE
        self._add(channel, now_ns, self.by_fd if is_ready else self.unready)
        if _LOG.isEnabledFor(DEBUG):
            _LOG.debug("%s: connected", self._rows.name(connection))
        # No read here: registration makes epoll report a socket that has bytes.
        if self.opened is not None:
            self.opened(channel)

    def _has_begun(self, sock: socket.socket) -> bool:
        """Return whether bytes were received from a connection, or sent to it."""
        if sock.family == socket.AF_UNIX or not are_relied_on(self._words):
            return False
        counts = stream_counts(sock)
        return counts is not None and bool(counts.received or counts.sent)

    def admit(self, channel: Channel) -> None:
        """Let a connection send requests: it has authenticated."""
        self.by_fd[channel.fd] = self.unready.pop(channel.fd)

    def refuse(self, sock: socket.socket) -> None:
        """Close a new connection."""
        _LOG.warning("no room for another connection: closed")
        end_connection(sock)

    def adopt(
        self, connection: int, sock: socket.socket, answered: frozenset[int], now: int
    ) -> tuple[Channel, Resumption, int] | None:
        """Continue a connection from its row and the kernel's counters.

        Args:
            connection: its row.
            sock: its socket.
            answered: slots whose answers are still on the response ring.
            now: ns, monotonic.

        Returns:
            Its channel, the next action, and how many bytes of its answer are sent;
            None: it had to be closed.
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
        """Note that a connection was given to us, and its socket has to come."""
        self._expected[connection] = now_ns + _ON_ITS_WAY_NS

    def miss(
        self, connection: int, answered: frozenset[int], now_ns: int, *, lacks: bool
    ) -> None:
        """Handle a row whose socket did not come: wait for it, or give the row up.

        Args:
            connection: the row.
            answered: slots whose answers are still on the response ring.
            now_ns: monotonic.
            lacks: sockets came, but there were no descriptors for them. They may come
                again; but an answer that comes before would have no connection.
        """
        if lacks and self._rows.is_reading(connection):
            self._rows.await_socket(connection)
        if self._rows.is_on_its_way(connection):
            self.expect(connection, now_ns)
        else:
            self.abandon(connection, answered)

    def give_up_expected(self, now_ns: int) -> bool:
        """Free rows whose socket is lost, since the giver and the keeper have died.

        Returns:
            Whether there were any.
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
        self._words[self._counters] = len(self.by_fd) + len(self.unready)

    # -- end -----------------------------------------------------------------------

    def close_reading(self) -> None:
        """Close all connections without a request in flight."""
        for channel in list(self.by_fd.values()):
            if channel.state == _READING:
                self.close(channel, ProcessorCounter.CLOSED_BY_HANDLER)

    def close_slow_senders(self, wanted: int) -> None:
        """Close connections that send requests slowly; others wait for the memory.

        Args:
            wanted: bytes for which others wait.
        """
        sending = self._reader.transfers(self.by_fd.values())
        for slow in slowest(sending, wanted):
            _LOG.info(
                "%s: closed: it sent %d of %d bytes of a request in %.1f s,"
                " and other connections need the memory",
                self._rows.name(slow.channel.connection),
                slow.done,
                slow.length,
                slow.held_ns / 1e9,
            )
            self.close(slow.channel, ProcessorCounter.CLOSED_IDLE)

    def close_slow_readers(self, now_ns: int) -> None:
        """Close connections that take answers slowly; others wait for the memory."""
        for handler, wanted in starved_handlers(
            self._words, now_ns - PATIENCE_NS
        ).items():
            for channel in list(self.by_fd.values()):
                # Its answer may be one of those that wait.
                if channel.closing and channel.state == _IN_FLIGHT:
                    self.close(channel, ProcessorCounter.CLOSED_BY_PEER)
            for slow in slowest(self._readers(handler, now_ns), wanted):
                _LOG.info(
                    "%s: closed: it took %d of %d bytes of an answer in %.1f s,"
                    " and other connections need the memory",
                    self._rows.name(slow.channel.connection),
                    slow.done,
                    slow.length,
                    slow.held_ns / 1e9,
                )
                self.close(slow.channel, ProcessorCounter.CLOSED_IDLE)

    def _readers(self, handler: int, now_ns: int) -> Iterator[Transfer]:
        """Yield the partly sent answers that are in a handler's region."""
        words = self._words
        for channel in self.by_fd.values():
            if channel.state != _SENDING:
                continue
            row = slot_row(channel.slot)
            if self._arena_layout.handler_of(words[row + SLOT_EXTENT]) == handler:
                length = words[row + SLOT_RESPONSE_LENGTH]
                left = sum(part.length for part in channel.outgoing) - channel.part_sent
                yield Transfer(
                    channel,
                    length - left,
                    length,
                    now_ns - words[row + SLOT_COMPLETED],
                    words[row + SLOT_EXTENT_LENGTH],
                )

    def close(self, channel: Channel, reason: ProcessorCounter) -> None:
        """End a connection, and free everything that it holds."""
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
        an answer is at fault, once it has not read any of it for as long.
        """
        if channel.active_ns >= since_ns:
            return False
        if channel.state == _SENDING:
            completed = self._words[slot_row(channel.slot) + SLOT_COMPLETED]
            return bool(completed < since_ns)
        return channel.state == _READING

    def obey(self, limits: Limits) -> int:
        """Close our connections that are in excess of the broker's max.connections.

        Connections with a request in flight stay; see excess_connections().

        Returns:
            The ns of silence after which connections are to be closed.
        """
        excess = set(excess_connections(self._words, limits))
        for channel in list(self.by_fd.values()) if excess else ():
            if channel.connection in excess and channel.state == _READING:
                self.close(channel, ProcessorCounter.CLOSED_EXCESS)
        return limits.broker.max_idle_ms * 1_000_000

    def forget(self, channel: Channel) -> None:
        """Remove a connection that is closed, or that another processor owns now."""
        if self.by_fd.pop(channel.fd, None) is None:
            del self.unready[channel.fd]
        self._cookies.discard(channel.cookie)
        self._words[self._counters] = len(self.by_fd) + len(self.unready)

    def abandon(self, connection: int, answered: frozenset[int]) -> None:
        """Free everything of a connection that no processor can continue."""
        self.count(ProcessorCounter.LOST, 1)
        channel = Channel(_NO_SOCKET, connection, self._rows.word(connection))
        base, start, sent = progress(self._words, connection)
        counts = StreamCounts(base + start, sent, True)
        restore(channel, self._words, counts, answered)
        self._release(channel)

    def _release(self, channel: Channel) -> None:
        """Free everything that a connection holds, and its row."""
        slot = channel.slot
        if slot >= 0 and channel.state != _READING:
            self.in_flight[slot - self._first_slot] = None
            if channel.state == _SENDING or self._requests.forget(slot):
                self._reader.release_request(slot)
                self._reader.release_slot(slot)
        self._reader.detach(channel)
        channel.outgoing = []
        self._rows.release(channel.connection)
