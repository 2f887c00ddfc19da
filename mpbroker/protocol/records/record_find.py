"""Find the first record of a batch at or after a timestamp.

100 MiB of small records inflate from some KB, and are ten million. A loop in Python
takes ten seconds for them, the compiled function of ``_records.c`` 0.1 s. Both must
return the same values for the same bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mpbroker.protocol.records.record_batch import iter_payload

if TYPE_CHECKING:
    from mpbroker.protocol.records.record_walk import Buffer

NOT_FOUND: Final = -1
NO_RECORDS: Final = -2
_INT64_MIN: Final = -(1 << 63)
_INT64_MAX: Final = (1 << 63) - 1


def find_record(
    data: Buffer, record_count: int, timestamp_delta: int, offset_delta: int
) -> tuple[int, int]:
    """Return (offset delta, timestamp delta) of the first record that is wanted.

    Args:
        data: the records of a batch, decompressed.
        record_count: their number. There may be gaps between their offsets.
        timestamp_delta: the least timestamp, less the batch's base timestamp.
        offset_delta: the least offset, less the batch's base offset.

    Returns:
        If no record is found: NOT_FOUND, and the largest timestamp delta of the records
        from the offset on; or NO_RECORDS and 0, if there are no such records.

    Raises:
        RecordBatchError: a length or count in the records is wrong.
    """
    least = max(_INT64_MIN, min(timestamp_delta, _INT64_MAX))
    if _compiled is not None:
        found: tuple[int, int] | None = _compiled(
            data, record_count, least, max(0, offset_delta)
        )
        if found is not None:
            return found
    return find_record_in_python(data, record_count, least, max(0, offset_delta))


def find_record_in_python(
    data: Buffer, record_count: int, timestamp_delta: int, offset_delta: int
) -> tuple[int, int]:
    """Do what `find_record` does; both deltas are int64, and the offset's is not < 0.

    Raises:
        RecordBatchError: as `find_record`.
    """
    largest: int | None = None
    for record in iter_payload(bytes(data), record_count, 0, 0, None):
        if record.offset < offset_delta:
            continue
        if record.timestamp >= timestamp_delta:
            return record.offset, record.timestamp
        if largest is None or record.timestamp > largest:
            largest = record.timestamp
    return (NO_RECORDS, 0) if largest is None else (NOT_FOUND, largest)


try:
    from mpbroker.native import _records  # type: ignore[attr-defined, unused-ignore]
except ImportError:  # no compiler where this was installed
    _compiled = None
else:
    _compiled = _records.find_record
