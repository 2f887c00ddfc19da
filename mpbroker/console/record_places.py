"""Find records in a batch's payload without decoding them.

A batch of 64 MiB may have 9 million records. To step over one takes a tenth of the time
that decoding it does.
"""

from __future__ import annotations

from typing import Final

from mpbroker.protocol.primitives import VarintError, read_varint
from mpbroker.protocol.records.batch_header import RecordBatchError

_STRIDE: Final = 1024  # records between two whose offset is read, on the way to one


def skipped_to(data: bytes, delta: int) -> tuple[int, int]:
    """Return where to begin in a batch's payload to come to an offset soon.

    Args:
        data: the payload.
        delta: the offset, less the batch's base offset.

    Returns:
        The place of a record at most _STRIDE records before the offset, and the number
        of the records before that place.

    Raises:
        RecordBatchError: a record on the way is malformed.
    """
    place = found = index = skipped = 0
    while delta > 0 and place < len(data):
        if index % _STRIDE == 0:
            if _offset_delta(data, place) > delta:
                break
            found, skipped = place, index
        place = end_of_record(data, place)
        index += 1
    return found, skipped


def end_of_record(data: bytes, place: int) -> int:
    """Return where the record ends that begins at a place of a batch's payload.

    Raises:
        RecordBatchError: it does not end in the payload.
    """
    length, start = data[place] >> 1, place + 1
    if data[place] & 0x81:  # of several bytes, or negative
        length, start = _varint(data, place)
    if length <= 0 or start + length > len(data):
        raise RecordBatchError(f"record of {length} bytes at {place} of {len(data)}")
    return start + length


def _offset_delta(data: bytes, place: int) -> int:
    """Return the offset, less the base offset, of the record at a place."""
    _, place = _varint(data, place)
    _, place = _varint(data, place + 1, 64)  # the timestamp, behind the attributes
    return _varint(data, place)[0]


def _varint(data: bytes, place: int, bits: int = 32) -> tuple[int, int]:
    try:
        return read_varint(data, place, bits)
    except (VarintError, IndexError):
        raise RecordBatchError(f"no number at {place} of {len(data)}") from None
