"""Read and write the topics in which the coordinator keeps its state.

These are __consumer_offsets, __transaction_state and __share_group_state. They are
topics like any other, but only the coordinator writes to them. A topic is created when
it gets its first record, and a partition's files when the partition does.

A hash (for example of the group id or the transactional id) chooses the partition of a
record, out of the number of partitions at the coordinator's start. So the coordinator
does not write to a topic whose number of partitions has changed, or that was deleted
and recreated. It restarts instead, and finds out which partition has which records.

Source: Kafka's GroupCoordinatorConfig, TransactionLogConfig and CoordinatorLoader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, Protocol

from mpbroker.base.logger import get_logger
from mpbroker.base.named_tuple import NamedTuple
from mpbroker.coordinator.outbox import TransactionalRecord
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError, ProtocolError
from mpbroker.protocol.records.batch_header import (
    NO_PARTITION_LEADER_EPOCH,
    NO_PRODUCER_EPOCH,
    NO_PRODUCER_ID,
    NO_SEQUENCE,
    TRANSACTIONAL_FLAG,
    BatchHeader,
    pack_header,
)
from mpbroker.protocol.records.compression import Codec, compress
from mpbroker.protocol.records.control_record import parse_end_transaction_marker
from mpbroker.protocol.records.log_validator import ValidatedBatch
from mpbroker.protocol.records.record_batch import (
    iter_payload,
    iter_records,
    records_payload,
)
from mpbroker.protocol.records.record_encode import RawRecord, encode_records
from mpbroker.storage.log.log_walk import walk_log
from mpbroker.storage.log.own_appends import OwnAppends

if TYPE_CHECKING:
    from mpbroker.coordinator.written_log import WrittenLog
    from mpbroker.metadata.topics import NewTopic, Topic, TopicRegistry
    from mpbroker.storage.log.partition_log import PartitionLog

_LOG = get_logger(__name__)

# Records are cut into batches of about this size; one record may be larger.
_BATCH_BYTES: Final = 512 * 1024


class LoadedRecord(NamedTuple):
    """A record of a coordinator's topic, or a marker that ends a transaction."""

    key: bytes
    value: bytes | None
    producer_id: int  # of its transaction; -1: the record is in no transaction
    commit: bool | None  # of a marker: whether it commits; None: this is a record


class RecordTopic(Protocol):
    """What keeps the coordinator's records: see CoordinatorTopic for the methods."""

    @property
    def name(self) -> str: ...

    @property
    def num_partitions(self) -> int: ...

    @property
    def has_changed(self) -> bool: ...

    @property
    def looks_again(self) -> bool:
        """Whether a partition that was lost is to be looked at again, and loaded."""

    def partitions_to_load(self) -> list[int]: ...

    def append(
        self, partition: int, records: list[tuple[bytes, bytes | None]], now_ms: int
    ) -> tuple[WrittenLog, int]: ...

    def append_transactional(
        self, partition: int, records: Sequence[TransactionalRecord], now_ms: int
    ) -> tuple[WrittenLog, int]: ...

    def log_of(self, partition: int) -> WrittenLog: ...

    def load(self, partition: int) -> Iterator[list[LoadedRecord]]: ...


class CoordinatorTopic:
    """Reads and writes one of the coordinator's topics.

    Args:
        log: returns a partition's log.
        exists: returns whether a partition has a directory, or may have one on a disk
            that cannot be read; then it cannot be loaded.
        made_as: the topic's name, and the number of partitions and the configs with
            which it is created if it does not exist yet.
        load_bytes: how many bytes of a partition are read at a time.
        own_appends: appends uncompressed records by the compiled core; None: all
            records are appended by PartitionLog.
    """

    looks_again: Final = True

    def __init__(
        self,
        registry: TopicRegistry,
        log: Callable[[Topic, int], PartitionLog],
        exists: Callable[[Topic, int], bool],
        made_as: NewTopic,
        *,
        codec: Codec,
        load_bytes: int,
        own_appends: OwnAppends | None = None,
    ) -> None:
        self.name = made_as.name
        self._registry = registry
        self._log = log
        self._exists = exists
        self._used = registry.topic(self.name)  # it holds our records
        self.num_partitions: Final = (
            made_as.num_partitions if self._used is None else len(self._used.partitions)
        )
        self._overrides = made_as.overrides
        self._codec = codec
        self._load_bytes = load_bytes
        self._own = OwnAppends() if own_appends is None or codec else own_appends

    @property
    def has_changed(self) -> bool:
        """Whether the topic was deleted, recreated, or given more partitions."""
        topic = self._registry.topic(self.name)
        if topic is None:
            return self._used is not None
        if self._used is not None and self._used is not topic:
            return True
        return len(topic.partitions) != self.num_partitions

    def partitions_to_load(self) -> list[int]:
        """Return the partitions that may hold records: those with a directory."""
        topic = self._registry.topic(self.name)
        if topic is None:
            return []
        return [
            number
            for number in range(len(topic.partitions))
            if self._exists(topic, number)
        ]

    def _topic(self) -> Topic:
        topic = self._registry.topic(self.name)
        if topic is None and self._used is None:
            try:
                topic = self._registry.create_topic(
                    self.name, self.num_partitions, self._overrides
                )
            except ApiError as error:
                if error.error_code is not ErrorCode.TOPIC_ALREADY_EXISTS:
                    raise
                topic = self._registry.topic(self.name)
        if topic is None or self.has_changed:
            raise ApiError(
                ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
                f"{self.name} was deleted or recreated",
            )
        self._used = topic
        return topic

    def append(
        self,
        partition: int,
        records: list[tuple[bytes, bytes | None]],
        now_ms: int,
    ) -> tuple[PartitionLog, int]:
        """Append records; return the log, and the offset behind the last record.

        Raises:
            ApiError: UNKNOWN_TOPIC_OR_PARTITION if the topic has changed; otherwise
                KAFKA_STORAGE_ERROR or the like, and some records may be in the log.
        """
        log = self._log(self._topic(), partition)
        end = self._own.append(log, records, now_ms)
        if end is not None:
            return log, end
        end = 0
        for raw in _cut(records, now_ms):
            end = _append(log, raw, self._codec, now_ms)
        return log, end

    def append_transactional(
        self, partition: int, records: Sequence[TransactionalRecord], now_ms: int
    ) -> tuple[PartitionLog, int]:
        """Append records of transactions, in separate batches for each producer.

        The return value and the errors are those of append().
        """
        log = self._log(self._topic(), partition)
        by_producer: dict[tuple[int, int], list[tuple[bytes, bytes | None]]] = {}
        for record in records:
            by_producer.setdefault(record[:2], []).append((record.key, record.value))
        end = 0
        for producer, pairs in by_producer.items():
            for raw in _cut(pairs, now_ms):
                end = _append(log, raw, self._codec, now_ms, producer)
        return log, end

    def log_of(self, partition: int) -> PartitionLog:
        """Return the log of one partition of this topic.

        Raises:
            ApiError: the topic was deleted, or the log cannot be opened.
        """
        topic = self._registry.topic(self.name)
        if topic is None:
            raise ApiError(
                ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"{self.name} was deleted"
            )
        return self._log(topic, partition)

    def load(self, partition: int) -> Iterator[list[LoadedRecord]]:
        """Read a partition from its start to its end, a part at a time.

        A damaged batch is skipped and logged. If the coordinator ended with an error
        instead, its successors would do the same, until the broker gives up. If it
        stopped reading there, all records behind the batch would be lost.

        Raises:
            ApiError: the partition is offline, or cannot be read.
        """
        log = self.log_of(partition)
        log.view.require_online()
        start = log.row.log_start_offset

        def take(header: BatchHeader, batch: memoryview) -> list[LoadedRecord]:
            try:
                return records_of(header, batch, start)
            except ProtocolError as error:
                _LOG.error(
                    "%s-%d: the batch at offset %d cannot be read, its records are"
                    " skipped: %s",
                    self.name,
                    partition,
                    header.base_offset,
                    error,
                )
                return []

        for records, damage in walk_log(log.view, start, self._load_bytes, take):
            for offset, what in damage:
                _LOG.error(
                    "%s-%d is damaged at offset %d: %s",
                    self.name,
                    partition,
                    offset,
                    what,
                )
            yield records


def newest(records: list[LoadedRecord]) -> list[LoadedRecord]:
    """Return the newest record of each key, as compaction would leave them.

    If some records are of transactions, return all records: how a transaction ends
    decides whether its records count.
    """
    by_key: dict[bytes, LoadedRecord] = {}
    for record in records:
        if record.producer_id >= 0 or record.commit is not None:
            return records
        by_key.pop(record.key, None)  # so that the key moves to its newest place
        by_key[record.key] = record
    return list(by_key.values())


def _cut(
    records: Sequence[tuple[bytes, bytes | None]], now_ms: int
) -> Iterator[list[RawRecord]]:
    """Split records into batches of about _BATCH_BYTES, so that none is too large."""
    batch: list[RawRecord] = []
    size = 0
    for key, value in records:
        batch.append((now_ms, key, value, ()))
        size += len(key) + len(value or b"")
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _append(
    log: PartitionLog,
    records: list[RawRecord],
    codec: Codec,
    now_ms: int,
    producer: tuple[int, int] | None = None,
) -> int:
    """Append a batch to one partition's log; return the offset behind it."""
    payload, _, _ = encode_records(records)
    if codec:
        payload = compress(codec, payload)
    attributes = codec if producer is None else codec | TRANSACTIONAL_FLAG
    last = len(records) - 1
    producer_id, epoch = producer or (NO_PRODUCER_ID, NO_PRODUCER_EPOCH)
    header = BatchHeader(
        base_offset=0,
        batch_length=0,
        partition_leader_epoch=NO_PARTITION_LEADER_EPOCH,
        magic=2,
        crc=0,
        attributes=attributes,
        last_offset_delta=last,
        base_timestamp=now_ms,
        max_timestamp=now_ms,
        producer_id=producer_id,
        producer_epoch=epoch,
        base_sequence=NO_SEQUENCE,
        record_count=last + 1,
    )
    data = pack_header(header, payload)
    data += payload
    batch = ValidatedBatch(header, last, now_ms, last + 1, last, memoryview(data), -1)
    return log.append(batch, now_ms=now_ms).last_offset + 1


def records_of(
    header: BatchHeader, batch: memoryview, from_offset: int
) -> list[LoadedRecord]:
    """Return a batch's records from an offset on, or the markers of a control batch.

    Leave out records without a key.

    Raises:
        ProtocolError: the batch cannot be read.
    """
    if header.is_control:
        markers = map(parse_end_transaction_marker, iter_records(batch))
        return [
            LoadedRecord(b"", None, header.producer_id, marker.commit)
            for marker in markers
        ]
    producer_id = header.producer_id if header.is_transactional else -1
    records = iter_payload(
        records_payload(header, batch),
        header.record_count,
        header.base_offset,
        header.base_timestamp,
        None,  # timestamps do not matter here
    )
    return [
        LoadedRecord(record.key, record.value, producer_id, None)
        for record in records
        if record.offset >= from_offset and record.key is not None
    ]
