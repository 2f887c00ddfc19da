"""Build and read control batches: the markers that end a transaction in a partition.

A control batch has one record. Its key is an int16 version and an int16 type. The value
of the types 0 (abort) and 1 (commit) is an int16 version and an int32 coordinator
epoch. Later versions add fields only at the end.

Source: KIP-98; Kafka's EndTransactionMarker.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

from mpbroker.base.named_tuple import NamedTuple
from mpbroker.protocol.records.batch_header import (
    CONTROL_FLAG,
    NO_PARTITION_LEADER_EPOCH,
    NO_SEQUENCE,
    TRANSACTIONAL_FLAG,
    RecordBatchError,
)
from mpbroker.protocol.records.crc32c import crc32c
from mpbroker.protocol.records.record_batch import Record

_CONTROL_KEY: Final = Struct(">hh")
_END_TRANSACTION_VALUE: Final = Struct(">hi")
# A whole marker, see batch_header and record_batch: one record of 16 bytes, with a key
# of 4 bytes, a value of 6 bytes and no headers. Key and value have version 0.
_MARKER_FRONT: Final = Struct(">qiibI")
_MARKER_CHECKED: Final = Struct(">hiqqqhiib3xb2xhb2xix")
_MARKER_LENGTH: Final = 5 + 4 + _MARKER_CHECKED.size
_RECORD_FRONT: Final = (16 << 1, 4 << 1)
_VALUE_SIZE: Final = 6 << 1

ABORT: Final = 0
COMMIT: Final = 1


class EndTransactionMarker(NamedTuple):
    """The end of a transaction: the record of a control batch of type 0 or 1."""

    commit: bool
    coordinator_epoch: int


def build_end_transaction_marker(
    producer_id: int,
    producer_epoch: int,
    marker: EndTransactionMarker,
    timestamp: int,
) -> bytes:
    """Return the control batch that ends a producer's transaction in a partition.

    Args:
        producer_id: the producer.
        producer_epoch: the producer's epoch.
        marker: whether the transaction commits, and the coordinator's epoch.
        timestamp: the record's timestamp, in ms.
    """
    checked = _MARKER_CHECKED.pack(
        TRANSACTIONAL_FLAG | CONTROL_FLAG,
        0,
        timestamp,
        timestamp,
        producer_id,
        producer_epoch,
        NO_SEQUENCE,
        1,
        *_RECORD_FRONT,
        COMMIT if marker.commit else ABORT,
        _VALUE_SIZE,
        marker.coordinator_epoch,
    )
    front = _MARKER_FRONT.pack(
        0, _MARKER_LENGTH, NO_PARTITION_LEADER_EPOCH, 2, crc32c(checked)
    )
    return front + checked


def parse_control_type(record: Record) -> int:
    """Return a control record's type: 0 abort, 1 commit.

    The caller skips records of other types.

    Raises:
        RecordBatchError: the record's key is not a control record's.
    """
    if record.key is None or len(record.key) < _CONTROL_KEY.size:
        raise RecordBatchError("control record without version and type in its key")
    version, control_type = _CONTROL_KEY.unpack_from(record.key)
    if version < 0:
        raise RecordBatchError(f"control record key of version {version}")
    return int(control_type)


def parse_end_transaction_marker(record: Record) -> EndTransactionMarker:
    """Return the end-transaction marker in the record of a control batch.

    Raises:
        RecordBatchError: the record is another type of control record, or malformed.
    """
    control_type = parse_control_type(record)
    if control_type not in (ABORT, COMMIT):
        raise RecordBatchError(
            f"control type {control_type} does not end a transaction"
        )
    if record.value is None or len(record.value) < _END_TRANSACTION_VALUE.size:
        raise RecordBatchError("end-transaction marker without a coordinator epoch")
    version, coordinator_epoch = _END_TRANSACTION_VALUE.unpack_from(record.value)
    if version < 0:
        raise RecordBatchError(f"end-transaction marker of version {version}")
    return EndTransactionMarker(control_type == COMMIT, coordinator_epoch)
