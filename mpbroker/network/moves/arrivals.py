"""Arrivals: receive the connections that other processes send to a processor."""

import fcntl
import os
import socket
import time
from typing import Final

from mpbroker.base.logger import get_logger
from mpbroker.base.named_tuple import NamedTuple
from mpbroker.ipc.fdpass import recv_fds_in_part
from mpbroker.ipc.layout import (
    CONNECTION_COOKIE,
    CONNECTION_OWNER,
    CONNECTION_STATE,
    PROCESSOR_DELIVERED,
    PROCESSOR_INCARNATION,
    PROCESSOR_LISTENER,
    PROCESSOR_REGISTERED,
    STATE_MASK,
    connection_row,
    processor_row,
)
from mpbroker.ipc.segment import Segment
from mpbroker.network.channel_selector import ChannelSelector
from mpbroker.network.connection_rows import ConnectionRows
from mpbroker.network.moves.hand_over import (
    HAND_OVER,
    MAX_MESSAGE_BYTES,
    MAX_SOCKETS,
    HandOver,
    KeeperLink,
    unpack_adopt,
)
from mpbroker.network.moves.tcp_counters import socket_cookie

_LOG = get_logger(__name__)

# A live keeper sends a successor's sockets within milliseconds; a new keeper reports
# that there are none. It takes longer only if the machine is too busy to start a
# keeper. When we give up, connections close. The time is less than a lease (leases.py).
_DELIVERY_S: Final = 20.0
_POLL_S: Final = 0.05
# A connection is rarely handed over again sooner. It may wait in the hand-over socket
# very long, if the processor has retired before it read the socket.
_LATE_NS: Final = 20_000_000
_NOT_DELIVERED: Final = 0  # the keeper has sent sockets to no incarnation
_RAISE_LIMIT: Final = "raise the limit of open files (ulimit -n, LimitNOFILE)"


class NewConnection(NamedTuple):
    """Holds a connection that has arrived, and has no record in shared memory yet."""

    sock: socket.socket
    listener: int
    sequence: int
    accepted_ns: int  # 0: it does not come directly from an acceptor


class GivenConnection(NamedTuple):
    """Holds a connection that has arrived from another process that served it.

    It has a row already, its record in shared memory.
    """

    sock: socket.socket
    connection: int
    accepted_ns: int = 0


class LateLock:
    """Lets only one processor at a time give a row to a late connection.

    A connection is late if several processors may have been given it: the keeper and a
    processor that retires may each hand one connection to another processor. Without
    the lock, both could find no row of it, and both begin to read. The kernel releases
    the lock when its holder dies.

    Args:
        control: the segment on whose file the flock is taken. Each lock opens the file
            anew, because inherited descriptors would share one flock.
    """

    def __init__(self, control: Segment) -> None:
        self._path = f"/proc/self/fd/{control.fd}"
        self._fd = -1

    def try_acquire(self) -> bool:
        """Take the lock for late connections, without waiting for it.

        Return False if another processor has the lock, or no descriptor is free.
        """
        try:
            self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.release()
            return False
        return True

    def release(self) -> None:
        fd, self._fd = self._fd, -1
        os.close(fd)


class Arrivals:
    """Receives the connections that other processes send to one processor."""

    def __init__(
        self, processor: int, control: Segment, handover: socket.socket
    ) -> None:
        self._words = control.words
        self._owner = processor + 1
        self._row = processor_row(processor)
        self._handover = handover
        self._early: list[NewConnection] = []
        self._lacks = False  # whether the kernel dropped sockets of our rows
        self._had_all = False

    @property
    def has_early(self) -> bool:
        """Whether new connections were kept for the next ``receive``.

        They came during ``wait_for``, or were put back.
        """
        return bool(self._early)

    def receive(
        self, max_messages: int
    ) -> tuple[list[NewConnection | GivenConnection], bool]:
        """Take the connections that other processes have sent to this processor.

        Args:
            max_messages: how many messages to read at most.

        Returns:
            The connections, those kept since before first, and whether there may be
            more.
        """
        found: list[NewConnection | GivenConnection] = list(self._early)
        self._early = []
        for _ in range(max_messages):
            message = self._message()
            if message is None:
                return found, False
            found.extend(message)
        return found, True

    def _message(self) -> list[NewConnection] | list[GivenConnection] | None:
        """Receive one message; return its connections, or None if there is none.

        The list is shorter, or empty, if no descriptor was free for all sockets.
        """
        try:
            message, fds, is_cut = recv_fds_in_part(
                self._handover, MAX_MESSAGE_BYTES, MAX_SOCKETS
            )
        except BlockingIOError:
            return None
        if not message:
            return None
        kind, listener, sequence, accepted_ns = HAND_OVER.unpack_from(message)
        socks = [socket.socket(fileno=fd) for fd in fds]
        if kind == HandOver.ADOPT:
            rows = unpack_adopt(message)
            if is_cut:
                self._lacks = True
                _LOG.warning(
                    "%d connections wait for descriptors; %s",
                    len(rows) - len(socks),
                    _RAISE_LIMIT,
                )
            pairs = zip(socks, rows, strict=not is_cut)
            return [GivenConnection(sock, row) for sock, row in pairs]
        if kind == HandOver.NEW:
            self._words[self._row + PROCESSOR_REGISTERED] += 1
        if is_cut:
            _LOG.warning("a new connection was lost; %s", _RAISE_LIMIT)
        return [NewConnection(sock, listener, sequence, accepted_ns) for sock in socks]

    def is_late(self, new: NewConnection) -> bool:
        """Return whether another processor may have been given this connection, too.

        That can be if the connection is old: if no processor has registered a
        connection after a while, the keeper sends it again, perhaps to another one. It
        can also be if this processor does not serve the connection's listener any more:
        then the keeper chooses another one.
        """
        return bool(
            time.monotonic_ns() - new.accepted_ns > _LATE_NS
            or self._words[self._row + PROCESSOR_LISTENER] != new.listener + 1
        )

    def put_back(self, new: NewConnection) -> None:
        """Keep a new connection, so that the next ``receive`` returns it once more."""
        self._early.append(new)

    @property
    def lacks(self) -> bool:
        """Whether sockets of own connections came when no descriptor was free.

        The kernel has dropped them; `ask_again` asks the keeper for them.
        """
        return self._lacks

    def ask_again(self, rows: ConnectionRows, keeper: KeeperLink) -> list[int]:
        """Ask the keeper again for sockets that came when no descriptor was free.

        Do nothing if all sockets are here, or the keeper is still sending. The caller
        repeats this, because there may still be no free descriptor.

        Returns:
            The rows (connections' records) whose sockets must come now; a socket that
            does not come is lost. The list is empty if the keeper was not asked.
        """
        if not self._lacks or not self._has_all:  # without all, it is still sending
            return []
        self._lacks = False
        self._words[self._row + PROCESSOR_DELIVERED] = _NOT_DELIVERED
        keeper.ask()
        return [row for row in rows.owned() if rows.is_on_its_way(row)]

    def had_all(self) -> bool:
        """Return whether the keeper had sent all our sockets when this was last called.

        Return False also if it is sending sockets again now. If the result is True, and
        the caller has handled all messages since the last call, no socket is on its
        way.
        """
        had_all, self._had_all = self._had_all, self._has_all
        return had_all and self._had_all

    @property
    def _has_all(self) -> bool:
        words, row = self._words, self._row
        return bool(
            words[row + PROCESSOR_DELIVERED] == words[row + PROCESSOR_INCARNATION]
        )

    def is_ours(self, given: GivenConnection) -> bool:
        """Return whether this processor owns a connection, and the socket is right.

        The connection's record in shared memory says both: its owner, and its socket's
        cookie.
        """
        words, row = self._words, connection_row(given.connection)
        return bool(
            words[row + CONNECTION_STATE] & STATE_MASK
            and words[row + CONNECTION_OWNER] == self._owner
            and words[row + CONNECTION_COOKIE] == socket_cookie(given.sock)
        )

    def wait_for(
        self, rows: list[int], keeper: KeeperLink, selector: ChannelSelector
    ) -> dict[int, socket.socket]:
        """Wait for the keeper to send some connections' sockets, at most 20 seconds.

        New connections that come meanwhile are kept for ``receive``. Other sockets are
        closed.

        Args:
            rows: the indexes of the rows (connections' records) whose sockets this
                process lacks.
            keeper: is asked to send the sockets.
            selector: only the doorbell and the hand-over socket may be registered with
                it.

        Returns:
            The sockets that came, by row.
        """
        words, row = self._words, self._row
        lacking = set(rows)
        found: dict[int, socket.socket] = {}
        keeper.ask()
        deadline = time.monotonic() + _DELIVERY_S
        while True:
            delivered = words[row + PROCESSOR_DELIVERED]
            while (message := self._message()) is not None:
                for each in message:
                    if isinstance(each, NewConnection):
                        self._early.append(each)
                    elif each.connection in lacking and self.is_ours(each):
                        lacking.remove(each.connection)
                        found[each.connection] = each.sock
                    else:
                        each.sock.close()
            if not lacking or delivered == words[row + PROCESSOR_INCARNATION]:
                return found
            if time.monotonic() > deadline:
                _LOG.warning(
                    "%d sockets did not arrive in time: their connections are closed",
                    len(lacking),
                )
                return found
            selector.poll(_POLL_S)
