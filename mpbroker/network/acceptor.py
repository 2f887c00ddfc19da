"""Acceptor: one listener's process, which passes each client's socket on.

Sockets go to the listener's processors in round robin, among those with credit: at
most NEW_CONNECTIONS that a processor has been handed and has not yet registered. When
none has credit the acceptor waits, and the time it waits is AcceptorBlockedPercent.

So does it when a quota of the broker or the listener is used up: it looks away from the
listen socket for a while, and goes on when there is room (connection_quotas.py). Those
who connect too often from one address are held, unread, and closed when their time is
up: the one whose time is up first is the first (Kafka holds them for as long as the
last one).

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
# More of them would be no longer a client that is slowed down, but descriptors lost.
_MAX_HELD: Final = 1000
_SAY_AGAIN_NS: Final = 1_000_000_000
# Errors of accept(2) that concern the one connection that was about to be accepted.
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
# The kernel has no memory for it just now; who waits goes on waiting.
_NO_MEMORY: Final = {errno.ENOBUFS, errno.ENOMEM}


class Acceptor:
    """Accept on one listener's socket and hand the connections over.

    Args:
        listener: its index; which processors serve it is in their rows.
        sock: the listening socket; the supervisor's, so its backlog outlives us.
        handovers: the sending ends of every processor's Unix socket, by id.
        keeper: gets a duplicate of each connection, before its processor does.
        doorbell: rung when the broker's phase changes.
        quotas: who may come; and the sizes of sockets' buffers.
        entitle_guard: make the process that calls it known as this one's guard.
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
        self._blocked_since = 0  # by a quota; 0: it is not
        self._resume_ns = 0
        self._held: list[tuple[int, int, socket.socket]] = []  # until when; a heap
        self._said_ns = dict.fromkeys(Verdict, 0)
        self._lack_said_ns = 0
        self._epoll = select.epoll(flags=select.EPOLL_CLOEXEC)
        self._epoll.register(sock.fileno(), select.EPOLLIN)
        self._epoll.register(doorbell.fd, select.EPOLLIN | select.EPOLLET)
        self._guard = AcceptorGuard(sock, self._rescue, entitle_guard)
        self._guard_pidfd = -1

    def run(self) -> None:
        """Accept until the broker drains, or another acceptor serves in our place."""
        while not self._must_stop():
            if self._guard_pidfd < 0:
                self._post_guard()
            self.turn(_POLL_S)
        for _, _, sock in self._held:
            sock.close()
        self._guard.bury()

    def _post_guard(self) -> None:
        self._guard_pidfd = self._guard.post()
        if self._guard_pidfd >= 0:
            self._epoll.register(self._guard_pidfd, select.EPOLLIN)

    def _rescue(self, socks: list[socket.socket]) -> None:
        """In the guard: leave with the keeper what we had in hand when we died."""
        if self._words[HEADER + HEADER_PHASE] >= Phase.DRAINING:
            return
        alive = []
        for sock in socks:
            with contextlib.suppress(OSError):  # else it has gone already
                self._configure(sock)
                alive.append(sock)
        if alive:
            self._keeper.keep_rescued(alive, self._listener)

    def turn(self, patience_s: float) -> None:
        """Accept whoever waits; wait for somebody, or for what is due, at most."""
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
            self._guard_pidfd = -1  # ``run`` posts another
        if self._blocked_since:
            if now >= self._resume_ns:
                self.accept_all()
        elif any(fd == self._sock.fileno() for fd, _ in events):
            self.accept_all()

    def close_held(self, now_ns: int) -> None:
        """Close those whose time is up."""
        while self._held and self._held[0][0] <= now_ns:
            heapq.heappop(self._held)[2].close()

    @property
    def held(self) -> int:
        """How many connections are held for having come too fast."""
        return len(self._held)

    def _must_stop(self) -> bool:
        words = self._words
        return (
            words[HEADER + HEADER_PHASE] >= Phase.DRAINING
            or words[HEADER + HEADER_RETIRING + self._listener] == self._pid
        )

    def accept_all(self) -> None:
        """Accept until nobody waits, or nobody may come."""
        while not self._must_stop():
            if self._must_wait():
                return
            accepted = self._accept_one()
            if not accepted:
                self._quotas.withdraw(time.monotonic_ns())
            if accepted is None:
                return

    def _accept_one(self) -> bool | None:
        """Accept one; False: it came to nothing, None: there is none to accept."""
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
        # Not before: whoever looks and finds nobody waiting skips no processor.
        self._next = processor + 1
        with sock:
            return self._hand_over(sock, processor)

    def _say_again_later(self, error: OSError) -> None:
        """The kernel lacks something; let it find some before it is asked again."""
        now = time.monotonic_ns()
        if now - self._lack_said_ns > _SAY_AGAIN_NS:
            self._lack_said_ns = now
            _LOG.error("connections wait: %s", error.strerror)
        time.sleep(_BLOCKED_S)

    def _must_wait(self) -> bool:
        """Whether a quota keeps everybody waiting just now."""
        now = time.monotonic_ns()
        wait_ns = self._quotas.reserve(now)
        if self._blocked_since:
            self._count_blocked(now - self._blocked_since)
        elif wait_ns:
            # Level-triggered: whoever waits would wake us all the time.
            self._epoll.modify(self._sock.fileno(), 0)
        if self._blocked_since and not wait_ns:
            self._epoll.modify(self._sock.fileno(), select.EPOLLIN)
        self._blocked_since = now if wait_ns else 0
        self._resume_ns = now + wait_ns
        return bool(wait_ns)

    def _turn_away(
        self, sock: socket.socket, name: object, judgement: Judgement, now_ns: int
    ) -> None:
        """One address has too many, or too many a second: the latter waits for it."""
        host = name[0] if isinstance(name, tuple) else "?"
        if judgement.verdict is Verdict.TOO_MANY:
            self._words[self._counters + AcceptorCounter.TOO_MANY_OF_ADDRESS] += 1
            sock.close()
            text = (
                "a connection from %s was closed: it has %d, as many as"
                " max.connections.per.ip lets it have"
            )
        else:
            self._words[self._counters + AcceptorCounter.TOO_FAST_OF_ADDRESS] += 1
            if len(self._held) < _MAX_HELD:
                self._sequence += 1
                sock.set_inheritable(True)  # our guard passes it on to nobody
                entry = (judgement.until_ns, self._sequence, sock)
                heapq.heappush(self._held, entry)
            else:
                sock.close()
            text = (
                "a connection from %s was refused: it makes more than the %d a second"
                " that its quota connection_creation_rate lets it make"
            )
        if now_ns - self._said_ns[judgement.verdict] > _SAY_AGAIN_NS:
            self._said_ns[judgement.verdict] = now_ns
            _LOG.info(text, host, judgement.limit)

    def _count_blocked(self, blocked_ns: int) -> None:
        self.blocked_ns += blocked_ns
        self._words[METRICS + METRICS_BLOCKED + self._listener] += blocked_ns

    def _next_processor(self) -> int | None:
        """The next one with credit; wait for it if there is none just now."""
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
            # A death between hand-over and count, of ours or of the processor's.
            words[row + PROCESSOR_HANDED] -= on_their_way
            on_their_way = 0
        return on_their_way < NEW_CONNECTIONS

    def _hand_over(self, sock: socket.socket, processor: int) -> bool:
        """Pass it on; False: it has gone, or is lost."""
        self._sequence += 1
        # First of all: should we or the processor die, the keeper sees it delivered.
        kept = self._keeper.keep_new(sock, processor, self._listener, self._sequence)
        try:
            self._configure(sock)
        except OSError:
            return False  # it has gone already
        message = HAND_OVER.pack(
            HandOver.NEW, self._listener, self._sequence, time.monotonic_ns()
        )
        word = processor_row(processor) + PROCESSOR_HANDED
        self._quotas.handed(processor, self._words[word] + 1)
        try:
            send_fds(self._handovers[processor], message, [sock.fileno()])
        except OSError as error:
            # The queue holds more than the credit: this is no backpressure.
            if not kept:
                _LOG.warning(
                    "a connection was lost on its way to a processor: %s", error
                )
            return True
        # Last: dying in between must give credit away, and not take it for good.
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
        """No descriptor is left: close one waiting connection, or we would spin.

        Returns:
            False if none waited: the kernel says that it has no descriptor first.
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
