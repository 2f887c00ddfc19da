"""Compaction: compact one log, that is, keep the newest record of every key.

First the dirty part (the records appended since the last compaction) is read, and the
newest offset of each key is noted, until the map is full or the part ends. Then all
segments up to that offset are copied without the records that have a newer record of
their key; small neighbouring segments become one segment.
Offsets never change. A tombstone stays for delete.retention.ms after the first
compaction that read it: that compaction writes the end of this time into the batch (the
delete horizon).

A batch without remaining records is removed, unless it has its producer's last sequence
or is the last batch that was compacted; then it stays without records.

A copy is written to `.cleaned` files, beside the log, and forced to disk. Then it
replaces its originals in one short change under the partition's lock.

Source: Kafka's Cleaner; KIP-58, KIP-354, KIP-534.
"""

import os
from collections.abc import Callable, Iterator
from typing import Final

from mpbroker.base.directories import sync_directory
from mpbroker.base.named_tuple import NamedTuple
from mpbroker.ipc.layout import RowStatus
from mpbroker.protocol.records.batch_header import (
    BATCH_HEADER_SIZE,
    BatchHeader,
    parse_batch_header,
)
from mpbroker.protocol.records.record_batch import records_payload
from mpbroker.storage.cleaning.batch_filter import (
    KeptRecords,
    build_compressed,
    build_empty,
    build_filtered,
    build_plain,
    delete_horizon,
    read_raw_records,
    walk_raw_records,
)
from mpbroker.storage.cleaning.chunk_reader import ChunkReader
from mpbroker.storage.cleaning.cleaned_transactions import CleanedTransactions
from mpbroker.storage.cleaning.key_map import new_key_map
from mpbroker.storage.cleaning.retention import rename_deleted
from mpbroker.storage.files.log_segment import LogSegment
from mpbroker.storage.files.segment_writer import (
    SegmentWriter,
    remove_unfinished_copies,
)
from mpbroker.storage.files.txn_index import AbortedTransaction, read_aborted
from mpbroker.storage.log.log_loader import install_swap
from mpbroker.storage.log.partition_log import PartitionLog
from mpbroker.storage.log.partition_view import ACTIVE_BASE
from mpbroker.storage.producers.producer_replay import parse_marker
from mpbroker.storage.producers.producer_state import ProducerState

_MAX_RELATIVE_OFFSET: Final = 0x7FFF_FFFF
_NO_TIMESTAMP: Final = -1
_NO_OFFSET: Final = -1


class CleaningAbortedError(Exception):
    """A compaction was stopped by its caller, or the partition is not online."""


class CleanResult(NamedTuple):
    """The result of one compaction of a log: how far it went, and what it saved.

    Attributes:
        clean_offset: the log below this offset is compacted.
        bytes_before: bytes of the segments that were replaced.
        bytes_after: bytes of the segments in their place.
        deleted_files: `.deleted` files, to be removed after file.delete.delay.ms.
    """

    clean_offset: int
    bytes_before: int
    bytes_after: int
    deleted_files: list[str]


class Compaction:
    """One compaction of one log.

    Args:
        log: the log.
        now_ms: the wall clock, for tombstones.
        max_keys: the number of keys that the key map has room for.
        throttled: called with the number of bytes of each batch read and of each
            segment written; it may sleep, or raise CleaningAbortedError.

    Raises:
        ApiError, OSError, CorruptLogError: the log cannot be read.
    """

    def __init__(
        self,
        log: PartitionLog,
        now_ms: int,
        max_keys: int,
        throttled: Callable[[int], None] = lambda size: None,
    ) -> None:
        self._log = log
        self._view = log.view
        self._now_ms = now_ms
        self._keys = new_key_map(max_keys)
        self._throttled = throttled
        state = log.view.state()
        log.view.refresh(state.active_base_offset)
        self._state = state
        self._aborted = self._read_aborted()
        self._last_of_producer = _last_of_producers(log.producers.at(state))

    def run(self, first_dirty: int, first_uncleanable: int) -> CleanResult:
        """Compact the log below ``first_uncleanable``, as far as the key map has room.

        The key map has the newest offset of each key.

        Args:
            first_dirty: the log below this offset is compacted already.
            first_uncleanable: the offset from which on segments are left alone.

        Raises:
            CleaningAbortedError, ApiError, OSError, CorruptLogError: some groups of
                segments, or none, were replaced; the log is valid in each case.
        """
        remove_unfinished_copies(self._log.directory)
        self._map_keys(first_dirty, first_uncleanable)
        clean_offset = self._keys.latest_offset + 1
        # A record is removed because a newer one of its key exists. The newer one must
        # be on disk first: its segment may not have been forced there yet, and a power
        # cut would take both.
        self._log.sync.flush(clean_offset)
        bases = self._view.segments.below(clean_offset)
        transactions = CleanedTransactions(self._aborted)
        before = after = 0
        deleted: list[str] = []
        for group in self._groups(bases, first_uncleanable):
            size, went = self._clean_group(group, transactions, first_uncleanable)
            before += sum(segment_size for _, segment_size in group)
            after += size
            deleted += went
        return CleanResult(clean_offset, before, after, deleted)

    # -- the map -------------------------------------------------------------------

    def _map_keys(self, start: int, end: int) -> None:
        keys = self._keys
        keys.latest_offset = start - 1
        transactions = CleanedTransactions(
            [txn for txn in self._aborted if txn.last_offset >= start]
        )
        for segment in self._view.segments.from_offset(start):
            if segment.base_offset >= end:
                break
            if not self._map_segment(segment, start, transactions):
                return
            following = self._view.segments.next_base(segment.base_offset)
            assert following is not None  # the active segment is never cleanable
            keys.latest_offset = min(following, end) - 1
            segment.close()

    def _map_segment(
        self, segment: LogSegment, start: int, transactions: CleanedTransactions
    ) -> bool:
        """Note the newest offset of each key in a segment; False: memory is full."""
        keys = self._keys
        reader = self._reader(segment, start)
        while reader.has_more():
            at, is_full = keys.map_batches(reader.chunk, reader.at, start)
            reader.take_to(at)
            if is_full:
                return False
            found = reader.next_batch()
            if found is None:
                continue
            batch, body = found
            if not batch.is_control and not transactions.discards_batch(batch):
                if not self._map_batch(batch, body, start):
                    return False
            elif batch.is_control:
                transactions.discards_marker(batch, parse_marker(body))
            keys.latest_offset = max(keys.latest_offset, batch.last_offset)
        return True

    def _map_batch(self, batch: BatchHeader, body: bytes, start: int) -> bool:
        payload = records_payload(batch, body)
        at, is_full = self._keys.map_batches(build_plain(batch, payload), 0, start)
        if at or is_full:
            return not is_full
        for record in walk_raw_records(payload, batch.record_count):
            offset = batch.base_offset + record.offset_delta
            if record.key is None or offset < start:
                continue
            if not self._keys.put(record.key, offset):
                return False
        return True

    # -- groups ----------------------------------------------------------------------

    def _groups(
        self, bases: list[int], first_uncleanable: int
    ) -> Iterator[list[tuple[LogSegment, int]]]:
        """Yield groups of neighbouring segments, each small enough for one new segment.

        A group is a list of (segment, size of its `.log` in bytes).
        """
        config = self._view.config
        group: list[tuple[LogSegment, int]] = []
        total = entries = time_entries = 0
        for base in bases:
            segment = self._view.segments.get(base)
            size = segment.file_size()
            index = segment.offset_index.file_entries() * 8
            time_index = segment.time_index.file_entries() * 12
            segment.close()
            following = self._view.segments.next_base(base) or first_uncleanable
            if group and (
                total + size > config.segment_bytes
                or entries + index > config.segment_index_bytes
                or time_entries + time_index > config.segment_index_bytes
                or following - 1 - group[0][0].base_offset > _MAX_RELATIVE_OFFSET
            ):
                yield group
                group, total, entries, time_entries = [], 0, 0, 0
            group.append((segment, size))
            total += size
            entries += index
            time_entries += time_index
        if group:
            yield group

    def _clean_group(
        self,
        group: list[tuple[LogSegment, int]],
        transactions: CleanedTransactions,
        first_uncleanable: int,
    ) -> tuple[int, list[str]]:
        """Write the compacted copy of a group of segments, and replace the group by it.

        Returns:
            The copy's size in bytes, and the `.deleted` files.
        """
        log = self._log
        first = group[0][0]
        writer = SegmentWriter(
            log.directory, first.base_offset, log.view.config.index_interval_bytes
        )
        transactions.kept = []
        try:
            for segment, _ in group:
                self._copy_segment(segment, writer, transactions, first_uncleanable)
                segment.close()
            size = writer.size
            self._throttled(size)
            indexed = any(os.path.exists(each.txn_index_path) for each, _ in group)
            modified_s = os.stat(group[-1][0].path).st_mtime
            writer.finish(transactions.kept if indexed else None, modified_s)
        except BaseException:
            writer.abandon()
            raise
        return size, self._replace(writer, [each.base_offset for each, _ in group])

    def _replace(self, writer: SegmentWriter, bases: list[int]) -> list[str]:
        """Replace the segments with these base offsets by the finished copy.

        Returns:
            The `.deleted` files.

        Raises:
            CleaningAbortedError: the partition is not online.
            OSError: a file cannot be renamed.
        """
        log, row = self._log, self._log.row
        deleted: list[str] = []
        with row.locked():
            if row.status != RowStatus.ONLINE:
                writer.abandon()
                raise CleaningAbortedError(f"{log.directory} is not online any more")
            # Odd from here on: readers wait for the lock. If this process is killed,
            # the next owner of the lock sees the odd version and repairs: before the
            # rename to `.log.swap` the originals stay, after it the copy replaces them.
            row.structure_version += 1
            writer.install()
            # Oldest first: if this stops half way, the segments that are left are the
            # newer ones. So a tombstone never goes before the values that it deletes.
            for base in bases[1:]:
                deleted += rename_deleted(log.directory, base)
            # This renames the copy over the first of the originals. From then on there
            # is no `.log.swap` file, and nothing is left to repair.
            install_swap(log.directory, bases[0])
            # Even: readers list the directory again.
            row.structure_version += 1
        sync_directory(log.directory)
        log.view.refresh(log.view.committed()[ACTIVE_BASE])
        return deleted

    # -- batches -----------------------------------------------------------------------

    def _reader(self, segment: LogSegment, start: int) -> ChunkReader:
        position = 0
        if start > segment.base_offset:
            entries = segment.offset_index.file_entries()
            position = segment.offset_index.lookup(start, entries)
        end = segment.file_size()
        return ChunkReader(segment.fd, position, end, self._throttled)

    def _copy_segment(
        self,
        segment: LogSegment,
        writer: SegmentWriter,
        transactions: CleanedTransactions,
        first_uncleanable: int,
    ) -> None:
        reader = self._reader(segment, 0)
        while reader.has_more():
            at, batches, spans = self._keys.filter_batches(
                reader.chunk, reader.at, first_uncleanable - 1
            )
            reader.take_to(at)
            writer.write_batches(batches, spans)
            found = reader.next_batch()
            if found is not None:
                self._copy(*found, writer, transactions, first_uncleanable)

    def _copy(
        self,
        batch: BatchHeader,
        body: bytes,
        writer: SegmentWriter,
        transactions: CleanedTransactions,
        first_uncleanable: int,
    ) -> None:
        """Write the records of a batch that stay to the compacted copy.

        Args:
            batch: the batch's header.
            body: all bytes of the batch, header included.
            writer: writes the copy.
            transactions: the transactions, followed up to this batch.
            first_uncleanable: the batch that ends right below this offset is kept, if
                need be without records.
        """
        horizon = delete_horizon(batch)
        if batch.is_control:
            gone = transactions.discards_marker(batch, parse_marker(body))
            drop_all = gone and 0 <= horizon <= self._now_ms
        else:
            gone = drop_all = transactions.discards_batch(batch)
        kept: KeptRecords | None = None
        if not drop_all and batch.record_count:
            if batch.is_control:
                kept = read_raw_records(batch, body)
            else:
                payload = records_payload(batch, body)
                filtered = self._filter(batch, body, payload)
                if filtered:
                    timestamp = parse_batch_header(filtered).max_timestamp
                    writer.write(filtered, batch.last_offset, timestamp)
                    return
                if filtered is None:
                    kept = self._keep(batch, payload, horizon)
        if kept is None or not kept.records:
            # The last batch stays, so that the files have the end offset of what was
            # compacted.
            if self._is_last_of_producer(batch) or (
                batch.last_offset + 1 == first_uncleanable
            ):
                writer.write(build_empty(batch), batch.last_offset, _NO_TIMESTAMP)
            return
        needs_horizon = horizon < 0 and (
            gone if batch.is_control else kept.has_tombstone
        )
        if needs_horizon:
            horizon = self._now_ms + self._view.config.delete_retention_ms
            body = build_filtered(batch, kept, horizon)
        elif len(kept.records) < batch.record_count:
            body = build_filtered(batch, kept, _NO_TIMESTAMP)
        timestamp = parse_batch_header(body).max_timestamp
        writer.write(body, batch.last_offset, timestamp)

    def _filter(self, batch: BatchHeader, body: bytes, payload: bytes) -> bytes | None:
        """Return a batch with the records that stay, by the compiled walk.

        Args:
            batch: the batch's header.
            body: all bytes of the batch, header included.
            payload: its records, decompressed.

        Returns:
            No bytes if no record stays. None: the walk is not compiled, or the batch
            has tombstones that stay, or is damaged: Python must decide.
        """
        if batch.has_delete_horizon:
            return None
        plain = build_plain(batch, payload)
        at, found, spans = self._keys.filter_batches(plain, 0, _NO_OFFSET)
        if not at:
            return None
        if not spans:
            return b""
        header = parse_batch_header(found)
        if header.record_count == batch.record_count:
            return body
        new_header = batch._replace(
            max_timestamp=header.max_timestamp, record_count=header.record_count
        )
        return build_compressed(new_header, found[BATCH_HEADER_SIZE:])

    def _keep(self, batch: BatchHeader, payload: bytes, horizon: int) -> KeptRecords:
        keys = self._keys
        kept = []
        for record in walk_raw_records(payload, batch.record_count):
            offset = batch.base_offset + record.offset_delta
            if offset > keys.latest_offset:
                kept.append(record)
                continue
            if record.key is None or keys.get(record.key) > offset:
                continue
            if record.has_value or not 0 <= horizon <= self._now_ms:
                kept.append(record)
        return KeptRecords(payload, kept)

    def _is_last_of_producer(self, batch: BatchHeader) -> bool:
        if batch.producer_id < 0:
            return False
        last = self._last_of_producer.get(batch.producer_id)
        if last is None:
            return False
        last_offset, epoch = last
        if last_offset >= 0:
            return batch.last_offset == last_offset
        return batch.is_control and batch.producer_epoch == epoch

    def _read_aborted(self) -> list[AbortedTransaction]:
        found: list[AbortedTransaction] = []
        for segment in self._view.segments.from_offset(0):
            end = self._state.log_end_offset
            found += read_aborted(segment.txn_index_path, end)
        return found


def _last_of_producers(producers: ProducerState) -> dict[int, tuple[int, int]]:
    """Return the end of each producer's data in a log, by producer id.

    Returns:
        The last offset of the producer's data (-1: it has none), and its epoch.
    """
    return {
        producer_id: (
            entry.batches[-1].last_offset if entry.batches else -1,
            entry.epoch,
        )
        for producer_id, entry in producers.entries.items()
    }


__all__ = ["CleanResult", "CleaningAbortedError", "Compaction"]
