"""Acceptor: the process that accepts a listener's connections and passes them on.

Connections go to the listener's processors in round robin, among the processors with
credit: a processor may have at most NEW_CONNECTIONS that were handed to it and that it
has not registered yet. If no processor has credit the acceptor waits, and the metric
AcceptorBlockedPercent counts this time.

The acceptor also waits if a quota of the broker or the listener is used up: it does not
poll the listening socket until there is room (connection_quotas.py). If an address
makes connections too fast, its new connections are held: they stay open, and no byte is
read from them. Each is closed when its own time is over. (Kafka holds all of them until
the time of the last is over.)

Source: Kafka SocketServer.Acceptor.
"""

import contextlib
import errno
import heapq
import os
import select
import socket
import time
from collections.abc import Callable, Mapping
from typing import Final

from mpbroker.base.logger import get_logger
from mpbroker.ipc import pulse
from mpbroker.ipc.doorbell import Doorbell
from mpbroker.ipc.fdpass import send_fds
from mpbroker.ipc.layout import (
    ACCEPTOR_COUNTERS,
    HEADER,
    HEADER_PHASE,
    HEADER_RETIRING,
    MAX_PROCESSORS,
    METRICS,
    METRICS_BLOCKED,
    METRICS_CONNECTIONS,
    PROCESSOR_HANDED,
    PROCESSOR_LISTENER,
    PROCESSOR_REGISTERED,
    Phase,
    processor_row,
)
from mpbroker.ipc.segment import Segment
from mpbroker.network.acceptor_guard import AcceptorGuard
from mpbroker.network.connection_quotas import (
    AcceptorCounter,
    ConnectionQuotas,
    Judgement,
    Verdict,
)
from mpbroker.network.connection_rows import address_words
from mpbroker.network.moves.hand_over import HAND_OVER, HandOver, KeeperLink
from mpbroker.network.processor import NEW_CONNECTIONS

_LOG = get_logger(__name__)

_POLL_S: Final = 1.0
_BLOCKED_S: Final = 0.001
# A limit, because each held connection uses a descriptor.
_MAX_HELD: Final = 1000
_SAY_AGAIN_NS: Final = 1_000_000_000
# Errors of accept(2) about one connection, which leave the listening socket usable.
_ONE_CONNECTION: Final = {
    errno.ECONNABORTED,
    errno.EPROTO,
    errno.EPERM,
    errno.ENETDOWN,
    errno.ENONET,
    errno.ENOPROTOOPT,
    errno.EOPNOTSUPP,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.ENETUNREACH,
    errno.EINTR,
}
_NO_FILES: Final = {errno.EMFILE, errno.ENFILE}
# The kernel has no memory just now; connections stay in the backlog.
_NO_MEMORY: Final = {errno.ENOBUFS, errno.ENOMEM}


class Acceptor:
    """Accepts the connections of one listener and hands them to its processors.

    Args:
        listener: the listener's index. Each processor's row in the control segment says
            which listener the processor serves.
        sock: the listening socket; the supervisor has it too, so its backlog outlives
            this process.
        control: the shared memory with the state of all processes.
        handovers: the sending ends of every processor's Unix socket, by id.
        keeper: the way to the keeper, the process with a duplicate of every client's
            socket. It gets each connection before the processor does.
        doorbell: rung when the broker's phase changes.
        quotas: limits for connections, and the sizes of sockets' buffers.
        entitle_guard: called in the guard (acceptor_guard.py) to set its process title.
    """

    def __init__(
        self,
        listener: int,
        sock: socket.socket,
        control: Segment,
        handovers: Mapping[int, socket.socket],
        keeper: KeeperLink,
        doorbell: Doorbell,
        quotas: ConnectionQuotas,
        entitle_guard: Callable[[], None] = lambda: None,
    ) -> None:
        self._listener = listener
        self._pid = os.getpid()
        self._sock = sock
        self._words = control.words
        self._handovers = handovers
        self._keeper = keeper
        self._quotas = quotas
        self._counters = METRICS + METRICS_CONNECTIONS + listener * ACCEPTOR_COUNTERS
        self._next = 0
        self._sequence = 0
        self._spare_fd = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        self.blocked_ns = 0
        self._blocked_since = 0  # ns, when a quota was used up; 0: none is
        self._resume_ns = 0
        # A heap: held until (ns), sequence number, socket.
        self._held: list[tuple[int, int, socket.socket]] = []
        self._said_ns = dict.fromkeys(Verdict, 0)
        self._lack_said_ns = 0
        self._epoll = select.epoll(flags=select.EPOLL_CLOEXEC)
        self._epoll.register(sock.fileno(), select.EPOLLIN)
        # Accepted sockets inherit it. Urgent bytes would be counted by the kernel, and
        # never read: a successor would begin each of the client's frames too late.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_OOBINLINE, 1)
        self._epoll.register(doorbell.fd, select.EPOLLIN | select.EPOLLET)
        self._guard = AcceptorGuard(sock, self._rescue, entitle_guard)
        self._guard_pidfd = -1

    def run(self) -> None:
        """Accept until the broker drains, or another acceptor replaces this one.

        At the end close the connections that are held unread because their clients
        connect too fast.
        """
        while not self._must_stop():
            if self._guard_pidfd < 0:
                self._post_guard()
            self.turn(_POLL_S)
            pulse.step()
        for _, _, sock in self._held:
            sock.close()
        self._guard.bury()

    def _post_guard(self) -> None:
        self._guard_pidfd = self._guard.post()
        if self._guard_pidfd >= 0:
            self._epoll.register(self._guard_pidfd, select.EPOLLIN)

    def _rescue(self, socks: list[socket.socket]) -> None:
        """Send the keeper a dead acceptor's connections, for it to pass to processors.

        This runs in the acceptor's guard. If the broker is draining for its end, send
        none.
        """
        if self._words[HEADER + HEADER_PHASE] >= Phase.DRAINING:
            return
        alive = []
        for sock in socks:
            with contextlib.suppress(OSError):  # the client has closed it already
                self._configure(sock)
                alive.append(sock)
        if alive:
            self._keeper.keep_rescued(alive, self._listener)

    def turn(self, patience_s: float) -> None:
        """Wait until clients connect or a timer is due; accept all waiting connections.

        Args:
            patience_s: the longest wait, in seconds.
        """
        now = time.monotonic_ns()
        due = [now + int(patience_s * 1e9)]
        if self._blocked_since:
            due.append(self._resume_ns)
        if self._held:
            due.append(self._held[0][0])
        events = self._epoll.poll(max(0, min(due) - now) / 1e9)
        now = time.monotonic_ns()
        self.close_held(now)
        if any(fd == self._guard_pidfd for fd, _ in events) or self._guard.is_stopped():
            self._epoll.unregister(self._guard_pidfd)
            self._guard.bury()
            self._guard_pidfd = -1  # ``run`` starts another
        if self._blocked_since:
            if now >= self._resume_ns:
                self.accept_all()
        elif any(fd == self._sock.fileno() for fd, _ in events):
            self.accept_all()

    def close_held(self, now_ns: int) -> None:
        """Close the connections, held because they came too fast, that are due."""
        while self._held and self._held[0][0] <= now_ns:
            heapq.heappop(self._held)[2].close()

    @property
    def held(self) -> int:
        """The number of connections that are held because they came too fast."""
        return len(self._held)

    def _must_stop(self) -> bool:
        words = self._words
        return (
            words[HEADER + HEADER_PHASE] >= Phase.DRAINING
            or words[HEADER + HEADER_RETIRING + self._listener] == self._pid
        )

    def accept_all(self) -> None:
        """Accept until no connection waits, or none may be accepted now."""
        while not self._must_stop():
            pulse.step()
            if self._must_wait():
                return
            accepted = self._accept_one()
            if not accepted:
                self._quotas.withdraw()
            if accepted is None:
                return

    def _accept_one(self) -> bool | None:
        """Accept a connection and hand it to a processor.

        Returns:
            True if it was handed over, False if it was lost or refused. None if no
            connection waits, or none can be accepted now.
        """
        processor = self._next_processor()
        if processor is None:
            return None
        try:
            sock, name = self._sock.accept()
        except BlockingIOError:
            return None
        except OSError as error:
            if error.errno in _NO_FILES:
                return False if self._refuse_one(error) else None
            if error.errno in _NO_MEMORY:
                self._say_again_later(error)
                return None
            if error.errno not in _ONE_CONNECTION:
                raise
            return False
        now = time.monotonic_ns()
        judgement = self._quotas.admit(*address_words(sock.family, name), now)
        if judgement.verdict is not Verdict.ADMITTED:
            self._turn_away(sock, name, judgement, now)
            return False
        self._words[self._counters + AcceptorCounter.ACCEPTED] += 1
        # Not before accept(): a call that finds no connection must skip no processor.
        self._next = processor + 1
        with sock:
            return self._hand_over(sock, processor)

    def _say_again_later(self, error: OSError) -> None:
        """Log that the kernel lacks memory, and wait before the next attempt."""
        now = time.monotonic_ns()
        if now - self._lack_said_ns > _SAY_AGAIN_NS:
            self._lack_said_ns = now
            _LOG.error("connections wait to be accepted: %s", error.strerror)
        time.sleep(_BLOCKED_S)

    def _must_wait(self) -> bool:
        """Return whether a quota of the broker or the listener makes connections wait.

        If no quota does, count the next connection already, by reserving a place.
        Otherwise stop polling the listening socket, and note when to try again.
        """
        now = time.monotonic_ns()
        wait_ns = self._quotas.reserve(now)
        if self._blocked_since:
            self._count_blocked(now - self._blocked_since)
        elif wait_ns:
            # Level-triggered: a waiting connection would wake us all the time.
            self._epoll.modify(self._sock.fileno(), 0)
        if self._blocked_since and not wait_ns:
            self._epoll.modify(self._sock.fileno(), select.EPOLLIN)
        self._blocked_since = now if wait_ns else 0
        self._resume_ns = now + wait_ns
        return bool(wait_ns)

    def _turn_away(
        self, sock: socket.socket, name: object, judgement: Judgement, now_ns: int
    ) -> None:
        """Refuse a connection, because of the limits of its client's address.

        Close it at once if the address has too many connections. Hold it unread, and
        close it later, if the address makes connections too fast.
        """
        host = name[0] if isinstance(name, tuple) else "?"
        if judgement.verdict is Verdict.TOO_MANY:
            self._words[self._counters + AcceptorCounter.TOO_MANY_OF_ADDRESS] += 1
            sock.close()
            text = (
                "a connection from %s was closed: this address has %d connections, the"
                " limit of max.connections.per.ip"
            )
        else:
            self._words[self._counters + AcceptorCounter.TOO_FAST_OF_ADDRESS] += 1
            if len(self._held) < _MAX_HELD:
                self._sequence += 1
                sock.set_inheritable(True)  # a mark: our guard does not pass it on
                entry = (judgement.until_ns, self._sequence, sock)
                heapq.heappush(self._held, entry)
            else:
                sock.close()
            text = (
                "a connection from %s was refused: this address makes more than %d"
                " connections a second, the limit of its quota connection_creation_rate"
            )
        if now_ns - self._said_ns[judgement.verdict] > _SAY_AGAIN_NS:
            self._said_ns[judgement.verdict] = now_ns
            _LOG.info(text, host, judgement.limit)

    def _count_blocked(self, blocked_ns: int) -> None:
        self.blocked_ns += blocked_ns
        self._words[METRICS + METRICS_BLOCKED + self._listener] += blocked_ns

    def _next_processor(self) -> int | None:
        """Return the next processor, in round robin, that may get a new connection.

        That is one with fewer than NEW_CONNECTIONS which it has not registered yet. If
        there is none, wait until there is one. Return None if this acceptor must stop.
        """
        blocked_since = 0
        while True:
            for step in range(MAX_PROCESSORS):
                processor = (self._next + step) % MAX_PROCESSORS
                if self._has_credit(processor):
                    if blocked_since:
                        self._count_blocked(time.monotonic_ns() - blocked_since)
                    return processor
            if self._must_stop():
                return None
            blocked_since = blocked_since or time.monotonic_ns()
            time.sleep(_BLOCKED_S)

    def _has_credit(self, processor: int) -> bool:
        words, row = self._words, processor_row(processor)
        if words[row + PROCESSOR_LISTENER] != self._listener + 1:
            return False
        on_their_way = words[row + PROCESSOR_HANDED] - words[row + PROCESSOR_REGISTERED]
        if on_their_way < 0:
            # This process or the processor died between hand-over and count.
            words[row + PROCESSOR_HANDED] -= on_their_way
            on_their_way = 0
        return on_their_way < NEW_CONNECTIONS

    def _hand_over(self, sock: socket.socket, processor: int) -> bool:
        """Send a connection to the keeper, which keeps a duplicate, and to a processor.

        Return False if the client has closed the connection already. Return True in all
        other cases, also if the message to the processor could not be sent.
        """
        self._sequence += 1
        # First: if we or the processor die, the keeper delivers the connection.
        kept = self._keeper.keep_new(sock, processor, self._listener, self._sequence)
        try:
            self._configure(sock)
        except OSError:
            return False  # the client has closed it already
        message = HAND_OVER.pack(
            HandOver.NEW, self._listener, self._sequence, time.monotonic_ns()
        )
        word = processor_row(processor) + PROCESSOR_HANDED
        self._quotas.handed(processor, self._words[word] + 1)
        try:
            send_fds(self._handovers[processor], message, [sock.fileno()])
        except OSError as error:
            # The queue has room for more than the credit: this is no backpressure.
            if not kept:
                _LOG.warning(
                    "a connection was lost on its way to a processor: %s", error
                )
            return True
        # Last: a death in between may give too much credit, but must not lose credit.
        self._words[word] += 1
        return True

    def _configure(self, sock: socket.socket) -> None:
        own = self._quotas.limits.of_listener(self._listener)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if own.send_buffer_bytes >= 0:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, own.send_buffer_bytes)

    def _refuse_one(self, error: OSError) -> bool:
        """Accept and close one connection when the process has no descriptor left.

        If it stayed in the backlog, the poll would return again and again.

        Returns:
            True if a connection was closed. False if none was waiting; the kernel
            reports the lack of descriptors even then.
        """
        os.close(self._spare_fd)
        try:
            sock, _ = self._sock.accept()
            sock.close()
        except OSError:
            return False
        finally:
            self._spare_fd = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        self._words[self._counters + AcceptorCounter.NO_FILES] += 1
        _LOG.error(
            "a connection was refused: %s; raise the limit of open files"
            " (ulimit -n, LimitNOFILE)",
            os.strerror(error.errno or 0),
        )
        return True
