"""Show a log segment as kafka-dump-log does: one line for each batch and each record.

The words, their order and their spelling are those of that tool, so that programs which
read its output can read this one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, Final, NamedTuple

from mpbroker.cli.records.record_format import json_bytes
from mpbroker.metadata.kraft_records import decode_control, decode_versioned
from mpbroker.metadata.kraft_schema import CONTROL_ROWS, LEADER_CHANGE
from mpbroker.protocol.errors import ProtocolError
from mpbroker.protocol.records.compression import Codec
from mpbroker.protocol.records.control_record import (
    parse_control_type,
    parse_end_transaction_marker,
)
from mpbroker.protocol.records.record_batch import (
    BATCH_HEADER_SIZE,
    BatchHeader,
    Record,
    RecordBatchError,
    compute_crc,
    increment_sequence,
    iter_records,
    parse_batch_header,
)

_TIMESTAMP_TYPES: Final = ("CreateTime", "LogAppendTime")
_CODEC_MASK: Final = 0x07
_ENDS_TRANSACTION: Final = (0, 1)


def open_bytes(path: Path) -> memoryview:
    """Map a file for reading.

    Raises:
        OSError: the file cannot be read; the error has its name.
    """
    with path.open("rb") as file:
        # An empty file cannot be mapped.
        if not path.stat().st_size:
            return memoryview(b"")
        try:
            return memoryview(mmap(file.fileno(), 0, access=ACCESS_READ))
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error


class SegmentBatch(NamedTuple):
    """A batch, its position in the segment, and whether its CRC is right."""

    position: int
    header: BatchHeader
    data: memoryview
    is_valid: bool


def iter_segment(view: memoryview) -> Iterator[SegmentBatch]:
    """Yield the batches of a segment up to the first bytes that are no batch."""
    position = 0
    while len(view) - position >= BATCH_HEADER_SIZE:
        try:
            header = parse_batch_header(view, position)
        except RecordBatchError:
            return
        end = position + header.size_in_bytes
        if end > len(view):
            return
        data = view[position:end]
        yield SegmentBatch(position, header, data, compute_crc(data) == header.crc)
        position = end


class DumpOptions(NamedTuple):
    """The options of a segment dump.

    Attributes:
        deep_iteration: show every record, not only the batches.
        print_data: show the key and the value of a record.
        skip_record_metadata: show only the key and the value of a record.
        cluster_metadata: decode values as records of the metadata log.
    """

    deep_iteration: bool = False
    print_data: bool = False
    skip_record_metadata: bool = False
    cluster_metadata: bool = False


class SegmentDump:
    """Dumps one segment, and collects messages about it.

    Attributes:
        notes: messages about gaps between offsets, as compaction leaves them.
        problems: messages about damage.
    """

    def __init__(self, path: Path, options: DumpOptions) -> None:
        self.notes: list[str] = []
        self.problems: list[str] = []
        self._path = path
        self._options = options
        self._gaps: list[tuple[int, int]] = []
        self._last_offset = -1

    def write(self, view: memoryview, out: Callable[[bytes], object]) -> None:
        """Write the segment as lines of text; ``out`` is called with each line."""
        end = 0
        for batch in iter_segment(view):
            out(_batch_line(batch).encode() + b"\n")
            self._check(batch)
            if self._options.deep_iteration:
                for record in self._records(batch):
                    out(self._record_line(batch.header, record))
            end = batch.position + batch.header.size_in_bytes
        if end < len(view):
            self._note_trailing(view, end)
            left = len(view) - end
            out(
                f"Found {left} invalid bytes at the end of {self._path.name}\n".encode()
            )
        self._note_gaps()

    def objects(self, view: memoryview) -> Iterator[dict[str, Any]]:
        """Yield a dictionary for each batch, to be written as JSON."""
        end = 0
        for batch in iter_segment(view):
            self._check(batch)
            entry = batch_object(batch)
            entry["file"] = str(self._path)
            if self._options.deep_iteration:
                entry["records"] = [
                    self._record_object(batch.header, record)
                    for record in self._records(batch)
                ]
            yield entry
            end = batch.position + batch.header.size_in_bytes
        if end < len(view):
            self._note_trailing(view, end)
        self._note_gaps()

    def _check(self, batch: SegmentBatch) -> None:
        if not batch.is_valid:
            self.problems.append(
                f"{self._path}: the batch at position {batch.position} (base offset"
                f" {batch.header.base_offset}) has a wrong CRC"
            )

    def _note_trailing(self, view: memoryview, end: int) -> None:
        try:
            parse_batch_header(view, end)
            reason = "the last batch is cut off"
        except RecordBatchError as error:
            reason = str(error)
        self.problems.append(
            f"{self._path}: {len(view) - end} invalid bytes from position {end}:"
            f" {reason}"
        )

    def _note_gaps(self) -> None:
        if self._gaps:
            self.notes.append(f"Non-consecutive offsets in {self._path}")
            self.notes += [f"  {a} is followed by {b}" for a, b in self._gaps]

    def _records(self, batch: SegmentBatch) -> Iterator[Record]:
        try:
            for record in iter_records(batch.data):
                if self._last_offset >= 0 and record.offset != self._last_offset + 1:
                    self._gaps.append((self._last_offset, record.offset))
                self._last_offset = record.offset
                yield record
        except ProtocolError as error:
            self.problems.append(
                f"{self._path}: the batch at position {batch.position} cannot be read:"
                f" {error}"
            )

    def _record_line(self, header: BatchHeader, record: Record) -> bytes:
        parts = [b"|"]
        if not self._options.skip_record_metadata:
            parts.append(_record_text(header, record))
        if header.is_control:
            pass
        elif self._options.cluster_metadata:
            parts += [b"payload:", _compact_json(self._metadata_record(record))]
        elif self._options.print_data:
            if record.key is not None:
                parts += [b"key:", record.key]
            if record.value is not None:
                parts += [b"payload:", record.value]
        return b" ".join(parts) + b"\n"

    def _record_object(self, header: BatchHeader, record: Record) -> dict[str, Any]:
        entry: dict[str, Any] = {
            "offset": record.offset,
            "timestamp": record.timestamp,
            "keySize": _size(record.key),
            "valueSize": _size(record.value),
            "sequence": _sequence(header, record),
            "headerKeys": [
                json_bytes(name.encode("utf-8", "surrogateescape"))
                for name, _ in record.headers
            ],
        }
        if header.is_control:
            entry["control"] = _control_text(record)
        elif self._options.cluster_metadata:
            entry["payload"] = self._metadata_record(record)
        elif self._options.print_data:
            entry["key"] = json_bytes(record.key)
            entry["payload"] = json_bytes(record.value)
        return entry

    def _metadata_record(self, record: Record) -> Any:
        """Decode a record of the metadata log, with the names of kafka-dump-log.

        If that fails, note the problem and return None. In the logs of earlier
        versions of mpbroker the value is JSON already.
        """
        try:
            if record.value is not None and record.value.startswith(b"{"):
                return json.loads(record.value)
            fields, version = decode_versioned(record.value)
        except (ProtocolError, ValueError) as error:
            self.problems.append(f"{self._path}: offset {record.offset}: {error}")
            return None
        name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", fields.pop("type")).upper()
        return {"type": name, "version": version, "data": fields}


def batch_object(batch: SegmentBatch) -> dict[str, Any]:
    """Return a batch's fields under kafka-dump-log's names, in its order."""
    header = batch.header
    bits = header.attributes & _CODEC_MASK
    return {
        "baseOffset": header.base_offset,
        "lastOffset": header.last_offset,
        "count": header.record_count,
        "baseSequence": header.base_sequence,
        "lastSequence": header.last_sequence,
        "producerId": header.producer_id,
        "producerEpoch": header.producer_epoch,
        "partitionLeaderEpoch": header.partition_leader_epoch,
        "isTransactional": header.is_transactional,
        "isControl": header.is_control,
        "deleteHorizonMs": (
            header.base_timestamp if header.has_delete_horizon else None
        ),
        "position": batch.position,
        "timestampType": _TIMESTAMP_TYPES[header.timestamp_type],
        "maxTimestamp": header.max_timestamp,
        "size": header.size_in_bytes,
        "magic": header.magic,
        "compresscodec": (
            Codec(bits).name.lower() if bits <= Codec.ZSTD else f"unknown ({bits})"
        ),
        "crc": header.crc,
        "isvalid": batch.is_valid,
    }


def _batch_line(batch: SegmentBatch) -> str:
    words = []
    entry = batch_object(batch)
    timestamp_type = entry.pop("timestampType")
    for name, value in entry.items():
        if name == "maxTimestamp":
            name = timestamp_type
        if name == "deleteHorizonMs":
            value = "OptionalLong" + (".empty" if value is None else f"[{value}]")
        elif isinstance(value, bool):
            value = str(value).lower()
        words.append(f"{name}: {value}")
    return " ".join(words)


def _record_text(header: BatchHeader, record: Record) -> bytes:
    keys = ",".join(name for name, _ in record.headers)
    text = (
        f"offset: {record.offset} {_TIMESTAMP_TYPES[header.timestamp_type]}:"
        f" {record.timestamp} keySize: {_size(record.key)}"
        f" valueSize: {_size(record.value)} sequence: {_sequence(header, record)}"
        f" headerKeys: [{keys}]"
    )
    if header.is_control:
        text += " " + _control_text(record)
    return text.encode("utf-8", "surrogateescape")


def _control_text(record: Record) -> str:
    try:
        control_type = parse_control_type(record)
        if control_type in CONTROL_ROWS:
            fields = _compact_json(decode_control(control_type, record.value)).decode()
            colon = ":" if control_type == LEADER_CHANGE else ""
            return f"{CONTROL_ROWS[control_type].name}{colon} {fields}"
        if control_type not in _ENDS_TRANSACTION:
            return f"controlType: {control_type}"
        marker = parse_end_transaction_marker(record)
    except ProtocolError as error:
        return f"controlType: unreadable ({error})"
    kind = "COMMIT" if marker.commit else "ABORT"
    return f"endTxnMarker: {kind} coordinatorEpoch: {marker.coordinator_epoch}"


def _compact_json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def _sequence(header: BatchHeader, record: Record) -> int:
    if header.base_sequence < 0:
        return -1
    return increment_sequence(header.base_sequence, record.offset - header.base_offset)


def _size(value: bytes | None) -> int:
    return -1 if value is None else len(value)
