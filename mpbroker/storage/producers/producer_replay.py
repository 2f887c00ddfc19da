"""Replay batches of the log, to bring a copy of the producers' state up to date.

Source: Kafka's UnifiedLog.loadProducersFromRecords; EndTxnMarker.json for markers.
"""

import os
from struct import Struct
from typing import Final

from mpbroker.ipc.tables.partition_table import LogState
from mpbroker.protocol.records.batch_header import (
    BATCH_HEADER_SIZE,
    CONTROL_FLAG,
    LOG_OVERHEAD,
    MAGIC,
    MIN_BATCH_LENGTH,
    TRANSACTIONAL_FLAG,
    BatchHeader,
)
from mpbroker.storage.files.batch_scan import read_batch, scan_producer_batches
from mpbroker.storage.files.segment_list import SegmentList
from mpbroker.storage.producers.producer_state import (
    AppendedBatch,
    EndTransactionMarker,
    ProducerState,
    last_sequence_of,
)

_MARKER_KEY: Final = Struct(">hh")  # version, type
_MARKER_VALUE: Final = Struct(">hi")  # version, coordinator epoch
# A marker as every broker writes it, uncompressed and with CreateTime: the batch's
# header, then one record with deltas of 0, a key of 4 bytes and a value of 6 bytes.
_USUAL_MARKER: Final = Struct(">q14xb4xq22x9s2xhs2xis")
# The bytes between these fields: a count of 1, a record of 16 bytes, a key of 4 bytes;
# a value of 6 bytes; no headers.
_USUAL_REST: Final = (b"\0\0\0\1\x20\0\0\0\x08", b"\x0c", b"\0")
_CODEC_OR_TIME: Final = 0x0F
# Base offset, length, magic, attributes, last offset delta, largest timestamp; producer
# id, epoch, first sequence.
_BATCH: Final = Struct(">qi4xb4xhi8xqqhi4x")
# A range up to this size is read as a whole. Mostly it has one or two batches, which
# other processes have appended since the last time.
_SHORT_BYTES: Final = 16 * 1024


def parse_marker(batch: bytes | memoryview) -> EndTransactionMarker | None:
    """Return the end-of-transaction marker in a control batch.

    Returns:
        None if the batch has no record, because compaction has removed it, or if the
        record is no marker.
    """
    if len(batch) == _USUAL_MARKER.size:
        fields = _USUAL_MARKER.unpack(batch)
        offset, attributes, timestamp, head, control_type, size, epoch, tail = fields
        if not attributes & _CODEC_OR_TIME and (head, size, tail) == _USUAL_REST:
            return EndTransactionMarker(control_type, epoch, offset, timestamp)
    from mpbroker.protocol.records.record_batch import iter_records

    for record in iter_records(memoryview(batch)):
        key, value = record.key, record.value
        if key is None or value is None or len(key) < 4 or len(value) < 6:
            return None
        return EndTransactionMarker(
            _MARKER_KEY.unpack_from(key)[1],
            _MARKER_VALUE.unpack_from(value)[1],
            record.offset,
            record.timestamp,
        )
    return None


def replay_batch(
    state: ProducerState, fd: int, position: int, batch: BatchHeader
) -> None:
    """Apply one batch of the log, which has a producer id, to the producers' state.

    Args:
        state: the producers' state.
        fd: the log file.
        position: the position of the batch, in bytes.
        batch: the header of the batch.
    """
    producer_id = batch.producer_id
    if batch.is_control:
        marker = parse_marker(read_batch(fd, position, batch))
        if marker is not None:
            state.apply_marker(producer_id, batch.producer_epoch, marker)
        return
    last = last_sequence_of(batch.base_sequence, batch.last_offset_delta)
    appended = AppendedBatch(
        batch.base_sequence,
        last,
        batch.base_offset,
        batch.last_offset,
        batch.max_timestamp,
    )
    state.apply(producer_id, batch.producer_epoch, appended, batch.is_transactional)


def replay_log(
    producers: ProducerState, segments: SegmentList, state: LogState
) -> None:
    """Apply all batches from ``producers.end_offset`` to the end of the committed log.

    Args:
        producers: the producers' state.
        segments: the segments, as of ``state``.
        state: the committed state of the partition.

    Raises:
        CorruptLogError, OSError: the log cannot be read. The state is as of the last
            batch of a producer that was applied, so the replay may be repeated.
    """
    for segment in segments.from_offset(producers.end_offset):
        end, entries = segment.extent(state)
        start = 0
        if producers.end_offset > segment.base_offset:
            start, _ = segment.find(producers.end_offset, end, entries)
        if start >= 0:
            replay_range(producers, segment.fd, start, end)
        if segment.base_offset != state.active_base_offset:
            segment.close()
    producers.end_offset = state.log_end_offset


def replay_range(producers: ProducerState, fd: int, start: int, end: int) -> None:
    """Apply the batches between two positions of a segment to the producers' state.

    Batches that were applied before are skipped.

    Args:
        producers: the producers' state.
        fd: the log file.
        start: the position of the first batch, in bytes.
        end: the position behind the last batch, in bytes.

    Raises:
        CorruptLogError, OSError: as ``replay_log``.
    """
    if end - start <= _SHORT_BYTES and _replay_short(
        producers, os.pread(fd, end - start, start)
    ):
        return
    for position, batch in scan_producer_batches(fd, start, end):
        if batch.base_offset >= producers.end_offset:
            replay_batch(producers, fd, position, batch)
            producers.end_offset = batch.last_offset + 1


def _replay_short(producers: ProducerState, data: bytes) -> bool:
    """Apply the batches in ``data``, as ``replay_range`` does.

    Returns:
        Whether all bytes were batches. If not, the batches before the other bytes are
        applied, and ``replay_range``, which reads on from there, raises the error.
    """
    at, size = 0, len(data)
    while size - at >= BATCH_HEADER_SIZE:
        fields = _BATCH.unpack_from(data, at)
        offset, length, magic, attributes, delta, timestamp, *producer = fields
        following = at + length + LOG_OVERHEAD
        if length < MIN_BATCH_LENGTH or magic != MAGIC or following > size:
            return False
        producer_id, epoch, sequence = producer
        if producer_id >= 0 and offset >= producers.end_offset:
            if attributes & CONTROL_FLAG:
                marker = parse_marker(data[at:following])
                if marker is not None:
                    producers.apply_marker(producer_id, epoch, marker)
            else:
                last = last_sequence_of(sequence, delta)
                end = offset + delta
                appended = AppendedBatch(sequence, last, offset, end, timestamp)
                transactional = attributes & TRANSACTIONAL_FLAG
                producers.apply(producer_id, epoch, appended, transactional)
            producers.end_offset = offset + delta + 1
        at = following
    return at == size
