"""The connections of one processor: how each begins here, and how it ends.

One begins as a new one, or is carried on for another processor; it ends when either
side has had enough, when it is given away, or when nobody can carry it on. What happens
in between is the Processor's.
"""

import contextlib
import socket
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from mpbroker.base.logger import DEBUG, get_logger
from mpbroker.ipc.layout import (
    PROCESSOR_COUNTERS,
    SLOT_COMPLETED,
    SLOTS_PER_PROCESSOR,
    ConnectionSecurity,
    ConnectionState,
    ProcessorCounter,
    processor_row,
    slot_row,
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
from mpbroker.network.request_reader import RequestReader, stalled_longest

_LOG = get_logger(__name__)

_READING: Final = ConnectionState.READING
_SENDING: Final = ConnectionState.SENDING
# Whoever gives a connection away sends its socket at once, or is dead by then, and the
# keeper has sent it.
_ON_ITS_WAY_NS: Final = 3_000_000_000
# Made beforehand: who has lost a connection may have no descriptor for another.
_NO_SOCKET: Final = socket.socket()
_NO_SOCKET.close()


class Connections:
    """Those that one processor carries.

    Attributes:
        by_fd: all that may send requests.
        unready: those that have yet to prove who they are; see unready_channels.py.
        security: what the rows of new ones say; PRIVATE: they begin unready.
        opened: told of each new one.
        max_request_bytes: socket.request.max.bytes.
        in_flight: of each request in flight the connection, by slot in the processor.
    """

    def __init__(
        self,
        processor: int,
        control: Segment,
        selector: ChannelSelector,
        rows: ConnectionRows,
        reader: RequestReader,
        requests: ProcessorEnd,
    ) -> None:
        self._words = control.words
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
        self._words[self._counters] = 0  # a predecessor's
        self._expected: dict[int, int] = {}  # rows, and until when

    def is_here(self, channel: Channel) -> bool:
        """Whether a connection is neither closed nor given away."""
        return self.by_fd.get(channel.fd) is channel

    def unread(self, reading: Iterable[Channel]) -> Iterator[Channel]:
        """Those of READING ones that are still here and of which more may be read."""
        for channel in reading:
            if (
                self.is_here(channel)
                and not channel.waiting
                and (channel.readable or channel.start < channel.end)
            ):
                yield channel

    def has(self, sock: socket.socket) -> bool:
        """Whether a socket is the duplicate of one of theirs."""
        return socket_cookie(sock) in self._cookies

    def is_elsewhere(self, sock: socket.socket) -> bool:
        """Whether anybody has a row for this socket."""
        return has_cookie(self._words, socket_cookie(sock))

    def count(self, counter: ProcessorCounter, amount: int) -> None:
        self._words[self._counters + counter] += amount

    def count_of(self, counter: ProcessorCounter) -> int:
        return int(self._words[self._counters + counter])

    # -- how they begin ------------------------------------------------------------

    def open(self, new: NewConnection, now_ns: int) -> None:
        """Give a new connection a row; close it if there is none for it."""
        sock = new.sock
        sock.setblocking(False)
        if new.is_late and self._has_begun(sock):
            # It had a row that was given up: nobody knows where it is in its streams.
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
        except OSError:  # it has gone already
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
        """Whether anything was received from a connection, or sent to it."""
        if sock.family == socket.AF_UNIX or not are_relied_on(self._words):
            return False
        counts = stream_counts(sock)
        return counts is not None and bool(counts.received or counts.sent)

    def admit(self, channel: Channel) -> None:
        """It has proved who it is."""
        self.by_fd[channel.fd] = self.unready.pop(channel.fd)

    def refuse(self, sock: socket.socket) -> None:
        """Close a new connection."""
        _LOG.warning("no room for another connection: closed")
        end_connection(sock)

    def adopt(
        self, connection: int, sock: socket.socket, answered: frozenset[int], now: int
    ) -> tuple[Channel, Resumption, int] | None:
        """Carry a connection on from its row and the kernel's counters.

        Args:
            connection: its row.
            sock: its socket.
            answered: slots whose answers nobody has taken from the response ring.
            now: ns, monotonic.

        Returns:
            It, what to do for it, and how many bytes of its answer are out; None: it
            had to be closed.
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
                "%s: closed: its row and the kernel do not agree on what was received"
                " and sent",
                self._rows.name(connection),
            )
            self.close(channel, ProcessorCounter.LOST)
            return None
        if resumption != Resumption.READ:
            self.in_flight[channel.slot - self._first_slot] = channel
        return channel, resumption, already

    def expect(self, connection: int, now_ns: int) -> None:
        """One has been given to us, and its socket is still to come."""
        self._expected[connection] = now_ns + _ON_ITS_WAY_NS

    def miss(
        self, connection: int, answered: frozenset[int], now_ns: int, *, lacks: bool
    ) -> None:
        """A successor has not got the socket of a row: wait for it, or give it up.

        Args:
            lacks: it came, and there was no descriptor for it. It may come again; but
                an answer that comes before it would find nobody.
        """
        if lacks and self._rows.is_reading(connection):
            self._rows.await_socket(connection)
        if self._rows.is_on_its_way(connection):
            self.expect(connection, now_ns)
        else:
            self.abandon(connection, answered)

    def give_up_expected(self, now_ns: int) -> bool:
        """Free the rows of those whose giver died, and the keeper with it.

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
        channel.active_ns = now_ns
        where[channel.fd] = channel
        self._cookies.add(channel.cookie)
        self._words[self._counters] = len(self.by_fd) + len(self.unready)

    # -- how they end --------------------------------------------------------------

    def close_reading(self) -> None:
        """Close those that have no request in flight, since all must go."""
        for channel in list(self.by_fd.values()):
            if channel.state == _READING:
                self.close(channel, ProcessorCounter.CLOSED_BY_HANDLER)

    def close_stalled(self, stalled_ns: int) -> None:
        """Close the connection that holds memory longest for bytes that do not come."""
        stalled = stalled_longest(self.by_fd.values(), stalled_ns)
        if stalled is not None:
            _LOG.info(
                "%s: closed: it stalled with %d of %d bytes of a request sent,"
                " and others need the memory",
                self._rows.name(stalled.connection),
                stalled.extent_have,
                stalled.extent_length,
            )
            self.close(stalled, ProcessorCounter.CLOSED_IDLE)

    def close(self, channel: Channel, reason: ProcessorCounter) -> None:
        """End a connection for everyone, and give back what it holds."""
        self.count(reason, 1)
        if _LOG.isEnabledFor(DEBUG):
            _LOG.debug(
                "%s: ended: %s", self._rows.name(channel.connection), reason.name
            )
        # First: a row may only come free when its socket cannot be used any more, or
        # the keeper would take the socket for a connection that never had a row.
        with contextlib.suppress(OSError):
            self._selector.close(channel)
        self.forget(channel)
        self._release(channel)

    def rests(self, channel: Channel, since_ns: int) -> bool:
        """Whether a connection has been silent since then, by its own fault.

        Who waits for an answer is not; who has one and does not read it is, once it
        has had it for as long.
        """
        if channel.active_ns >= since_ns:
            return False
        if channel.state == _SENDING:
            completed = self._words[slot_row(channel.slot) + SLOT_COMPLETED]
            return bool(completed < since_ns)
        return channel.state == _READING

    def obey(self, limits: Limits) -> int:
        """Close those of ours that are among the broker's above max.connections.

        Not those whose request is being answered; see excess_connections().

        Returns:
            After how much silence others are to be closed, ns.
        """
        excess = set(excess_connections(self._words, limits))
        for channel in list(self.by_fd.values()) if excess else ():
            if channel.connection in excess and channel.state == _READING:
                self.close(channel, ProcessorCounter.CLOSED_EXCESS)
        return limits.broker.max_idle_ms * 1_000_000

    def forget(self, channel: Channel) -> None:
        """It is closed, or another's now."""
        if self.by_fd.pop(channel.fd, None) is None:
            del self.unready[channel.fd]
        self._cookies.discard(channel.cookie)
        self._words[self._counters] = len(self.by_fd) + len(self.unready)

    def abandon(self, connection: int, answered: frozenset[int]) -> None:
        """Free what a connection has that nobody can carry on."""
        self.count(ProcessorCounter.LOST, 1)
        channel = Channel(_NO_SOCKET, connection, self._rows.word(connection))
        base, start, sent = progress(self._words, connection)
        counts = StreamCounts(base + start, sent, True)
        restore(channel, self._words, counts, answered)
        self._release(channel)

    def _release(self, channel: Channel) -> None:
        """Give back what a connection holds, and its row."""
        slot = channel.slot
        if slot >= 0 and channel.state != _READING:
            self.in_flight[slot - self._first_slot] = None
            if channel.state == _SENDING or self._requests.forget(slot):
                self._reader.release_request(slot)
                self._reader.release_slot(slot)
        self._reader.detach(channel)
        channel.outgoing = []
        self._rows.release(channel.connection)
