"""Append markers: the control batches that end transactions, one in each partition.

    killed before the append         The successor appends the marker.
    killed after it                  The successor tries to append it. The append finds,
                                     under the partition's lock, that the transaction
                                     has ended there, and does nothing.
    power cut before it is on disk   If Prepare is the last record of the transactional
                                     id, this is like the first case. Otherwise the
                                     later records name the marker, and a load appends
                                     it again.

Source: Kafka's TransactionMarkerChannelManager; KafkaApis.handleWriteTxnMarkersRequest.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, Protocol

from mpbroker.base.logger import get_logger
from mpbroker.base.named_tuple import NamedTuple
from mpbroker.coordinator.durability import Awaited
from mpbroker.coordinator.groups.group_coordinator import GroupCoordinator
from mpbroker.coordinator.outbox import (
    AppendedMarker,
    Call,
    Marked,
    Markers,
    Outbox,
)
from mpbroker.coordinator.transactions.transaction_ends import COORDINATOR_EPOCH
from mpbroker.ipc.layout import RowStatus
from mpbroker.metadata.topic_names import OFFSETS_TOPIC, TopicPartition
from mpbroker.metadata.topics import Topic, TopicRegistry, require_partition
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.messages.write_txn_markers import (
    WritableTxnMarker,
    WritableTxnMarkerPartitionResult,
    WritableTxnMarkerResult,
    WritableTxnMarkerTopicResult,
    WriteTxnMarkersRequest,
    WriteTxnMarkersResponse,
)
from mpbroker.protocol.records.batch_header import BATCH_HEADER_SIZE, parse_batch_header
from mpbroker.protocol.records.control_record import (
    EndTransactionMarker,
    build_end_transaction_marker,
)
from mpbroker.protocol.records.log_validator import ValidatedBatch
from mpbroker.storage.log.own_appends import OwnAppends
from mpbroker.storage.log.partition_log import PartitionLog

if TYPE_CHECKING:
    from mpbroker.coordinator.shard_transactions import ShardTransactions

_LOG = get_logger(__name__)


# Errors of a log that cannot be opened now, but perhaps a moment later.
_PASSING: Final = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT}
)
# The errors of appends to partitions that are there, and could not be written.
_NOT_WRITTEN: Final = frozenset(
    {ErrorCode.KAFKA_STORAGE_ERROR, ErrorCode.NOT_LEADER_OR_FOLLOWER}
)


class FindLog(Protocol):
    """A function that returns the log of a partition."""

    def __call__(self, topic: Topic, partition: int) -> PartitionLog: ...


class _Place(NamedTuple):
    """A transaction's marker that a power cut may have taken, and the log it was in."""

    marker: AppendedMarker
    log: PartitionLog | None  # None: the partition is offline
    wanted: Awaited[PartitionLog] | None  # what to sync for it; None: nothing

    def is_on_disk(self) -> bool:
        if self.log is None:
            return False
        end = self.marker.offset + 1 if self.wanted is None else self.wanted.end
        return self.log.row.durable_end_offset >= end


def sync_logs(awaited: Iterable[Awaited[PartitionLog]]) -> None:
    """Sync each log once, up to the largest offset that is wanted of it.

    Raises:
        ApiError: a log could not be synced and is still online. The other logs were
            synced if possible.
    """
    ends: dict[int, Awaited[PartitionLog]] = {}
    for each in awaited:
        known = ends.get(each.log.row.index)
        if known is None or known.end < each.end:
            ends[each.log.row.index] = each
    failure: ApiError | None = None
    for each in ends.values():
        try:
            each.log.sync.flush(each.end)
        except ApiError as error:
            if each.log.row.status == RowStatus.ONLINE:
                failure = error
    if failure is not None:
        raise failure


class MarkerWriter:
    """Appends transactions' markers to logs; finds those that a power cut has taken.

    Args:
        appended: called with each log after an append, so that waiting fetches go on.
        shards: ends transactions in shards of groups, which a cluster has in place of
            the partitions of __consumer_offsets; None: there is no cluster.
    """

    def __init__(
        self,
        registry: TopicRegistry,
        log: FindLog,
        groups: GroupCoordinator,
        appended: Callable[[PartitionLog], None],
        own_appends: OwnAppends,
        shards: ShardTransactions | None = None,
    ) -> None:
        self.shards = shards
        self._registry = registry
        self._log = log
        self._groups = groups
        self._appended = appended
        self._own = own_appends

    def append(
        self, markers: Markers, now_ms: int
    ) -> tuple[
        dict[TopicPartition, ErrorCode],
        list[Awaited[PartitionLog]],
        tuple[AppendedMarker, ...],
    ]:
        """Append a transaction's markers, one to each of its partitions.

        Returns:
            The error code of each partition; the logs to sync if the caller waits for
            the disk; the markers that were appended.
        """
        data = build_end_transaction_marker(
            markers.producer_id,
            markers.producer_epoch,
            EndTransactionMarker(markers.commit, markers.coordinator_epoch),
            now_ms,
        )
        results: dict[TopicPartition, ErrorCode] = {}
        awaited = []
        appended = []
        for topic_partition in markers.partitions:
            name, partition = topic_partition
            if self.shards is not None and name == OFFSETS_TOPIC:
                results[topic_partition] = self._end(self.shards, markers, partition)
                continue
            try:
                topic = require_partition(self._registry.topic(name), name, partition)
                if topic.config.diskless_enable:
                    # A marker of WriteTxnMarkers would be in the local copy alone.
                    raise ApiError(
                        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
                        "it is shared by a cluster, and in no transaction",
                    )
                log = self._log(topic, partition)
                end = self._append(log, data, now_ms)
            except ApiError as error:
                results[topic_partition] = error.error_code
                _LOG.warning(
                    "%s-%d: no marker could be appended: %s", name, partition, error
                )
                continue
            results[topic_partition] = ErrorCode.NONE
            awaited.append(Awaited(topic_partition, log, end))
            producer = markers.producer_id, markers.producer_epoch, markers.commit
            appended.append(
                AppendedMarker(*producer, name, topic.topic_id, partition, end - 1)
            )
            self._tell_groups(appended[-1])
        awaited.extend(self._awaited(markers.earlier))
        return results, awaited, tuple(appended)

    @staticmethod
    def _end(shards: ShardTransactions, markers: Markers, shard: int) -> ErrorCode:
        """Have a shard of groups write what the end of a transaction means.

        Return an error until it has. Then the marker is tried again.
        """
        # Imported here: most brokers are in no cluster.
        from mpbroker.cluster.groups.transaction_exchange import OffsetsEnd

        if markers.is_by_hand:
            return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        end = OffsetsEnd(
            shard, markers.producer_id, markers.producer_epoch, markers.commit
        )
        if shards.end(end):
            return ErrorCode.NONE
        return ErrorCode.COORDINATOR_NOT_AVAILABLE

    def _log_of(self, marker: AppendedMarker) -> PartitionLog | None:
        """Return the log of a marker's partition; None if the topic was deleted."""
        topic = self._registry.topic(marker.topic)
        if topic is None or topic.topic_id != marker.topic_id:
            return None
        return self._log(topic, marker.partition)

    def is_on_disk(self, marker: AppendedMarker) -> bool:
        """Return whether a marker (the record that ends a transaction) is on disk.

        Return True also if its partition was deleted, or has flush.acks.all=false.
        """
        try:
            log = self._log_of(marker)
        except ApiError:
            return False
        return (
            log is None
            or log.row.durable_end_offset > marker.offset
            or not log.view.config.flush_acks_all
        )

    def topic_id(self, topic: str) -> bytes | None:
        """Return the id of a topic; None if there is no topic of that name."""
        found = self._registry.topic(topic)
        return None if found is None else found.topic_id

    def expect(
        self,
        producer_id: int,
        epoch: int,
        partitions: Iterable[TopicPartition],
        *,
        commit: bool,
    ) -> tuple[AppendedMarker, ...]:
        """Return a transaction's markers, each with the offset it would get now.

        Leave out partitions that are offline.
        """
        expected = []
        for name, partition in partitions:
            topic = self._registry.topic(name)
            if topic is None or not 0 <= partition < len(topic.partitions):
                continue
            if self.shards is not None and name == OFFSETS_TOPIC:
                continue  # the topic is of before this broker was a node
            with contextlib.suppress(ApiError):
                row = self._log(topic, partition).row
                # Under the lock: an append that has looked into the table before is in
                # the log by now, and in front of this end.
                with row.locked():
                    end = row.log_end_offset
                where = name, topic.topic_id, partition, end
                expected.append(AppendedMarker(producer_id, epoch, commit, *where))
        return tuple(expected)

    def _awaited(
        self, markers: Iterable[AppendedMarker]
    ) -> list[Awaited[PartitionLog]]:
        """Return the logs of markers that are online, and how far to sync each."""
        awaited = []
        for marker in markers:
            with contextlib.suppress(ApiError):  # do not wait for one that is offline
                if (log := self._log_of(marker)) is not None:
                    name = marker.topic, marker.partition
                    awaited.append(Awaited(name, log, marker.offset + 1))
        return awaited

    def begun_behind(
        self, ends: Iterable[AppendedMarker], producer_id: int, epoch: int
    ) -> tuple[set[TopicPartition], set[TopicPartition]]:
        """Find the partitions in which a producer has begun its next transaction.

        A transaction may begin before its record is on disk, so a power cut may have
        taken the record. It began in partitions that the record before it names.

        Args:
            ends: the markers that the last record names, in their order.
            producer_id: the producer id of the next transaction.
            epoch: the producer epoch of the next transaction.

        Returns:
            The partitions in which it has begun, and the partitions that could not be
            searched because they are offline.

        Raises:
            ApiError: a partition cannot be read now, but perhaps a moment later.
        """
        unseen: set[TopicPartition] = set()
        begun: set[TopicPartition] = set()
        for marker in ends:
            log = None
            try:
                log = self._log_of(marker)
                if log is None:
                    continue
                entry = log.producers.at(log.view.state()).entries.get(producer_id)
            except ApiError as error:
                if self._may_pass(log, error):
                    raise
                unseen.add((marker.topic, marker.partition))
                continue
            where = marker.topic, marker.partition
            # A transaction that was found behind an earlier marker of this partition
            # may be the one that this marker ends.
            begun.discard(where)
            if (
                entry is not None
                and entry.epoch == epoch
                and entry.txn_first_offset >= marker.offset
            ):
                begun.add(where)
        return begun, unseen

    def require_ended(self, results: Mapping[TopicPartition, ErrorCode]) -> None:
        """Raise an error if a partition of an ended transaction lacks the end marker.

        An offline partition may lack it, because no process writes there.

        Raises:
            ApiError: KAFKA_STORAGE_ERROR: the disk is full, for example;
                NOT_LEADER_OR_FOLLOWER: a log directory was not there at the start.
        """
        for (name, partition), code in results.items():
            if code not in _NOT_WRITTEN:
                continue
            log = None
            try:
                topic = self._registry.topic(name)
                log = None if topic is None else self._log(topic, partition)
            except ApiError as error:
                may_pass = self._may_pass(log, error)
            else:
                may_pass = log is not None and log.row.status == RowStatus.ONLINE
            if may_pass:
                raise ApiError(code, f"{name}-{partition} lacks a marker")

    @staticmethod
    def _may_pass(log: PartitionLog | None, error: ApiError) -> bool:
        """Return whether a marker's append, which failed, may succeed if repeated."""
        if log is None:
            return not _is_for_good(error)
        return log.row.status == RowStatus.ONLINE

    def restore(
        self, ends: Iterable[Sequence[AppendedMarker]], now_ms: int
    ) -> list[tuple[list[AppendedMarker], bool]]:
        """Append the markers again that a power cut has taken, and sync them.

        A power cut takes only the end of a log. So if a transaction is open in a log,
        and began below the offset of the marker that ended it, that marker is lost. The
        producer's later records were behind the marker, and are lost with it. Until
        this method returns the producer cannot append: the power cut that took a marker
        also emptied the table of open transactions.

        Args:
            ends: the markers of several producers; each log is synced once for all.

        Returns:
            For each producer, the markers that may still not be on disk, and whether a
            marker was appended at a new offset. A record of another transaction can
            take its old offset, so the caller writes a record that does not name it.

        Raises:
            ApiError: a log cannot be read or written now, but perhaps later.
        """
        found = [self._look_for(markers, now_ms) for markers in ends]
        sync_logs(each.wanted for places, _ in found for each in places if each.wanted)
        return [
            ([each.marker for each in places if not each.is_on_disk()], moved)
            for places, moved in found
        ]

    def _look_for(
        self, markers: Iterable[AppendedMarker], now_ms: int
    ) -> tuple[list[_Place], bool]:
        found, moved = [], False
        for marker in markers:
            log = None
            try:
                log = self._log_of(marker)
                if log is None:
                    continue
                state = log.view.state()
                entry = log.producers.at(state).entries.get(marker.producer_id)
                first = -1 if entry is None else entry.txn_first_offset
                # The first condition: the transaction is still open in this log. The
                # second: it wrote nothing to it, but the log ends before the marker's
                # offset. A consumer that has read behind the marker would miss a record
                # that is written in the marker's place.
                if 0 <= first < marker.offset or state.log_end_offset <= marker.offset:
                    moved = True
                    end = self._append_again(log, marker, now_ms)
                    found.append(_Place(marker, log, Awaited(marker, log, end)))
                elif not _is_there(log, marker):
                    # An earlier coordinator has appended the marker again, at a later
                    # offset, and died before the sync. So sync the whole log: that the
                    # old offset is on disk says nothing about the marker.
                    end = state.log_end_offset
                    found.append(_Place(marker, log, Awaited(marker, log, end)))
                else:
                    found.append(_Place(marker, log, None))
            except ApiError as error:
                if log is None and _is_for_good(error):
                    _LOG.error("%s-%d: %s", marker.topic, marker.partition, error)
                elif log is None or log.row.status == RowStatus.ONLINE:
                    if error.error_code is ErrorCode.INVALID_PRODUCER_EPOCH:
                        # The producer has a later epoch there, so the transaction has
                        # ended.
                        continue
                    raise
                # The partition is offline: it is neither written nor read. Keep the
                # marker for a later load.
                found.append(_Place(marker, None, None))
        return found, moved

    def _append_again(
        self, log: PartitionLog, marker: AppendedMarker, now_ms: int
    ) -> int:
        _LOG.warning(
            "%s-%d has lost the marker of producer %d at offset %d: appending it again",
            marker.topic,
            marker.partition,
            marker.producer_id,
            marker.offset,
        )
        end = EndTransactionMarker(marker.commit, COORDINATOR_EPOCH)
        data = build_end_transaction_marker(*marker[:2], end, now_ms)
        behind = self._append(log, data, now_ms)
        self._tell_groups(marker)
        return behind

    def _tell_groups(self, marker: AppendedMarker) -> None:
        """Commit or drop a transaction's offsets, if a marker is in __consumer_offsets.

        Do nothing while that partition is being loaded: the load will read this marker.
        The offsets loaded so far may be those of an earlier transaction, which has a
        marker of its own.
        """
        if (
            marker.topic == OFFSETS_TOPIC
            and self.shards is None
            and not self._groups.is_loading(marker.partition)
        ):
            self._groups.replay_end_of_transaction(
                marker.partition, marker.producer_id, commit=marker.commit
            )

    def _append(self, log: PartitionLog, data: bytes, now_ms: int) -> int:
        end = self._own.append_marker(log, data, now_ms)
        if end is not None:
            self._appended(log)
            return end
        header = parse_batch_header(data)
        batch = ValidatedBatch(
            header,
            header.last_offset_delta,
            header.max_timestamp,
            header.record_count,
            header.last_offset_delta,
            memoryview(bytearray(data)),
            -1,
        )
        result = log.append(batch, now_ms=now_ms)
        if not result.duplicate:
            self._appended(log)
        return result.last_offset + 1


def _is_for_good(error: ApiError) -> bool:
    """Return whether an error that kept a log from being opened will not pass.

    The log then counts as offline.

    A partition with a damaged directory counts as offline. If it did not, no partition
    of __transaction_state with a record that names it could be loaded.
    """
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno not in _PASSING


def _is_there(log: PartitionLog, marker: AppendedMarker) -> bool:
    """Return whether a transaction's marker is still at the offset of its append."""
    try:
        found = log.reader.read(marker.offset, 1, min_one_batch=True)
    except ApiError:
        return False  # the record at that offset was deleted, for example
    data = os.pread(found.fd, BATCH_HEADER_SIZE, found.position)
    if not found.length or len(data) < BATCH_HEADER_SIZE:
        return False
    header = parse_batch_header(data)
    return (
        header.is_control
        and header.base_offset == marker.offset
        and header.producer_id == marker.producer_id
    )


class MarkerRequests:
    """Serves WriteTxnMarkers, by which an administrator ends transactions by hand."""

    def __init__(self, outbox: Outbox) -> None:
        self._out = outbox

    def write_txn_markers(
        self, call: Call, request: WriteTxnMarkersRequest, now_ms: int
    ) -> None:
        results: dict[int, Mapping[TopicPartition, ErrorCode]] = {}

        def answer_if_all_done() -> None:
            if len(results) == len(request.markers):
                rows = [
                    _result(marker, results[index])
                    for index, marker in enumerate(request.markers)
                ]
                self._out.answer(call, WriteTxnMarkersResponse(markers=rows))

        def done(index: int) -> Marked:
            def note(
                codes: Mapping[TopicPartition, ErrorCode],
                now_ms: int,
                appended: Sequence[AppendedMarker],
            ) -> None:
                results[index] = codes
                answer_if_all_done()

            return note

        for index, marker in enumerate(request.markers):
            partitions = [
                (topic.name, partition)
                for topic in marker.topics
                for partition in topic.partition_indexes
            ]
            self._out.write_markers(
                Markers(
                    marker.producer_id,
                    marker.producer_epoch,
                    marker.transaction_result,
                    marker.coordinator_epoch,
                    partitions,
                    done(index),
                    is_by_hand=True,
                )
            )
        answer_if_all_done()


def _result(
    marker: WritableTxnMarker, codes: Mapping[TopicPartition, ErrorCode]
) -> WritableTxnMarkerResult:
    return WritableTxnMarkerResult(
        producer_id=marker.producer_id,
        topics=[
            WritableTxnMarkerTopicResult(
                name=topic.name,
                partitions=[
                    WritableTxnMarkerPartitionResult(
                        partition_index=partition,
                        error_code=codes[topic.name, partition],
                    )
                    for partition in topic.partition_indexes
                ],
            )
            for topic in marker.topics
        ],
    )
