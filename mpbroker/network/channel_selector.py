"""ChannelSelector: the only Python code that polls, receives and sends for clients.

Each socket is registered once, for reading, writing and hang-up, edge-triggered. So a
connection is muted by a Python flag, without a system call. In return a reader must
remember that there may be more bytes (``Channel.readable``), until a short read shows
that there are none.

Source: epoll(7), "Level-triggered and edge-triggered".
"""

import contextlib
import os
import select
import socket
from typing import Final

from mpbroker.ipc.doorbell import Doorbell
from mpbroker.network.channel import Channel

# TCP urgent data. Reads stop short before it, which would look as if the socket were
# drained, and no Kafka client sends any: a connection that does is ended. Accepted
# sockets have SO_OOBINLINE, so that until then the kernel's counters are right.
URGENT: Final = select.EPOLLPRI
_CHANNEL_EVENTS: Final = (
    select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | URGENT | select.EPOLLET
)
HANG_UP: Final = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR | URGENT
READABLE: Final = select.EPOLLIN | HANG_UP
WRITABLE: Final = select.EPOLLOUT | select.EPOLLHUP | select.EPOLLERR
_MAX_EVENTS: Final = 256

CLOSED: Final = -1


def end_connection(sock: socket.socket) -> None:
    """Shut a connection down for all processes that share it; close this descriptor."""
    with contextlib.suppress(OSError):  # the client has closed it already
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


def has_ended(sock: socket.socket) -> bool:
    """Return whether `end_connection` ended a connection, or its client reset it."""
    poll = select.poll()
    poll.register(sock, 0)  # hang-ups and errors are always reported
    return bool(poll.poll(0))


class ChannelSelector:
    """Polls, receives and sends for the sockets of one processor.

    Attributes:
        last_poll: the number of events of any kind that the last poll returned, and its
            timeout in seconds.
        doorbell_fd: the descriptor given to ``watch_doorbell``; -1: none yet.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll(flags=select.EPOLL_CLOEXEC)
        self.fd = self._epoll.fileno()  # for the compiled core, which waits too
        self.doorbell_fd = -1
        self.last_poll = (0, 0.0)

    def watch(self, fd: int) -> None:
        """Watch a descriptor that is no client's socket.

        It is watched for reading, level-triggered.
        """
        self._epoll.register(fd, select.EPOLLIN)

    def watch_doorbell(self, doorbell: Doorbell) -> None:
        self.doorbell_fd = doorbell.fd
        self._epoll.register(doorbell.fd, select.EPOLLIN | select.EPOLLET)

    def register(self, channel: Channel) -> None:
        self._epoll.register(channel.fd, _CHANNEL_EVENTS)

    def close(self, channel: Channel) -> None:
        """End a connection for all processes that share it; close this descriptor."""
        self._epoll.unregister(channel.fd)
        end_connection(channel.sock)

    def end_reading(self, channel: Channel) -> None:
        """Shut the receiving direction down: bytes that have come can still be read.

        The next poll then reports the end of the connection.
        """
        with contextlib.suppress(OSError):  # the client has closed it already
            channel.sock.shutdown(socket.SHUT_RD)

    def unregister(self, channel: Channel) -> None:
        """Stop the events of a connection that moves to another process.

        To be called before this process closes its descriptor. Otherwise the open file,
        which other processes share, would live on after the close, and events would
        come for a descriptor that this process no longer has.
        """
        self._epoll.unregister(channel.fd)

    def poll(self, timeout_s: float) -> list[tuple[int, int]]:
        """Wait for events; return at most _MAX_EVENTS pairs (fd, events).

        Further events are returned by the next poll.
        """
        events = self._epoll.poll(timeout_s, _MAX_EVENTS)
        self.last_poll = (len(events), timeout_s)
        return events

    def receive(self, channel: Channel, into: memoryview) -> int:
        """Call recv once for a connection; return the number of bytes received.

        Return 0 if no bytes have come, CLOSED if the connection has ended. Set
        ``channel.readable`` to False if the socket is drained.
        """
        try:
            count = channel.sock.recv_into(into)
        except BlockingIOError:
            channel.readable = False
            return 0
        except OSError:
            return CLOSED
        if count == 0:
            return CLOSED
        if count < len(into) and not channel.closing:
            # A short read has drained the socket. After a hang-up there must be another
            # read, because the end of file gives no further event.
            channel.readable = False
        return count

    def has_bytes(self, channel: Channel) -> bool:
        """Return whether bytes have come, without receiving them.

        Set ``channel.readable`` to False if neither bytes nor the end have come.
        """
        try:
            return bool(channel.sock.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            channel.readable = False
        except OSError:
            pass  # receive() gets the error, too
        return False

    def send(self, channel: Channel, data: memoryview, *, more: bool = False) -> int:
        """Call send once; return the number of bytes sent.

        Return 0 if the socket is full, CLOSED if the connection has ended.

        Args:
            channel: the connection.
            data: the bytes to send.
            more: whether more bytes follow at once (MSG_MORE).
        """
        try:
            return channel.sock.send(data, _MSG_MORE if more else 0)
        except BlockingIOError:
            return 0
        except OSError:
            return CLOSED

    def send_file(self, channel: Channel, file: int, position: int, length: int) -> int:
        """Call sendfile once for a range of a file; return the number of bytes sent.

        Return 0 if the socket is full, CLOSED if the connection has ended.

        Raises:
            EOFError: the file ends at or before ``position``.
        """
        try:
            count = os.sendfile(channel.fd, file, position, length)
        except BlockingIOError:
            return 0
        except OSError:
            return CLOSED
        if count == 0:
            raise EOFError(f"no bytes at position {position}")
        return count


_MSG_MORE: Final = 0x8000  # socket.MSG_MORE; as an int, for the hot path
