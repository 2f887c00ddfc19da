"""RecordAccumulator: records that wait to be sent, in queues of batches by partition.

Many threads append to the last batch of a queue. The `Sender` drains the first batches,
grouped by the node that leads their partitions. One lock guards all queues. No thread
waits, encodes or compresses while it holds the lock: the thread that finds a batch full
seals it afterwards.

Source: KIP-480 and KIP-794 for records without keys; KIP-91 for expiry.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from typing import Final, NamedTuple, Protocol

from mpbroker.client.backoff import Backoff
from mpbroker.client.metadata import NO_NODE, Snapshot
from mpbroker.producer.batch import (
    Callback,
    ProducerBatch,
    RecordFuture,
    complete_here,
)
from mpbroker.producer.buffer_pool import BufferPool, Grant
from mpbroker.producer.config import ProducerSettings
from mpbroker.producer.errors import (
    DeliveryTimeoutError,
    ProducerClosedError,
    ProducerError,
)
from mpbroker.producer.queues import PartitionQueue, TopicQueues
from mpbroker.producer.sticky import StickyPartitioner
from mpbroker.protocol.records.batch_header import BATCH_HEADER_SIZE
from mpbroker.protocol.records.record_encode import RawRecord

# Nagle's rule with a limit: for this time after a request, a node that has not answered
# it gets no batch that still has room. A broker serves the requests of a connection one
# by one. After a standstill they would queue there, one for each record; here the
# records gather in a batch. Measured at 1,000 records a second, with processes of the
# broker stopped for 10 ms ten times a second: one record in twenty waits for 5.0 ms or
# more without this rule, for 4.1 ms with it, and for 4.1 ms with 2 ms. Where an answer
# takes 4 ms, the median at that rate is 0.6 ms later, with 2 ms 1.0 ms; at lower rates
# it is not.
GATHER_MS: Final = 1.0

_NO_NODES: Final[AbstractSet[int]] = frozenset()

_log = logging.getLogger(__name__)


class DrainRules(Protocol):
    """Decides when a batch may leave its queue to be sent, and numbers it then."""

    def may_drain(self, batch: ProducerBatch) -> bool:
        """Return whether the first batch of a partition may be sent now."""

    def prepare(self, batch: ProducerBatch) -> None:
        """Give a batch that will be sent now its producer id and sequence number."""


class Ready(NamedTuple):
    """The nodes that batches can be sent to now, and when to ask again.

    Attributes:
        nodes: the nodes for which a batch is ready.
        next_check_ms: how long until another batch may be ready, in ms.
        leaderless: the topics of batches whose partition has no leader.
    """

    nodes: set[int]
    next_check_ms: float
    leaderless: set[str]


class RecordAccumulator:
    """Queues batches by partition, until the sender drains them.

    Attributes:
        lock: guards all queues.
        topics: the queues, by topic.
        flushes: calls of `flush` that wait; while there are any, no batch lingers.
        occupied: the nodes that take no more requests now; the sender sets it.
        trouble: the reason why brokers refuse the producer's login, for the errors of
            batches that expire; "" if none refuses it.
    """

    def __init__(
        self,
        settings: ProducerSettings,
        pool: BufferPool,
        rules: DrainRules | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self.lock = threading.Lock()
        self.pool = pool
        self.is_closed = False
        self.completing_transaction = False
        self._settings = settings
        self._rules = rules
        self._rng = rng or random.Random()
        self._backoff = Backoff(
            settings.client.retry_backoff_ms, settings.client.retry_backoff_max_ms
        )
        self.topics: dict[str, TopicQueues] = {}
        self._active: dict[PartitionQueue, None] = {}  # the queues that have batches
        self._incomplete: dict[ProducerBatch, None] = {}
        self.flushes: set[object] = set()
        self._drain_index: dict[int, int] = {}
        # The sender empties it before it looks for batches, so that records that come
        # later wake it.
        self.occupied: AbstractSet[int] = frozenset()
        self.trouble = ""
        # By node: the time since which it has not taken the batches that wait for it.
        self._stalled_since_ms: dict[int, float] = {}

    # -- appending ---------------------------------------------------------------------

    def topic(self, name: str) -> TopicQueues:
        """Return a topic's queues; make them if there are none."""
        found = self.topics.get(name)
        if found is None:
            with self.lock:
                found = self.topics.setdefault(
                    name, TopicQueues(name, StickyPartitioner(self._rng))
                )
        return found

    def try_append(
        self,
        queue: PartitionQueue,
        record: RawRecord,
        size: int,
        callback: Callback | None,
        transaction: int = 0,
    ) -> RecordFuture | None:
        """Add a record to the open batch; return None if there is none with room.

        Args:
            queue: the queue of the record's partition.
            record: the encoded parts of the record.
            size: the record's size in bytes, as `record_size` returns it.
            callback: called when the record is done.
            transaction: the number of the record's transaction. While a batch of a
                transaction is open, the transaction has not ended. So no other lock is
                needed here to check that.
        """
        with self.lock:
            batch = queue.open
            if batch is None or batch.size + size > batch.limit:
                return None
            if queue.transaction != transaction:
                return None
            # The code of `_add`; a call would be a tenth of the cost of a record.
            records = batch.records
            index = len(records)
            records.append(record)
            batch.size += size
            if callback is not None:
                batch.callbacks.append((index, callback))
        return RecordFuture(batch, index)

    @staticmethod
    def _add(
        batch: ProducerBatch, record: RawRecord, size: int, callback: Callback | None
    ) -> RecordFuture:
        records = batch.records
        index = len(records)
        records.append(record)
        batch.size += size
        if callback is not None:
            batch.callbacks.append((index, callback))
        return RecordFuture(batch, index)

    def seal_full(self, queue: PartitionQueue, size: int) -> bool:
        """Close and seal the open batch if ``size`` more bytes do not fit.

        Returns:
            Whether a batch was closed.
        """
        mine = None
        try:
            with self.lock:
                batch = queue.open
                if batch is None or batch.size + size <= batch.limit:
                    return False
                mine = batch
                queue.open = None
                mine.is_closed = mine.is_sealing = True
                self._note_closed(queue, max(mine.size, self._settings.batch_size))
            self.seal(mine)
        finally:
            if mine is not None:
                # If this thread was interrupted (Ctrl-C), the sender seals the batch.
                mine.is_sealing = False
        return True

    def _note_closed(self, queue: PartitionQueue, size: int) -> None:
        topic = self.topics[queue.topic]
        if topic.current is queue:
            topic.sticky.bytes += size

    def seal(self, batch: ProducerBatch) -> None:
        """Encode a closed batch, whose ``is_sealing`` the caller has set."""
        try:
            batch.seal(self._settings.codec, self._settings.compression_level)
        finally:
            batch.is_sealing = False
        if self._settings.codec and batch.topic in self.topics:
            self.topics[batch.topic].learn_ratio(batch)

    def append_new(
        self,
        queue: PartitionQueue,
        record: RawRecord,
        size: int,
        grant: Grant,
        callback: Callback | None,
        now_ms: float,
        transaction: int = 0,
    ) -> RecordFuture:
        """Add a record to a new batch, which takes the memory that was granted.

        If another thread has opened a batch meanwhile, the record goes there.

        Raises:
            ProducerClosedError: the producer was closed meanwhile.
        """
        with self.lock:
            batch = queue.open
            if self.is_closed:
                raise ProducerClosedError("the producer is closed; make a new one")
            if batch is not None and batch.size + size <= batch.limit:
                return self._add(batch, record, size, callback)
            limit = self._settings.batch_size
            if self._settings.codec:
                limit = self.topics[queue.topic].limit(limit)
            new = ProducerBatch(queue.topic, queue.partition, limit, grant.held, now_ms)
            future = self._add(new, record, size, callback)
            # From here on, this thread can be interrupted (Ctrl-C) only after the last
            # call. So the sender sees a whole batch, or none yet.
            grant.held = 0
            self._incomplete[new] = None
            self._active[queue] = None
            if batch is not None:
                batch.is_closed = True  # the sender seals it
            queue.open, queue.transaction = new, transaction
            queue.batches.append(new)
            return future

    def sticky_queue(
        self,
        topic: TopicQueues,
        partition_count: int,
        snapshot: Snapshot,
        now_ms: float,
    ) -> PartitionQueue:
        """Return the queue for the next batch of records without keys.

        It is the same queue as before until batch.size bytes have gone to its
        partition. So each partition gets its share of bytes, even if batches are sent
        before they are full.
        """
        with self.lock:
            topic.queue(partition_count - 1)
            unavailable = self._unavailable_nodes(now_ms)
            info = snapshot.topics.get(topic.name)
            leaders = () if info is None else info.leaders
            known = len(leaders)
            lengths: list[int | None] = [
                len(queue.batches) for queue in topic.queues[:partition_count]
            ]
            if unavailable or known < partition_count or NO_NODE in leaders:
                for partition in range(partition_count):
                    leader = leaders[partition] if partition < known else NO_NODE
                    if leader == NO_NODE or leader in unavailable:
                        lengths[partition] = None
            current = topic.current
            if (
                current is not None
                and topic.sticky.bytes < self._settings.batch_size
                and current.partition < partition_count
                and lengths[current.partition] is not None
            ):
                return current
            adaptive = self._settings.partitioner_adaptive_partitioning_enable
            topic.current = topic.queues[topic.sticky.choose(lengths, adaptive)]
            return topic.current

    def _unavailable_nodes(self, now_ms: float) -> AbstractSet[int]:
        limit_ms = self._settings.partitioner_availability_timeout_ms
        if not limit_ms:
            return _NO_NODES
        return {
            node
            for node, since_ms in self._stalled_since_ms.items()
            if now_ms - since_ms > limit_ms
        }

    # -- draining ----------------------------------------------------------------------

    def ready(
        self,
        snapshot: Snapshot,
        now_ms: float,
        unanswered_ms: Callable[[int], float] = lambda node: -float("inf"),
    ) -> Ready:
        """Return the nodes for which batches are ready.

        Args:
            snapshot: the metadata that names the leaders.
            now_ms: the time of the producer's clock, in ms.
            unanswered_ms: a function that returns, for a node's id, the time in ms at
                which it got the last batches that it has not answered; -inf if there
                are none.
        """
        nodes: set[int] = set()
        leaderless: set[str] = set()
        next_check_ms = float("inf")
        linger_ms = self._settings.linger_ms
        with self.lock:
            hurry = (
                self.is_closed
                or bool(self.flushes)
                or self.completing_transaction
                or self.pool.waiting > 0
            )
            for queue in self._active:
                leader = queue.follow(snapshot)
                if leader == NO_NODE:
                    leaderless.add(queue.topic)
                    continue
                if queue.is_muted or leader in nodes:
                    continue
                batch = queue.batches[0]
                if batch.attempts:
                    backoff_ms = self._backoff_left_ms(queue, batch, now_ms)
                    if backoff_ms > 0:
                        next_check_ms = min(next_check_ms, backoff_ms)
                        continue
                if hurry or batch.is_closed or batch.attempts:
                    nodes.add(leader)
                    continue
                left_ms = batch.created_ms + linger_ms - now_ms
                if linger_ms < GATHER_MS:
                    since_ms = min(batch.created_ms, unanswered_ms(leader))
                    left_ms = max(left_ms, since_ms + GATHER_MS - now_ms)
                if left_ms <= 0:
                    nodes.add(leader)
                else:
                    next_check_ms = min(next_check_ms, left_ms)
        return Ready(nodes, next_check_ms, leaderless)

    @staticmethod
    def _backoff_left_ms(
        queue: PartitionQueue, batch: ProducerBatch, now_ms: float
    ) -> float:
        """Return how long a batch must wait before its next attempt, in ms."""
        if (queue.leader, queue.leader_epoch) != batch.key_of_leader:
            return 0.0  # the new leader has not refused it
        return batch.last_attempt_ms + batch.backoff_ms - now_ms

    def must_wait(self, queue: PartitionQueue, snapshot: Snapshot) -> bool:
        """Return whether a queue's leader takes no more requests now."""
        occupied = self.occupied
        return bool(occupied) and (
            snapshot.leader(queue.topic, queue.partition) in occupied
        )

    def note_node(self, node: int, is_usable: bool, now_ms: float) -> None:
        """Note whether a broker can take the batches that wait for it."""
        if is_usable:
            self._stalled_since_ms.pop(node, None)
        else:
            self._stalled_since_ms.setdefault(node, now_ms)

    def drain(
        self, snapshot: Snapshot, nodes: Iterable[int], now_ms: float
    ) -> dict[int, list[ProducerBatch]]:
        """Remove batches from the queues, seal them, and return them by node.

        A node gets one batch of a partition at most, and max.request.size bytes in all;
        its first batch may be larger than that.
        """
        wanted = set(nodes)
        drained: dict[int, list[ProducerBatch]] = {}
        with self.lock:
            by_node: dict[int, list[PartitionQueue]] = {}
            for queue in self._active:
                leader = queue.follow(snapshot)
                if leader in wanted:
                    by_node.setdefault(leader, []).append(queue)
            for node, queues in by_node.items():
                drained[node] = self._drain_node(node, queues, now_ms)
        for node, batches in drained.items():
            drained[node] = [batch for batch in batches if self._is_sealed(batch)]
        return drained

    def _is_sealed(self, batch: ProducerBatch) -> bool:
        """Seal a drained batch; if that fails, put it back, and return False.

        Sealing is tried again until delivery.timeout.ms is over.
        """
        if batch.data is not None:
            return True
        try:
            self.seal(batch)
        except Exception as error:  # noqa: BLE001 - a codec's error, or no memory
            _log.exception("sealing a batch of %s-%d", batch.topic, batch.partition)
            batch.last_refusal = (
                f"it cannot be encoded: {error or type(error).__name__}"
            )
            self.reenqueue(batch, batch.last_attempt_ms)
            return False
        return True

    def _drain_node(
        self, node: int, queues: list[PartitionQueue], now_ms: float
    ) -> list[ProducerBatch]:
        # Begin with the first queue that had no room in the last request.
        count, rules = len(queues), self._rules
        limit = self._settings.max_request_size
        first = start = self._drain_index.get(node, 0) % count
        taken: list[ProducerBatch] = []
        size = 0
        for index in range(start, start + count):
            queue = queues[index % count]
            batch = queue.batches[0]
            first = index
            if queue.is_muted or batch.is_sealing:
                continue
            if batch.attempts and self._backoff_left_ms(queue, batch, now_ms) > 0:
                continue
            if taken and size + batch.size > limit:
                break
            if rules is not None and not rules.may_drain(batch):
                continue
            self._take(queue, batch)
            batch.key_of_leader = queue.leader, queue.leader_epoch
            taken.append(batch)
            size += batch.size
            first = index + 1
        self._drain_index[node] = first
        return taken

    def _take(self, queue: PartitionQueue, batch: ProducerBatch) -> None:
        queue.batches.popleft()
        if not queue.batches:
            del self._active[queue]
        if queue.open is batch:
            queue.open = None
            self._note_closed(queue, batch.size)
        batch.is_closed = True
        if batch.data is None:
            # The rules below need the number of records, before they are encoded.
            batch.record_count = len(batch.records)
            batch.is_sealing = True
        if self._rules is not None:
            self._rules.prepare(batch)

    # -- trying again ------------------------------------------------------------------

    def reenqueue(self, batch: ProducerBatch, now_ms: float) -> None:
        """Put a batch back into its queue, for another attempt after its backoff."""
        batch.backoff_ms = self._backoff.delay_ms(batch.attempts, self._rng)
        batch.attempts += 1
        batch.last_attempt_ms = now_ms
        batch.in_retry = True
        with self.lock:
            self._put_back(batch)

    def _put_back(self, batch: ProducerBatch) -> None:
        queue = self.topics[batch.topic].queue(batch.partition)
        position = 0
        if batch.has_sequence:
            # Batches that were drained later may have been put back earlier.
            for position, other in enumerate(queue.batches):
                # Sequence numbers wrap around to 0 after the highest.
                ahead = (other.base_sequence - batch.base_sequence) & 0x7FFFFFFF
                if not other.has_sequence or 0 < ahead < 1 << 30:
                    break
            else:
                position = len(queue.batches)
        queue.batches.insert(position, batch)
        self._active[queue] = None

    def split_and_reenqueue(self, batch: ProducerBatch) -> list[ProducerBatch]:
        """Split a batch that was too large; put the parts in its place; return them.

        The parts have up to batch.size bytes. If the batch was no larger, or is itself
        a part, they have half of its bytes, down to single records.
        """
        limit = self._settings.batch_size + BATCH_HEADER_SIZE
        if batch.is_split or batch.raw_size <= limit:
            limit = max(batch.raw_size // 2, 1)
        topic = self.topics[batch.topic]
        if self._settings.codec:
            actual = (batch.size - BATCH_HEADER_SIZE) / max(batch.raw_size, 1)
            topic.ratio = max(1.0, actual)
        children = batch.split(
            self._settings.codec, self._settings.compression_level, limit
        )
        sequence = batch.base_sequence
        with self.lock:
            self._incomplete.pop(batch, None)
            for child in children:
                if batch.has_sequence:
                    child.set_producer(
                        batch.producer_id, batch.producer_epoch, sequence
                    )
                    sequence = (sequence + child.record_count) & 0x7FFFFFFF
                self._incomplete[child] = None
            for child in reversed(children):
                self._put_back(child)
        self.pool.free(batch.charge)
        batch.charge = 0
        return children

    def mute(self, batch: ProducerBatch) -> None:
        """Send no more batches of this batch's partition, until `unmute`."""
        self.topics[batch.topic].queue(batch.partition).is_muted = True

    def unmute(self, batch: ProducerBatch) -> None:
        """Allow batches of this batch's partition to be sent again; see `mute`."""
        self.topics[batch.topic].queue(batch.partition).is_muted = False

    # -- the end -----------------------------------------------------------------------

    def expired(self, now_ms: float) -> list[ProducerBatch]:
        """Remove and return the waiting batches older than delivery.timeout.ms."""
        limit_ms = self._settings.delivery_timeout_ms
        expired: list[ProducerBatch] = []
        with self.lock:
            for queue in list(self._active):
                while queue.batches:
                    batch = queue.batches[0]
                    if now_ms - batch.created_ms < limit_ms or batch.is_sealing:
                        break
                    queue.batches.popleft()
                    if queue.open is batch:
                        queue.open = None
                    batch.is_closed = True
                    expired.append(batch)
                if not queue.batches:
                    del self._active[queue]
        return expired

    def next_expiry_ms(self) -> float:
        """Return the time at which the first waiting batch expires; inf without any.

        The time is in ms of the producer's clock.
        """
        with self.lock:
            oldest = min(
                (queue.batches[0].created_ms for queue in self._active),
                default=float("inf"),
            )
        return oldest + self._settings.delivery_timeout_ms

    def expiry_error(self, batch: ProducerBatch, now_ms: float) -> DeliveryTimeoutError:
        """Return the error for the records of an expired batch."""
        count = batch.record_count or len(batch.records)
        sent = (
            "; they were sent, and may be written"
            if (batch.attempts or batch.in_retry) and batch.data is not None
            else ""  # not sent, or it could not be encoded
        )
        return DeliveryTimeoutError(
            f"{count} record(s) for {batch.topic}-{batch.partition} were not"
            f" acknowledged in {now_ms - batch.created_ms:.0f} ms"
            f" (delivery.timeout.ms={self._settings.delivery_timeout_ms}){sent}; "
            + (
                batch.last_refusal
                or self.trouble
                or "does the broker run, and is it fast enough?"
            )
        )

    def release(self, batch: ProducerBatch) -> None:
        """Forget a batch that is acknowledged or has failed; free its memory, once."""
        with self.lock:
            self._incomplete.pop(batch, None)
            charge, batch.charge = batch.charge, 0
        if charge:
            self.pool.free(charge)

    @property
    def has_undrained(self) -> bool:
        return bool(self._active)

    @property
    def has_incomplete(self) -> bool:
        """Whether there is a batch that is neither acknowledged nor failed."""
        with self.lock:  # a thread may be adding one while the producer is closed
            return bool(self._incomplete)

    @property
    def unacknowledged(self) -> int:
        """The number of records that are not done.

        They are counted without the lock, which the calling thread may hold.
        """
        batches = list(self._incomplete)  # one step, which no other thread interrupts
        return sum(batch.record_count or len(batch.records) for batch in batches)

    def complete_here(self) -> None:
        """Mark the calling thread as the one that completes all batches.

        A wait of this thread for a batch then raises an error: it would never end.
        """
        complete_here(self._incomplete)

    def undrained(self) -> list[ProducerBatch]:
        """Remove all batches that were not sent yet from their queues; return them."""
        with self.lock:
            batches = [batch for queue in self._active for batch in queue.batches]
            for queue in self._active:
                queue.batches.clear()
                queue.open = None
            self._active.clear()
            for batch in batches:
                batch.is_closed = True
        return batches

    def abort(self, batches: Iterable[ProducerBatch], error: ProducerError) -> None:
        """Fail the records of batches that will not be sent, and free their memory."""
        for batch in batches:
            batch.fail(error)
            self.release(batch)

    def disown(self, error: ProducerError) -> None:
        """End all batches in a forked child, which has no thread to send them.

        See `ProducerBatch.disown`.
        """
        for batch in list(self._incomplete):
            batch.disown(error)

    def incomplete(self) -> list[ProducerBatch]:
        """Return all batches that are neither acknowledged nor failed, sent or not."""
        with self.lock:
            return list(self._incomplete)
