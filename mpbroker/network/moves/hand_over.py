"""What goes with a client's socket when it changes hands (SCM_RIGHTS).

To a processor, through its hand-over socket:

    NEW     acceptor:    one connection, accepted just now; it has used up credit
    AGAIN   keeper:      the same of one that seems to have got lost on its way
    ADOPT   keeper, or   connections that have rows already, one word a row behind
            a processor  the head: whoever owns a row carries it on

To the keeper, through its own: a new connection and for whom it is, duplicates of
connections that have rows, or what an acceptor had in hand when it died. Messages are
short and whole (SOCK_SEQPACKET). The supervisor holds both ends of all these sockets,
so what waits in one outlives whoever was to read it.
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
RESCUED: Final = -3  # an acceptor has died with them: somebody has them, or nobody
HAND_OUT: Final = -2  # with a Unix socket: whoever has its other end wants them all
# So many descriptors a message: a hundred would be no faster (0.3 us each).
MAX_SOCKETS: Final = 64
_RESCUE_S: Final = 1.0
_RETRY_S: Final = 0.002
_NO_KEEPER: Final = -1
MAX_MESSAGE_BYTES: Final = HAND_OVER.size + 8 * MAX_SOCKETS


class HandOver(IntEnum):
    """What a message to a processor brings."""

    NEW = 0
    AGAIN = 1
    ADOPT = 2


def pack_adopt(rows: Sequence[int]) -> bytes:
    """A message that brings the sockets of these rows, in this order."""
    return HAND_OVER.pack(HandOver.ADOPT, -1, len(rows), 0) + _words(len(rows)).pack(
        *rows
    )


def unpack_adopt(message: bytes) -> tuple[int, ...]:
    count = (len(message) - HAND_OVER.size) // 8
    return _words(count).unpack_from(message, HAND_OVER.size)


def _words(count: int) -> Struct:
    return Struct(f"={count}q")


class KeeperLink:
    """How acceptors and processors reach the keeper, which need not be alive."""

    def __init__(self, sock: socket.socket, bell: Doorbell) -> None:
        self._sock = sock
        self._bell = bell

    def keep_new(
        self, sock: socket.socket, processor: int, listener: int, sequence: int
    ) -> bool:
        """Leave a duplicate of a connection that has no row yet.

        Returns:
            False if the keeper is far behind. The connection works all the same.
        """
        return self._send(KEEP.pack(processor, listener, sequence), [sock.fileno()])

    def keep_rescued(self, socks: Sequence[socket.socket], listener: int) -> None:
        """Leave duplicates of connections that may be on their way, or lost.

        Waits, for a while, until the keeper has read what is before them.
        """
        message = KEEP.pack(RESCUED, listener, 0)
        deadline = time.monotonic() + _RESCUE_S
        for first in range(0, len(socks), MAX_SOCKETS):
            fds = [sock.fileno() for sock in socks[first : first + MAX_SOCKETS]]
            while not self._send(message, fds) and time.monotonic() < deadline:
                time.sleep(_RETRY_S)

    def keep(self, socks: Sequence[socket.socket]) -> bool:
        """Leave duplicates of connections that have rows; False: try again later."""
        fds = [sock.fileno() for sock in socks]
        return self._send(KEEP.pack(HAS_ROW, -1, 0), fds)

    def _send(self, message: bytes, fds: list[int]) -> bool:
        try:
            send_fds(self._sock, message, fds)
        except OSError:  # its queue is full
            return False
        return True

    def ask(self) -> None:
        """Make the keeper look at who lacks sockets."""
        self._bell.ring()


class Offers:
    """What a processor still has to leave with a keeper that may know none of it.

    That is all it has when there is a new keeper, or it is new itself; and who was on
    the way to it when the last keeper died, whom no other processor offers any more. Of
    what a keeper has already it drops the second duplicate.
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
        """If there is a new keeper, the last one's duplicates are gone with it."""
        keeper = self._words[HEADER + HEADER_KEEPER]
        if keeper != self._seen:
            self._seen, self._seen_ns = keeper, time.monotonic_ns()
            self._waiting = [channel.sock for channel in channels]

    def came(self, sock: socket.socket, accepted_ns: int) -> None:
        """A connection is here; if accepted before this keeper was seen, offer it."""
        if accepted_ns < self._seen_ns:
            self._waiting.append(sock)

    def send(self) -> bool:
        """Leave as many as it takes, of those still open; whether there are more."""
        while self._waiting:
            batch = [sock for sock in self._waiting[:MAX_SOCKETS] if sock.fileno() >= 0]
            if batch and not self._keeper.keep(batch):
                return True
            del self._waiting[:MAX_SOCKETS]
        return False
