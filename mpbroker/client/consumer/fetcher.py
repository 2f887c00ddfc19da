"""Fetcher: reads partitions in batches; brokers prepare more while these are used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from mpbroker.base.errors import MpbrokerError
from mpbroker.client.cluster import Broker, Cluster, Pending, TopicPartition
from mpbroker.client.consumer.consumer_metrics import ConsumerMetrics
from mpbroker.client.consumer.position_epochs import NO_EPOCH, PositionEpochs
from mpbroker.client.errors import (
    BrokerUnavailableError,
    ClientError,
    RequestTimeoutError,
    check_error,
    describe_error,
    error_code_of,
)
from mpbroker.client.selector import monotonic_ms
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ProtocolError
from mpbroker.protocol.messages.fetch import (
    AbortedTransaction,
    FetchPartition,
    FetchRequest,
    FetchResponse,
    FetchTopic,
    PartitionData,
)
from mpbroker.protocol.records.control_record import parse_control_type
from mpbroker.protocol.records.record_batch import (
    BatchHeader,
    compute_crc,
    iter_batches,
    iter_records,
)

READ_UNCOMMITTED: Final = 0
READ_COMMITTED: Final = 1

_NAMED_TOPICS_MAX_VERSION: Final = 12  # from 13 on, topics go by id
_ABORT: Final = 0


class OffsetOutOfRangeError(ClientError):
    """A partition has no such offset: its record was deleted, or is not written yet."""

    def __init__(self, partition: TopicPartition, offset: int) -> None:
        super().__init__(f"{partition} has no offset {offset}")
        self.partition = partition
        self.offset = offset


class LogTruncationError(OffsetOutOfRangeError):
    """A new leader lacks records that were read; other records may get their offsets.

    Attributes:
        divergent_offset: the offset from which on the leader's log differs; None if the
            leader does not know it.
        divergent_epoch: the leader epoch of the leader's last record before that
            offset; -1 if the leader does not know it.
    """

    def __init__(
        self,
        partition: TopicPartition,
        offset: int,
        divergent_offset: int | None = None,
        divergent_epoch: int = NO_EPOCH,
    ) -> None:
        super().__init__(partition, offset)
        since = (
            "" if divergent_offset is None else f" from offset {divergent_offset} on"
        )
        self.args = (
            f"{partition} has lost records before offset {offset}: its leader's log"
            f"{since} is not what was read; call seek() to say where to go on, or set"
            " auto.offset.reset",
        )
        self.divergent_offset = divergent_offset
        self.divergent_epoch = divergent_epoch


class NoOffsetError(ClientError):
    """A partition has no position, and auto.offset.reset is none."""


class LeaderLostError(ClientError):
    """A broker does not lead a partition any more: find the leader, and try again."""


class FetchSettings(NamedTuple):
    """The limits of Fetch requests; most fields are Kafka's settings of these names.

    Attributes:
        isolation_level: READ_COMMITTED leaves out records of transactions that are
            aborted, or not decided yet.
        fetch_max_wait_ms: how long a broker may wait for ``fetch_min_bytes``.
        fetch_min_bytes: the bytes of a response that are worth sending.
        fetch_max_bytes: the most bytes of a response; its first batch may be larger.
        max_partition_fetch_bytes: the most bytes of a partition in a response; the
            partition's first batch may be larger.
    """

    isolation_level: int = READ_COMMITTED
    fetch_max_wait_ms: int = 500
    fetch_min_bytes: int = 1
    fetch_max_bytes: int = 32 * 1024 * 1024
    max_partition_fetch_bytes: int = 4 * 1024 * 1024


DEFAULT_FETCH_SETTINGS: Final = FetchSettings()


class FetchedBatch(NamedTuple):
    """A fetched batch; the reader skips its records below ``first_offset``."""

    partition: TopicPartition
    first_offset: int
    header: BatchHeader
    data: memoryview


class _Asked:
    """A Fetch request in flight: its broker, and the offsets that it asks for."""

    __slots__ = ("broker", "offsets", "pending", "waited_ms")

    def __init__(
        self, broker: Broker, pending: Pending, offsets: dict[TopicPartition, int]
    ) -> None:
        self.broker = broker
        self.pending = pending
        self.offsets = offsets
        self.waited_ms = 0.0  # counts only the time in `fetch`


class Fetcher:
    """Fetches all partitions of a broker in one request; each broker has one in flight.

    Attributes:
        positions: the next offset to fetch, by partition. The caller may change it:
            remove a partition to stop reading it, or set another offset to go on at.
        is_woken: a function that `fetch` calls while it waits; True ends the wait. The
            caller may set it.
    """

    def __init__(
        self,
        cluster: Cluster,
        positions: Mapping[TopicPartition, int],
        leaders: Mapping[TopicPartition, int],
        settings: FetchSettings = DEFAULT_FETCH_SETTINGS,
        *,
        metrics: ConsumerMetrics | None = None,
        epochs: PositionEpochs | None = None,
    ) -> None:
        """Make a fetcher; no request is sent yet.

        Args:
            cluster: the brokers.
            positions: the offset to start at, by partition.
            leaders: the leader's node id, by partition.
            settings: the limits of the requests.
            metrics: counts every response.
            epochs: the epochs of leaders; the epochs of the records read are added.
        """
        self.positions = dict(positions)
        self._cluster = cluster
        self._leaders = dict(leaders)
        self._settings = settings
        self._metrics = metrics
        self._epochs = epochs or PositionEpochs()
        self._in_flight: dict[int, _Asked] = {}
        # Leaders that are not ready, each with its number of failures before this try.
        self._not_ready: dict[int, tuple[Broker, int]] = {}
        self._error: MpbrokerError | None = None
        self.is_woken: Callable[[], bool] = bool

    def reads(self, partition: TopicPartition) -> bool:
        """Return whether a partition's leader is known, so that it can be read."""
        return partition in self._leaders

    @property
    def lacks_leader(self) -> bool:
        """Whether some partition's leader is not connected; others may be read."""
        return bool(self._not_ready)

    def _has_failed(self, leader: int) -> bool:
        broker, before = self._not_ready[leader]
        return broker.failures > before and broker.delay_ms > 0

    def lead(
        self,
        leaders: Mapping[TopicPartition, int],
        positions: Mapping[TopicPartition, int],
    ) -> None:
        """Store new leaders, and add partitions to read.

        Args:
            leaders: the leader's node id, by partition.
            positions: the offset to start at, by partition; a partition that is read
                already keeps its own.
        """
        self._leaders |= leaders
        for partition, offset in positions.items():
            self.positions.setdefault(partition, offset)

    def fetch(self) -> list[FetchedBatch]:
        """Wait until a broker has answered; return its batches, which may be none.

        A broker that is slow, or cannot be reached, does not delay the batches of the
        others. Control batches are left out, and with READ_COMMITTED the batches of
        aborted transactions, too.

        Raises:
            OffsetOutOfRangeError: set another position, and go on.
            LeaderLostError: find the leaders, and make a new fetcher.
            ApiError: a broker refused for another reason, such as a deleted topic.
            ProtocolError: the CRC of a batch is wrong.
            BrokerUnavailableError: no leader can be reached, or one answers too late.
            AuthenticationError: a login or a certificate was refused.
        """
        if self._error is not None:
            error, self._error = self._error, None
            if not self._is_outdated(error):
                raise error
        self._cluster.poll(0)  # a connection may have been closed long ago
        self._send_all()
        self._wait()
        batches: list[FetchedBatch] = []
        for leader, asked in list(self._in_flight.items()):
            if asked.pending.answer is None:
                continue
            del self._in_flight[leader]
            try:
                self._take_answer(leader, asked, batches)
            except MpbrokerError as error:
                if not batches:
                    raise
                # Positions are after these batches: return them before the error.
                self._error = error
                return batches
        # Now, so that brokers work while the caller uses the batches.
        self._send_all()
        return batches

    def _wait(self) -> None:
        """Wait until a request in flight is answered, or `is_woken` says to end."""
        limit_ms = self._cluster.timeout_s * 1000 + self._settings.fetch_max_wait_ms
        connect_by_ms = monotonic_ms() + self._cluster.timeout_s * 1000
        while (self._in_flight or self._not_ready) and not (
            self.is_woken()
            or any(asked.pending.answer for asked in self._in_flight.values())
        ):
            left_ms = self._check_leaders(connect_by_ms)
            for leader, asked in list(self._in_flight.items()):
                left_ms = min(left_ms, limit_ms - asked.waited_ms)
                if asked.waited_ms >= limit_ms:
                    del self._in_flight[leader]
                    raise asked.broker.give_up()
            began_ms = monotonic_ms()
            self._cluster.poll(max(0.0, left_ms))
            waited_ms = monotonic_ms() - began_ms
            for asked in self._in_flight.values():
                asked.waited_ms += waited_ms
            if self._not_ready:
                self._send_all()

    def _check_leaders(self, connect_by_ms: float) -> float:
        """Return how long to wait until a leader can be tried again, in ms.

        Raises:
            BrokerUnavailableError: connecting has failed for all leaders.
            AuthenticationError: a leader has refused the login, or its certificate is
                refused.
        """
        left_ms = float("inf")
        failed = None
        for leader, (broker, _) in self._not_ready.items():
            left_ms = min(left_ms, broker.delay_ms)
            if self._has_failed(leader):
                failed = broker.failure
                if not isinstance(failed, BrokerUnavailableError):
                    raise failed
        if self._in_flight:
            return left_ms
        connect_ms = connect_by_ms - monotonic_ms()
        if failed is not None and all(map(self._has_failed, self._not_ready)):
            raise failed
        if connect_ms <= 0:
            broker, _ = next(iter(self._not_ready.values()))
            raise RequestTimeoutError(f"cannot reach {broker.address}: not in time")
        return min(left_ms, connect_ms)

    def _is_outdated(self, error: MpbrokerError) -> bool:
        """Return whether an error names an offset that is no longer the position."""
        return (
            isinstance(error, OffsetOutOfRangeError)
            and self.positions.get(error.partition) != error.offset
        )

    def _take_answer(
        self, leader: int, asked: _Asked, batches: list[FetchedBatch]
    ) -> None:
        response = asked.broker.wait(asked.pending, FetchResponse)
        if self._metrics is not None:
            assert asked.pending.answer is not None
            self._metrics.fetched(
                leader, asked.pending.answer.latency_ms, response.throttle_time_ms
            )
        before = len(batches)
        failed: MpbrokerError | None = None
        check_error(response.error_code, f"fetch from {asked.broker.address}")
        for topic in response.responses:
            for data in topic.partitions:
                partition = TopicPartition(topic.topic, data.partition_index)
                offset = asked.offsets.get(partition)
                if offset is None or self.positions.get(partition) != offset:
                    continue  # the caller has stopped it, or moved it elsewhere
                try:
                    # One by one, so that batches before an error are in the list.
                    for batch in self._read_partition(partition, data):
                        batches.append(batch)
                except MpbrokerError as error:
                    failed = failed or error  # raised when the others are read
                    continue
                if self._metrics is not None:
                    self._tell_ends(self._metrics, partition, data)
        if self._metrics is not None:
            sizes: dict[str, int] = {}
            records: dict[str, int] = {}
            for partition, _, header, found in batches[before:]:
                name = partition.topic
                sizes[name] = sizes.get(name, 0) + len(found)
                records[name] = records.get(name, 0) + header.record_count
            self._metrics.answered(sizes, records)
        if failed is not None:
            raise failed

    def _tell_ends(
        self, metrics: ConsumerMetrics, partition: TopicPartition, data: PartitionData
    ) -> None:
        # A read_committed reader does not lag behind records that it may not see yet.
        end = data.high_watermark
        if (
            self._settings.isolation_level == READ_COMMITTED
            and data.last_stable_offset >= 0
        ):
            end = data.last_stable_offset
        metrics.reached(
            partition, max(0, data.log_start_offset), end, self.positions[partition]
        )

    def _send_all(self) -> None:
        settings = self._settings
        by_leader: dict[int, dict[str, list[FetchPartition]]] = {}
        for partition, offset in self.positions.items():
            leader = self._leaders[partition]
            if leader not in self._in_flight:
                topics = by_leader.setdefault(leader, {})
                topics.setdefault(partition.topic, []).append(
                    FetchPartition(
                        partition=partition.partition,
                        current_leader_epoch=self._epochs.leader_epoch(partition),
                        fetch_offset=offset,
                        partition_max_bytes=settings.max_partition_fetch_bytes,
                    )
                )
        not_ready: dict[int, tuple[Broker, int]] = {}
        for leader, topics in by_leader.items():
            request = FetchRequest(
                max_wait_ms=settings.fetch_max_wait_ms,
                min_bytes=settings.fetch_min_bytes,
                max_bytes=settings.fetch_max_bytes,
                isolation_level=settings.isolation_level,
                topics=[
                    FetchTopic(topic=name, partitions=partitions)
                    for name, partitions in topics.items()
                ],
            )
            broker = self._cluster.named(leader)
            failures = broker.failures
            pending = broker.send_if_ready(
                request, FetchResponse, max_version=_NAMED_TOPICS_MAX_VERSION
            )
            if pending is None:
                found = self._not_ready.get(leader)
                not_ready[leader] = found or (broker, failures)
                continue
            offsets = {
                TopicPartition(name, entry.partition): entry.fetch_offset
                for name, partitions in topics.items()
                for entry in partitions
            }
            self._in_flight[leader] = _Asked(broker, pending, offsets)
        self._not_ready = not_ready
        self._rotate()

    def _rotate(self) -> None:
        # A broker fills its response in the order of the request. Rotate, so that the
        # first partitions do not starve the last ones.
        if len(self.positions) > 1:
            first = next(iter(self.positions))
            self.positions[first] = self.positions.pop(first)

    def _read_partition(
        self, partition: TopicPartition, data: PartitionData
    ) -> Iterator[FetchedBatch]:
        position = self.positions[partition]
        if data.error_code:
            if data.error_code == ErrorCode.UNKNOWN_LEADER_EPOCH:
                self._epochs.refuse(partition)
            _raise_partition_error(partition, position, data.error_code)
        if data.diverging_epoch is not None and data.diverging_epoch.end_offset >= 0:
            self._epochs.forget(partition)  # only followers ask for this field
            return
        records = data.records
        if not isinstance(records, (bytes, bytearray, memoryview)):
            return
        aborted = AbortedProducers(data.aborted_transactions or ())
        for header, batch in iter_batches(records):
            if header.next_offset <= position:
                continue
            if compute_crc(batch) != header.crc:
                raise ProtocolError(
                    f"{partition}: the batch at offset {header.base_offset} is corrupt:"
                    f" its CRC is not {header.crc:#010x}"
                )
            self.positions[partition] = header.next_offset
            self._epochs.note(
                partition,
                min(position, header.base_offset),  # no records are in between
                header.next_offset,
                header.partition_leader_epoch,
            )
            if not aborted.hide(header, batch):
                yield FetchedBatch(partition, position, header, batch)
            position = header.next_offset


class AbortedProducers:
    """Finds the batches of one Fetch response that belong to aborted transactions.

    Source: KIP-98. A response lists the aborted transactions that overlap it; each ends
    at its producer's abort marker.
    """

    def __init__(self, transactions: Iterable[AbortedTransaction]) -> None:
        self._coming = sorted(
            ((entry.first_offset, entry.producer_id) for entry in transactions),
            reverse=True,
        )
        self._open: set[int] = set()

    def hide(self, header: BatchHeader, batch: memoryview) -> bool:
        """Return whether to hide a batch from readers; batches come in their order."""
        while self._coming and self._coming[-1][0] <= header.last_offset:
            self._open.add(self._coming.pop()[1])
        if header.is_control:
            record = next(iter_records(batch), None)
            if record is not None and parse_control_type(record) == _ABORT:
                self._open.discard(header.producer_id)
            return True
        return header.is_transactional and header.producer_id in self._open


def _raise_partition_error(
    partition: TopicPartition, position: int, number: int
) -> None:
    code = error_code_of(number)
    if code == ErrorCode.OFFSET_OUT_OF_RANGE:
        raise OffsetOutOfRangeError(partition, position)
    if code in _LEADER_LOST:
        raise LeaderLostError(f"{partition}: {describe_error(code, None)}")
    check_error(number, str(partition))


_LEADER_LOST: Final = frozenset(
    {
        ErrorCode.NOT_LEADER_OR_FOLLOWER,
        ErrorCode.LEADER_NOT_AVAILABLE,
        ErrorCode.FENCED_LEADER_EPOCH,
        ErrorCode.UNKNOWN_LEADER_EPOCH,
        ErrorCode.REPLICA_NOT_AVAILABLE,
    }
)
