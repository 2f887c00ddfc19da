"""`Producer` sends records to any Kafka broker, from any number of threads.

    with Producer(bootstrap_servers="localhost:9092", linger_ms=20) as producer:
        future = producer.send("events", b"value", key=b"key")
        print(future.result().offset)

`send` hands a record over and returns a future. The producer's own thread sends
batches, and calls callbacks; so a callback must not wait for the producer. A producer
belongs to the process that made it; a forked child makes its own.

Source: the API of Apache Kafka's KafkaProducer; KIP-447 for offsets in transactions.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from mpbroker.base.errors import MpbrokerError
from mpbroker.client.backoff import Backoff
from mpbroker.client.cluster import TopicPartition
from mpbroker.client.group_metadata import GroupMetadata, group_of
from mpbroker.client.metadata import Metadata, TopicInfo
from mpbroker.client.selector import make_network_client, monotonic_ms
from mpbroker.client.serialization import Serializer
from mpbroker.client.settings import settings_together
from mpbroker.producer import lifetime
from mpbroker.producer.accumulator import RecordAccumulator
from mpbroker.producer.batch import (
    RECORD_OVERHEAD,
    Callback,
    ProducerBatch,
    RecordFuture,
    record_size,
    record_size_bound,
)
from mpbroker.producer.buffer_pool import BufferPool
from mpbroker.producer.code import ProducerCode
from mpbroker.producer.config import ProducerSettings
from mpbroker.producer.errors import (
    BufferExhaustedError,
    ProducerClosedError,
    ProducerError,
    ProducerForkedError,
    RecordTooLargeError,
    RefusedError,
    RetriableError,
    SerializationError,
    TransactionStateError,
)
from mpbroker.producer.idempotence import Idempotence
from mpbroker.producer.metrics import ProducerMetrics
from mpbroker.producer.partitioners import Partitioner, cached_partition_for_key
from mpbroker.producer.queues import PartitionQueue, TopicQueues
from mpbroker.producer.record import (
    Headers,
    Interceptors,
    ProducerInterceptor,
    ProducerRecord,
    to_bytes,
    to_raw_headers,
)
from mpbroker.producer.sender import Sender
from mpbroker.producer.topic_wait import TopicWait
from mpbroker.producer.transactions import (
    OffsetAndMetadata,
    Operation,
    PreparedTransaction,
    TransactionManager,
)
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.records.record_encode import RawRecord

_T = TypeVar("_T")

_FEATURE: Final = "transaction.version"


class Producer:
    """Sends records to brokers. Any thread may call any method.

    A signal handler must not call a method, because the thread that it interrupts may
    hold a lock of the producer. It may raise an exception: the interrupted call leaves
    nothing behind, and can be made again.
    """

    def __init__(
        self,
        config: Mapping[str, object] | None = None,
        *,
        key_serializer: Serializer | str | None = None,
        value_serializer: Serializer | str | None = None,
        partitioner: Partitioner | None = None,
        interceptors: Sequence[ProducerInterceptor] = (),
        **settings: object,
    ) -> None:
        """Start the producer's thread, which connects when there is something to do.

        Args:
            config: Kafka's settings by name, with dots or underscores.
            key_serializer: a function that returns the bytes of a key, or its name;
                see `mpbroker.client.serialization`. None: keys are bytes already.
            value_serializer: the same for values.
            partitioner: chooses partitions; None: by key, as Kafka's Java client. The
                setting partitioner.class may name its class as MODULE:CLASS.
            interceptors: objects that see every record, in this order. The setting
                interceptor.classes may name their classes.
            settings: more settings like those of ``config``, as keyword arguments.

        Raises:
            ConfigError: a setting is wrong or missing; the text says which, and what to
                do.
            AddressError: bootstrap.servers cannot be read.
        """
        given, code = ProducerCode.take(
            settings_together(config, settings),
            key_serializer,
            value_serializer,
            partitioner,
            interceptors,
        )
        self._settings = options = ProducerSettings.parse(given)
        self._key_serializer = code.key_serializer
        self._value_serializer = code.value_serializer
        self._partitioner = code.partitioner
        self._interceptors = Interceptors(code.interceptors)
        self._metrics = ProducerMetrics()
        self._pool = BufferPool(options.buffer_memory)
        rng = random.Random()
        self._metadata = _make_metadata(options, rng)
        self._transactions = _make_transactions(options)
        idempotence = self._transactions or (
            Idempotence() if options.idempotent else None
        )
        self._accumulator = RecordAccumulator(options, self._pool, idempotence, rng)
        self._client = make_network_client(options.client, self._metadata, rng)
        self._sender = Sender(
            self._client,
            self._metadata,
            self._accumulator,
            options,
            idempotence,
            self._metrics,
            monotonic_ms,
        )
        self._refusal: ProducerError | None = None  # why send() refuses all records
        # A smaller record surely fits; the size of a larger one is computed exactly.
        self._surely_small = min(options.max_request_size, options.buffer_memory) - 128
        self._lock = self._accumulator.lock
        self._plain = self._plain_queues(code)
        self._made_by = os.getpid()
        self._made_ms = monotonic_ms()
        self._thread = self._make_thread()
        self._topic_wait = TopicWait(
            self._metadata,
            self._client,
            self._metrics,
            max_block_ms=options.max_block_ms,
            asking=self._thread,
        )
        # Watch before start(), which waits and may be interrupted (Ctrl-C): then the
        # finalizer ends the thread of the producer, which is dropped.
        parts = self._sender, self._accumulator, options.client.client_id
        self._unclosed = lifetime.watch(self, Producer._disown, *parts)
        self._thread.start()

    def _plain_queues(self, code: ProducerCode) -> Mapping[str, TopicQueues]:
        """Return the queues that `send` may append to directly, by topic.

        The mapping is empty if the producer has serializers, a partitioner,
        interceptors or transactions: then `send` takes the longer path.
        """
        special = *code[:3], self._transactions
        if code.interceptors or any(each is not None for each in special):
            return {}
        return self._accumulator.topics

    def _make_thread(self) -> threading.Thread:
        name = f"kafka-producer-network-thread | {self._settings.client.client_id}"
        run = partial(_run, self._sender, self._interceptors)
        return threading.Thread(target=run, name=name, daemon=True)

    # -- sending -----------------------------------------------------------------------

    def send(
        self,
        topic: str,
        value: Any = None,
        key: Any = None,
        *,
        headers: Headers = (),
        partition: int | None = None,
        timestamp_ms: int | None = None,
        callback: Callback | None = None,
    ) -> RecordFuture:
        """Hand a record over; it is sent in a batch with others of its partition.

        Waits up to max.block.ms for the topic's metadata, and for memory while
        buffer.memory is full. Once the record is serialized, errors are not raised
        here: the future and the callback get them. In a callback, `send` does not wait:
        the topic must be known, and memory is lent.

        Args:
            topic: the topic's name; the broker may create the topic.
            value: bytes, or a value that the serializer accepts; None is null.
            key: the same for the key; records with the same key go to one partition,
                in order.
            headers: pairs of a name and bytes or None.
            partition: the partition's number; None: the partitioner chooses.
            timestamp_ms: the record's time, in ms since 1970; None: now.
            callback: called with a `RecordMetadata` or None, and an error or None, when
                the record is done. The producer's thread calls it, in the order of the
                records of a partition; this thread does if the record fails at once.

        Raises:
            SerializationError: the key, value or headers are not bytes, or the time is
                not a number of ms.
            ProducerClosedError: the producer is closed, or was made before a fork.
            TransactionStateError: the producer is transactional, and no transaction is
                open.
            FatalError: the producer cannot be used any more; close it.
        """
        queues = self._plain.get(topic)
        if (
            queues is not None
            and queues.current is not None
            and type(value) is bytes
            and key is None
            and partition is None
            and timestamp_ms is None
            and not headers
            and (size := len(value) + RECORD_OVERHEAD) < self._surely_small
        ):
            # The code of `RecordAccumulator.try_append`, without the cost of its call:
            # nearly always there is room in the open batch.
            with self._lock:
                batch = queues.current.open
                if batch is not None and batch.size + size <= batch.limit:
                    records = batch.records
                    index = len(records)
                    records.append((time.time_ns() // 1_000_000, None, value, ()))
                    batch.size += size
                    if callback is not None:
                        batch.callbacks.append((index, callback))
                    return RecordFuture(batch, index)
        if self._interceptors:
            record = ProducerRecord(
                topic, value, key, tuple(headers), partition, timestamp_ms
            )
            return self._send_intercepted(record, callback)
        return self._send(topic, value, key, headers, partition, timestamp_ms, callback)

    def _send(
        self,
        topic: str,
        value: Any,
        key: Any,
        headers: Headers,
        partition: int | None,
        timestamp_ms: int | None,
        callback: Callback | None,
    ) -> RecordFuture:
        if self._refusal is not None:
            raise self._refusal.with_traceback(None)
        manager = self._transactions
        transaction = manager.check_open("send()") if manager is not None else 0
        if self._key_serializer is not None or (
            key is not None and type(key) is not bytes
        ):
            key = to_bytes(self._key_serializer, topic, "key", key)
        if self._value_serializer is not None or (
            value is not None and type(value) is not bytes
        ):
            value = to_bytes(self._value_serializer, topic, "value", value)
        raw_headers = to_raw_headers(topic, headers) if headers else ()
        if timestamp_ms is None:
            timestamp_ms = time.time_ns() // 1_000_000
        elif type(timestamp_ms) is not int or not 0 <= timestamp_ms < 1 << 63:
            raise SerializationError(
                f"timestamp_ms={timestamp_ms!r}: it must be an int of ms since 1970,"
                " 0 or more"
            )
        record = timestamp_ms, key, value, raw_headers
        try:
            return self._append(topic, record, partition, callback, transaction)
        except (RetriableError, RefusedError) as error:
            return self._failed(topic, partition, record, callback, error, transaction)
        except BaseException:
            self._client.wakeup()  # a batch may be ready that the sender does not know
            raise

    def _append(
        self,
        topic: str,
        record: RawRecord,
        partition: int | None,
        callback: Callback | None,
        transaction: int,
    ) -> RecordFuture:
        _, key, value, headers = record
        size = record_size(record)
        if size >= self._surely_small:
            self._check_size(topic, record_size_bound(key, value, headers))
        began = time.monotonic()
        info = self._metadata.snapshot.topics.get(topic)
        if info is None or (partition is not None and partition >= len(info.leaders)):
            info = self._topic_wait.wait(topic, partition, began)
        queues = self._accumulator.topic(topic)
        accumulator = self._accumulator
        chosen = self._choose(topic, record, partition, info)
        queue = self._queue(queues, chosen, info)
        future = accumulator.try_append(queue, record, size, callback, transaction)
        if future is not None:
            return future
        now_ms = monotonic_ms()
        self._metadata.add_topic(topic, now_ms)  # so that it is not forgotten
        if accumulator.seal_full(queue, size):
            # At once, even if this record fails below: the sender has skipped the batch
            # while it was being sealed, and a call of close() may wait for it.
            self._have_sent(queue)
        if chosen is None:
            # The batch is full, or was sent before it was full. Choose another
            # partition, unless this one has had only a few bytes.
            queue = accumulator.sticky_queue(
                queues, len(info.leaders), self._metadata.snapshot, now_ms
            )
        charge = max(self._settings.batch_size, record_size_bound(key, value, headers))
        with self._pool.grant(charge) as grant:
            if threading.current_thread() is self._thread:
                grant.overdraw()  # a callback: only this thread could free memory
            else:
                left_s = self._settings.max_block_ms / 1000 + began - time.monotonic()
                grant.take(max(0.0, left_s), self._client.wakeup)
            rest = size, grant, callback, monotonic_ms(), transaction
            begin = partial(accumulator.append_new, queue, record, *rest)
            future = self._joined(queue, transaction, begin)
        self._have_sent(queue)
        return future

    def _joined(
        self, queue: PartitionQueue, transaction: int, append: Callable[[], _T]
    ) -> _T:
        """Append a record by a call of ``append``.

        In a transactional producer, first make its partition part of the transaction.

        Args:
            queue: the queue that ``append`` appends to.
            transaction: the number of the record's transaction.
            append: appends the record, and returns its result.
        """
        if self._transactions is None:
            return append()
        place = queue.topic, queue.partition
        return self._transactions.append(transaction, place, append)

    def _have_sent(self, queue: PartitionQueue) -> None:
        """Wake the sender, unless the queue's node takes no more requests now."""
        snapshot = self._metadata.snapshot
        if self._transactions or not self._accumulator.must_wait(queue, snapshot):
            self._client.wakeup()

    def _check_size(self, topic: str, bound: int) -> None:
        for name, limit in (
            ("max.request.size", self._settings.max_request_size),
            ("buffer.memory", self._settings.buffer_memory),
        ):
            if bound > limit:
                raise RecordTooLargeError(
                    f"a record for {topic!r} of up to {bound} bytes is above"
                    f" {name}={limit}; raise that, or send smaller records",
                    ErrorCode.MESSAGE_TOO_LARGE,
                )

    def _choose(
        self, topic: str, record: RawRecord, partition: int | None, info: TopicInfo
    ) -> int | None:
        """Return the number of the record's partition, or None.

        None stands for the sticky one, to which records without keys go now.

        Raises:
            RefusedError: the partition does not exist.
        """
        count = len(info.leaders)
        if partition is not None:
            if partition < 0:
                raise RefusedError(
                    f"partition {partition}: it must be 0 or more, or None for any"
                )
            return partition
        _, key, value, _ = record
        if self._partitioner is not None:
            available = [i for i, leader in enumerate(info.leaders) if leader >= 0]
            chosen = self._partitioner.partition(topic, key, value, count, available)
            if chosen is not None and not 0 <= chosen < count:
                raise RefusedError(
                    f"the partitioner chose {chosen} for topic {topic!r}, which has"
                    f" partitions 0..{count - 1}"
                )
            return chosen
        if key is None or self._settings.partitioner_ignore_keys:
            return None
        return cached_partition_for_key(key, count)

    def _queue(
        self, topic: TopicQueues, partition: int | None, info: TopicInfo
    ) -> PartitionQueue:
        if partition is not None:
            if partition < len(topic.queues):
                return topic.queues[partition]
            with self._accumulator.lock:
                return topic.queue(partition)
        if topic.current is not None:
            return topic.current
        return self._accumulator.sticky_queue(
            topic, len(info.leaders), self._metadata.snapshot, monotonic_ms()
        )

    def _failed(
        self,
        topic: str,
        partition: int | None,
        record: RawRecord,
        callback: Callback | None,
        error: ProducerError,
        transaction: int,
    ) -> RecordFuture:
        """Return the failed future of a record that did not get into a batch."""
        number = -1 if partition is None else partition
        batch = ProducerBatch(topic, number, 0, 0, monotonic_ms())
        batch.records.append(record)
        if callback is not None:
            batch.callbacks.append((0, callback))
        self._metrics.count("record-error", 1, monotonic_ms(), topic)
        if isinstance(error, BufferExhaustedError):
            self._metrics.count("buffer-exhausted", 1, monotonic_ms())
        if self._transactions is not None:
            self._transactions.refused(error, transaction)
        batch.fail(error)
        return RecordFuture(batch, 0)

    # -- interceptors ------------------------------------------------------------------

    def _send_intercepted(
        self, record: ProducerRecord, callback: Callback | None
    ) -> RecordFuture:
        topic, value, key, headers, partition, timestamp_ms = (
            self._interceptors.on_send(record)
        )
        acknowledged = self._interceptors.before(callback)
        try:
            return self._send(
                topic, value, key, headers, partition, timestamp_ms, acknowledged
            )
        except MpbrokerError as error:
            acknowledged.not_sent(topic, partition, error)
            raise

    # -- transactions ------------------------------------------------------------------

    def _manager(self) -> TransactionManager:
        if self._refusal is not None:
            raise self._refusal.with_traceback(None)
        if self._transactions is None:
            raise TransactionStateError(
                "this producer has no transactional.id; set one to use transactions"
            )
        return self._transactions

    def _transact(self, metric: str, begin: Callable[[], Operation]) -> None:
        self._check_own_thread("a transaction's call")
        began = time.monotonic()
        operation = begin()
        self._client.wakeup()
        try:
            operation.wait(self._settings.max_block_ms)
        finally:
            self._metrics.spend(metric, time.monotonic() - began)

    def init_transactions(self) -> None:
        """Get ready for transactions; call it once, before the first one.

        It aborts the transaction that an earlier producer of this transactional.id has
        left open, and fences that producer.

        Raises:
            DeliveryTimeoutError: there is no answer within max.block.ms; call it again.
            FatalError: close the producer.
            TransactionStateError: it was called before, or transactional.id is not set.
        """
        self._transact("txn-init-time-ns", self._manager().begin_init)

    def begin_transaction(self, *, to_prepare: bool = False) -> None:
        """Open a transaction, to which all records belong until it is ended.

        The transaction is of the second version (KIP-890) if the cluster supports that.

        Args:
            to_prepare: whether `prepare_transaction` will hand the transaction to
                another client. Then it is of the first version, in which producer id
                and epoch stay the same when a transaction ends.

        Raises:
            TransactionStateError: a transaction is open, or `init_transactions` was not
                called.
            FatalError: close the producer.
        """
        began = time.monotonic()
        second = not to_prepare and self._client.feature_level(_FEATURE) >= 2
        self._manager().begin(2 if second else 1)
        self._metrics.spend("txn-begin-time-ns", time.monotonic() - began)

    def send_offsets_to_transaction(
        self,
        offsets: Mapping[TopicPartition, OffsetAndMetadata | int],
        group: GroupMetadata | str,
    ) -> None:
        """Commit a consumer group's offsets together with the transaction.

        Args:
            offsets: the offset of the next record to read, by partition.
            group: the group and its member, as `Consumer.group_metadata` returns them:
                a member that was replaced cannot commit. The group's name alone is
                taken, with a UserWarning.

        Raises:
            AbortableError: abort the transaction.
            DeliveryTimeoutError: there is no answer within max.block.ms; call it again,
                or abort.
            FatalError: close the producer.
        """
        manager = self._manager()
        member = group_of(group, 2)
        if not offsets:
            return
        positions = {
            TopicPartition(*partition): (
                OffsetAndMetadata(offset) if isinstance(offset, int) else offset
            )
            for partition, offset in offsets.items()
        }
        self._transact(
            "txn-send-offsets-time-ns", lambda: manager.add_offsets(positions, member)
        )

    def prepare_transaction(self) -> PreparedTransaction:
        """Wait until all records are acknowledged; leave the transaction open.

        Another client ends it. Close this producer, which cannot be used any more. The
        broker aborts the transaction if it is not ended within transaction.timeout.ms.

        Returns:
            The ids and the epoch that the other client needs to commit or abort.

        Raises:
            AbortableError: a record was lost: abort.
            FatalError: close the producer.
            TransactionStateError: no transaction is open.

        Source: KIP-939's prepareTransaction, which brokers do not know yet.
        """
        manager = self._manager()
        manager.check_open("prepare_transaction()")
        self.flush()
        while not manager.prepare_end(self._has_incomplete):
            self.flush()  # a callback may have sent more records
        return PreparedTransaction(
            manager.transactional_id, manager.producer_id, manager.epoch
        )

    def commit_transaction(self) -> None:
        """Wait until all records are acknowledged; then commit them together.

        Raises:
            AbortableError: a record was lost, and nothing is committed: abort.
            DeliveryTimeoutError: there is no answer within max.block.ms; call it again
                to go on waiting.
            FatalError: close the producer.
        """
        self._transact("txn-commit-time-ns", self._manager().begin_commit)

    def abort_transaction(self) -> None:
        """Abort the transaction: read_committed readers never see its records.

        Raises:
            DeliveryTimeoutError: there is no answer within max.block.ms; call it again
                to go on waiting.
            FatalError: close the producer.
        """
        self._transact("txn-abort-time-ns", self._manager().begin_abort)

    def _has_incomplete(self) -> bool:
        return self._accumulator.has_incomplete

    # -- the rest ----------------------------------------------------------------------

    def would_block(self, topic: str, partition: int | None = None) -> bool:
        """Return whether `send` may have to wait, for metadata or for memory."""
        info = self._metadata.snapshot.topics.get(topic)
        return (
            info is None
            or (partition is not None and partition >= len(info.leaders))
            or self._pool.waiting > 0
            # Assume the largest record.
            or self._pool.available_bytes
            < self._settings.max_request_size + self._settings.batch_size
        )

    def partitions_for(self, topic: str) -> int:
        """Return how many partitions a topic has; wait for its metadata as `send` does.

        Raises:
            ProducerError: the topic is not known in time, or the producer is closed.
        """
        if self._refusal is not None:
            raise self._refusal.with_traceback(None)
        info = self._metadata.snapshot.topics.get(topic)
        if info is None:
            info = self._topic_wait.wait(topic, None, time.monotonic())
        return len(info.leaders)

    def flush(self, timeout: float | None = None) -> None:
        """Send all records now, and wait until they are acknowledged or have failed.

        It does not wait for records that other threads send meanwhile. Futures and
        callbacks get the errors of records.

        Args:
            timeout: the longest wait, in seconds; None waits as long as
                delivery.timeout.ms allows.

        Raises:
            TimeoutError: some records are not done after ``timeout`` seconds.
            ProducerClosedError: the producer was made before a fork, or a callback
                calls this and would wait for itself.
        """
        self._check_own_thread("flush()")
        if isinstance(self._refusal, ProducerForkedError):
            raise self._refusal.with_traceback(None)
        began = time.monotonic()
        deadline = None if timeout is None else began + timeout
        flush, flushes = object(), self._accumulator.flushes
        try:
            flushes.add(flush)
            pending = self._accumulator.incomplete()
            self._client.wakeup()
            while pending:
                batch = pending.pop()
                left = deadline and max(0.0, deadline - time.monotonic())
                if not batch.wait(left):
                    raise TimeoutError(
                        f"records are not acknowledged after {timeout:g} s of flush()"
                    )
                pending += batch.children
        finally:
            # One call into C, so that an interrupt (Ctrl-C) cannot come before it.
            flushes.discard(flush)
            self._metrics.spend("flush-time-ns", time.monotonic() - began)

    def _check_own_thread(self, what: str) -> None:
        if threading.current_thread() is self._thread:
            raise ProducerClosedError(
                f"{what} in a callback would wait for itself; call it elsewhere"
            )

    def close(self, timeout: float | None = None) -> None:
        """Send all records, wait until they are done, and end the producer's thread.

        A second call does nothing. In a callback, or in a forked child, it does not
        wait. An open transaction is aborted.

        Args:
            timeout: the longest wait, in seconds; records that are not acknowledged by
                then fail. None waits as long as delivery.timeout.ms allows.
        """
        self.begin_close()
        self._unclosed.detach()
        if isinstance(self._refusal, ProducerForkedError):
            return
        if threading.current_thread() is self._thread:
            self._sender.force_close()
            return
        if timeout == 0:
            self._sender.force_close()
        self._sender.close()
        self._thread.join(timeout)
        if self._thread.is_alive():
            self._sender.force_close()
            self._thread.join()

    def begin_close(self) -> None:
        """Refuse records from now on, and wake threads that wait in `send`.

        Call `close` afterwards.
        """
        self._plain = {}
        if self._refusal is None:
            self._refusal = ProducerClosedError(
                "the producer is closed; make a new one"
            )
        if not isinstance(self._refusal, ProducerForkedError):
            self._pool.close()
            self._metadata.fail(self._refusal)

    def _disown(self) -> None:
        """Make this copy of the producer, in a forked child, refuse all calls."""
        self._plain = {}
        self._refusal = ProducerForkedError(
            f"this producer belongs to process {self._made_by}, and this is"
            f" {os.getpid()}, forked from it; make a producer here after the fork"
        )
        self._accumulator.disown(self._refusal)

    def metrics(self) -> dict[str, dict[str, float]]:
        """Return the metrics by Kafka's names, in groups.

        The groups are producer-metrics, and one for each topic and for each node.

        Raises:
            ProducerForkedError: the producer was made before a fork.
        """
        if isinstance(self._refusal, ProducerForkedError):
            raise self._refusal.with_traceback(None)
        now_ms = monotonic_ms()
        self._metrics.follow(self._client.counts, now_ms, at_once=True)
        groups = self._metrics.snapshot(now_ms)
        groups["producer-metrics"] |= {
            **self._pool.metrics(now_ms - self._made_ms),
            "requests-in-flight": float(self._client.in_flight()),
            "connection-count": float(self._client.connection_count()),
            "metadata-age": (now_ms - self._metadata.updated_ms) / 1000,
        }
        return groups

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # After an error in the block, do not wait: its author wants to see it soon.
        self.close(0 if exc_type is not None else None)


def _run(sender: Sender, interceptors: Interceptors) -> None:
    """Run the producer's thread, which must not keep a dropped producer alive."""
    try:
        sender.run()
    finally:
        interceptors.close()


def _make_metadata(settings: ProducerSettings, rng: random.Random) -> Metadata:
    client = settings.client
    return Metadata(
        max_age_ms=client.metadata_max_age_ms,
        topic_max_idle_ms=settings.metadata_max_idle_ms,
        backoff=Backoff(client.retry_backoff_ms, client.retry_backoff_max_ms),
        rng=rng,
    )


def _make_transactions(settings: ProducerSettings) -> TransactionManager | None:
    if settings.transactional_id is None:
        return None
    return TransactionManager(
        settings.transactional_id, settings.transaction_timeout_ms
    )
