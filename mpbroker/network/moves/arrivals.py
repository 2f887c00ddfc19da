"""Arrivals: the connections that come through a processor's hand-over socket."""

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

# A live keeper sends a successor's sockets within milliseconds; a new keeper reports
# that there are none. It takes longer only if the machine is too busy to start a
# keeper; and when we give up, connections close. Less than a lease (leases.py).
_DELIVERY_S: Final = 20.0
_POLL_S: Final = 0.05
# A connection is rarely handed over again sooner. It may wait here very long, if the
# processor has retired before it read its hand-over socket.
_LATE_NS: Final = 20_000_000
_NOT_DELIVERED: Final = 0  # the keeper has sent sockets to no incarnation
_RAISE_LIMIT: Final = "raise the limit of open files (ulimit -n, LimitNOFILE)"


class NewConnection(NamedTuple):
    """A connection that has no row yet."""

    sock: socket.socket
    listener: int
    sequence: int
    accepted_ns: int  # 0: it does not come directly from an acceptor
    is_late: bool  # another processor may have got it meanwhile


class GivenConnection(NamedTuple):
    """A connection that has a row."""

    sock: socket.socket
    connection: int
    accepted_ns: int = 0


class Arrivals:
    """The receiving end of one processor's hand-over socket."""

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
        """Whether new connections came during ``wait_for``."""
        return bool(self._early)

    def receive(
        self, max_messages: int
    ) -> tuple[list[NewConnection | GivenConnection], bool]:
        """Return the connections that were handed over, and if there may be more."""
        found: list[NewConnection | GivenConnection] = list(self._early)
        self._early = []
        for _ in range(max_messages):
            message = self._message()
            if message is None:
                return found, False
            found.extend(message)
        return found, True

    def _message(self) -> list[NewConnection] | list[GivenConnection] | None:
        """Return the connections of one message; None: there is no message."""
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
        """Whether sockets came that had no free descriptor; see ``ask_again``."""
        return self._lacks

    def ask_again(self, rows: ConnectionRows, keeper: KeeperLink) -> list[int]:
        """Ask the keeper again for sockets that came when no descriptor was free.

        To be called now and then: there may be no more room than before.

        Returns:
            The rows whose sockets are to come; if one does not come, it is lost.
        """
        if not self._lacks or not self._has_all:  # without all, it is still sending
            return []
        self._lacks = False
        self._words[self._row + PROCESSOR_DELIVERED] = _NOT_DELIVERED
        keeper.ask()
        return [row for row in rows.owned() if rows.is_on_its_way(row)]

    def had_all(self) -> bool:
        """Return whether the keeper had sent all our sockets at the call before this.

        If so, and all that has come since is handled, no socket is still to come.
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
        """Return whether the row is this processor's, and the socket is the row's."""
        words, row = self._words, connection_row(given.connection)
        return bool(
            words[row + CONNECTION_STATE] & STATE_MASK
            and words[row + CONNECTION_OWNER] == self._owner
            and words[row + CONNECTION_COOKIE] == socket_cookie(given.sock)
        )

    def wait_for(
        self, rows: list[int], keeper: KeeperLink, selector: ChannelSelector
    ) -> dict[int, socket.socket]:
        """Wait for the keeper to send the sockets of these rows, and return them.

        Only the doorbell and the hand-over socket may be registered with the selector.
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
