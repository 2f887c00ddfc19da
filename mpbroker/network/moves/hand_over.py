"""Define and send the messages that pass a client's socket to another process.

The socket goes with the message (SCM_RIGHTS). A processor gets three kinds of messages
through its hand-over socket:

    kind    from         carries
    NEW     acceptor     one connection, accepted just now; it has used up credit
    AGAIN   keeper       one connection that was probably lost on its way
    ADOPT   keeper, or   connections that have rows already, one word for each row
            a processor  behind the head: the row's owner continues the connection

The keeper gets messages through its own socket: a new connection and its processor,
duplicates of connections that have rows, or the connections of an acceptor that has
died. A message is short and never split (SOCK_SEQPACKET). The supervisor holds both
ends of all these sockets, so unread messages outlive the process that was to read them.
"""

import socket
import time
from collections.abc import Iterable, Sequence
from enum import IntEnum
from struct import Struct
from typing import Final

from mpbroker.ipc.doorbell import Doorbell
from mpbroker.ipc.fdpass import send_fds
from mpbroker.ipc.layout import HEADER, HEADER_KEEPER
from mpbroker.ipc.segment import Segment
from mpbroker.network.channel import Channel

# kind, listener, accept sequence, accepted (ns, monotonic)
HAND_OVER: Final = Struct("=iiqq")
# processor (or HAS_ROW), listener, accept sequence
KEEP: Final = Struct("=iiq")
HAS_ROW: Final = -1
RESCUED: Final = -3  # connections of a dead acceptor; a processor may have them or not
HAND_OUT: Final = -2  # with a Unix socket: send all sockets to its other end
# Descriptors in a message; with a hundred it would not be faster (0.3 us each).
MAX_SOCKETS: Final = 64
_RESCUE_S: Final = 1.0
_RETRY_S: Final = 0.002
_NO_KEEPER: Final = -1
MAX_MESSAGE_BYTES: Final = HAND_OVER.size + 8 * MAX_SOCKETS


class HandOver(IntEnum):
    """Names the kinds of messages to a processor."""

    NEW = 0
    AGAIN = 1
    ADOPT = 2


def pack_adopt(rows: Sequence[int]) -> bytes:
    """Return the bytes of an ADOPT message, which gives connections to their owner.

    Args:
        rows: the indexes of the connections' rows (records in shared memory), in the
            order in which the sockets are sent.
    """
    return HAND_OVER.pack(HandOver.ADOPT, -1, len(rows), 0) + _words(len(rows)).pack(
        *rows
    )


def unpack_adopt(message: bytes) -> tuple[int, ...]:
    count = (len(message) - HAND_OVER.size) // 8
    return _words(count).unpack_from(message, HAND_OVER.size)


def _words(count: int) -> Struct:
    return Struct(f"={count}q")


class KeeperLink:
    """Sends duplicates of clients' sockets to the keeper, which saves them from death.

    While no keeper runs, the messages wait in the socket for the next keeper.
    """

    def __init__(self, sock: socket.socket, bell: Doorbell) -> None:
        self._sock = sock
        self._bell = bell

    def keep_new(
        self, sock: socket.socket, processor: int, listener: int, sequence: int
    ) -> bool:
        """Send the keeper a duplicate of a connection that is not registered yet.

        Returns:
            False if the keeper's queue is full. The connection can be used even then.
        """
        return self._send(KEEP.pack(processor, listener, sequence), [sock.fileno()])

    def keep_rescued(self, socks: Sequence[socket.socket], listener: int) -> None:
        """Send the keeper the connections of a dead acceptor.

        Some of them may have been handed to a processor already. If the keeper's queue
        is full, wait up to a second for room; after that, connections are left out.
        """
        message = KEEP.pack(RESCUED, listener, 0)
        deadline = time.monotonic() + _RESCUE_S
        for first in range(0, len(socks), MAX_SOCKETS):
            fds = [sock.fileno() for sock in socks[first : first + MAX_SOCKETS]]
            while not self._send(message, fds) and time.monotonic() < deadline:
                time.sleep(_RETRY_S)

    def keep(self, socks: Sequence[socket.socket]) -> bool:
        """Send the keeper duplicates of connections that a processor has registered.

        Return False if the keeper's queue is full: the caller tries again later.
        """
        fds = [sock.fileno() for sock in socks]
        return self._send(KEEP.pack(HAS_ROW, -1, 0), fds)

    def _send(self, message: bytes, fds: list[int]) -> bool:
        try:
            send_fds(self._sock, message, fds)
        except OSError:  # its queue is full
            return False
        return True

    def ask(self) -> None:
        """Wake the keeper, to send sockets to the processors that lack them."""
        self._bell.ring()


class Offers:
    """Keeps the sockets of which a processor must still send the keeper duplicates.

    If the keeper or the processor is new, these are all sockets of the processor. A
    socket that was on the way to the processor when the last keeper died is added when
    it arrives, since no other processor offers it. A keeper that has a socket already
    drops the second duplicate.
    """

    def __init__(self, control: Segment, keeper: KeeperLink) -> None:
        self._words = control.words
        self._keeper = keeper
        self._seen = _NO_KEEPER
        self._seen_ns = time.monotonic_ns()
        self._waiting: list[socket.socket] = []

    @property
    def is_under_way(self) -> bool:
        return bool(self._waiting)

    def look(self, channels: Iterable[Channel]) -> None:
        """Plan to send the keeper all sockets, if it is a new one since the last call.

        A new keeper has no duplicates yet.
        """
        keeper = self._words[HEADER + HEADER_KEEPER]
        if keeper != self._seen:
            self._seen, self._seen_ns = keeper, time.monotonic_ns()
            self._waiting = [channel.sock for channel in channels]

    def came(self, sock: socket.socket, accepted_ns: int) -> None:
        """Plan to send the keeper an arrived connection, if it may not have it.

        That is so if it was accepted before this process knew of the present keeper.

        Args:
            sock: the connection's socket.
            accepted_ns: when it was accepted, monotonic; 0 if that is unknown.
        """
        if accepted_ns < self._seen_ns:
            self._waiting.append(sock)

    def send(self) -> bool:
        """Send the planned duplicates, while the keeper's queue has room.

        Return whether some are left, which the next call sends.
        """
        while self._waiting:
            batch = [sock for sock in self._waiting[:MAX_SOCKETS] if sock.fileno() >= 0]
            if batch and not self._keeper.keep(batch):
                return True
            del self._waiting[:MAX_SOCKETS]
        return False
