"""Size-delimited framing: a big-endian int32 length N, then N bytes of payload.

For clients and tests; the broker's processors frame inside shared memory.

Source: Kafka protocol guide, "Common Request and Response Structure".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from mpbroker.protocol.errors import FrameLengthError
from mpbroker.protocol.primitives import Buffer

SIZE_BYTES: Final = 4
DEFAULT_MAX_FRAME_BYTES: Final = 100 * 1024 * 1024  # Kafka's socket.request.max.bytes

# Drop consumed bytes only when they outweigh this: moving the rest down for every
# small frame would make a stream of them quadratic.
_COMPACT_BYTES: Final = 64 * 1024
# A part of a frame that is smaller costs less to copy than to send by itself.
_WORTH_A_PART: Final = 2048


def encode_frame(payload: Buffer | Iterable[Buffer]) -> bytes:
    """Return the payload, given whole or in parts, behind its length."""
    if isinstance(payload, (bytes, bytearray, memoryview)):
        return b"".join((len(payload).to_bytes(SIZE_BYTES, "big"), payload))
    parts = list(payload)
    size = sum(map(len, parts))
    return b"".join((size.to_bytes(SIZE_BYTES, "big"), *parts))


def encode_frame_parts(payload: Sequence[Buffer]) -> list[Buffer]:
    """Return the payload behind its length, large parts without a copy of them."""
    size = sum(map(len, payload))
    pieces = [size.to_bytes(SIZE_BYTES, "big"), *payload]
    parts: list[Buffer] = []
    start = 0  # of small pieces that are not in a part yet
    for index, piece in enumerate(pieces):
        if len(piece) >= _WORTH_A_PART:
            if index > start:
                parts.append(b"".join(pieces[start:index]))
            parts.append(piece)
            start = index + 1
    if start < len(pieces):
        parts.append(b"".join(pieces[start:]))
    return parts


class FrameDecoder:
    """Cut a byte stream into payloads, wherever its chunks were cut."""

    def __init__(self, max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES) -> None:
        self._max_frame_bytes = max_frame_bytes
        self._received = bytearray()
        self._position = 0

    @property
    def buffered_bytes(self) -> int:
        """Bytes fed and not returned; above 0 at the end of a stream: a cut frame."""
        return len(self._received) - self._position

    def feed(self, data: Buffer) -> None:
        """Add bytes as they came from the peer."""
        if self._position >= _COMPACT_BYTES or self._position == len(self._received):
            del self._received[: self._position]
            self._position = 0
        self._received += data

    def next_frame(self) -> bytes | None:
        """Return the next payload, or None if more bytes are needed first.

        Raises:
            FrameLengthError: length negative or above ``max_frame_bytes``. The stream
                cannot be resynchronised: close the connection without answering.
        """
        start = self._position + SIZE_BYTES
        received = self._received
        if start > len(received):
            return None
        length = int.from_bytes(received[self._position : start], "big", signed=True)
        # Judged before the payload arrives: four bytes from a hostile peer must not
        # make us wait for, or hold, 2 GiB.
        if not 0 <= length <= self._max_frame_bytes:
            raise FrameLengthError(
                f"frame length {length} is not in 0..{self._max_frame_bytes} bytes"
            )
        end = start + length
        if end > len(received):
            return None
        self._position = end
        return bytes(memoryview(received)[start:end])
