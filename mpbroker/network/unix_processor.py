"""The processor of a listener whose clients come over a Unix socket.

The kernel does not count the bytes of such a connection, as it does those of TCP
(tcp_counters.py): SIOCOUTQ says what the client has not yet read, and nothing how much
was ever sent. So nobody can say where a dead processor was, and its connections end
with it, as those of TLS do: their rows say PRIVATE.
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
    """As Processor, which see."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._connections.security = ConnectionSecurity.PRIVATE
        self._connections.opened = self._opened

    def _opened(self, channel: Channel) -> None:
        # The file's mode has decided who may come.
        self._connections.admit(channel)

    def _depart(self) -> None:
        """Nothing can go elsewhere: close what is idle, if all must go."""
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
