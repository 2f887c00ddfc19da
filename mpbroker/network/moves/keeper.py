"""Keeper: holds a duplicate of every client's socket, so that none dies with a process.

An acceptor leaves a duplicate with the keeper before it hands a connection to a
processor. When a processor has died, the keeper sends its successor the sockets of all
connections it owns. (A row is a connection's record in shared memory; it names the
owner.) A new connection that has no row after a while is handed over once more; a
processor that has the connection already drops the second duplicate. An acceptor's
guard leaves a dead acceptor's connections with the keeper, which hands them on at once.

The row of a socket has the kernel's cookie of the socket, so they cannot be confused.
The kernel also tells when a duplicate may be closed: a processor shuts a connection
down before it closes it, or the client resets it, and epoll reports a hang-up in both
cases. So the end of a connection needs no message, which could be lost with a process.

If the keeper dies, the processors have their sockets, and leave duplicates with the
next keeper. The dead keeper's guard does the same, also with the sockets of dead
processors (keeper_guard.py). The keeper reads and writes no bytes of clients, takes no
lock, and writes five words of shared memory.
"""

import contextlib
import os
import select
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Final

from mpbroker.base.logger import get_logger
from mpbroker.base.named_tuple import NamedTuple
from mpbroker.ipc import pulse
from mpbroker.ipc.doorbell import Doorbell
from mpbroker.ipc.fdpass import FdsDroppedError, recv_fds, send_fds
from mpbroker.ipc.layout import (
    CONNECTION_COOKIE,
    CONNECTION_OWNER,
    HEADER,
    HEADER_COUNTERS,
    HEADER_DEATH_EPOCH,
    HEADER_KEEPER,
    HEADER_PHASE,
    MAX_PROCESSORS,
    PROCESSOR_DELIVERED,
    PROCESSOR_INCARNATION,
    PROCESSOR_LISTENER,
    Phase,
    connection_row,
    processor_row,
)
from mpbroker.ipc.segment import Segment
from mpbroker.network.connection_rows import is_held, live_rows
from mpbroker.network.moves.hand_over import (
    HAND_OUT,
    HAND_OVER,
    HAS_ROW,
    KEEP,
    MAX_SOCKETS,
    RESCUED,
    HandOver,
    pack_adopt,
)
from mpbroker.network.moves.keeper_guard import KeeperGuard, await_guard
from mpbroker.network.moves.tcp_counters import counters_are_exact, socket_cookie

_LOG = get_logger(__name__)

_POLL_S: Final = 1.0
_RETRY_S: Final = 0.005  # a processor's queue was full
# A connection without a row for so long counts as lost on its way.
_ON_ITS_WAY_S: Final = 0.25
_HAND_OUT_S: Final = 1.0
_MAX_EVENTS: Final = 256


class _New(NamedTuple):
    """Holds the facts about a new connection, which no processor has registered yet.

    The keeper sends it to a processor again if it is not registered in time.
    """

    processor: int
    listener: int
    sequence: int
    since: float


class _Parcel(NamedTuple):
    """Holds one message for a processor, with the sockets that it carries."""

    processor: int
    message: bytes  # AGAIN, of one socket; b"": ADOPT
    sockets: list[tuple[int, int]]  # cookie and row


class Keeper:
    """Keeps duplicates of all clients' sockets, and sends them to new processes.

    Args:
        control: the shared memory with the records (rows) of all connections and
            processes.
        link: the receiving end of the socket through which duplicates come.
        handovers: the sending ends of every processor's Unix socket, by id.
        bell: the keeper's own doorbell.
        processor_bells: the processors' doorbells, by id.
        guard: the process that shares the keeper's descriptors. None: the keeper runs
            without a guard.
    """

    def __init__(
        self,
        control: Segment,
        link: socket.socket,
        handovers: Mapping[int, socket.socket],
        bell: Doorbell,
        processor_bells: Sequence[Doorbell],
        guard: KeeperGuard | None = None,
    ) -> None:
        self._words = control.words
        self._link = link
        self._handovers = handovers
        self._bell = bell
        self._processor_bells = processor_bells
        self._guard = guard
        self._guard_pidfd = -1
        self._fds: dict[int, int] = {}  # descriptor by cookie
        self._cookies: dict[int, int] = {}  # cookie by descriptor
        self._new: dict[int, _New] = {}  # by cookie
        self._undelivered: list[_Parcel] = []
        self._death_epoch = -1
        self._next_look = 0.0
        self._epoll = select.epoll(flags=select.EPOLL_CLOEXEC)
        self._epoll.register(bell.fd, select.EPOLLIN | select.EPOLLET)
        self._epoll.register(link.fileno(), select.EPOLLIN)

    def run(self) -> None:
        """Keep duplicates of all clients' sockets until the broker has stopped."""
        # A predecessor's result stays valid: the test could also fail for lack of
        # descriptors or time, which says nothing about the kernel.
        exact = self._words[HEADER + HEADER_COUNTERS] == 1 or counters_are_exact()
        if not exact:
            _LOG.warning(
                "this kernel's TCP counters are not exact: connections are closed"
                " when their processor dies"
            )
        words = self._words
        words[HEADER + HEADER_COUNTERS] = 1 if exact else -1
        # Before any processor is told that it has got all.
        await_guard(words, self._receive)
        words[HEADER + HEADER_KEEPER] += 1
        for bell in self._processor_bells:
            bell.ring()
        while words[HEADER + HEADER_PHASE] < Phase.STOPPED:
            self._see_to_guard()
            self.turn()
            pulse.step()
        if self._guard is not None:
            self._guard.dismiss()

    def _see_to_guard(self) -> None:
        """Start the keeper's guard, if none runs or the running one was stopped.

        The guard is a second process with the same sockets: see keeper_guard.py.
        """
        guard = self._guard
        if guard is None:
            return
        if self._guard_pidfd >= 0 and guard.is_stopped():
            self._bury_guard(guard)
        if self._guard_pidfd < 0:
            self._guard_pidfd = guard.post()
            if self._guard_pidfd >= 0:
                self._epoll.register(self._guard_pidfd, select.EPOLLIN)

    def _bury_guard(self, guard: KeeperGuard) -> None:
        self._epoll.unregister(self._guard_pidfd)
        guard.bury()
        self._guard_pidfd = -1

    @property
    def count(self) -> int:
        """The number of sockets that the keeper holds."""
        return len(self._fds)

    def turn(self, timeout_s: float = _POLL_S) -> None:
        """Wait for events, and handle them.

        With or without events, each turn also sends again what has found a queue full,
        and sends a process that replaces a dead one the sockets of its connections.

        Args:
            timeout_s: the longest wait, in seconds. It is shorter while something is to
                be sent again, or a new socket is in no connection's row yet.
        """
        if self._undelivered:
            timeout_s = min(timeout_s, _RETRY_S)
        elif self._new:
            timeout_s = min(timeout_s, _ON_ITS_WAY_S)
        was_asked = False
        for fd, _ in self._epoll.poll(timeout_s, _MAX_EVENTS):
            if fd in self._cookies:
                self._drop(fd)  # the connection has ended, for whatever reason
            elif fd == self._link.fileno():
                self._receive()
            elif fd == self._guard_pidfd and self._guard is not None:
                self._bury_guard(self._guard)
            else:
                was_asked = True
        if self._undelivered:
            self._deliver()
        self._look_for_successors()
        if self._new and time.monotonic() >= self._next_look:
            self._look_for_lost()
        if was_asked:
            self._end_given_up()

    # -- keeping -------------------------------------------------------------------

    def _receive(self) -> None:
        """Receive all sockets that acceptors, processors and guards have sent."""
        while True:
            try:
                message, fds = recv_fds(self._link, KEEP.size, MAX_SOCKETS)
            except BlockingIOError:
                return
            except FdsDroppedError as error:
                _LOG.warning("duplicates of connections were not kept: %s", error)
                continue
            if not message:
                return
            processor, listener, sequence = KEEP.unpack(message)
            if processor == HAND_OUT:
                self._hand_out(fds)
                continue
            for fd in fds:
                cookie, is_new = self._keep(fd)
                if processor == RESCUED:
                    self._rescue(cookie, listener, is_new=is_new)
                elif is_new and processor != HAS_ROW:
                    now = time.monotonic()
                    self._new[cookie] = _New(processor, listener, sequence, now)

    def _rescue(self, cookie: int, listener: int, *, is_new: bool) -> None:
        """Plan to send a dead acceptor's connection to a processor at the next look.

        If a processor has registered it by then, it is not sent.
        """
        if is_new:
            self._new[cookie] = _New(0, listener, 0, 0.0)  # _server_of() finds another
        elif cookie in self._new:
            # To the processor that it was meant for, which may have it already.
            self._new[cookie] = self._new[cookie]._replace(since=0.0)
        self._next_look = 0.0

    def _hand_out(self, fds: list[int]) -> None:
        """Send all sockets to the supervisor, which waits for them.

        Args:
            fds: the descriptor of one Unix socket, to whose other end they are sent.
        """
        (fd,) = fds
        with socket.socket(fileno=fd) as link, contextlib.suppress(OSError):
            link.settimeout(_HAND_OUT_S)
            for cookie, new in self._new.items():
                send_fds(link, KEEP.pack(*new[:3]), [self._fds[cookie]])
            others = [fd for cookie, fd in self._fds.items() if cookie not in self._new]
            for first in range(0, len(others), MAX_SOCKETS):
                batch = others[first : first + MAX_SOCKETS]
                send_fds(link, KEEP.pack(HAS_ROW, -1, 0), batch)

    def _keep(self, fd: int) -> tuple[int, bool]:
        """Keep a descriptor, or close it if the keeper has this socket already.

        Returns:
            The socket's cookie, and whether the descriptor is kept.
        """
        # With a given family, so that Python does not ask the kernel for it.
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=fd)
        cookie = socket_cookie(sock)
        sock.detach()
        if cookie in self._fds:
            os.close(fd)
            return cookie, False
        self._fds[cookie] = fd
        self._cookies[fd] = cookie
        # No events are requested; hang-ups and errors are always reported.
        self._epoll.register(fd, 0)
        return cookie, True

    def _drop(self, fd: int) -> None:
        cookie = self._cookies.pop(fd)
        del self._fds[cookie]
        self._new.pop(cookie, None)
        self._epoll.unregister(fd)
        os.close(fd)

    # -- delivering ----------------------------------------------------------------

    def _look_for_successors(self) -> None:
        """After the death of a process, send processors the sockets that they lack.

        These are the sockets of connections that a processor owns and its new process
        does not have. Then store in the records of new processors that they have got
        all, unless a message could not be sent yet.
        """
        words = self._words
        epoch = words[HEADER + HEADER_DEATH_EPOCH]
        waiting = {
            processor: words[processor_row(processor) + PROCESSOR_INCARNATION]
            for processor in range(MAX_PROCESSORS)
        }
        waiting = {
            processor: incarnation
            for processor, incarnation in waiting.items()
            if words[processor_row(processor) + PROCESSOR_DELIVERED] != incarnation
        }
        if epoch == self._death_epoch and not waiting:
            return
        self._death_epoch = epoch
        self._receive()  # first the sockets that the dead process has left
        lacking: dict[int, list[int]] = {}
        for row in live_rows(words):
            if not is_held(words, row):
                owner = words[connection_row(row) + CONNECTION_OWNER] - 1
                lacking.setdefault(owner, []).append(row)
        for processor, rows in lacking.items():
            self._send_rows(processor, rows)
        for cookie in list(self._new):
            self._new[cookie] = self._new[cookie]._replace(since=0.0)
        self._look_for_lost()
        self._deliver()
        for processor, incarnation in waiting.items():
            if all(parcel.processor != processor for parcel in self._undelivered):
                words[processor_row(processor) + PROCESSOR_DELIVERED] = incarnation
                self._processor_bells[processor].ring()

    def _send_rows(self, processor: int, rows: list[int]) -> None:
        words = self._words
        sockets = [
            (words[connection_row(row) + CONNECTION_COOKIE], row) for row in rows
        ]
        for first in range(0, len(sockets), MAX_SOCKETS):
            batch = sockets[first : first + MAX_SOCKETS]
            self._undelivered.append(_Parcel(processor, b"", batch))

    def _look_for_lost(self) -> None:
        """Send a new connection again if no processor has registered it in time."""
        words, now = self._words, time.monotonic()
        self._next_look = now + _ON_ITS_WAY_S
        in_rows = {
            words[connection_row(row) + CONNECTION_COOKIE] for row in live_rows(words)
        }
        for cookie, new in list(self._new.items()):
            if cookie in in_rows:
                del self._new[cookie]
            elif now - new.since >= _ON_ITS_WAY_S:
                processor = self._server_of(new)
                self._new[cookie] = new._replace(processor=processor, since=now)
                message = HAND_OVER.pack(HandOver.AGAIN, new.listener, new.sequence, 0)
                self._undelivered.append(_Parcel(processor, message, [(cookie, -1)]))

    def _end_given_up(self) -> None:
        """End the connections whose record in shared memory is gone, except new ones.

        Their records were given up by processors that lacked the sockets. All other
        connections end before their records become free, and epoll reports that.
        """
        words = self._words
        in_rows = {
            words[connection_row(row) + CONNECTION_COOKIE] for row in live_rows(words)
        }
        for cookie, fd in list(self._fds.items()):
            if cookie not in in_rows and cookie not in self._new:
                sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=fd)
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)  # epoll will report the hang-up
                sock.detach()

    def _server_of(self, new: _New) -> int:
        """Return the processor that shall get a new connection.

        This is the processor that the connection was for. If that one does not serve
        the listener any more, return another that does.
        """
        words, wanted = self._words, new.listener + 1
        if words[processor_row(new.processor) + PROCESSOR_LISTENER] == wanted:
            return new.processor
        for processor in range(MAX_PROCESSORS):
            if words[processor_row(processor) + PROCESSOR_LISTENER] == wanted:
                return processor
        return new.processor

    def _deliver(self) -> None:
        waiting, self._undelivered = self._undelivered, []
        for parcel in waiting:
            there = [
                (self._fds[cookie], row)
                for cookie, row in parcel.sockets
                if cookie in self._fds
            ]
            if not there:
                continue
            message = parcel.message or pack_adopt([row for _, row in there])
            sender = self._handovers[parcel.processor]
            try:
                send_fds(sender, message, [fd for fd, _ in there])
            except OSError:  # its queue is full; it, or a successor, will read
                self._undelivered.append(parcel)

    def close(self) -> None:
        """Close all sockets."""
        for fd in list(self._cookies):
            with contextlib.suppress(OSError):
                self._drop(fd)
        self._epoll.close()
