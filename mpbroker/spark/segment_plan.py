"""Plan which parts of which segments a query reads, by offset, time and transaction.

Runs on the driver. A closed segment changes by compaction and deletion only, so the
plan stays valid while tasks run. Each task filters rows by its own offsets again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from pyarrow import fs

from mpbroker.client.cluster import TopicPartition
from mpbroker.protocol.records.batch_header import BatchHeader
from mpbroker.protocol.records.record_batch import iter_records
from mpbroker.spark.offsets import DataLossError
from mpbroker.spark.options import (
    EARLIEST,
    LATEST,
    OffsetRequest,
    OptionError,
    Subscription,
    asks_for,
    or_default,
    parse_boolean,
    parse_choice,
    parse_integer,
    parse_offset_request,
    parse_subscription,
)
from mpbroker.spark.partition_reader import logger
from mpbroker.spark.segment_directory import (
    INDEX,
    TIME_INDEX,
    TXN_INDEX,
    PartitionFiles,
    Segment,
    SegmentReader,
    list_partitions,
    open_path,
    read_file,
)
from mpbroker.spark.segment_index import (
    AbortedRange,
    IndexEntry,
    parse_aborted,
    parse_offset_index,
    parse_open_transactions,
    parse_time_index,
)

_INTERNAL: Final = {"__consumer_offsets", "__transaction_state", "__cluster_metadata"}
_TASK_BYTES: Final = 128 * 1024 * 1024  # the default of Spark's maxPartitionBytes


@dataclass(frozen=True)
class SegmentOptions:
    """The checked options of a query; Spark pickles them to its executors."""

    paths: tuple[str, ...]
    subscription: Subscription
    starting: OffsetRequest
    ending: OffsetRequest
    unmatched_timestamp_is_latest: bool
    include_active: bool
    include_headers: bool
    fail_on_data_loss: bool
    read_committed: bool
    max_task_bytes: int


class SegmentTask(NamedTuple):
    """The part of a segment that one task reads.

    Attributes:
        root: the data directory, as the user gave it.
        first: the offset of the first row; earlier ones are other tasks'.
        end: the offset behind the last row.
        size: the file's, in bytes, when the query was planned. If a task finds another
            size, the file was replaced, and the task reads it from its beginning.
        position: where to begin in the file; at or before ``first``.
        is_active: the file may end with an incomplete batch.
        aborted: transactions whose rows are skipped.
    """

    root: str
    path: str
    partition: TopicPartition
    first: int
    end: int
    size: int
    position: int
    is_active: bool
    aborted: tuple[AbortedRange, ...]


def parse_segment_options(options: Mapping[str, str]) -> SegmentOptions:
    """Parse and check the options of a query.

    Raises:
        OptionError: an option is missing or wrong.
    """
    given = {name.lower(): value for name, value in options.items()}
    paths = tuple(each.strip() for each in given.get("path", "").split(",") if each)
    if not paths:
        raise OptionError(
            "path is not set; give a broker's log.dirs, or where its segments are kept"
        )
    starting = parse_offset_request(given, "starting", EARLIEST)
    ending = parse_offset_request(given, "ending", LATEST)
    if asks_for(starting, LATEST) or asks_for(ending, EARLIEST):
        raise OptionError(
            "startingOffsets must not be latest, and endingOffsets not earliest:"
            " nothing would be read"
        )
    return SegmentOptions(
        paths=paths,
        subscription=parse_subscription(given),
        starting=starting,
        ending=ending,
        unmatched_timestamp_is_latest=parse_choice(
            given, "startingOffsetsByTimestampStrategy", ("error", "latest")
        )
        == "latest",
        include_active=parse_boolean(given, "includeActive", False),
        include_headers=parse_boolean(given, "includeHeaders", False),
        fail_on_data_loss=parse_boolean(given, "failOnDataLoss", True),
        read_committed=parse_choice(
            given, "kafka.isolation.level", ("read_uncommitted", "read_committed")
        )
        == "read_committed",
        max_task_bytes=or_default(
            parse_integer(given, "maxPartitionBytes", 1), _TASK_BYTES
        ),
    )


def plan(options: SegmentOptions) -> list[SegmentTask]:
    """Return the tasks of a query.

    Raises:
        SegmentError: a path is not a directory.
        OptionError: a topic or partition has no segments, or no offsets are given for
            it.
        DataLossError: the requested offsets are not in the segments, and
            ``fail_on_data_loss`` is set.
    """
    chosen = list(_chosen(options))
    tasks = []
    for root, files, here in chosen:
        tasks += PartitionPlan(options, root, files, here).tasks(
            _request_for(options.starting, here.partition, "starting"),
            _request_for(options.ending, here.partition, "ending"),
        )
    return tasks


def _chosen(
    options: SegmentOptions,
) -> Iterator[tuple[str, fs.FileSystem, PartitionFiles]]:
    """Yield path, file system and files of each partition that the query reads.

    A partition that lies under several paths is read from the last of them.
    """
    wanted = options.subscription
    found: dict[TopicPartition, tuple[str, fs.FileSystem, PartitionFiles]] = {}
    for path in options.paths:
        files, root = open_path(path)
        for partition, here in list_partitions(files, root).items():
            found[partition] = path, files, here
    topics = sorted({each.topic for each in found})
    if wanted.pattern is not None:
        matches = re.compile(wanted.pattern).fullmatch
        names = {each for each in topics if matches(each) and each not in _INTERNAL}
        partitions = [each for each in found if each.topic in names]
    elif wanted.partitions:
        partitions = list(wanted.partitions)
    else:
        partitions = [each for each in found if each.topic in wanted.topics]
        for topic in wanted.topics:
            if topic not in topics:
                raise OptionError(
                    f"subscribe: there are no segments of topic {topic!r} in"
                    f" {', '.join(options.paths)}; there are some of"
                    f" {', '.join(topics[:20]) or 'none'}"
                )
    for partition in sorted(partitions):
        if partition not in found:
            raise OptionError(f"assign: there are no segments of {partition}")
        yield found[partition]


def _request_for(
    request: OffsetRequest, partition: TopicPartition, side: str
) -> tuple[bool, int]:
    """Return a partition's part of a request.

    Returns:
        Whether the value is a timestamp in ms, and the value: a timestamp or an offset.
    """
    if request.timestamp_ms is not None:
        return True, request.timestamp_ms
    given = request.timestamps if request.timestamps is not None else request.offsets
    if given is None:
        return False, request.everywhere
    if partition not in given:
        raise OptionError(
            f"{side} offsets are not given for {partition}, which is read"
        )
    return request.timestamps is not None, given[partition]


class PartitionPlan:
    """Plans the tasks of one partition."""

    def __init__(
        self,
        options: SegmentOptions,
        root: str,
        files: fs.FileSystem,
        here: PartitionFiles,
    ) -> None:
        self._options = options
        self._root = root
        self._files = files
        self._here = here
        self._active = here.segments[-1]
        self._known_log_end: int | None = None
        readable = here.segments if options.include_active else here.segments[:-1]
        self._start = max(here.segments[0].base_offset, here.log_start_offset)
        self._segments = [
            each for each in readable if each.end is None or each.end > self._start
        ]
        self._end = self._start
        if self._segments:
            end = self._segments[-1].end
            self._end = max(self._start, self._log_end() if end is None else end)
        self._aborted: list[AbortedRange] = []
        if options.read_committed and self._segments:
            self._aborted = self._read_aborted()
            self._end = min(self._end, max(self._start, self._last_stable_offset()))

    def tasks(
        self, start: tuple[bool, int], end: tuple[bool, int]
    ) -> list[SegmentTask]:
        """Return the tasks that read the partition from start to end.

        Args:
            start: whether the value is a timestamp, and the value; ``end`` likewise.

        Raises:
            OptionError: all records are older than a starting timestamp.
            DataLossError: an offset is not in the segments, and ``fail_on_data_loss``.
        """
        first, until = self._first(*start), self._until(*end)
        found: list[SegmentTask] = []
        for segment in self._segments:
            if segment.base_offset < until and (
                segment.end is None or segment.end > first
            ):
                found += self._cut(segment, first, until)
        return found

    # -- from where to where -----------------------------------------------------------

    def _first(self, is_timestamp: bool, value: int) -> int:
        if is_timestamp:
            found = self._offset_of(value)
            if found is None and not self._options.unmatched_timestamp_is_latest:
                raise OptionError(
                    f"{self._here.partition} has no record at or after timestamp"
                    f" {value}; set startingOffsetsByTimestampStrategy=latest to start"
                    " at its end"
                )
            return self._end if found is None else found
        if value < 0:
            return self._start if value == EARLIEST else self._end
        return self._within(value)

    def _until(self, is_timestamp: bool, value: int) -> int:
        if is_timestamp:
            found = self._offset_of(value)
            return self._end if found is None else found
        return self._end if value < 0 else self._within(value)

    def _within(self, offset: int) -> int:
        if self._start <= offset <= self._end:
            return offset
        text = (
            f"{self._here.partition}: offset {offset} was asked for; the segments have"
            f" {self._start} to {self._end - 1}"
        )
        if self._options.fail_on_data_loss:
            raise DataLossError(
                f"{text}. Some data may have been lost, or is in the active segment"
                " (includeActive=true); set failOnDataLoss=false to go on without"
            )
        logger.warning("%s", text)
        return min(max(offset, self._start), self._end)

    def _offset_of(self, timestamp: int) -> int | None:
        """Return the first offset with this timestamp (ms) or a later one, if any."""
        for segment in self._segments:
            entries = []
            path = segment.beside(TIME_INDEX)
            if self._here.has(path):
                content = read_file(self._files, path)
                entries = parse_time_index(content, segment.base_offset)
            # The last entry has the largest timestamp in closed segments only: a broker
            # adds it when it closes the segment.
            closed = segment is not self._active
            if closed and entries and entries[-1].timestamp < timestamp:
                continue
            older = [each.offset for each in entries if each.timestamp < timestamp]
            found = self._search(segment, timestamp, max(older, default=0))
            if found is not None:
                return found
        return None

    def _search(self, segment: Segment, timestamp: int, after: int) -> int | None:
        """Return the first offset in a segment with this timestamp (ms) or a later one.

        Args:
            after: records up to this offset are older, by the time index.
        """
        position = 0
        for entry in self._index(segment):
            if entry.offset <= after:
                position = entry.position
        reader = SegmentReader(self._files, segment.path)
        try:
            for at, header in reader.headers(position):
                if header.is_control or not self._start < header.next_offset:
                    continue
                if header.max_timestamp < timestamp or header.base_offset >= self._end:
                    continue
                batch = reader.batch(at, header)
                assert batch is not None  # headers() yields whole batches only
                for record in iter_records(batch):
                    if record.timestamp >= timestamp and record.offset >= self._start:
                        return min(record.offset, self._end)
        finally:
            reader.close()
        return None

    # -- transactions ------------------------------------------------------------------

    def _read_aborted(self) -> list[AbortedRange]:
        """Return the partition's aborted transactions, from the segments' indexes."""
        found: list[AbortedRange] = []
        log_end = self._log_end()
        for segment in self._here.segments:
            path = segment.beside(TXN_INDEX)
            if self._here.has(path):
                found += parse_aborted(read_file(self._files, path))
        # A broker writes the entry before the abort marker. If it was killed in
        # between, the entry lies beyond the log's end: the transaction is not aborted.
        return [each for each in found if each.last_offset < log_end]

    def _last_stable_offset(self) -> int:
        """Return the first offset of the earliest open transaction, or the log end.

        Starts from the newest readable producer snapshot, and follows the headers of
        the batches behind it.
        """
        open_transactions: dict[int, int] = {}
        scan_from = -1
        for offset in sorted(self._here.snapshots, reverse=True):
            path = self._here.snapshots[offset]
            found = parse_open_transactions(read_file(self._files, path))
            if found is not None:
                open_transactions, scan_from = found, offset
                break
        for header in self._headers_from(scan_from):
            if header.is_control:
                open_transactions.pop(header.producer_id, None)
            elif header.is_transactional:
                open_transactions.setdefault(header.producer_id, header.base_offset)
        return min(open_transactions.values(), default=self._log_end())

    def _headers_from(self, offset: int) -> Iterator[BatchHeader]:
        """Yield the headers of all batches whose base offset is not below an offset."""
        for segment in self._here.segments:
            if segment.end is not None and segment.end <= offset:
                continue
            position = 0
            for entry in self._index(segment):
                if entry.offset < offset:
                    position = entry.position
            reader = SegmentReader(self._files, segment.path)
            try:
                for _, header in reader.headers(position):
                    if header.base_offset >= offset:
                        yield header
            finally:
                reader.close()

    def _log_end(self) -> int:
        """Return the offset behind the last whole batch of the active segment."""
        if self._known_log_end is None:
            self._known_log_end = self._find_log_end()
        return self._known_log_end

    def _find_log_end(self) -> int:
        entries = self._index(self._active)
        reader = SegmentReader(self._files, self._active.path)
        try:
            # The batch of the last index entry may be incomplete: then try the entry
            # before it.
            for position in [*(each.position for each in reversed(entries)), 0]:
                end = -1
                for _, header in reader.headers(position):
                    if header.base_offset < end:
                        break  # old bytes behind the end, left by a killed writer
                    end = header.next_offset
                if end >= 0:
                    return end
        finally:
            reader.close()
        return self._active.base_offset

    # -- tasks -------------------------------------------------------------------------

    def _index(self, segment: Segment) -> list[IndexEntry]:
        path = segment.beside(INDEX)
        if not self._here.has(path):
            return []
        return parse_offset_index(read_file(self._files, path), segment.base_offset)

    def _cut(self, segment: Segment, first: int, until: int) -> Iterator[SegmentTask]:
        """Yield tasks for a segment, cut at batches of its index.

        Args:
            first: the query's first offset.
            until: the offset behind the query's last one.
        """
        first = max(first, segment.base_offset)
        until = until if segment.end is None else min(until, segment.end)
        position = 0
        cuts: list[int] = []
        before = segment.base_offset - 1
        for entry in self._index(segment):
            if entry.offset < first:
                position = entry.position
            elif first <= before < until and (
                entry.position - (cuts[-1] if cuts else position)
                >= self._options.max_task_bytes
            ):
                cuts.append(entry.position)
            before = entry.offset
        bounds = [first, *self._base_offsets(segment, cuts), until]
        for at, begin, end in zip([position, *cuts], bounds, bounds[1:], strict=False):
            yield SegmentTask(
                root=self._root,
                path=segment.path,
                partition=segment.partition,
                first=begin,
                end=min(end, until),
                size=segment.size,
                position=at,
                is_active=segment is self._active,
                aborted=tuple(
                    each
                    for each in self._aborted
                    if each.last_offset >= begin and each.first_offset < end
                ),
            )

    def _base_offsets(self, segment: Segment, positions: list[int]) -> list[int]:
        if not positions:
            return []
        with self._files.open_input_file(segment.path) as file:
            return [int.from_bytes(file.read_at(8, each), "big") for each in positions]
