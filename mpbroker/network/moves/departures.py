"""Departures: give connections to processors that stay or that have less to do.

The order is in the processor's row: the number of connections, and their targets. A
connection moves when it is READING, so it waits for one answer at most. A part of a
frame stays where it is, and the new owner fetches it:

    giver    ends the events of the socket
    giver    stores another owner in the row: the commit
    giver    sends the socket to the new owner, and closes its own descriptor
    owner    reads row and counters, as after a death, and copies the bytes
    giver    sees that the row does not name the block any more, and frees it

If a giver dies between the second line and the third, the owner lacks the socket, and
the keeper sends it. A processor that gets a socket twice closes the second duplicate.
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
    """One processor's order to give connections away, and those not sent yet.

    Attributes:
        left: connections still to be given away; ALL: all, and every new one.
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
        # An order that a predecessor did not finish is ours now.
        self._order = self._words[self._row + PROCESSOR_MOVE_DONE]
        self._targets = 0
        self._next = processor + 1
        self.left = 0
        self._unsent: deque[tuple[int, list[Channel]]] = deque()

    @property
    def is_under_way(self) -> bool:
        """Whether connections are still to be given away, or to be sent."""
        return self.left != 0 or bool(self._unsent)

    def look(self) -> None:
        """Check for a new order; it replaces the last one."""
        words, row = self._words, self._row
        order = words[row + PROCESSOR_MOVE_ORDER]
        if order != self._order:
            self._order = order
            self._targets = words[row + PROCESSOR_MOVE_TARGETS]
            self.left = words[row + PROCESSOR_MOVE_COUNT]

    def give(self, channels: list[Channel]) -> list[Channel]:
        """Give READING connections away; return those that were given away.

        The caller must ``send`` and forget them. The others have no target just now.
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
        """Pass a connection on that has no row yet; False: there is no target."""
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
        """Send connections that were given away, as far as the queues have room."""
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
        """Note in the row if the order is done; ``connections`` are left here."""
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
        """Return the next target, in round robin, that serves this listener."""
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
