"""ChunkReader: read the batches of a segment in order, in chunks of bounded size.

The caller takes as many batches of a chunk at once as it can, and the other batches one
by one.
"""

import os
from collections.abc import Callable
from typing import Final

from mpbroker.base.storage_errors import CorruptLogError
from mpbroker.protocol.records.batch_header import (
    BATCH_HEADER_SIZE,
    HEADER,
    MAGIC,
    BatchHeader,
)

CHUNK_BYTES: Final = 512 * 1024


class ChunkReader:
    """Reads the batches of a segment file in order, in chunks of bounded size.

    Args:
        fd: the log file.
        position: the position in bytes of the first batch to read.
        end: the position of the end of the committed bytes.
        throttled: called with the number of bytes of the batches that were taken; it
            may sleep.

    Attributes:
        chunk: the bytes of the file that were read last.
        at: the index in ``chunk`` at which the next batch begins.
    """

    def __init__(
        self, fd: int, position: int, end: int, throttled: Callable[[int], None]
    ) -> None:
        self._fd = fd
        self._position = position  # of the chunk
        self._end = end
        self._throttled = throttled
        self._is_used_up = True
        self.chunk = b""
        self.at = 0

    def has_more(self) -> bool:
        """Return whether the segment has further batches; read some if needed.

        Raises:
            OSError: the file cannot be read.
        """
        if self._is_used_up:
            self._position += self.at
            self.at = 0
            if self._position >= self._end:
                return False
            size = min(CHUNK_BYTES, self._end - self._position)
            self.chunk = os.pread(self._fd, size, self._position)
            self._is_used_up = False
        return True

    def take_to(self, at: int) -> None:
        """Move behind the batches of ``chunk`` that the caller has taken."""
        if at > self.at:
            self._throttled(at - self.at)
        self.at = at

    def next_batch(self) -> tuple[BatchHeader, bytes] | None:
        """Return the header and all bytes of the next batch, and move behind it.

        Returns:
            None if the rest of the chunk is not a whole batch: then call ``has_more``.

        Raises:
            CorruptLogError: there are committed bytes that are not a batch.
            OSError: the file cannot be read.
        """
        at, left = self.at, len(self.chunk) - self.at
        position = self._position + at
        if left < BATCH_HEADER_SIZE:
            if not at:
                raise CorruptLogError(f"no record batch at position {position}")
            self._is_used_up = True
            return None
        header = BatchHeader._make(HEADER.unpack_from(self.chunk, at))
        size = header.size_in_bytes
        if (
            size < BATCH_HEADER_SIZE
            or header.magic != MAGIC
            or position + size > self._end
        ):
            raise CorruptLogError(f"no record batch at position {position}")
        if size <= left:
            batch = self.chunk[at : at + size]
        elif at:
            self._is_used_up = True
            return None
        else:
            batch = os.pread(self._fd, size, position)
        self.at += size
        self._is_used_up = self.at >= len(self.chunk)
        self._throttled(size)
        return header, batch
