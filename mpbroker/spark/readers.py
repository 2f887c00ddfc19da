"""Read topics for `MpbrokerDataSource`: in batch queries and in streams.

Spark plans each query in a new process and reads in others. Every import adds to each
query's time, so a module that only one kind of process needs is imported in a function.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import (
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from mpbroker.base.errors import MpbrokerError
from mpbroker.client.cluster import TopicPartition
from mpbroker.client.errors import BrokerUnavailableError
from mpbroker.protocol.errors import ApiError
from mpbroker.spark.offsets import (
    DataLossError,
    OffsetRange,
    OffsetReader,
    Offsets,
    Subscribed,
    check_order,
    from_json,
    is_unknown,
    limit_offsets,
    made_again,
    split_ranges,
    to_json,
    topic_ids_from_json,
)
from mpbroker.spark.options import (
    EARLIEST,
    LATEST,
    OptionError,
    SourceOptions,
)

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger(__name__)

_NAMED_PARTITIONS: Final = 5  # in the text of an error; there may be thousands


class RangePartition(InputPartition):
    """The range of offsets that one task reads."""

    def __init__(self, range_: OffsetRange) -> None:
        super().__init__(tuple(range_))
        self.range = range_


class BatchReader(DataSourceReader):
    """Reads each partition from one offset to another, once."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options

    def partitions(self) -> Sequence[InputPartition]:
        reader = OffsetReader(self._options)
        try:
            ranges = batch_ranges(reader, self._options)
        finally:
            reader.close()
        return _input_partitions(ranges, self._options)

    def read(self, partition: InputPartition | None) -> Iterator[pa.RecordBatch]:
        return _read_partition(partition, self._options)


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads micro-batches; Spark keeps the offsets in the query's checkpoint."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._offsets = OffsetReader(options)
        # Where Trigger.AvailableNow ends; None with other triggers.
        self._target: Offsets | None = None
        self._latest: Offsets = {}
        # The partitions that were read before and are not in the metadata.
        self._missing: list[TopicPartition] = []
        # None: no batch since the start; the time of the one before is not known.
        self._last_trigger_s: float | None = None

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        leaders, topic_ids = self._offsets.subscribed()
        start = self._offsets.resolve(
            self._options.starting,
            leaders,
            unmatched=lambda partition, timestamp_ms: unmatched_start(
                self._options, partition, timestamp_ms
            ),
        )
        within = _within(self._offsets, self._options, "starting", start, leaders)
        return to_json(within, topic_ids)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        wanted = self._options.subscription
        names = wanted.topics or {each.topic for each in wanted.partitions}
        # Topics that are not there are told of by `initialOffset` or `latestOffset`.
        leaders, _ = self._subscribed(names)
        self._target = self._offsets.offsets(leaders, LATEST)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        if self._options.max_offsets_per_trigger is None:
            return ReadAllAvailable()
        return ReadMaxRows(self._options.max_offsets_per_trigger)

    def latestOffset(  # noqa: N802
        self, start: dict[str, Any], limit: ReadLimit
    ) -> dict[str, Any]:
        read = from_json(start)
        with self._waiting_for_brokers(read):
            return self._latest_offset(start, read, limit)

    def _latest_offset(
        self, start: dict[str, Any], read: Offsets, limit: ReadLimit
    ) -> dict[str, Any]:
        leaders, topic_ids = self._subscribed({each.topic for each in read})
        known_ids = topic_ids_from_json(start)
        anew = self._made_again(known_ids, topic_ids)
        before = _without(read, anew)
        missing = sorted(set(before) - set(leaders))
        if missing and missing != self._missing:  # once, not at each trigger
            self._report_loss(
                f"{_told({each: before[each] for each in missing})}: the partitions do"
                " not exist any more, or are not subscribed to"
            )
        self._missing = missing
        latest = self._offsets.offsets(leaders, LATEST)
        self._latest = latest
        if self._target is not None:
            latest = {
                partition: min(latest.get(partition, offset), offset)
                for partition, offset in self._target.items()
            }
        begun = self._with_new_partitions(before, leaders)
        for partition, offset in latest.items():
            if offset < begun.get(partition, 0):
                self._report_loss(
                    f"{partition}: the log ends at {offset}, below"
                    f" {begun[partition]}, which was read before (the topic was"
                    " deleted and made again?)"
                )
        if isinstance(limit, ReadMaxRows):
            latest = limit_offsets(begun, latest, limit.max_rows)
        new = sum(
            max(0, offset - begun.get(partition, offset))
            for partition, offset in latest.items()
        )
        if self._too_few(new):
            return start
        if new:
            self._last_trigger_s = time.monotonic()
        # Keep partitions that are missing from the metadata for a moment: they would
        # look new when they come back, and be read again from their beginning. If their
        # topic was made again meanwhile, its id will tell.
        end = {**before, **latest}
        if not anew and end == read:
            return start  # not an empty batch for an id that an older mpbroker left out
        return to_json(end, known_ids | topic_ids)

    def _too_few(self, new: int) -> bool:
        """Return whether to wait for minOffsetsPerTrigger before the next batch.

        The first batch after a start does not wait: the delay may have ended long ago.
        """
        least = self._options.min_offsets_per_trigger
        if least is None or self._target is not None or self._last_trigger_s is None:
            return False
        waited_s = time.monotonic() - self._last_trigger_s
        return waited_s * 1000 < self._options.max_trigger_delay_ms and new < least

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        return to_json(self._latest) or None

    def partitions(
        self, start: dict[str, Any], end: dict[str, Any]
    ) -> Sequence[InputPartition]:
        planned, read = from_json(end), from_json(start)
        with self._waiting_for_brokers(read):
            return self._partitions(start, read, end, planned)

    def _partitions(
        self,
        start: dict[str, Any],
        read: Offsets,
        end: dict[str, Any],
        planned: Offsets,
    ) -> Sequence[InputPartition]:
        leaders, topic_ids = self._subscribed({each.topic for each in planned})
        planned_ids = topic_ids_from_json(end)
        gone = self._made_again(planned_ids, topic_ids)
        until = _without(planned, gone)
        anew = made_again(topic_ids_from_json(start), planned_ids)
        begun = self._with_new_partitions(
            _without(read, anew),
            {each: leaders[each] for each in until if each in leaders},
        )
        # A new partition may have no leader, or be missing from the metadata, just when
        # its first batch is planned again. Its beginning is not known then, but its
        # rows must not be left out: the task waits, and tells what is gone.
        ranges = [
            OffsetRange(
                partition,
                begun.get(partition, 0),
                offset,
                planned_ids.get(partition.topic, ""),
            )
            for partition, offset in sorted(until.items())
        ]
        return _input_partitions(ranges, self._options)

    @contextmanager
    def _waiting_for_brokers(self, read: Offsets) -> Iterator[None]:
        """Wait for brokers as long as tasks do: a query that runs survives a restart.

        Args:
            read: where the query goes on, for the error.

        Raises:
            BrokerUnavailableError: none has answered for ``poll_timeout_ms``.
        """
        self._offsets.patience_s = self._options.poll_timeout_ms / 1000
        try:
            yield
        except BrokerUnavailableError as error:
            raise BrokerUnavailableError(
                f"{error}; waited {self._offsets.patience_s:g} s"
                " (kafkaConsumer.pollTimeoutMs). Start the query again when brokers"
                f" answer: it goes on where it was, {_told(read)}"
            ) from error

    def _subscribed(self, known: Collection[str]) -> Subscribed:
        """Return what is subscribed to, without topics of ``known`` that are gone."""
        if self._options.fail_on_data_loss:
            # Ask for longer: the query ends if a topic is gone.
            try:
                return self._offsets.subscribed()
            except (ApiError, OptionError) as error:
                if isinstance(error, ApiError) and not is_unknown(error):
                    raise
        return self._offsets.subscribed(known)

    def _made_again(self, before: dict[str, str], now: dict[str, str]) -> set[str]:
        """Return the topics that were deleted and made again: they have another id.

        Raises:
            DataLossError: there are some, and ``fail_on_data_loss`` is set. If it is
                not, the loss is logged.
        """
        found = made_again(before, now)
        for topic in sorted(found):
            self._report_loss(
                f"topic {topic} was deleted and made again, or this is another cluster"
                f" (its id was {before[topic]} and is {now[topic]}): records of the old"
                " one that were not read are gone, and the new one is to be read from"
                " its start"
            )
        return found

    def _with_new_partitions(
        self, before: Offsets, leaders: dict[TopicPartition, int]
    ) -> Offsets:
        """Return ``before``, and the earliest offset of each partition not in it.

        A partition whose leader is -1 (none) is left out.

        Raises:
            DataLossError: a new partition begins above 0, so records are lost, and
                ``fail_on_data_loss`` is set. If it is not, the loss is logged.
        """
        new = {
            partition: leader
            for partition, leader in leaders.items()
            if partition not in before and leader >= 0
        }
        if not new:
            return before
        earliest = self._offsets.offsets(new, EARLIEST)
        for partition, offset in sorted(earliest.items()):
            if offset:
                self._report_loss(
                    f"{partition} is new and starts at {offset} instead of 0: earlier"
                    " records are gone already"
                )
        return before | earliest

    def read(self, partition: InputPartition | None) -> Iterator[pa.RecordBatch]:
        return _read_partition(partition, self._options)

    def commit(self, end: dict[str, Any]) -> None:
        """Store the offsets for the group of ``commitGroup``, for tools that show lag.

        Spark calls this when it plans the next batch. Only the checkpoint decides what
        is read, so an error here is logged and the stream goes on.
        """
        group = self._options.commit_group
        if group is None:
            return
        try:
            self._offsets.store(group, from_json(end))
        except MpbrokerError as error:
            logger.warning("commitGroup=%s: offsets are not stored: %s", group, error)

    def stop(self) -> None:
        self._offsets.close()

    def _report_loss(self, text: str) -> None:
        report_loss(self._options, text)


def _told(offsets: Offsets) -> str:
    """Return how far partitions were read, as text: of five, and how many there are."""
    named = sorted(offsets.items())[:_NAMED_PARTITIONS]
    text = ", ".join(f"{each} (read up to offset {offset})" for each, offset in named)
    more = len(offsets) - len(named)
    return (text or "nothing was read") + (f" and {more} others" if more else "")


def _without(offsets: Offsets, topics: set[str]) -> Offsets:
    return {each: offsets[each] for each in offsets if each.topic not in topics}


def batch_ranges(reader: OffsetReader, options: SourceOptions) -> list[OffsetRange]:
    """Return the range of each partition that a batch query reads.

    Raises:
        OptionError: a start is greater than an end, or an option does not fit.
        DataLossError: an offset lies beyond the end, and ``fail_on_data_loss`` is set.
        ApiError, BrokerUnavailableError: the broker refuses, or does not answer.
    """

    def unmatched(partition: TopicPartition, timestamp_ms: int) -> int:
        return unmatched_start(options, partition, timestamp_ms)

    leaders, topic_ids = reader.subscribed()
    start = reader.resolve(options.starting, leaders, unmatched=unmatched)
    end = reader.resolve(options.ending, leaders, unmatched=lambda *_: LATEST)
    within = _within(reader, options, "starting", start, leaders)
    for each in sorted(leaders):
        check_order(each, start[each], end[each])
    end = _within(reader, options, "ending", end, leaders)
    return [
        OffsetRange(each, within[each], end[each], topic_ids.get(each.topic, ""))
        for each in sorted(leaders)
    ]


def _within(
    reader: OffsetReader,
    options: SourceOptions,
    side: str,
    offsets: Offsets,
    leaders: Mapping[TopicPartition, int],
) -> Offsets:
    """Return the offsets; one beyond a partition's log end is lowered to that end.

    Only offsets that the user named can lie beyond. Offsets below the start of a log
    stay: the tasks that read them report the data loss.

    Raises:
        DataLossError: an offset lies beyond the end, and ``fail_on_data_loss`` is set.
    """
    request = options.starting if side == "starting" else options.ending
    if request.offsets is None:
        return offsets
    ends = reader.ends(leaders)
    for partition, offset in sorted(offsets.items()):
        if offset > ends[partition]:
            text = (
                f"{side}Offsets of {partition} is {offset}, and the log ends at"
                f" {ends[partition]}"
            )
            report_loss(options, text)
    return {each: min(offset, ends[each]) for each, offset in offsets.items()}


def report_loss(options: SourceOptions, text: str) -> None:
    """Report lost records: log a warning if failOnDataLoss is false.

    Raises:
        DataLossError: failOnDataLoss is true.
    """
    if options.fail_on_data_loss:
        raise DataLossError(
            f"{text}. Some data may have been lost; set failOnDataLoss=false to go"
            " on without them"
        )
    logger.warning("%s", text)


def unmatched_start(
    options: SourceOptions, partition: TopicPartition, timestamp_ms: int
) -> int:
    """Return LATEST for a starting timestamp that is later than all records.

    Raises:
        OptionError: startingOffsetsByTimestampStrategy is not ``latest``.
    """
    if options.unmatched_timestamp_is_latest:
        return LATEST
    raise OptionError(
        f"{partition} has no record at or after timestamp {timestamp_ms}; set"
        " startingOffsetsByTimestampStrategy=latest to start at its end"
    )


def _read_partition(
    partition: InputPartition | None, options: SourceOptions
) -> Iterator[pa.RecordBatch]:
    if partition is None or partition.value is None:
        return iter(())  # Spark reads one empty partition where the plan has none
    assert isinstance(partition, RangePartition)
    from mpbroker.spark.partition_reader import read_range

    return read_range(partition.range, options)


def _input_partitions(
    ranges: list[OffsetRange], options: SourceOptions
) -> list[InputPartition]:
    cut = split_ranges(
        ranges, options.min_partitions, options.max_records_per_partition
    )
    return [RangePartition(each) for each in cut]
