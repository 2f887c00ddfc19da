"""ChannelSelector: the only code that polls, receives and sends.

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

_CHANNEL_EVENTS: Final = (
    select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET
)
HANG_UP: Final = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR
READABLE: Final = select.EPOLLIN | HANG_UP
WRITABLE: Final = select.EPOLLOUT | select.EPOLLHUP | select.EPOLLERR
_MAX_EVENTS: Final = 256

CLOSED: Final = -1


def end_connection(sock: socket.socket) -> None:
    """End a connection although others have duplicates; close our descriptor."""
    with contextlib.suppress(OSError):  # the client has closed it already
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


class ChannelSelector:
    """One processor's epoll set, and the system calls on its sockets.

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
        """Watch a descriptor that is no channel, level-triggered."""
        self._epoll.register(fd, select.EPOLLIN)

    def watch_doorbell(self, doorbell: Doorbell) -> None:
        self.doorbell_fd = doorbell.fd
        self._epoll.register(doorbell.fd, select.EPOLLIN | select.EPOLLET)

    def register(self, channel: Channel) -> None:
        self._epoll.register(channel.fd, _CHANNEL_EVENTS)

    def close(self, channel: Channel) -> None:
        """End the connection for everyone, and close our descriptor."""
        self._epoll.unregister(channel.fd)
        end_connection(channel.sock)

    def unregister(self, channel: Channel) -> None:
        """Stop the events of a connection that moves to another process.

        To be called before our descriptor is closed. Otherwise the open file, which
        other processes share, would live on after the close, and events would come for
        a descriptor that is no longer ours.
        """
        self._epoll.unregister(channel.fd)

    def poll(self, timeout_s: float) -> list[tuple[int, int]]:
        """Return (fd, events), at most a few hundred; the others with the next poll."""
        events = self._epoll.poll(timeout_s, _MAX_EVENTS)
        self.last_poll = (len(events), timeout_s)
        return events

    def receive(self, channel: Channel, into: memoryview) -> int:
        """Receive once; 0: there are no bytes, CLOSED: the connection has ended."""
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

    def send(self, channel: Channel, data: memoryview, *, more: bool = False) -> int:
        """Send once; 0: the socket is full, CLOSED: the connection has ended."""
        try:
            return channel.sock.send(data, _MSG_MORE if more else 0)
        except BlockingIOError:
            return 0
        except OSError:
            return CLOSED

    def send_file(self, channel: Channel, file: int, position: int, length: int) -> int:
        """Send a range of a file once, with the results of ``send``.

        Raises:
            EOFError: the file ends before ``position``.
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
