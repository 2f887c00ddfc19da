"""What comes through a processor's hand-over socket."""

import socket
import time
from typing import Final, NamedTuple

from mpbroker.base.logger import get_logger
from mpbroker.ipc.fdpass import recv_fds_in_part
from mpbroker.ipc.layout import (
    CONNECTION_COOKIE,
    CONNECTION_OWNER,
    CONNECTION_STATE,
    PROCESSOR_DELIVERED,
    PROCESSOR_INCARNATION,
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

# The keeper sends a successor's sockets within milliseconds, if it lives; if not, its
# own successor says that there are none. Only a machine that is too busy to start it
# lets us wait longer, and to give up closes connections. Below a lease (leases.py).
_DELIVERY_S: Final = 20.0
_POLL_S: Final = 0.05
# Rarely is a connection handed over again sooner. One may wait here for a whole life:
# that of the processor that retired before it had read it.
_LATE_NS: Final = 20_000_000
_NOT_DELIVERED: Final = 0  # to no incarnation
_RAISE_LIMIT: Final = "raise the limit of open files (ulimit -n, LimitNOFILE)"


class NewConnection(NamedTuple):
    """One that has no row."""

    sock: socket.socket
    listener: int
    sequence: int
    accepted_ns: int  # 0: not by an acceptor just now
    is_late: bool  # so that another processor may have got it meanwhile


class GivenConnection(NamedTuple):
    """One that has a row."""

    sock: socket.socket
    connection: int
    accepted_ns: int = 0


class Arrivals:
    """One processor's receiving end."""

    def __init__(
        self, processor: int, control: Segment, handover: socket.socket
    ) -> None:
        self._words = control.words
        self._owner = processor + 1
        self._row = processor_row(processor)
        self._handover = handover
        self._early: list[NewConnection] = []
        self._lacks = False  # the kernel dropped sockets of rows that are ours
        self._had_all = False

    @property
    def has_early(self) -> bool:
        """New connections came while others were waited for."""
        return bool(self._early)

    def receive(
        self, max_messages: int
    ) -> tuple[list[NewConnection | GivenConnection], bool]:
        """Take what was handed over; return it, and whether there may be more."""
        found: list[NewConnection | GivenConnection] = list(self._early)
        self._early = []
        for _ in range(max_messages):
            message = self._message()
            if message is None:
                return found, False
            found.extend(message)
        return found, True

    def _message(self) -> list[NewConnection] | list[GivenConnection] | None:
        """What one message brought; None: there is none."""
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
        is_late = time.monotonic_ns() - accepted_ns > _LATE_NS
        return [
            NewConnection(sock, listener, sequence, accepted_ns, is_late)
            for sock in socks
        ]

    @property
    def lacks(self) -> bool:
        """Sockets came for which there was no descriptor; see ``ask_again``."""
        return self._lacks

    def ask_again(self, rows: ConnectionRows, keeper: KeeperLink) -> list[int]:
        """Have the keeper send once more what came when no descriptor was left.

        Now and then: there may be no more room than before.

        Returns:
            The rows whose sockets are to come; or are nobody's, if they do not.
        """
        if not self._lacks or not self._has_all:  # else it is still sending
            return []
        self._lacks = False
        self._words[self._row + PROCESSOR_DELIVERED] = _NOT_DELIVERED
        keeper.ask()
        return [row for row in rows.owned() if rows.is_on_its_way(row)]

    def had_all(self) -> bool:
        """The keeper had sent all that it has of ours when this was last asked.

        So after a look at what has come since there is nothing to be waited for.
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
        """Whether it is the very socket of the row, and the row is this processor's."""
        words, row = self._words, connection_row(given.connection)
        return bool(
            words[row + CONNECTION_STATE] & STATE_MASK
            and words[row + CONNECTION_OWNER] == self._owner
            and words[row + CONNECTION_COOKIE] == socket_cookie(given.sock)
        )

    def wait_for(
        self, rows: list[int], keeper: KeeperLink, selector: ChannelSelector
    ) -> dict[int, socket.socket]:
        """Return the sockets of these rows that the keeper has, when it has sent them.

        Nothing may be registered with the selector yet but what wakes us.
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
                    "%d sockets were not to be had: their connections are closed",
                    len(lacking),
                )
                return found
            selector.poll(_POLL_S)
