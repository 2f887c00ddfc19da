"""SecureSelector: poll, receive and send for a SecureProcessor.

It keeps the events of unready connections (not authenticated yet) apart, and wakes up
when a delay or timeout of one of them is over. Over TLS it reads and writes through
OpenSSL. Then the socket and the stream become ready at different times:

- A record that OpenSSL has read only in part gives no further event. So a channel is
  drained when OpenSSL wants to read from the socket, and not before.
- OpenSSL may have to read in order to write, and the other way round. So any event
  counts for both directions.
- OpenSSL encrypts one record at a time. So a send continues until the socket is full.
- The kernel cannot encrypt. So file ranges are read, and sent like other bytes.

Source: SSL_read(3), SSL_write(3), "Notes on non-blocking I/O" in Python's ssl.
"""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Callable, Container
from typing import Final

from mpbroker.network.channel import Channel
from mpbroker.network.channel_selector import CLOSED, ChannelSelector

_BOTH: Final = select.EPOLLIN | select.EPOLLOUT
# Bytes of a file that are read at once: several records, but little memory.
_FILE_BYTES: Final = 256 * 1024


class SecureSelector(ChannelSelector):
    """Polls like ChannelSelector, but sets events of unready connections aside.

    An unready connection has not authenticated yet. This class itself is used without
    TLS, for SASL_PLAINTEXT.

    Attributes:
        unready: descriptors whose events are kept apart.
        events: events kept apart since the last take_events().
        due_s: returns the seconds until a delay or timeout of an unready connection is
            over. The processor sets it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.unready: Container[int] = ()
        self.events: list[tuple[int, int]] = []
        self.due_s: Callable[[], float] = lambda: float("inf")

    def poll(self, timeout_s: float) -> list[tuple[int, int]]:
        return self.sift(super().poll(max(0.0, min(timeout_s, self.due_s()))))

    def sift(self, found: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Set the events of unready connections aside, and return the others.

        Unready means that the connection has not authenticated yet.
        """
        unready = self.unready
        if not unready:
            return found
        self.events += [event for event in found if event[0] in unready]
        return [event for event in found if event[0] not in unready]

    def take_events(self) -> list[tuple[int, int]]:
        events, self.events = self.events, []
        return events


class TlsSelector(SecureSelector):
    """Receives and sends over TLS.

    A socket becomes an ssl.SSLSocket when its first bytes have come.
    """

    def __init__(self) -> None:
        super().__init__()
        import ssl

        self._wants = (ssl.SSLWantReadError, ssl.SSLWantWriteError)
        self._buffer = memoryview(bytearray(_FILE_BYTES))

    def poll(self, timeout_s: float) -> list[tuple[int, int]]:
        return [
            (fd, event | _BOTH if event & _BOTH else event)
            for fd, event in super().poll(timeout_s)
        ]

    def close(self, channel: Channel) -> None:
        # Tell the client that this is no truncation attack. It need not answer.
        unwrap = getattr(channel.sock, "unwrap", None)
        if unwrap is not None:
            with contextlib.suppress(OSError, ValueError):
                unwrap()
        super().close(channel)

    def receive(self, channel: Channel, into: memoryview) -> int:
        try:
            count = channel.sock.recv_into(into)
        except self._wants:
            channel.readable = False
            return 0
        except OSError:
            return CLOSED
        return count or CLOSED

    def has_bytes(self, channel: Channel) -> bool:
        # OpenSSL may have them. It does not matter: the row is PRIVATE.
        return channel.readable

    def send(self, channel: Channel, data: memoryview, *, more: bool = False) -> int:
        send, sent, length = channel.sock.send, 0, len(data)
        try:
            while sent < length:
                sent += send(data[sent:])
        except self._wants:
            pass  # the next call must begin with the same bytes, as OpenSSL demands
        except OSError:
            return CLOSED
        return sent

    def send_file(self, channel: Channel, file: int, position: int, length: int) -> int:
        total = 0
        while total < length:
            view = self._buffer[: min(length - total, _FILE_BYTES)]
            try:
                count = os.preadv(file, [view], position + total)
            except OSError:
                return CLOSED
            if count == 0:
                raise EOFError(f"no bytes at position {position + total}")
            sent = self.send(channel, view[:count])
            if sent == CLOSED:
                return CLOSED
            total += sent
            if sent < count:
                break
        return total
