"""Read one range of offsets on an executor.

The next Fetch is in flight while rows of the last one are decoded.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

from mpbroker.client.admin.topic_admin import list_offsets
from mpbroker.client.cluster import Cluster, TopicPartition
from mpbroker.client.consumer.fetcher import (
    FetchedBatch,
    Fetcher,
    FetchSettings,
    LeaderLostError,
    OffsetOutOfRangeError,
)
from mpbroker.client.errors import BrokerUnavailableError
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.records.record_columns import EncodedRecords, encoded_records
from mpbroker.spark.arrow import record_batches
from mpbroker.spark.offsets import (
    FIRST_PAUSE_S,
    GONE_ANSWERS,
    LONGEST_PAUSE_S,
    NO_TOPIC_ID,
    DataLossError,
    OffsetRange,
)
from mpbroker.spark.options import EARLIEST, LATEST

if TYPE_CHECKING:
    import pyarrow as pa

    from mpbroker.spark.options import SourceOptions

logger = logging.getLogger(__name__)

_MAX_WAIT_MS: Final = 500


class _PartitionGoneError(Exception):
    """A broker says that a partition does not exist."""

    def __str__(self) -> str:
        return "the topic or the partition does not exist any more"


class _MadeAgainError(Exception):
    """A topic was deleted, and another one has its name."""

    def __str__(self) -> str:
        return "the topic was deleted and made again"


def read_range(range_: OffsetRange, options: SourceOptions) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a range of a partition's offsets, in order.

    After a lost connection or a change of the leader, reading goes on at the offset
    reached. A partition without a leader is waited for.

    Raises:
        DataLossError: part of the range is gone, and ``fail_on_data_loss`` is set.
        BrokerUnavailableError: no progress for ``poll_timeout_ms``.
        ApiError: the broker refuses.
        RecordBatchError, ProtocolError: a batch is corrupt.
    """
    return record_batches(
        _read(range_, options),
        range_.partition,
        with_headers=options.include_headers,
        end=range_.end,
    )


def _read(range_: OffsetRange, options: SourceOptions) -> Iterator[EncodedRecords]:
    """Yield the records of each batch of a range; the last may have some beyond it."""
    position = range_.start
    patience_s = options.poll_timeout_ms / 1000
    waiting_since = time.monotonic()
    pause_s = FIRST_PAUSE_S
    gone_answers = 0
    while True:
        failure: Exception | None = None
        try:
            for batch, reached in _read_connected(range_, position, options):
                if reached > position:
                    position, pause_s, gone_answers = reached, FIRST_PAUSE_S, 0
                    if batch is not None:
                        yield batch
                    # Only after the yield: the time that the query needs for the rows
                    # is no wait for the broker.
                    waiting_since = time.monotonic()
                elif time.monotonic() - waiting_since > patience_s:
                    break
        except (BrokerUnavailableError, LeaderLostError) as error:
            failure = error
        except _PartitionGoneError as error:
            failure = error
            gone_answers += 1
            if gone_answers == GONE_ANSWERS:
                position = _lose(range_, position, range_.end, str(error), options)
        except _MadeAgainError as error:
            position = _lose(range_, position, range_.end, str(error), options)
        if position >= range_.end:
            return
        if time.monotonic() - waiting_since > patience_s:
            why = f": {failure}" if failure else ""
            raise BrokerUnavailableError(
                f"{range_.partition}: no record from offset {position} on in"
                f" {patience_s:g} s (kafkaConsumer.pollTimeoutMs){why}"
            ) from failure
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _read_connected(
    range_: OffsetRange, position: int, options: SourceOptions
) -> Iterator[tuple[EncodedRecords | None, int]]:
    """Yield the batches that one connection fetches, and the offset reached after each.

    Ends when the offset reached is at or after the range's end; raises when the
    connection cannot be used any more. None stands for no batch: the offsets up to the
    one reached are hidden (markers, aborted transactions) or gone (compaction).
    """
    partition = range_.partition
    timeout_s = options.request_timeout_ms / 1000
    with Cluster(options.bootstrap, timeout_s, options.client) as cluster:
        leaders = {partition: _leader(cluster, range_)}
        fetcher = Fetcher(
            cluster,
            {partition: position},
            leaders,
            FetchSettings(
                isolation_level=options.isolation_level,
                fetch_max_wait_ms=_MAX_WAIT_MS,
                max_partition_fetch_bytes=options.partition_max_bytes,
            ),
        )
        while position < range_.end:
            try:
                fetched = fetcher.fetch()
            except OffsetOutOfRangeError:
                position = _after_loss(cluster, leaders, range_, position, options)
                fetcher.positions[partition] = position
                yield None, position
                continue
            for batch in fetched:
                position = batch.header.next_offset
                yield _records(batch, range_), position
                if position >= range_.end:
                    return
            position = max(position, fetcher.positions[partition])
            yield None, position


def _leader(cluster: Cluster, range_: OffsetRange) -> int:
    """Return the node id of the leader of a range's partition.

    Raises:
        _PartitionGoneError: the broker knows no such topic, or no such partition.
        _MadeAgainError: the topic has another id than when the range was planned.
        LeaderLostError: it has no leader now.
        ApiError, BrokerUnavailableError: the broker refuses, or does not answer.
    """
    partition = range_.partition
    try:
        topic = cluster.topic(partition.topic, wait=False)
    except ApiError as error:
        if error.error_code != ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
            raise
        raise _PartitionGoneError from error
    found = topic.topic_id
    if range_.topic_id and found != NO_TOPIC_ID and found.hex() != range_.topic_id:
        raise _MadeAgainError
    for each in topic.partitions:
        if each.partition_index == partition.partition:
            if each.leader_id < 0:
                raise LeaderLostError(f"{partition} has no leader")
            return each.leader_id
    raise _PartitionGoneError


def _records(batch: FetchedBatch, range_: OffsetRange) -> EncodedRecords | None:
    """Return a batch's records; None if all lie beyond the end of the range."""
    if batch.header.base_offset >= range_.end:
        return None
    return encoded_records(batch.header, batch.data, batch.first_offset)


def _after_loss(
    cluster: Cluster,
    leaders: Mapping[TopicPartition, int],
    range_: OffsetRange,
    position: int,
    options: SourceOptions,
) -> int:
    """Return the offset to go on from after a Fetch was answered "offset out of range".

    The log has no offset ``position``: its records were deleted, or the topic was.

    Raises:
        DataLossError: ``fail_on_data_loss`` is set.
    """
    partition = range_.partition
    ends = {}
    for which in (EARLIEST, LATEST):
        ends[which] = list_offsets(cluster, {partition: which}, leaders)[
            partition
        ].offset
    earliest, latest = ends[EARLIEST], ends[LATEST]
    if position < earliest:
        lost = min(earliest, range_.end)
        why = f"the log starts at {earliest} now (retention, or deleted records)"
    else:
        lost = range_.end
        why = f"the log ends at {latest} (the topic was deleted and made again?)"
    return _lose(range_, position, lost, why, options)


def _lose(
    range_: OffsetRange, position: int, lost: int, why: str, options: SourceOptions
) -> int:
    """Return ``lost``, the offset to go on from: log that those below are skipped.

    Raises:
        DataLossError: ``fail_on_data_loss`` is set.
    """
    text = f"{range_.partition}: offsets {position} to {lost - 1} cannot be read: {why}"
    if options.fail_on_data_loss:
        raise DataLossError(
            f"{text}. Some data may have been lost; set failOnDataLoss=false to go on"
            " without them"
        )
    logger.warning("%s; %d offsets are skipped", text, lost - position)
    return lost
