"""Departures: give connections to processors that stay or that have less to do.

The supervisor's order to do so is in the processor's record in shared memory: the
number of connections, and the processors that may get them, the targets. A connection
moves when it is READING, so it waits for one answer at most. A part of a frame stays
where it is, and the new owner fetches it:

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
from mpbroker.ipc.masks import read_mask
from mpbroker.ipc.segment import Segment
from mpbroker.network.channel import Channel
from mpbroker.network.channel_selector import ChannelSelector
from mpbroker.network.connection_rows import ConnectionRows
from mpbroker.network.moves.hand_over import MAX_SOCKETS, pack_adopt

ALL: Final = -1


class Departures:
    """Carries out the supervisor's order to give connections to other processors.

    Attributes:
        left: how many connections this processor still has to give away. 0: none. ALL:
            all that it has, and every new one.
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
        """Whether the order to give connections away is not fully carried out yet.

        Connections are still to be given, or the sockets of given ones to be sent.
        """
        return self.left != 0 or bool(self._unsent)

    def look(self) -> None:
        """Check shared memory for a new order; it replaces the last one."""
        words, row = self._words, self._row
        order = words[row + PROCESSOR_MOVE_ORDER]
        if order != self._order:
            self._order = order
            self._targets = read_mask(words, row + PROCESSOR_MOVE_TARGETS)
            self.left = words[row + PROCESSOR_MOVE_COUNT]

    def give(self, channels: list[Channel]) -> list[Channel]:
        """Make other processors the owners of connections, as many as ordered.

        Args:
            channels: connections that may be given away, because they have no request
                in flight (state READING).

        Returns:
            The connections that were given away: the caller must forget them, and call
            ``send``. The others stay, because the order is done, or because none of the
            processors named in the order serves their listener now.
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
        """Send a new, unregistered connection to a target that serves its listener.

        Targets are the processors named in the order. Return False if there is no such
        target, or its queue is full. Otherwise close this process's descriptor.

        Args:
            message: the message to send with the socket.
            sock: the connection's socket.
            listener: the index of the connection's listener.
        """
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
        """Send the sockets that ``give`` chose to their new owners; close them here.

        If an owner's queue is full, its sockets stay for the next call.
        """
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
        """Store in shared memory that the order is done, if it is.

        An order for some connections is also done when the processor has none left.

        Args:
            connections: how many connections this processor still has.
        """
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
        """Return the next processor that may get a connection of a listener.

        It is chosen in round robin from those that the order names and that serve the
        listener. Return None if there is none.
        """
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
