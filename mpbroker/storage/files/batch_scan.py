"""Walk the batches of a segment file by their headers, in chunks of bounded size.

There are two kinds of walk. Walks over committed bytes look at headers only, and raise
CorruptLogError at bytes that are not a batch. The walk over bytes that a crash may
have left, ``scan_valid_batches``, also checks checksums, and ends at the first bytes
that are not a whole batch.

Source: Kafka protocol guide, "Record Batch".
"""

import os
from collections.abc import Iterator
from struct import Struct
from typing import Final
from zlib import crc32

from mpbroker.base.storage_errors import CorruptLogError
from mpbroker.ipc import pulse
from mpbroker.protocol.records.batch_header import (
    ATTRIBUTES_POSITION,
    BATCH_HEADER_SIZE,
    HEADER,
    LOG_OVERHEAD,
    MAGIC,
    MAGIC_POSITION,
    MIN_BATCH_LENGTH,
    BatchHeader,
)
from mpbroker.protocol.records.crc32c import crc32c

_MIN_OLD_LENGTH: Final = 14
_MAX_OLD_LENGTH: Final = 128 * 1024 * 1024
# Parts of the header, for walks that need only these fields.
_SPAN: Final = Struct(">qi11xi")  # base offset, length, last offset delta
# Base offset, length, magic, CRC, last offset delta, max timestamp, record count.
_CHECKED: Final = Struct(">qi4xbI2xi8xq14xi")
_PRODUCED: Final = Struct(">8xi4xb26xq")  # length, magic, producer id
_SPAN_BYTES: Final = _SPAN.size
CHUNK_BYTES: Final = 64 * 1024
_FIRST_CHUNK_BYTES: Final = 4 * 1024  # a page
_VALIDATION_CHUNK_BYTES: Final = 1024 * 1024
_SEARCH_CHUNK_BYTES: Final = 8 * 1024  # mostly, two index entries are closer than this
_new_tuple: Final = tuple.__new__  # a quarter of the cost of calling the class

# Position, end, base offset, last offset, max timestamp, record count: a plain tuple,
# since a recovery looks at every batch of a segment.
ValidBatch = tuple[int, int, int, int, int, int]


def scan_batches(fd: int, position: int, end: int) -> Iterator[tuple[int, BatchHeader]]:
    """Yield position and header of the committed batches from ``position`` to ``end``.

    Positions are in bytes. One read covers many small batches; the bodies of large
    batches are skipped. The first read is of one page, since many callers need only the
    first header, and a read of 64 KiB costs some 20 us.

    Raises:
        CorruptLogError: there are committed bytes that are not a batch.
        OSError: the file cannot be read.
    """
    size_to_read = _FIRST_CHUNK_BYTES
    while position < end:
        chunk = os.pread(fd, min(size_to_read, end - position), position)
        at, have = 0, len(chunk)
        while have - at >= BATCH_HEADER_SIZE:
            header = _new_tuple(BatchHeader, HEADER.unpack_from(chunk, at))
            size = header.batch_length + LOG_OVERHEAD
            here = position + at
            if size < BATCH_HEADER_SIZE or header.magic != MAGIC or here + size > end:
                raise CorruptLogError(f"no record batch at position {here}")
            yield here, header
            at += size
        if at == 0:
            raise CorruptLogError(f"no record batch at position {position}")
        # Behind large batches, of which most is skipped, a longer read finds no more.
        is_sparse = at > 2 * have
        size_to_read = (
            _FIRST_CHUNK_BYTES if is_sparse else min(4 * size_to_read, CHUNK_BYTES)
        )
        position += at


def read_batch(fd: int, position: int, header: BatchHeader) -> bytes:
    """Return all bytes of a batch that ``scan_batches`` has found at a position."""
    return os.pread(fd, header.size_in_bytes, position)


def find_batch(fd: int, position: int, end: int, offset: int) -> tuple[int, int]:
    """Return (position, size) of the first batch whose last offset is >= ``offset``.

    Args:
        fd: the log file.
        position: the position in bytes of the batch to begin with.
        end: the position of the end of the committed bytes.
        offset: the offset to look for.

    Returns:
        Position and size in bytes; (-1, 0) if there is no such batch before ``end``.

    Raises:
        CorruptLogError, OSError: as in ``scan_batches``.
    """
    unpack = _SPAN.unpack_from
    while position < end:
        chunk = os.pread(fd, min(_SEARCH_CHUNK_BYTES, end - position), position)
        at, last_start = 0, len(chunk) - _SPAN_BYTES
        if last_start < 0:
            raise CorruptLogError(f"no record batch at position {position}")
        while at <= last_start:
            base_offset, length, delta = unpack(chunk, at)
            if base_offset + delta >= offset:
                return position + at, length + LOG_OVERHEAD
            if length < MIN_BATCH_LENGTH:
                raise CorruptLogError(f"no record batch at position {position + at}")
            at += length + LOG_OVERHEAD
        position += at
    return -1, 0


def batch_size_at(fd: int, position: int) -> int:
    """Return the size in bytes of the batch at a position.

    Raises:
        CorruptLogError: there is no batch.
    """
    head = os.pread(fd, LOG_OVERHEAD, position)
    if len(head) == LOG_OVERHEAD:
        length = int.from_bytes(head[8:], "big", signed=True)
        if length >= MIN_BATCH_LENGTH:
            return length + LOG_OVERHEAD
    raise CorruptLogError(f"no record batch at position {position}")


def scan_valid_batches(fd: int, position: int, end: int) -> Iterator[ValidBatch]:
    """Yield the batches from a position on that are whole and have a right checksum.

    The first other bytes end the walk.

    Args:
        fd: the log file.
        position: the position in bytes of the first batch.
        end: the position in bytes where the walk ends.

    Yields:
        (position, end, base offset, last offset, largest timestamp in ms, number of
        records) of each batch; position and end in bytes.

    Raises:
        OSError: the file cannot be read.
    """
    buffer = bytearray(_VALIDATION_CHUNK_BYTES)
    view = memoryview(buffer)
    unpack = _CHECKED.unpack_from
    while position < end:
        have = os.preadv(fd, [view[: min(len(buffer), end - position)]], position)
        pulse.step()
        at = 0
        while have - at >= BATCH_HEADER_SIZE:
            base, length, magic, crc, delta, timestamp, count = unpack(buffer, at)
            next_at = at + length + LOG_OVERHEAD
            if length < MIN_BATCH_LENGTH or magic != MAGIC or position + next_at > end:
                return
            if next_at <= have:
                checksum = crc32c(view[at + ATTRIBUTES_POSITION : next_at])
            elif at:
                break  # read again from here, so that the batch is in the buffer
            else:
                start = position + ATTRIBUTES_POSITION
                checksum = _crc_of_range(fd, start, position + next_at, view)
            if checksum != crc or delta < 0:
                return
            yield (
                position + at,
                position + next_at,
                base,
                base + delta,
                timestamp,
                count,
            )
            at = next_at
        if at == 0:
            return
        position += at


def scan_producer_batches(
    fd: int, position: int, end: int
) -> Iterator[tuple[int, BatchHeader]]:
    """Yield position and header of the committed batches that have a producer id.

    Args:
        fd: the log file.
        position: the position in bytes of the batch to begin with.
        end: the position of the end of the committed bytes.

    Raises:
        CorruptLogError: as in ``scan_batches``.
    """
    unpack = _PRODUCED.unpack_from
    while position < end:
        chunk = os.pread(fd, min(CHUNK_BYTES, end - position), position)
        pulse.step()
        at, last_start = 0, len(chunk) - BATCH_HEADER_SIZE
        while at <= last_start:
            length, magic, producer_id = unpack(chunk, at)
            next_at = at + length + LOG_OVERHEAD
            if length < MIN_BATCH_LENGTH or magic != MAGIC or position + next_at > end:
                raise CorruptLogError(f"no record batch at position {position + at}")
            if producer_id >= 0:
                header = _new_tuple(BatchHeader, HEADER.unpack_from(chunk, at))
                yield position + at, header
            at = next_at
        if at == 0:
            raise CorruptLogError(f"no record batch at position {position}")
        position += at


def old_magic_at(fd: int, position: int) -> int | None:
    """Return the magic byte of the whole message of an old format at a position.

    Returns:
        0 or 1; None if there is no such message.
    """
    head = os.pread(fd, MAGIC_POSITION + 1, position)
    if len(head) <= MAGIC_POSITION or head[MAGIC_POSITION] not in (0, 1):
        return None
    length = int.from_bytes(head[8:12], "big", signed=True)
    crc = int.from_bytes(head[12:16], "big")
    if not _MIN_OLD_LENGTH <= length <= _MAX_OLD_LENGTH:
        return None
    content = os.pread(fd, length - 4, position + MAGIC_POSITION)
    if len(content) < length - 4 or crc32(content) != crc:
        return None
    return head[MAGIC_POSITION]


def _crc_of_range(fd: int, start: int, end: int, view: memoryview) -> int:
    checksum = 0
    while start < end:
        have = os.preadv(fd, [view[: min(len(view), end - start)]], start)
        if have == 0:
            break
        checksum = crc32c(view[:have], checksum)
        start += have
    return checksum
