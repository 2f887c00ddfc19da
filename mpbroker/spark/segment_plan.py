"""Plan which parts of which segments a query reads, by offset, time and transaction.

Runs on the driver. A closed segment changes by compaction and deletion only, so the
plan stays valid while tasks run. Each task drops the rows outside of its own offsets.

Objects of a remote store never change; they can only be deleted. A large one is cut by
bytes, and each task finds the batches at both cuts in the segment's index. So the plan
for 10,000 segments needs their manifests (the store's lists of segments), but not the
index of each segment.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple

from mpbroker.client.cluster import TopicPartition
from mpbroker.protocol.records.batch_header import BatchHeader
from mpbroker.protocol.records.record_batch import iter_records
from mpbroker.spark.offsets import (
    DataLossError,
    OffsetRange,
    OffsetReader,
    check_order,
    split_ranges,
)
from mpbroker.spark.options import (
    EARLIEST,
    LATEST,
    OffsetRequest,
    OptionError,
    SourceOptions,
    Subscription,
    asks_for,
    or_default,
    parse_boolean,
    parse_choice,
    parse_integer,
    parse_offset_request,
    parse_source_options,
    parse_subscription,
)
from mpbroker.spark.remote_store import is_remote_store, list_remote_partitions
from mpbroker.spark.segment_directory import (
    INDEX,
    TIME_INDEX,
    TXN_INDEX,
    PartitionFiles,
    Segment,
    SegmentReader,
    list_partitions,
    open_path,
)
from mpbroker.spark.segment_index import (
    AbortedRange,
    IndexEntry,
    parse_aborted,
    parse_offset_index,
    parse_open_transactions,
    parse_time_index,
)
from mpbroker.spark.topic_pattern import compile_topic_pattern

logger = logging.getLogger(__name__)

_INTERNAL: Final = {"__consumer_offsets", "__transaction_state", "__cluster_metadata"}
_OWN_OPTIONS: Final = {"path", "includeactive", "maxpartitionbytes"}
_TASK_BYTES: Final = 128 * 1024 * 1024  # the default of Spark's maxPartitionBytes


@dataclass(frozen=True)
class SegmentOptions:
    """The checked options of a query; Spark pickles them to its executors.

    Attributes:
        paths: data directories or remote stores, as the user gave them.
        max_task_bytes: the most bytes of a segment that one task reads.
        broker: the options of the broker that has the later records; None: read the
            segments only.
    """

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
    broker: SourceOptions | None = None


class SegmentTask(NamedTuple):
    """The part of a segment that one task reads.

    Attributes:
        root: the data directory or remote store, as the user gave it.
        path: the segment's `.log` file in it.
        first: the lowest offset to read.
        end: the offset after the last one to read.
        size: the file's size in bytes when the query was planned. If a task finds
            another size, the file was replaced, and the task reads it from the start.
        position: the byte to begin at in the file; the batch there is at or before
            ``first``.
        is_active: whether the file may end with an incomplete batch.
        aborted: the aborted transactions, whose rows are skipped.
        indexes_crc: see `Segment`. If it is set, ``position`` and ``stop`` need not be
            starts of batches: each stands for the last index entry at or before it, and
            the task reads from the one entry to the other.
        stop: the next task's ``position``, if ``indexes_crc`` is set.
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
    indexes_crc: int | None = None
    stop: int = -1


def parse_segment_options(options: Mapping[str, str]) -> SegmentOptions:
    """Parse and check the options of format("mpbroker-segments").

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
        broker=_broker(given),
    )


def _broker(given: Mapping[str, str]) -> SourceOptions | None:
    """Return the options for the broker that has the records after the segments.

    None: the query reads segments only, since kafka.bootstrap.servers is not given.
    """
    if "kafka.bootstrap.servers" not in given:
        return None
    others = {name: value for name, value in given.items() if name not in _OWN_OPTIONS}
    return parse_source_options(others, streaming=False)


def plan(options: SegmentOptions) -> list[SegmentTask]:
    """Return the tasks of a query: which part of which segment each of them reads.

    Raises:
        SegmentError: a path is not a directory.
        OptionError: a topic or partition has no segments, or no offsets are given for
            it.
        DataLossError: the requested offsets are not in the segments, and
            ``fail_on_data_loss`` is set.
    """
    tasks = []
    for root, here in _chosen(options):
        tasks += PartitionPlan(options, root, here).tasks(
            _request_for(options.starting, here.partition, "starting"),
            _request_for(options.ending, here.partition, "ending"),
        )
    return tasks


def plan_with_tail(options: SegmentOptions) -> list[SegmentTask | OffsetRange]:
    """Return the tasks of a query that reads both a remote store and its broker.

    The broker gives the offsets at which the query begins and ends. Of these, tasks
    read the offsets that the store has from the store, and the others from the broker.

    Raises:
        OptionError: a path is not a broker's remote store, or an option is wrong.
        SegmentError, DataLossError: as ``plan``.
        ApiError, BrokerUnavailableError: the broker refuses, or does not answer.
    """
    from mpbroker.spark.readers import batch_ranges

    broker = options.broker
    assert broker is not None
    reader = OffsetReader(broker)
    try:
        topic_ids = reader.topic_ids()
        stored = {
            partition: (path, here)
            for path in options.paths
            for partition, here in _stored(path, topic_ids).items()
        }
        ranges = batch_ranges(reader, broker)
    finally:
        reader.close()
    tasks: list[SegmentTask | OffsetRange] = []
    tail: list[OffsetRange] = []
    for each in ranges:
        start = each.start
        if each.partition in stored and each.size > 0:
            planned = PartitionPlan(options, *stored[each.partition])
            begin, end = max(start, planned.start), min(each.end, planned.end)
            if begin < end:
                tail.append(each._replace(end=begin))
                tasks += planned.tasks((False, begin), (False, end))
                start = end
        tail.append(each._replace(start=start))
    cut = split_ranges(tail, broker.min_partitions, broker.max_records_per_partition)
    return [*tasks, *cut]


def _stored(
    path: str, topic_ids: Mapping[str, str]
) -> Mapping[TopicPartition, PartitionFiles]:
    files, root = open_path(path)
    if not is_remote_store(files, root):
        raise OptionError(
            f"path={path!r} is not the remote store of a broker, so the broker of"
            " kafka.bootstrap.servers cannot be asked for what follows; leave out one"
            " of the two"
        )
    return list_remote_partitions(files, root, topic_ids)


def _chosen(options: SegmentOptions) -> Iterator[tuple[str, PartitionFiles]]:
    """Yield each partition that the query reads: the user's path, and the files there.

    A partition that is in several of the given paths is read from the last of them.
    """
    wanted = options.subscription
    found: dict[TopicPartition, tuple[str, PartitionFiles]] = {}
    for path in options.paths:
        files, root = open_path(path)
        is_remote = is_remote_store(files, root)
        listed = (list_remote_partitions if is_remote else list_partitions)(files, root)
        for partition, here in listed.items():
            found[partition] = path, here
    topics = sorted({each.topic for each in found})
    if wanted.pattern is not None:
        matches = compile_topic_pattern(wanted.pattern).search
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
    """Return the start or the end of a partition that a query's options ask for.

    Args:
        side: "starting" or "ending", for the text of an error.

    Returns:
        Whether the value is a timestamp, and the value: a timestamp in ms since 1970,
        or an offset, which may be EARLIEST or LATEST.
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
    """Plans the tasks of one partition.

    Args:
        options: the options of the query.
        root: the data directory or store, as the user gave it.
        here: the partition's files.

    Attributes:
        start: the first offset that the segments have.
        end: the offset after the last one that may be read.
    """

    def __init__(
        self, options: SegmentOptions, root: str, here: PartitionFiles
    ) -> None:
        self._options = options
        self._root = root
        self._files = here.files
        self._here = here
        self._known_log_end: int | None = None
        self.start = max(here.segments[0].base_offset, here.log_start_offset)
        self._segments = [
            each
            for each in here.segments
            if (options.include_active if each.end is None else each.end > self.start)
        ]
        self.end = self.start
        if self._segments:
            end = self._segments[-1].end
            self.end = max(self.start, self._log_end() if end is None else end)
        self._aborted: list[AbortedRange] = []
        if options.read_committed and self._segments:
            self._aborted = self._read_aborted()
            self.end = min(self.end, max(self.start, self._last_stable_offset()))

    def tasks(
        self, start: tuple[bool, int], end: tuple[bool, int]
    ) -> list[SegmentTask]:
        """Return the tasks that read the partition from start to end.

        Args:
            start: whether the value is a timestamp, and the value: a timestamp in ms
                since 1970, or an offset. ``end`` is likewise.

        Raises:
            OptionError: all records are older than a starting timestamp, or the start
                is beyond the end.
            DataLossError: an offset is not in the segments, and ``fail_on_data_loss``
                is set.
        """
        first, until = self._first(*start), self._until(*end)
        check_order(self._here.partition, first, until)
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
            return self.end if found is None else found
        if value < 0:
            return self.start if value == EARLIEST else self.end
        return self._within(value)

    def _until(self, is_timestamp: bool, value: int) -> int:
        if is_timestamp:
            found = self._offset_of(value)
            return self.end if found is None else found
        return self.end if value < 0 else self._within(value)

    def _within(self, offset: int) -> int:
        if self.start <= offset <= self.end:
            return offset
        text = (
            f"{self._here.partition}: offset {offset} was asked for; the segments have"
            f" {self.start} to {self.end - 1}"
        )
        if self._options.fail_on_data_loss:
            raise DataLossError(
                f"{text}. Some data may have been lost, or is in the active segment"
                " (includeActive=true); set failOnDataLoss=false to go on without"
            )
        logger.warning("%s", text)
        return min(max(offset, self.start), self.end)

    def _offset_of(self, timestamp: int) -> int | None:
        """Return the first offset with this timestamp (ms) or a later one, if any."""
        for segment in self._segments:
            latest = segment.largest_timestamp
            if latest is not None and latest < timestamp:
                continue
            content = self._here.beside(segment, TIME_INDEX) or b""
            entries = parse_time_index(content, segment.base_offset)
            # The last entry has the largest timestamp in closed segments only: a broker
            # adds it when it closes the segment.
            closed = segment.end is not None
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
            after: an offset; by the time index, all records up to it are older.
        """
        position = 0
        for entry in self._index(segment):
            if entry.offset <= after:
                position = entry.position
        reader = SegmentReader(self._files, segment.path)
        try:
            for at, header in reader.headers(position):
                if header.is_control or not self.start < header.next_offset:
                    continue
                if header.max_timestamp < timestamp or header.base_offset >= self.end:
                    continue
                batch = reader.batch(at, header)
                assert batch is not None  # headers() yields whole batches only
                for record in iter_records(batch):
                    if record.timestamp >= timestamp and record.offset >= self.start:
                        return min(record.offset, self.end)
        finally:
            reader.close()
        return None

    # -- transactions ------------------------------------------------------------------

    def _read_aborted(self) -> list[AbortedRange]:
        """Return the partition's aborted transactions, from the segments' indexes."""
        found: list[AbortedRange] = []
        log_end = self._log_end()
        for segment in self._here.segments:
            if segment.has_aborted is not False:
                found += parse_aborted(self._here.beside(segment, TXN_INDEX) or b"")
        # A broker writes the entry before the abort marker. If it was killed in
        # between, the entry lies beyond the log's end: the transaction is not aborted.
        return [each for each in found if each.last_offset < log_end]

    def _last_stable_offset(self) -> int:
        """Return the first offset of the earliest open transaction, or the log end.

        Starts from the newest readable producer snapshot, and follows the headers of
        the batches after it.
        """
        open_transactions: dict[int, int] = {}
        scan_from = -1
        for offset, content in self._here.snapshots():
            found = parse_open_transactions(content)
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
        """Yield the headers of all batches that begin at or after an offset."""
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
        """Return the offset after the last whole batch of the last segment."""
        if self._known_log_end is None:
            last = self._here.segments[-1]
            end = self._find_log_end(last) if last.end is None else last.end
            self._known_log_end = end
        return self._known_log_end

    def _find_log_end(self, active: Segment) -> int:
        entries = self._index(active)
        reader = SegmentReader(self._files, active.path)
        try:
            # The batch of the last index entry may be incomplete: then try the entry
            # before it.
            for position in [*(each.position for each in reversed(entries)), 0]:
                end = -1
                for _, header in reader.headers(position):
                    if header.base_offset < end:
                        break  # old bytes after the end, left by a killed writer
                    end = header.next_offset
                if end >= 0:
                    return end
        finally:
            reader.close()
        return active.base_offset

    # -- tasks -------------------------------------------------------------------------

    def _index(self, segment: Segment) -> list[IndexEntry]:
        content = self._here.beside(segment, INDEX) or b""
        return parse_offset_index(content, segment.base_offset)

    def _cut(self, segment: Segment, first: int, until: int) -> Iterator[SegmentTask]:
        """Yield the tasks of a segment, each for at most ``max_task_bytes`` of it.

        Cuts are at index entries only: the bytes between two entries belong to one
        task, even if they are more.

        Args:
            first: the query's first offset.
            until: the offset after the query's last one.
        """
        first = max(first, segment.base_offset)
        until = until if segment.end is None else min(until, segment.end)
        if segment.indexes_crc is not None:
            yield from self._cut_by_bytes(segment, first, until)
            return
        position, cuts = self._cuts(segment, first, until)
        bounds = [first, *self._base_offsets(segment, cuts), until]
        for at, begin, end in zip([position, *cuts], bounds, bounds[1:], strict=False):
            yield self._task(segment, begin, min(end, until), at)

    def _cut_by_bytes(
        self, segment: Segment, first: int, until: int
    ) -> Iterator[SegmentTask]:
        # A 32nd less than the limit: a task begins at the index entry before its cut.
        limit = self._options.max_task_bytes
        parts = -(-segment.size // max(1, limit - limit // 32))
        bounds = [segment.size * part // parts for part in range(parts + 1)]
        for at, stop in pairwise(bounds):
            yield self._task(segment, first, until, at)._replace(
                indexes_crc=segment.indexes_crc, stop=stop
            )

    def _task(
        self, segment: Segment, first: int, end: int, position: int
    ) -> SegmentTask:
        return SegmentTask(
            root=self._root,
            path=segment.path,
            partition=segment.partition,
            first=first,
            end=end,
            size=segment.size,
            position=position,
            is_active=segment.end is None,
            aborted=tuple(
                each
                for each in self._aborted
                if each.last_offset >= first and each.first_offset < end
            ),
        )

    def _cuts(self, segment: Segment, first: int, until: int) -> tuple[int, list[int]]:
        """Return the byte at which to begin in a segment, and those where tasks part.

        Args:
            segment: the segment.
            first: the query's first offset.
            until: the offset after the query's last one.
        """
        limit = self._options.max_task_bytes
        if first == segment.base_offset and segment.size <= limit:
            return 0, []
        position, end = 0, segment.size
        places: list[int] = []
        before = segment.base_offset - 1
        for entry in self._index(segment):
            if entry.offset < first:
                position = entry.position
            elif before >= until:
                end = entry.position
                break
            elif before >= first:
                places.append(entry.position)
            before = entry.offset
        cuts: list[int] = []
        begin = last = position
        for place in (*places, end):
            if place - begin > limit and last > begin:
                cuts.append(last)
                begin = last
            last = place
        return position, cuts

    def _base_offsets(self, segment: Segment, positions: list[int]) -> list[int]:
        if not positions:
            return []
        with self._files.open_input_file(segment.path) as file:
            return [int.from_bytes(file.read_at(8, each), "big") for each in positions]
