"""The ends of transactions in the partitions: control batches, each written once.

    killed before a marker's append     the successor appends it
    killed after it                     the successor finds the transaction ended there,
                                        under the partition's lock, and appends nothing
    power cut before it is on disk      as the first or, if __transaction_state is past
                                        that: its records name the marker (``restore``)

Source: Kafka's TransactionMarkerChannelManager; KafkaApis.handleWriteTxnMarkersRequest.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

from mpbroker.base.logger import get_logger
from mpbroker.coordinator.durability import Awaited
from mpbroker.coordinator.groups.group_coordinator import GroupCoordinator
from mpbroker.coordinator.outbox import (
    AppendedMarker,
    Call,
    Marked,
    Markers,
    Outbox,
    TopicPartition,
)
from mpbroker.coordinator.transactions.transaction_ends import COORDINATOR_EPOCH
from mpbroker.ipc.layout import RowStatus
from mpbroker.metadata.topic_names import OFFSETS_TOPIC
from mpbroker.metadata.topics import Topic, TopicRegistry
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

_LOG = get_logger(__name__)


# Why a log may not be opened now, and a moment later.
_PASSING: Final = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT}
)


class FindLog(Protocol):
    """Finds a partition's log."""

    def __call__(self, topic: Topic, partition: int) -> PartitionLog: ...


class _Place(NamedTuple):
    """Where a marker is that a power cut may have taken."""

    marker: AppendedMarker
    log: PartitionLog | None  # None: off line
    wanted: Awaited | None  # what is to be synced, if anything is

    def is_on_disk(self) -> bool:
        if self.log is None:
            return False
        end = self.marker.offset + 1 if self.wanted is None else self.wanted.end
        return self.log.row.durable_end_offset >= end


def sync_logs(awaited: Iterable[Awaited]) -> None:
    """Force logs to disk, each once.

    Raises:
        ApiError: one cannot be, and is on line all the same; all others are.
    """
    ends: dict[int, Awaited] = {}
    for each in awaited:
        known = ends.get(each.log.row.index)
        if known is None or known.end < each.end:
            ends[each.log.row.index] = each
    failure: ApiError | None = None
    for each in ends.values():
        try:
            each.log.sync(each.end)
        except ApiError as error:
            if each.log.row.status == RowStatus.ONLINE:
                failure = error
    if failure is not None:
        raise failure


class MarkerWriter:
    """Appends markers to partitions.

    Args:
        appended: told of every log that has grown, to wake waiting fetches.
    """

    def __init__(
        self,
        registry: TopicRegistry,
        log: FindLog,
        groups: GroupCoordinator,
        appended: Callable[[PartitionLog], None],
        own_appends: OwnAppends,
    ) -> None:
        self._registry = registry
        self._log = log
        self._groups = groups
        self._appended = appended
        self._own = own_appends

    def append(
        self, markers: Markers, now_ms: int
    ) -> tuple[
        dict[TopicPartition, ErrorCode], list[Awaited], tuple[AppendedMarker, ...]
    ]:
        """Append markers; say how each went, what is to be synced, and where it is."""
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
            try:
                topic = self._registry.topic(name)
                if topic is None or not 0 <= partition < len(topic.partitions):
                    raise ApiError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
                log = self._log(topic, partition)
                end = self._append(log, data, now_ms)
            except ApiError as error:
                results[topic_partition] = error.error_code
                _LOG.warning("no marker for %s-%d: %s", name, partition, error)
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

    def _log_of(self, marker: AppendedMarker) -> PartitionLog | None:
        """The log that a marker is in; None: it was deleted."""
        topic = self._registry.topic(marker.topic)
        if topic is None or topic.topic_id != marker.topic_id:
            return None
        return self._log(topic, marker.partition)

    def is_on_disk(self, marker: AppendedMarker) -> bool:
        """Whether a marker need not be remembered any more."""
        try:
            log = self._log_of(marker)
        except ApiError:
            return False
        return log is None or log.row.durable_end_offset > marker.offset

    def topic_id(self, topic: str) -> bytes | None:
        """The id of a topic; None: there is none of that name."""
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
        """Say where markers would come to be, were they appended now.

        Of what is off line there is none.
        """
        expected = []
        for name, partition in partitions:
            topic = self._registry.topic(name)
            if topic is None or not 0 <= partition < len(topic.partitions):
                continue
            with contextlib.suppress(ApiError):
                row = self._log(topic, partition).row
                with row.locked():  # who has looked whether it is open has appended
                    end = row.log_end_offset
                where = name, topic.topic_id, partition, end
                expected.append(AppendedMarker(producer_id, epoch, commit, *where))
        return tuple(expected)

    def _awaited(self, markers: Iterable[AppendedMarker]) -> list[Awaited]:
        """What is to be synced for markers to be on disk that were appended before."""
        awaited = []
        for marker in markers:
            with contextlib.suppress(ApiError):  # off line: it is not waited for
                if (log := self._log_of(marker)) is not None:
                    name = marker.topic, marker.partition
                    awaited.append(Awaited(name, log, marker.offset + 1))
        return awaited

    def begun_behind(
        self, ends: Iterable[AppendedMarker], producer_id: int, epoch: int
    ) -> tuple[set[TopicPartition], set[TopicPartition]]:
        """Find where a producer has written in a transaction behind its last one.

        If no record says that this has begun, a power cut has taken that: it need not
        have been on disk, as the record before names all partitions that it can be in.

        Args:
            ends: of earlier transactions, in their order.

        Returns:
            Those partitions; those of which it cannot be seen, as they are off line.

        Raises:
            ApiError: it cannot be seen, but may be a moment later.
        """
        unseen: set[TopicPartition] = set()
        begun: set[TopicPartition] = set()
        for marker in ends:
            log = None
            try:
                log = self._log_of(marker)
                if log is None:
                    continue
                entry = log.producers_at(log.state()).entries.get(producer_id)
            except ApiError as error:
                if self._may_pass(log, error):
                    raise
                unseen.add((marker.topic, marker.partition))
                continue
            where = marker.topic, marker.partition
            begun.discard(where)  # behind an earlier end: it is this one's, perhaps
            if (
                entry is not None
                and entry.epoch == epoch
                and entry.txn_first_offset >= marker.offset
            ):
                begun.add(where)
        return begun, unseen

    def require_ended(self, results: Mapping[TopicPartition, ErrorCode]) -> None:
        """Raise unless what lacks its marker is off line: nobody writes there.

        Raises:
            ApiError: KAFKA_STORAGE_ERROR: a disk that is full, say.
        """
        for (name, partition), code in results.items():
            if code is not ErrorCode.KAFKA_STORAGE_ERROR:
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
        """Whether what a log refused it may do a moment later."""
        if log is None:
            return not _is_for_good(error)
        return log.row.status == RowStatus.ONLINE

    def restore(
        self, ends: Iterable[Sequence[AppendedMarker]], now_ms: int
    ) -> list[tuple[list[AppendedMarker], bool]]:
        """Append once more what a power cut has taken, and force that to disk.

        A log loses its end only. So a transaction that is open, and began before the
        place of the marker that ended it, lacks that marker; what its producer has
        begun later is behind that place. Nobody may append for the producer meanwhile,
        if it was lost: all memory was, too.

        Args:
            ends: markers of each of several producers, for whom one sync of a log is
                enough.

        Returns:
            For each, those that may not be on disk still; whether what comes to one of
            the places now would be of another transaction than that which ended there.

        Raises:
            ApiError: it cannot be seen, or not be written, but may be later.
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
                state = log.state()
                entry = log.producers_at(state).entries.get(marker.producer_id)
                first = -1 if entry is None else entry.txn_first_offset
                # Also of a transaction that wrote nothing there: who has read behind
                # its marker must not miss what would come in its place.
                if 0 <= first < marker.offset or state.log_end_offset <= marker.offset:
                    moved = True
                    end = self._append_again(log, marker, now_ms)
                    found.append(_Place(marker, log, Awaited(marker, log, end)))
                elif not _is_there(log, marker):
                    # It was appended again, further on, by one that died before its
                    # sync: what its first place says of the disk is not about it.
                    end = state.log_end_offset
                    found.append(_Place(marker, log, Awaited(marker, log, end)))
                else:
                    found.append(_Place(marker, log, None))
            except ApiError as error:
                if log is None and _is_for_good(error):
                    _LOG.error("%s-%d: %s", marker.topic, marker.partition, error)
                elif log is None or log.row.status == RowStatus.ONLINE:
                    if error.error_code is ErrorCode.INVALID_PRODUCER_EPOCH:
                        continue  # the log has a later one: it has ended
                    raise
                # Off line: nobody writes there, and nobody reads.
                found.append(_Place(marker, None, None))
        return found, moved

    def _append_again(
        self, log: PartitionLog, marker: AppendedMarker, now_ms: int
    ) -> int:
        _LOG.warning(
            "%s-%d has lost the marker of producer %d at offset %d: appended again",
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
        """The offsets that were committed in a transaction count now, or never will.

        Not of a partition that is being loaded: that reads on to this marker, and it
        is the end of nothing that has another one before it.
        """
        if marker.topic == OFFSETS_TOPIC and not self._groups.is_loading(
            marker.partition
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
    """Whether a log that could not be opened is as good as off line.

    Else a single partition whose directory is damaged would keep all transactions from
    being loaded that are in the same log as one that names it.
    """
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno not in _PASSING


def _is_there(log: PartitionLog, marker: AppendedMarker) -> bool:
    """Whether a marker is where it was appended first."""
    try:
        found = log.read(marker.offset, 1, min_one_batch=True)
    except ApiError:
        return False  # deleted, say
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
    """WriteTxnMarkers: what an administrator ends by hand."""

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
