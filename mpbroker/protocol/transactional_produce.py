"""Read the producer of a transactional Produce request from its first batch header."""

from __future__ import annotations

from mpbroker.protocol.primitives import Buffer
from mpbroker.protocol.records.batch_header import (
    BATCH_HEADER_SIZE,
    HEADER,
    BatchHeader,
    RecordBatchError,
)


def producer_of(records: Buffer | None) -> tuple[int, int] | None:
    """Return the producer id and epoch of transactional records.

    Returns:
        None if there are no records, or if they are not transactional.

    Raises:
        RecordBatchError: there are fewer bytes than a batch header has.
    """
    if not records:
        return None
    if len(records) < BATCH_HEADER_SIZE:
        raise RecordBatchError(f"{len(records)} bytes are not a record batch")
    header = BatchHeader._make(HEADER.unpack_from(records))
    if not header.is_transactional:
        return None
    return header.producer_id, header.producer_epoch
