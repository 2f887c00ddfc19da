"""UnixProcessor: serve the clients of a listener with a Unix socket.

The kernel counts the bytes of a TCP connection (tcp_counters.py), but not those of a
Unix socket: SIOCOUTQ gives the bytes that the client has not read yet, but nothing
gives the bytes that were sent. So the progress of a dead processor's connections is
unknown, and the connections end with their processor, as connections over TLS do. Their
rows say PRIVATE.
"""

from __future__ import annotations

from typing import Any

from mpbroker.ipc.layout import (
    ConnectionSecurity,
    ConnectionState,
    ProcessorCounter,
)
from mpbroker.network.channel import Channel
from mpbroker.network.moves.departures import ALL
from mpbroker.network.processor import Processor


class UnixProcessor(Processor):
    """Serves connections over a Unix socket; no other process can continue them."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._connections.security = ConnectionSecurity.PRIVATE
        self._connections.opened = self._opened

    def _opened(self, channel: Channel) -> None:
        # No authentication: the mode of the socket's file has allowed the client.
        self._connections.admit(channel)

    def _depart(self) -> None:
        """Close the idle connections if all connections must leave this processor.

        None can be given away. If only some were to leave, all stay and are read again.
        """
        departures = self._departures
        reading = ConnectionState.READING
        idle = [each for each in self._channels.values() if each.state == reading]
        if departures.left == ALL:
            for channel in idle:
                self._connections.close(channel, ProcessorCounter.CLOSED_BY_HANDLER)
        else:
            departures.left = 0
            self._stay(idle)
        departures.send()
        departures.note_progress(len(self._channels))
