"""Read and write the batches of the metadata log: records from bytes, and back.

A record's value has one of two forms: Kafka's (kraft_records.py), or, in logs that an
earlier version of mpbroker began, a JSON object. All records of a log have one form:
records appended to a JSON log are JSON, too, because a program of the earlier version
may read the log at the same time.

Kafka's controller writes some changes as transactions of several batches. Their records
have an effect only when the transaction has ended.

Source: KIP-866 and KIP-868 for transactions of the metadata log.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from mpbroker.base.storage_errors import CorruptLogError, LogDirectoryError
from mpbroker.metadata.kraft_records import (
    UnknownRecordError,
    decode_control,
    decode_record,
    encode_record,
)
from mpbroker.metadata.kraft_schema import KRAFT_VERSION, KRAFT_VOTERS
from mpbroker.metadata.metadata_files import MetadataFiles
from mpbroker.metadata.metadata_image import MetadataRecord
from mpbroker.protocol.errors import ProtocolError
from mpbroker.protocol.records.record_batch import (
    BatchHeader,
    RecordBatchBuilder,
    RecordBatchError,
    iter_batches,
    iter_records,
)

_BEGIN: Final = "BeginTransactionRecord"
_END: Final = "EndTransactionRecord"
_ABORT: Final = "AbortTransactionRecord"


class MetadataBatches:
    """Decodes a metadata log from its beginning, and encodes the next records.

    Attributes:
        next_offset: the offset behind the last record decoded.
        epoch: the leader epoch of the last batch.
        is_json: whether the records are JSON.
        in_transaction: whether a transaction of Kafka's controller has begun and not
            ended.
        quorum: the fields of the last KRaftVersion and KRaftVoters control records, by
            their type.
    """

    def __init__(self, files: MetadataFiles) -> None:
        snapshot = files.snapshot
        self._snapshot = snapshot
        self.next_offset = 0
        self.epoch = 0
        self.is_json = False
        self.quorum: dict[int, dict[str, Any]] = {}
        self._pending: list[MetadataRecord] | None = None

    @property
    def in_transaction(self) -> bool:
        return self._pending is not None

    def decode(self, data: bytes, path: str, position: int) -> list[MetadataRecord]:
        """Return the records in the next bytes of the metadata log.

        The records of a transaction are returned when it ends.

        Args:
            data: whole batches.
            path: the path of their file.
            position: the position of ``data`` in the file, in bytes.

        Raises:
            CorruptLogError: the bytes are malformed.
            LogDirectoryError: a record is of a newer version of Kafka.
        """
        records: list[MetadataRecord] = []
        end = position + len(data)
        snapshot = self._snapshot
        in_snapshot = snapshot is not None and path == snapshot.path
        try:
            for header, batch in iter_batches(data):
                if in_snapshot or not self._is_in_snapshot(header):
                    self._decode_batch(header, batch, records)
                    if not in_snapshot:
                        self.next_offset = header.next_offset
                        self.epoch = max(self.epoch, header.partition_leader_epoch)
                position += len(batch)
            if position != end:
                raise RecordBatchError(f"cut off after {end - position} bytes")
        except UnknownRecordError as error:
            raise LogDirectoryError(
                f"log.dirs: {path} has a record of a newer Apache Kafka than 4.4.0, the"
                f" newest that this release knows: {error}; use a newer mpbroker, or"
                " that Kafka"
            ) from None
        except (ProtocolError, ValueError) as error:
            raise CorruptLogError(
                f"{path}: batch at byte {position}: {error}"
            ) from None
        if in_snapshot and snapshot is not None:
            self.next_offset, self.epoch = snapshot.end_offset, snapshot.epoch
        return records

    def encode(self, records: Sequence[MetadataRecord], now_ms: int) -> bytes:
        """Return the bytes of a batch of records, to follow the last batch decoded."""
        encode = _encode_json if self.is_json else encode_record
        builder = RecordBatchBuilder()
        for record in records:
            builder.append(now_ms, None, encode(record))
        return builder.build(
            base_offset=self.next_offset, partition_leader_epoch=self.epoch
        )

    def _is_in_snapshot(self, header: BatchHeader) -> bool:
        return (
            self._snapshot is not None
            and header.last_offset < self._snapshot.end_offset
        )

    def _decode_batch(
        self, header: BatchHeader, batch: memoryview, records: list[MetadataRecord]
    ) -> None:
        if header.is_control:
            # Imported here: a start needs it only if a Kafka wrote the log.
            from mpbroker.protocol.records.control_record import parse_control_type

            for each in iter_records(batch):
                kind = parse_control_type(each)
                if kind in (KRAFT_VERSION, KRAFT_VOTERS):
                    self.quorum[kind] = decode_control(kind, each.value)
            return
        for each in iter_records(batch):
            value = each.value
            if value is not None and value[:1] == b"{":
                self.is_json = True
                records.append(_decode_json(value))
                continue
            record = decode_record(value)
            kind_name = record["type"]
            if kind_name == _BEGIN:
                self._pending = []
            elif kind_name == _END:
                records += self._pending or ()
                self._pending = None
            elif kind_name == _ABORT:
                self._pending = None
            elif self._pending is not None:
                self._pending.append(record)
            else:
                records.append(record)


def end_of_snapshot(data: bytes, path: str) -> int:
    """Return the position in the log (in bytes) of the records behind a snapshot.

    The processes of a running broker have positions in the log. So a snapshot that a
    running broker makes says the position behind it. If a start or an Apache Kafka has
    made the snapshot, the position is the snapshot's size.

    Args:
        data: the content of the snapshot.
        path: the path of the snapshot, for the error.

    Raises:
        CorruptLogError: the snapshot is malformed.
    """
    try:
        for header, batch in iter_batches(data):
            if not header.is_control:
                for record in iter_records(batch):
                    position = decode_record(record.value).get("logPosition")
                    return len(data) if position is None else int(position)
    except ProtocolError as error:
        raise CorruptLogError(f"{path}: {error}") from None
    return len(data)


def next_offset(data: bytes, offset: int) -> int:
    """Return the offset after the last batch of a segment; if empty, ``offset``."""
    for header, _ in iter_batches(data):
        offset = header.next_offset
    return offset


def abort_transaction_record() -> MetadataRecord:
    """Make the record that ends a transaction that a dead Kafka controller left open.

    The records of the transaction then have no effect.
    """
    return {"type": _ABORT, "reason": "The controller has ended in the middle."}


def _encode_json(record: MetadataRecord) -> bytes:
    # Not orjson: its import takes 18 ms of a start, that of json 2 ms.
    import json

    return json.dumps(record, separators=(",", ":")).encode("ascii")


def _decode_json(value: bytes) -> MetadataRecord:
    import json

    record: Any = json.loads(value)
    if not isinstance(record, dict):
        raise ValueError(f"a record's value is {value!r}, not a JSON object")
    return record
