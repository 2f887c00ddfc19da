"""The processor of a listener whose clients come over a Unix socket.

The kernel counts the bytes of a TCP connection (tcp_counters.py), but not those of a
Unix socket: SIOCOUTQ gives the bytes that the client has not read yet, but nothing
gives the bytes that were sent. So the progress of a dead processor's connections is
unknown, and they end with it, as those of TLS do: their rows say PRIVATE.
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
    """A Processor whose connections cannot be continued by another process."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._connections.security = ConnectionSecurity.PRIVATE
        self._connections.opened = self._opened

    def _opened(self, channel: Channel) -> None:
        # No authentication: the mode of the socket's file has allowed the client.
        self._connections.admit(channel)

    def _depart(self) -> None:
        """Close idle connections if all must go, since none can be given away."""
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
