"""ProducerBatch: the records for one partition, until they are acknowledged or fail.

While a batch takes records, it keeps them as tuples. `seal` encodes and compresses all
of them at once, which costs half of doing it one by one, and drops the tuples. When the
batch is drained, it gets its producer id and sequence number.

State: open (takes records) -> closed -> sealed (bytes) -> done, once.
"""

from __future__ import annotations

import logging
import threading
from array import array
from collections.abc import Callable, Container, Sequence
from typing import Final, NamedTuple

from mpbroker.producer.errors import ProducerClosedError, ProducerError
from mpbroker.producer.latch import Latch
from mpbroker.protocol.records.batch_header import (
    BATCH_HEADER_SIZE,
    NO_PRODUCER_EPOCH,
    NO_PRODUCER_ID,
    NO_SEQUENCE,
    NO_TIMESTAMP,
    TRANSACTIONAL_FLAG,
    write_header,
)
from mpbroker.protocol.records.compression import Codec, compress
from mpbroker.protocol.records.record_batch import iter_records
from mpbroker.protocol.records.record_encode import RawRecord, encode_batch

_log = logging.getLogger(__name__)

NO_OFFSET: Final = -1


class RecordMetadata(NamedTuple):
    """The place of a record in its partition, and its timestamp.

    Attributes:
        offset: the record's offset; -1 if the broker did not tell it: with acks=0, or
            if it had the record already.
        timestamp: the record's time, in ms since 1970.
    """

    topic: str
    partition: int
    offset: int
    timestamp: int

    @property
    def has_offset(self) -> bool:
        """Whether the broker told the offset; with acks=0 it does not."""
        return self.offset >= 0


Callback = Callable[[RecordMetadata | None, Exception | None], object]


class InterceptedCallback:
    """A callback that gets a record's metadata even if the record has failed.

    Then the offset and the timestamp are -1, and so is the partition if none was chosen
    yet.
    """

    def __call__(
        self, metadata: RecordMetadata | None, error: Exception | None
    ) -> None:
        raise NotImplementedError


class _Thread(threading.local):
    """Holds the batches that the current thread completes; none in a user's thread."""

    batches: Container[ProducerBatch] = ()


_this_thread = _Thread()


def complete_here(batches: Container[ProducerBatch]) -> None:
    """Mark this thread as the one that completes these batches.

    A wait of this thread for one of them raises ProducerClosedError.
    """
    _this_thread.batches = batches


class RecordFuture:
    """The future of a record; `Producer.send` returns one.

    `result` blocks. For asyncio, `AsyncProducer.send` returns a future to await.
    """

    __slots__ = ("_batch", "_index")

    def __init__(self, batch: ProducerBatch, index: int) -> None:
        self._batch = batch
        self._index = index

    def done(self) -> bool:
        """Return whether the record was acknowledged or has failed."""
        return self._holder()[0].is_done

    def result(self, timeout: float | None = None) -> RecordMetadata:
        """Wait for the acknowledgement, and return the place of the record.

        Args:
            timeout: the longest wait, in seconds; None waits as long as
                delivery.timeout.ms allows.

        Raises:
            ProducerError: the record was not written, or this is not known. The text
                and the class say what to do.
            ProducerClosedError: a callback calls this, and would wait for itself.
            TimeoutError: the record is not acknowledged yet, and has not failed.
        """
        batch, index = self._wait(timeout)
        error = batch.error_of(index)
        if error is not None:
            # All records of a batch share the error; each raise would lengthen its
            # traceback.
            raise error.with_traceback(None)
        return batch.metadata_of(index)

    get = result  # kafka-python's name

    def exception(self, timeout: float | None = None) -> ProducerError | None:
        """Wait until the record is done; return its error, or None if it is written.

        Raises:
            TimeoutError: the record is not acknowledged yet, and has not failed.
        """
        batch, index = self._wait(timeout)
        return batch.error_of(index)

    def add_done_callback(self, function: Callable[[RecordFuture], object]) -> None:
        """Call ``function(self)`` when the record is done; at once if it is already.

        The producer's thread calls it, or this thread if the record is done already.
        """
        self._holder_add(lambda metadata, error: function(self))

    def _holder_add(self, callback: Callback) -> None:
        while True:
            batch, index = self._holder()
            if batch.add_callback(index, callback):
                return

    def _holder(self) -> tuple[ProducerBatch, int]:
        """Return the batch that holds the record now, and its index in that batch.

        The first batch may have been split since the record was sent.
        """
        batch, index = self._batch, self._index
        while batch.children:
            for child in batch.children:
                if index < child.record_count:
                    batch = child
                    break
                index -= child.record_count
        return batch, index

    def _wait(self, timeout: float | None) -> tuple[ProducerBatch, int]:
        while True:
            batch, index = self._holder()
            if not batch.wait(timeout):
                raise TimeoutError(f"not acknowledged after {timeout:g} s")
            if not batch.children:
                return batch, index


class ProducerBatch:
    """Collects the records of a Produce batch for one partition, and completes them.

    Times are in ms of the producer's clock.
    """

    __slots__ = (
        "_is_told",
        "_lock",
        "_waiters",
        "attempts",
        "backoff_ms",
        "base_offset",
        "base_sequence",
        "base_timestamp",
        "callbacks",
        "charge",
        "children",
        "created_ms",
        "data",
        "error",
        "errors",
        "in_retry",
        "is_closed",
        "is_done",
        "is_sealing",
        "is_split",
        "key_of_leader",
        "last_attempt_ms",
        "last_refusal",
        "limit",
        "log_append_time",
        "max_timestamp",
        "partition",
        "producer_epoch",
        "producer_id",
        "raw_size",
        "record_count",
        "records",
        "size",
        "timestamps",
        "topic",
        "transactional",
        "was_renumbered",
    )

    def __init__(
        self, topic: str, partition: int, limit: int, charge: int, created_ms: float
    ) -> None:
        """Make an empty batch.

        Args:
            topic: the topic of all its records.
            partition: the partition of all its records.
            limit: the uncompressed bytes that it may grow to; a first record may be
                larger.
            charge: the bytes of buffer.memory that it holds.
            created_ms: the time at which its delivery.timeout.ms begins.
        """
        self.topic = topic
        self.partition = partition
        self.limit = limit
        self.charge = charge
        self.created_ms = created_ms
        self.records: list[RawRecord] = []
        self.size = BATCH_HEADER_SIZE
        self.record_count = 0
        self.callbacks: list[tuple[int, Callback]] = []
        self.is_closed = False
        self.is_sealing = False
        self.is_done = False
        self.is_split = False
        self.in_retry = False
        self.transactional = False
        self.was_renumbered = False  # while in flight with an older sequence number
        self.data: bytearray | None = None  # when sealed: the batch, header included
        self.raw_size = 0
        self.base_timestamp = self.max_timestamp = NO_TIMESTAMP
        # An array: a list of ints would take as much memory as small records do.
        self.timestamps = array("q")
        self.producer_id: int = NO_PRODUCER_ID
        self.producer_epoch: int = NO_PRODUCER_EPOCH
        self.base_sequence: int = NO_SEQUENCE
        self.attempts = 0
        self.backoff_ms = 0.0  # since the last attempt
        self.last_attempt_ms = created_ms
        self.last_refusal = ""  # why the last attempt failed, if it will be repeated
        self.key_of_leader = (-1, -1)  # node and leader epoch of the last attempt
        self.base_offset = NO_OFFSET
        self.log_append_time = NO_TIMESTAMP
        self.error: ProducerError | None = None
        self.errors: dict[int, ProducerError] = {}
        self.children: list[ProducerBatch] = []
        self._is_told = False  # done, and all callbacks have been called
        # Made by the first thread that waits: making one costs a tenth of a batch.
        self._waiters: Latch | None = None
        self._lock = threading.Lock()

    # -- filling -----------------------------------------------------------------------

    def seal(self, codec: Codec, level: int | None) -> None:
        """Encode and compress the records, and drop them."""
        records = self.records
        data, self.base_timestamp, self.max_timestamp = encode_batch(records)
        self.raw_size = len(data) - BATCH_HEADER_SIZE
        if codec:
            with memoryview(data) as view:
                payload = compress(codec, view[BATCH_HEADER_SIZE:], level)
            data = bytearray(BATCH_HEADER_SIZE) + payload
        self.timestamps = array("q", [record[0] for record in records])
        self.record_count = len(records)
        self.data = data
        self.records = []
        self.size = len(data)

    @property
    def has_sequence(self) -> bool:
        return self.base_sequence != NO_SEQUENCE

    def set_producer(self, producer_id: int, epoch: int, base_sequence: int) -> None:
        """Set the producer id, the epoch and the first record's sequence number."""
        self.producer_id = producer_id
        self.producer_epoch = epoch
        self.base_sequence = base_sequence

    def encode(self, codec: Codec) -> bytearray:
        """Return the whole batch as it goes to the broker; it must be sealed.

        The buffer is the batch's own; only the next call changes it.
        """
        data = self.data
        assert data is not None, "not sealed"
        write_header(
            data,
            codec | (TRANSACTIONAL_FLAG if self.transactional else 0),
            self.base_timestamp,
            self.max_timestamp,
            self.producer_id,
            self.producer_epoch,
            self.base_sequence,
            self.record_count,
        )
        return data

    def split(self, codec: Codec, level: int | None, limit: int) -> list[ProducerBatch]:
        """Split the batch into batches of at most ``limit`` uncompressed bytes.

        A larger record gets a batch of its own. This batch passes its futures and
        callbacks on, and is done.
        """
        children: list[ProducerBatch] = []
        child: ProducerBatch | None = None
        for record in self._read_records(codec):
            size = record_size(record)
            if child is None or (child.size + size > limit and child.records):
                child = ProducerBatch(
                    self.topic, self.partition, limit, 0, self.created_ms
                )
                child.is_closed = child.is_split = True
                child.transactional = self.transactional
                child.attempts = self.attempts
                children.append(child)
            child.records.append(record)
            child.size += size
        for child in children:
            child.seal(codec, level)
        with self._lock:
            starts, first = [], 0
            for child in children:
                starts.append((first, child))
                first += child.record_count
            for index, callback in self.callbacks:
                start, child = max(
                    (pair for pair in starts if pair[0] <= index),
                    key=lambda pair: pair[0],
                )
                child.callbacks.append((index - start, callback))
            self.callbacks = []
            self.children = children
            self.data = None
            self.is_done = True
        self._tell()
        return children

    def _read_records(self, codec: Codec) -> list[RawRecord]:
        return [
            (
                record.timestamp,
                record.key,
                record.value,
                tuple(
                    (name.encode("utf-8", "surrogateescape"), value)
                    for name, value in record.headers
                ),
            )
            for record in iter_records(bytes(self.encode(codec)), self.raw_size or 1)
        ]

    # -- the end -----------------------------------------------------------------------

    def complete(self, base_offset: int, log_append_time: int) -> bool:
        """Acknowledge all records; return False if the batch was already done."""
        self.base_offset = base_offset
        self.log_append_time = log_append_time
        return self._finish()

    def fail(
        self, error: ProducerError, errors: dict[int, ProducerError] | None = None
    ) -> bool:
        """Fail all records; return False if the batch was already done.

        Args:
            error: the error of each record that has none of its own.
            errors: errors of single records, by index.
        """
        if self.is_done:
            return False
        self.error = error
        self.errors = errors or {}
        return self._finish()

    def _finish(self) -> bool:
        with self._lock:
            if self.is_done:
                return False
            self.is_done = True
            if not self.record_count:
                self.record_count = len(self.records)
                self.timestamps = array("q", [record[0] for record in self.records])
            callbacks, self.callbacks = self.callbacks, []
            self.data = None
            self.records = []
        for index, callback in callbacks:
            self._call(index, callback)
        self._tell()
        return True

    def _tell(self) -> None:
        with self._lock:
            self._is_told = True
            if self._waiters is not None:
                self._waiters.set()

    def _call(self, index: int, callback: Callback) -> None:
        error = self.error_of(index)
        metadata = None
        if error is None:
            metadata = self.metadata_of(index)
        elif isinstance(callback, InterceptedCallback):
            metadata = RecordMetadata(
                self.topic, self.partition, NO_OFFSET, NO_TIMESTAMP
            )
        try:
            callback(metadata, error)
        except BaseException:  # noqa: BLE001 - even sys.exit(): in this thread it would
            # only end the delivery of all other records.
            _log.exception("callback of a record of %s-%d", self.topic, self.partition)

    def add_callback(self, index: int, callback: Callback) -> bool:
        """Have ``callback`` called when the batch is done; at once if it is already.

        Returns:
            False if the batch was split, so that the record is in another one.
        """
        with self._lock:
            if self.children:
                return False
            if not self.is_done:
                self.callbacks.append((index, callback))
                return True
        self._call(index, callback)
        return True

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until the batch is done or split; return False if the time is over.

        Raises:
            ProducerClosedError: the producer's thread, which calls callbacks, would
                wait for itself.
        """
        with self._lock:
            if self._is_told:
                return True
            if self in _this_thread.batches:
                if self.is_done:
                    return True  # the record's own callback asks
                raise ProducerClosedError(
                    "a callback that waits for a record would wait for itself; call"
                    " result() elsewhere, or give that record a callback, too"
                )
            if self._waiters is None:
                self._waiters = Latch()
            waiters = self._waiters
        return waiters.wait(timeout_s)

    def wait_all(self) -> None:
        """Wait until the batch, and all batches that it was split into, are done."""
        self.wait(None)
        for child in self.children:
            child.wait_all()

    def disown(self, error: ProducerError) -> None:
        """Make the batch done in a forked child, where no thread will complete it.

        A lock of the parent may be held here by a thread that was not forked.
        """
        self._lock = threading.Lock()
        self.callbacks = []
        self.error = error
        self.is_done = self._is_told = True

    def error_of(self, index: int) -> ProducerError | None:
        """Return a record's error, or None; the batch must be done."""
        return self.errors.get(index, self.error)

    def metadata_of(self, index: int) -> RecordMetadata:
        """Return the topic, partition, offset and timestamp of the record at an index.

        The batch must be acknowledged.
        """
        offset = self.base_offset + index if self.base_offset >= 0 else NO_OFFSET
        timestamp = self.log_append_time
        if timestamp < 0:
            timestamp = self.timestamps[index]
        return RecordMetadata(self.topic, self.partition, offset, timestamp)


# The bytes of length, attributes, time and offset deltas, key and value lengths and
# header count, for records of a usual batch. It may be a few bytes too low. Only the
# moment at which a batch is closed depends on it.
RECORD_OVERHEAD: Final = 12


def record_size(record: RawRecord) -> int:
    """Return about how many uncompressed bytes a record takes in a batch."""
    _, key, value, headers = record
    size = RECORD_OVERHEAD + len(key or b"") + len(value or b"")
    for name, header_value in headers:
        size += 4 + len(name) + len(header_value or b"")
    return size


def record_size_bound(
    key: bytes | None,
    value: bytes | None,
    headers: Sequence[tuple[bytes, bytes | None]],
) -> int:
    """Return the most uncompressed bytes of a batch with only this record."""
    size = BATCH_HEADER_SIZE + 36 + len(key or b"") + len(value or b"")
    for name, header_value in headers:
        size += 10 + len(name) + len(header_value or b"")
    return size
