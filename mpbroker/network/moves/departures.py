"""Give connections away: to processors that stay, or to ones that have less to do.

The order lies in the processor's row: how many, and to whom. A connection goes at a
moment when it is READING, so at most one answer away; what it has of a frame stays
where it is, and its new owner fetches it:

    giver    no more events of the socket
    giver    the row's owner is another: the commit
    giver    the socket goes to the new owner; ours is closed
    owner    reads row and counters, as after a death, and copies the bytes over
    giver    sees that the row names the block no more, and frees it

A giver that dies between the second line and the third leaves a row whose owner lacks
the socket; the keeper sends it. Whoever gets a socket twice closes the second.
"""

import socket
from collections import deque
from collections.abc import Mapping
from typing import Final

from mpbroker.ipc.fdpass import send_fds
from mpbroker.ipc.layout import (
    CONNECTION_LISTENER,
    MAX_PROCESSORS,
    PROCESSOR_LISTENER,
    PROCESSOR_MOVE_COUNT,
    PROCESSOR_MOVE_DONE,
    PROCESSOR_MOVE_ORDER,
    PROCESSOR_MOVE_TARGETS,
    connection_row,
    processor_row,
)
from mpbroker.ipc.segment import Segment
from mpbroker.network.channel import Channel
from mpbroker.network.channel_selector import ChannelSelector
from mpbroker.network.connection_rows import ConnectionRows
from mpbroker.network.moves.hand_over import MAX_SOCKETS, pack_adopt

ALL: Final = -1


class Departures:
    """What one processor was told to give away, and what is on its way.

    Attributes:
        left: connections still to be given away; ALL: every one, and those to come.
    """

    def __init__(
        self,
        processor: int,
        control: Segment,
        handovers: Mapping[int, socket.socket],
        rows: ConnectionRows,
        selector: ChannelSelector,
    ) -> None:
        self._words = control.words
        self._processor = processor
        self._row = processor_row(processor)
        self._handovers = handovers
        self._rows = rows
        self._selector = selector
        # A predecessor's order is ours, if it was not done with it.
        self._order = self._words[self._row + PROCESSOR_MOVE_DONE]
        self._targets = 0
        self._next = processor + 1
        self.left = 0
        self._unsent: deque[tuple[int, list[Channel]]] = deque()

    @property
    def is_under_way(self) -> bool:
        """Something is to be given away, or on its way."""
        return self.left != 0 or bool(self._unsent)

    def look(self) -> None:
        """See whether there is a new order; the last one counts."""
        words, row = self._words, self._row
        order = words[row + PROCESSOR_MOVE_ORDER]
        if order != self._order:
            self._order = order
            self._targets = words[row + PROCESSOR_MOVE_TARGETS]
            self.left = words[row + PROCESSOR_MOVE_COUNT]

    def give(self, channels: list[Channel]) -> list[Channel]:
        """Give READING connections away; return those to ``send`` and to forget.

        The others have nobody to go to just now.
        """
        gone: list[Channel] = []
        by_target: dict[int, list[Channel]] = {}
        for channel in channels:
            target = self._target_for(channel.connection) if self.left else None
            if target is None:
                continue
            self._selector.unregister(channel)
            self._rows.give_away(channel.connection, target)
            by_target.setdefault(target, []).append(channel)
            gone.append(channel)
            if self.left != ALL:
                self.left -= 1
        for target, batch in by_target.items():
            for first in range(0, len(batch), MAX_SOCKETS):
                self._unsent.append((target, batch[first : first + MAX_SOCKETS]))
        return gone

    def forward(self, message: bytes, sock: socket.socket, listener: int) -> bool:
        """Pass a connection on that has no row yet; False: there is nobody."""
        target = self._target(listener)
        if target is None:
            return False
        try:
            send_fds(self._handovers[target], message, [sock.fileno()])
        except OSError:
            return False
        sock.close()
        return True

    def send(self) -> None:
        """Send what has been given away, as it is taken."""
        for _ in range(len(self._unsent)):
            target, batch = self._unsent.popleft()
            message = pack_adopt([channel.connection for channel in batch])
            fds = [channel.fd for channel in batch]
            try:
                send_fds(self._handovers[target], message, fds)
            except OSError:  # its queue is full
                self._unsent.append((target, batch))
                continue
            for channel in batch:
                channel.sock.close()

    def note_progress(self, connections: int) -> None:
        """Say when the order has been carried out; ``connections`` are still here."""
        if self.left != ALL and not connections:
            self.left = 0
        done = not connections if self.left == ALL else not self.left
        if done and not self._unsent:
            self._words[self._row + PROCESSOR_MOVE_DONE] = self._order

    @property
    def is_finished(self) -> bool:
        done: bool = self._words[self._row + PROCESSOR_MOVE_DONE] == self._order
        return done

    def _target_for(self, connection: int) -> int | None:
        words = self._words
        return self._target(words[connection_row(connection) + CONNECTION_LISTENER])

    def _target(self, listener: int) -> int | None:
        """The next of the targets, in turn, that serves this listener."""
        words = self._words
        for step in range(MAX_PROCESSORS):
            target = (self._next + step) % MAX_PROCESSORS
            if (
                self._targets >> target & 1
                and target != self._processor
                and words[processor_row(target) + PROCESSOR_LISTENER] == listener + 1
            ):
                self._next = target + 1
                return target
        return None
