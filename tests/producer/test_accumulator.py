"""The accumulator: which batch a record joins, and when a batch goes.

Mirrors Kafka's RecordAccumulatorTest, BufferPoolTest and BuiltInPartitionerTest.
"""

from __future__ import annotations

import random
import threading
import tracemalloc
from collections import Counter
from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpbroker.client.addresses import Address
from mpbroker.client.backoff import Backoff
from mpbroker.client.metadata import Snapshot, TopicInfo
from mpbroker.producer import buffer_pool
from mpbroker.producer.accumulator import RecordAccumulator
from mpbroker.producer.batch import ProducerBatch, record_size
from mpbroker.producer.buffer_pool import BufferPool
from mpbroker.producer.config import ProducerSettings
from mpbroker.producer.errors import (
    BufferExhaustedError,
    ProducerClosedError,
    ProducerError,
    RecordTooLargeError,
)
from mpbroker.producer.latch import Latch
from mpbroker.producer.sticky import StickyPartitioner
from mpbroker.protocol.records.compression import Codec
from mpbroker.protocol.records.record_batch import iter_records
from tests.support.children import wait_until

NODES = {0: Address("b0", 1), 1: Address("b1", 1)}


class Rig:
    """An accumulator, a clock, and a topic whose leaders a test chooses."""

    def __init__(self, leaders: tuple[int, ...] = (0, 0), **settings: object) -> None:
        self.settings = ProducerSettings.parse(
            {"bootstrap_servers": "b:1", "linger_ms": 10, "batch_size": 500, **settings}
        )
        self.pool = BufferPool(self.settings.buffer_memory)
        self.accumulator = RecordAccumulator(
            self.settings, self.pool, None, random.Random(1)
        )
        self.now_ms = 1000.0
        self.lead(*leaders)

    def lead(self, *leaders: int, epoch: int = 0) -> None:
        info = TopicInfo(leaders, (epoch,) * len(leaders))
        self.snapshot = Snapshot(NODES, {"t": info}, {})

    def append(self, value: bytes = b"x" * 80, partition: int = 0):
        accumulator = self.accumulator
        record = 1, None, value, ()
        size = record_size(record)
        queue = accumulator.topic("t").queue(partition)
        future = accumulator.try_append(queue, record, size, None)
        if future is not None:
            return future
        accumulator.seal_full(queue, size)
        charge = max(self.settings.batch_size, size)
        with self.pool.grant(charge) as grant:
            grant.take(0)
            return accumulator.append_new(queue, record, size, grant, None, self.now_ms)

    def fill(self, partition: int = 0) -> None:
        """Append until a batch is full and another has begun."""
        for _ in range(6):
            self.append(partition=partition)

    def ready(self, unanswered_ms: float = -float("inf")):
        return self.accumulator.ready(
            self.snapshot, self.now_ms, lambda node: unanswered_ms
        )

    def drain(self, *nodes: int) -> list[ProducerBatch]:
        drained = self.accumulator.drain(self.snapshot, nodes or (0, 1), self.now_ms)
        return [batch for batches in drained.values() for batch in batches]


def values(batch: ProducerBatch, codec: Codec = Codec.NONE) -> list[bytes | None]:
    return [record.value for record in iter_records(batch.encode(codec))]


def test_a_batch_is_ready_when_it_is_full_and_the_next_one_stays_open():
    rig = Rig()
    for _ in range(4):
        rig.append()
    assert not rig.ready().nodes
    rig.append()
    rig.append()
    assert rig.ready().nodes == {0}
    (batch,) = rig.drain()
    assert len(values(batch)) == 4
    assert not rig.ready().nodes


def test_a_record_larger_than_a_batch_has_one_of_its_own_and_is_ready_with_the_next():
    rig = Rig()
    rig.append(b"x" * 2000)
    rig.append()
    assert rig.ready().nodes == {0}
    (batch,) = rig.drain()
    assert values(batch) == [b"x" * 2000]


def test_linger_is_waited_for_and_no_longer():
    rig = Rig()
    rig.append()
    assert rig.ready().next_check_ms == 10
    rig.now_ms += 9
    assert not rig.ready().nodes
    rig.now_ms += 1
    assert rig.ready().nodes == {0}
    assert values(rig.drain()[0]) == [b"x" * 80]


def test_the_next_check_is_when_the_first_partition_is_due():
    rig = Rig((0, 1))
    rig.append(partition=0)
    rig.now_ms += 4
    rig.append(partition=1)
    assert rig.ready().next_check_ms == 6


def test_a_request_takes_one_batch_a_partition_and_begins_where_the_last_ended():
    rig = Rig((0, 0, 0), max_request_size=700)
    for partition in range(3):
        rig.fill(partition)
        rig.fill(partition)
    order = [rig.drain(0)[0].partition for _ in range(6)]
    assert order == [0, 1, 2, 0, 1, 2]


def test_a_single_batch_above_the_request_size_goes_all_the_same():
    rig = Rig(max_request_size=100)
    rig.append(b"x" * 400)
    rig.now_ms += 10
    assert len(rig.drain()) == 1


def test_a_node_that_leads_nothing_drains_nothing():
    rig = Rig((0,))
    rig.fill()
    assert rig.drain(1) == []
    assert rig.accumulator.drain(rig.snapshot, (7,), rig.now_ms) == {}


def test_a_partition_without_a_leader_is_named_and_not_ready():
    rig = Rig((-1,))
    rig.fill()
    assert rig.ready().leaderless == {"t"}
    assert not rig.ready().nodes


def test_a_muted_partition_is_neither_ready_nor_drained():
    rig = Rig()
    rig.fill()
    (batch,) = rig.drain()
    rig.fill()
    rig.accumulator.mute(batch)
    assert not rig.ready().nodes
    assert rig.drain() == []
    rig.accumulator.unmute(batch)
    assert rig.ready().nodes == {0}


def test_flush_closing_and_waiting_for_memory_do_not_wait_for_linger():
    for hurry in ("flush", "close", "transaction"):
        rig = Rig(linger_ms=5_000)
        rig.append()
        assert not rig.ready().nodes
        if hurry == "flush":
            rig.accumulator.flushes.add("one")
        elif hurry == "close":
            rig.accumulator.is_closed = True
        else:
            rig.accumulator.completing_transaction = True
        assert rig.ready().nodes == {0}


def test_linger_is_back_after_a_flush():
    rig = Rig(linger_ms=5_000)
    rig.accumulator.flushes.add("one")
    rig.accumulator.flushes.discard("one")
    rig.append()
    assert not rig.ready().nodes


def test_a_retried_batch_waits_for_its_backoff_and_does_not_hold_others_back():
    rig = Rig((0, 0))
    rig.fill()
    (batch,) = rig.drain()
    rig.accumulator.reenqueue(batch, rig.now_ms)
    assert not rig.drain()
    rig.fill(partition=1)
    assert [b.partition for b in rig.drain()] == [1]
    rig.now_ms += 121
    assert rig.drain()[0] is batch


def test_a_new_leader_is_tried_at_once_and_then_backed_off_from():
    rig = Rig((0,))
    rig.fill()
    (batch,) = rig.drain()
    rig.accumulator.reenqueue(batch, rig.now_ms)
    rig.lead(1, epoch=1)
    assert rig.ready().nodes == {1}
    assert rig.drain() == [batch]
    rig.accumulator.reenqueue(batch, rig.now_ms)
    assert not rig.ready().nodes
    assert batch.attempts == 2


@given(st.integers(0, 50))
def test_backoffs_double_with_chance_up_to_a_limit(failures):
    delay = Backoff(100, 1000).delay_ms(failures, random.Random(failures))
    expected = min(100 * 2**failures, 1000)
    assert 0.8 * expected <= delay <= 1.2 * expected


def test_a_batch_expires_muted_or_in_backoff_at_its_delivery_timeout():
    rig = Rig(delivery_timeout_ms=30_010)
    rig.fill()
    (retried,) = rig.drain()
    rig.accumulator.reenqueue(retried, rig.now_ms + 29_000)
    rig.accumulator.mute(retried)
    rig.now_ms += 30_009
    assert rig.accumulator.expired(rig.now_ms) == []
    assert rig.accumulator.next_expiry_ms() == rig.now_ms + 1
    rig.now_ms += 1
    assert rig.accumulator.expired(rig.now_ms)[0] is retried
    assert not rig.accumulator.has_undrained


def test_aborting_fails_everything_once_and_gives_all_memory_back():
    rig = Rig()
    futures = [rig.append() for _ in range(20)]
    in_flight = rig.drain()
    accumulator = rig.accumulator
    accumulator.abort([*in_flight, *accumulator.undrained()], ProducerError("enough"))
    assert all(str(f.exception(0)) == "enough" for f in futures)
    assert rig.pool.available_bytes == rig.pool.total_bytes
    assert not accumulator.has_incomplete
    accumulator.release(in_flight[0])
    assert rig.pool.available_bytes == rig.pool.total_bytes


def test_after_closing_nothing_is_taken_and_memory_is_given_back():
    rig = Rig()
    rig.accumulator.is_closed = True
    with pytest.raises(ProducerClosedError):
        rig.append()
    assert rig.pool.available_bytes == rig.pool.total_bytes


def test_many_threads_append_while_one_drains_and_nothing_is_lost():
    rig = Rig((0, 0, 0), linger_ms=0)
    done = threading.Event()

    def append(seed):
        for i in range(1000):
            rig.append(b"%d" % i, (seed + i) % 3)

    threads = [threading.Thread(target=append, args=(n,)) for n in range(5)]
    counted = Counter()

    def drain():
        while not done.is_set() or rig.accumulator.has_undrained:
            for batch in rig.drain():
                counted[batch.partition] += len(values(batch))
                batch.complete(0, -1)
                rig.accumulator.release(batch)

    draining = threading.Thread(target=drain)
    draining.start()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    draining.join()
    assert counted.total() == 5000
    assert rig.pool.available_bytes == rig.pool.total_bytes


def test_compression_is_learnt_so_that_batches_fill_and_seldom_overflow():
    rig = Rig(compression_type="gzip", batch_size=2000, buffer_memory=1 << 24)
    rng = random.Random(4)
    for _ in range(5000):
        rig.append(bytes(rng.choices(b"abcd", k=60)))
    sizes, counts = [], []
    while rig.accumulator.has_undrained:
        for batch in rig.drain():
            counts.append(batch.record_count)
            sizes.append(batch.size)
            assert len(values(batch, Codec.GZIP)) == batch.record_count
    assert counts[-2] > 1.5 * counts[0]  # the first did not know how well they compress
    assert sum(size > 2000 for size in sizes) < len(sizes) / 10


@pytest.mark.parametrize("codec", list(Codec))
def test_split_batches_keep_every_record_header_and_callback(codec):
    batch = ProducerBatch("t", 0, 10_000, 0, 0.0)
    seen = []
    for i in range(9):
        headers = ((b"\xff\xfe", None), (b"n", b"%d" % i))
        batch.records.append((i, b"k%d" % i, b"v" * 30, headers))
        batch.callbacks.append((i, lambda m, e, i=i: seen.append((i, m.offset))))
    batch.seal(codec, None)
    children = batch.split(codec, None, 250)
    assert len(children) > 2
    offset = 0
    for child in children:
        for record in iter_records(child.encode(codec)):
            number = record.timestamp
            assert record.key == b"k%d" % number
            assert (
                record.headers[0][0].encode("utf-8", "surrogateescape") == b"\xff\xfe"
            )
        child.complete(offset, -1)
        offset += child.record_count
    assert seen == [(i, i) for i in range(9)]


def test_a_batch_is_done_once_whatever_comes_later():
    batch = ProducerBatch("t", 0, 100, 0, 0.0)
    batch.records.append((1, None, b"x", ()))
    batch.seal(Codec.NONE, None)
    assert batch.fail(ProducerError("first"))
    assert not batch.complete(5, -1)
    assert not batch.fail(ProducerError("second"))
    assert str(batch.error_of(0)) == "first"


# -- the memory ------------------------------------------------------------------------


def test_memory_is_granted_in_the_order_asked_for():
    pool = BufferPool(100)
    pool.grant(100).take(0)
    got = []

    def take(name, size):
        pool.grant(size).take(30)
        got.append(name)

    threads = []
    for name, size in (("large", 80), ("small", 30)):
        thread = threading.Thread(target=take, args=(name, size))
        thread.start()
        threads.append(thread)
        wait_until(lambda: pool.waiting == len(threads))
    pool.free(40)  # enough for the small one, which must not overtake
    assert not pool.try_take(pool.grant(1))
    assert got == []
    pool.free(40)
    threads[0].join(30)
    pool.free(30)
    threads[1].join(30)
    assert got == ["large", "small"]


def test_who_waits_for_memory_is_not_woken_for_every_batch_but_soon(monkeypatch):
    pool = BufferPool(1600)
    pool.grant(1600).take(0)
    woken = []

    class WatchedLatch(Latch):
        def wait(self, timeout_s=None):
            if not woken:
                pool.free(99)  # less than a sixteenth
                woken.append(self.is_set())
                pool.free(1)
                woken.append(self.is_set())
            return self.is_set()

    monkeypatch.setattr(buffer_pool, "Latch", WatchedLatch)
    pool.grant(50).take(90)
    assert woken == [False, True]
    pool.grant(50).take(90)
    monkeypatch.undo()
    thread = threading.Thread(target=pool.grant(60).take, args=(600,))
    thread.start()
    wait_until(lambda: pool.waiting == 1)
    pool.free(60)  # nobody says more
    thread.join(90)
    assert not thread.is_alive()
    assert pool.available_bytes == 0


def test_memory_that_does_not_come_is_given_up_and_nothing_leaks():
    pool = BufferPool(100)
    pool.grant(60).take(0)
    with pytest.raises(BufferExhaustedError, match=r"buffer\.memory=100"):
        pool.grant(50).take(0.01)
    assert pool.waiting == 0
    assert pool.available_bytes == 40
    assert pool.exhausted_count == 1
    with pytest.raises(RecordTooLargeError):
        pool.grant(101).take(0)


def test_memory_may_be_waited_for_without_limit():
    pool = BufferPool(100)
    pool.grant(100).take(0)
    done = []

    def take():
        pool.grant(100).take((2**63 - 1) / 1000)  # Long.MAX_VALUE, in ms
        done.append(True)

    thread = threading.Thread(target=take)
    thread.start()
    wait_until(lambda: pool.waiting == 1 or not thread.is_alive())
    pool.free(100)
    thread.join(90)
    assert done


@pytest.mark.parametrize("ending", ["interrupt", "close"])
def test_memory_granted_to_who_does_not_wait_any_more_comes_back(monkeypatch, ending):
    pool = BufferPool(100)
    pool.grant(100).take(0)

    class WatchedLatch(Latch):
        def wait(self, timeout_s=None):
            pool.free(100)  # which grants it, and then
            if ending == "interrupt":
                raise KeyboardInterrupt
            pool.close()
            return True

    monkeypatch.setattr(buffer_pool, "Latch", WatchedLatch)
    with pytest.raises((KeyboardInterrupt, ProducerClosedError)):
        pool.grant(50).take(30)
    assert pool.available_bytes == 100
    assert pool.waiting == 0


def test_closing_wakes_all_who_wait_and_refuses_the_next():
    pool = BufferPool(10)
    pool.grant(10).take(0)
    errors = []

    def wait():
        try:
            pool.grant(5).take(30)
        except ProducerClosedError as error:
            errors.append(error)

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    wait_until(lambda: pool.waiting == 3)
    pool.close()
    for thread in threads:
        thread.join(30)
    assert len(errors) == 3
    with pytest.raises(ProducerClosedError):
        pool.try_take(pool.grant(1))


@pytest.mark.parametrize("codec", ["none", "lz4"])
@pytest.mark.parametrize("size", [100, 1000])
def test_what_waits_to_be_sent_takes_little_more_than_buffer_memory(codec, size):
    limit = 2_000_000
    rig = Rig(
        buffer_memory=limit,
        batch_size=16_384,
        linger_ms=60_000,
        compression_type=codec,
    )
    rig.append()  # imports, tables
    rng = random.Random(6)
    tracemalloc.start()
    try:
        while rig.pool.available_bytes >= 16_384 + size:
            rig.append(rng.randbytes(size // 2) + b"x" * (size // 2))
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert limit / 2 < used < 1.2 * limit


# -- records without keys --------------------------------------------------------------


def chosen(lengths, adaptive=True, count=7000):
    sticky = StickyPartitioner(random.Random(5))
    return Counter(sticky.choose(lengths, adaptive) for _ in range(count))


def test_shorter_queues_are_likelier_by_how_much_shorter_they_are():
    found = chosen([1, 7, 2], count=14_000)
    assert found[0] / found[1] == pytest.approx(7, rel=0.15)
    assert found[2] / found[1] == pytest.approx(6, rel=0.15)


def test_without_adaptation_all_are_equally_likely():
    found = chosen([1, 70, 2], adaptive=False)
    assert min(found.values()) > 2000


def test_what_is_unavailable_is_never_chosen_unless_all_are():
    assert set(chosen([None, 3, None, 0])) == {1, 3}
    assert set(chosen([None, None])) == {0, 1}


def test_a_node_that_takes_nothing_for_long_is_avoided():
    rig = Rig((0, 1), partitioner_availability_timeout_ms=100)
    topic = rig.accumulator.topic("t")
    rig.accumulator.note_node(0, False, rig.now_ms)
    rig.now_ms += 101

    def picks() -> set[int]:
        found = set()
        for _ in range(30):
            topic.sticky.bytes = rig.settings.batch_size  # that had its share
            queue = rig.accumulator.sticky_queue(topic, 2, rig.snapshot, rig.now_ms)
            found.add(queue.partition)
        return found

    assert picks() == {1}
    rig.accumulator.note_node(0, True, rig.now_ms)
    assert picks() == {0, 1}


def test_small_batches_stay_with_a_partition_until_it_has_had_its_share():
    rig = Rig((0, 0, 0), batch_size=1000, linger_ms=5)
    topic = rig.accumulator.topic("t")

    went = []
    for _ in range(180):
        queue = rig.accumulator.sticky_queue(topic, 3, rig.snapshot, rig.now_ms)
        rig.append(b"x" * 300, queue.partition)
        rig.now_ms += 5
        (batch,) = rig.drain(0)  # lingered, and is far from full
        went.append(batch.partition)
    # By chance the same may be chosen again.
    assert {len(list(run)) % 3 for _, run in groupby(went)} == {0}
    assert set(went) == {0, 1, 2}


def test_a_partition_without_a_leader_is_left_though_it_had_little():
    rig = Rig((0, 0))
    topic = rig.accumulator.topic("t")
    first = rig.accumulator.sticky_queue(topic, 2, rig.snapshot, rig.now_ms).partition
    rig.lead(*(-1 if index == first else 0 for index in (0, 1)))
    second = rig.accumulator.sticky_queue(topic, 2, rig.snapshot, rig.now_ms).partition
    assert second == 1 - first
