"""FrameDecoder and encode_frame(): frames of an int32 length N and N bytes of payload.

The length is big-endian. This is for clients and tests; the broker's processors read
frames into shared memory with code of their own.

Source: Kafka protocol guide, "Common Request and Response Structure".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from mpbroker.protocol.errors import FrameLengthError
from mpbroker.protocol.primitives import Buffer

SIZE_BYTES: Final = 4
DEFAULT_MAX_FRAME_BYTES: Final = 100 * 1024 * 1024  # Kafka's socket.request.max.bytes

# Remove consumed bytes from the buffer only when there are more than this: moving the
# rest for every small frame would take quadratic time.
_COMPACT_BYTES: Final = 64 * 1024
# To copy a smaller part of a frame costs less than to send it by itself.
_WORTH_A_PART: Final = 2048


def encode_frame(payload: Buffer | Iterable[Buffer]) -> bytes:
    """Return a frame: the length of the payload, then the payload.

    Args:
        payload: the bytes, or an iterable of their parts.
    """
    if isinstance(payload, (bytes, bytearray, memoryview)):
        return b"".join((len(payload).to_bytes(SIZE_BYTES, "big"), payload))
    parts = list(payload)
    size = sum(map(len, parts))
    return b"".join((size.to_bytes(SIZE_BYTES, "big"), *parts))


def encode_frame_parts(payload: Sequence[Buffer]) -> list[Buffer]:
    """Return a frame as a list of parts. Parts of 2 KiB or more are not copied."""
    size = sum(map(len, payload))
    pieces = [size.to_bytes(SIZE_BYTES, "big"), *payload]
    parts: list[Buffer] = []
    start = 0  # index of the first small piece that is not in a part yet
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
    """Splits a byte stream into the payloads of frames.

    The chunks of the stream may be cut at any byte.

    Args:
        max_frame_bytes: the largest length of a payload, in bytes.
    """

    def __init__(self, max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES) -> None:
        self._max_frame_bytes = max_frame_bytes
        self._received = bytearray()
        self._position = 0

    @property
    def buffered_bytes(self) -> int:
        """The number of bytes that were fed, but not returned in a payload yet.

        If it is above 0 at the end of a stream, the last frame is cut off.
        """
        return len(self._received) - self._position

    def feed(self, data: Buffer) -> None:
        """Add the next bytes of the stream, as they came from the peer."""
        if self._position >= _COMPACT_BYTES or self._position == len(self._received):
            del self._received[: self._position]
            self._position = 0
        self._received += data

    def next_frame(self) -> bytes | None:
        """Return the next payload, or None if more bytes are needed first.

        Raises:
            FrameLengthError: the length is negative or above ``max_frame_bytes``. The
                stream cannot be resynchronised: close the connection without answering.
        """
        start = self._position + SIZE_BYTES
        received = self._received
        if start > len(received):
            return None
        length = int.from_bytes(received[self._position : start], "big", signed=True)
        # Check it before the payload arrives: four bytes from a hostile peer must not
        # make this process wait for 2 GiB, or keep them in memory.
        if not 0 <= length <= self._max_frame_bytes:
            raise FrameLengthError(
                f"frame length {length} is not in 0..{self._max_frame_bytes} bytes"
            )
        end = start + length
        if end > len(received):
            return None
        self._position = end
        return bytes(memoryview(received)[start:end])
