"""Read the producer of a transactional Produce request from its first batch header."""

from __future__ import annotations

from struct import Struct
from typing import Final

from mpbroker.protocol.primitives import Buffer
from mpbroker.protocol.records.batch_header import RecordBatchError

# Positions in the header: attributes at 21; producer id and epoch at 43.
_ATTRIBUTES: Final = Struct(">h")
_PRODUCER: Final = Struct(">qh")
_ATTRIBUTES_AT: Final = 21
_PRODUCER_AT: Final = 43
_TRANSACTIONAL: Final = 0x10


def producer_of(records: Buffer | None) -> tuple[int, int] | None:
    """Return the producer id and epoch of transactional records.

    Returns:
        None if there are no records, or if they are not transactional.

    Raises:
        RecordBatchError: there are fewer bytes than a batch header has.
    """
    if not records:
        return None
    if len(records) < _PRODUCER_AT + _PRODUCER.size:
        raise RecordBatchError(f"{len(records)} bytes are not a record batch")
    if not _ATTRIBUTES.unpack_from(records, _ATTRIBUTES_AT)[0] & _TRANSACTIONAL:
        return None
    producer_id, epoch = _PRODUCER.unpack_from(records, _PRODUCER_AT)
    return producer_id, epoch
