"""Acceptor: one listener's process, which passes each client's socket on.

Sockets go to the listener's processors in round robin, among those with credit: at
most NEW_CONNECTIONS that a processor has been handed and has not yet registered. When
none has credit the acceptor waits, and the time it waits is AcceptorBlockedPercent.

Source: Kafka SocketServer.Acceptor.
"""

import errno
import os
import select
import socket
import time
from collections.abc import Mapping
from typing import Final

from mpbroker.ipc.doorbell import Doorbell
from mpbroker.ipc.fdpass import send_fds
from mpbroker.ipc.layout import (
    HEADER,
    HEADER_PHASE,
    HEADER_RETIRING,
    MAX_PROCESSORS,
    METRICS,
    METRICS_BLOCKED,
    PROCESSOR_HANDED,
    PROCESSOR_LISTENER,
    PROCESSOR_REGISTERED,
    Phase,
    processor_row,
)
from mpbroker.ipc.segment import Segment
from mpbroker.logger import get_logger
from mpbroker.network.hand_over import HAND_OVER, HandOver, KeeperLink
from mpbroker.network.processor import NEW_CONNECTIONS

_LOG = get_logger(__name__)

_POLL_S: Final = 0.5
_BLOCKED_S: Final = 0.001
# Errors of accept(2) that concern the one connection that was about to be accepted.
_ONE_CONNECTION: Final = {
    errno.ECONNABORTED,
    errno.EPROTO,
    errno.EPERM,
    errno.ENETDOWN,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.ENETUNREACH,
    errno.EINTR,
}
_NO_FILES: Final = {errno.EMFILE, errno.ENFILE}


class Acceptor:
    """Accept on one listener's socket and hand the connections over.

    Args:
        listener: its index; which processors serve it is in their rows.
        sock: the listening socket; the supervisor's, so its backlog outlives us.
        handovers: the sending ends of every processor's Unix socket, by id.
        keeper: gets a duplicate of each connection, before its processor does.
        doorbell: rung when the broker's phase changes.
        send_buffer_bytes: socket.send.buffer.bytes; -1 leaves it to the system.
    """

    def __init__(
        self,
        listener: int,
        sock: socket.socket,
        control: Segment,
        handovers: Mapping[int, socket.socket],
        keeper: KeeperLink,
        doorbell: Doorbell,
        send_buffer_bytes: int,
    ) -> None:
        self._listener = listener
        self._pid = os.getpid()
        self._sock = sock
        self._words = control.words
        self._handovers = handovers
        self._keeper = keeper
        self._send_buffer_bytes = send_buffer_bytes
        self._next = 0
        self._sequence = 0
        self._spare_fd = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        self.blocked_ns = 0
        self._epoll = select.epoll(flags=select.EPOLL_CLOEXEC)
        self._epoll.register(sock.fileno(), select.EPOLLIN)
        self._epoll.register(doorbell.fd, select.EPOLLIN | select.EPOLLET)

    def run(self) -> None:
        """Accept until the broker drains, or another acceptor serves in our place."""
        while not self._must_stop():
            if any(fd == self._sock.fileno() for fd, _ in self._epoll.poll(_POLL_S)):
                self.accept_all()

    def _must_stop(self) -> bool:
        words = self._words
        return (
            words[HEADER + HEADER_PHASE] >= Phase.DRAINING
            or words[HEADER + HEADER_RETIRING + self._listener] == self._pid
        )

    def accept_all(self) -> None:
        """Accept until nobody waits."""
        while not self._must_stop():
            processor = self._next_processor()
            if processor is None:
                return
            try:
                sock, _ = self._sock.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _NO_FILES:
                    if not self._refuse_one(error):
                        return
                elif error.errno not in _ONE_CONNECTION:
                    raise
                continue
            # Not before: whoever looks and finds nobody waiting skips no processor.
            self._next = processor + 1
            with sock:
                self._hand_over(sock, processor)

    def _next_processor(self) -> int | None:
        """The next one with credit; wait for it if there is none just now."""
        blocked_since = 0
        while True:
            for step in range(MAX_PROCESSORS):
                processor = (self._next + step) % MAX_PROCESSORS
                if self._has_credit(processor):
                    if blocked_since:
                        blocked_ns = time.monotonic_ns() - blocked_since
                        self.blocked_ns += blocked_ns
                        word = METRICS + METRICS_BLOCKED + self._listener
                        self._words[word] += blocked_ns
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

    def _hand_over(self, sock: socket.socket, processor: int) -> None:
        self._sequence += 1
        # First of all: should we or the processor die, the keeper sees it delivered.
        kept = self._keeper.keep_new(sock, processor, self._listener, self._sequence)
        try:
            if sock.family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if self._send_buffer_bytes >= 0:
                sock.setsockopt(
                    socket.SOL_SOCKET, socket.SO_SNDBUF, self._send_buffer_bytes
                )
        except OSError:
            return  # it has gone already
        message = HAND_OVER.pack(
            HandOver.NEW, self._listener, self._sequence, time.monotonic_ns()
        )
        try:
            send_fds(self._handovers[processor], message, [sock.fileno()])
        except OSError as error:
            # The queue holds more than the credit: this is no backpressure.
            if not kept:
                _LOG.warning(
                    "a connection was lost on its way to a processor: %s", error
                )
            return
        # Last: dying in between must give credit away, and not take it for good.
        self._words[processor_row(processor) + PROCESSOR_HANDED] += 1

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
        _LOG.error(
            "a connection was refused: %s; raise the limit of open files"
            " (ulimit -n, LimitNOFILE)",
            os.strerror(error.errno or 0),
        )
        return True
