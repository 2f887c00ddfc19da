"""A `send` that is interrupted (Ctrl-C, an alarm's handler) costs no other record.

Nor memory, nor lingering.
"""

from __future__ import annotations

from itertools import count

import pytest

from mpbroker.producer.buffer_pool import BufferPool
from tests.producer.interrupts import interrupted_at
from tests.support.patience import LONGEST_S


@pytest.mark.parametrize("codec", ["none", "lz4"])
def test_wherever_send_is_interrupted_all_other_records_are_delivered(
    make_producer, new_topic, codec
):
    topic = new_topic(1)
    producer = make_producer(linger_ms=0, batch_size=300, compression_type=codec)
    producer.partitions_for(topic)
    for nth in count(1):
        futures = []
        with interrupted_at(nth) as interrupted:
            for number in range(3):  # each but the first closes a batch and opens one
                value = b"%d-%d" % (nth, number) + bytes(200)
                futures.append(producer.send(topic, value, partition=0))
            producer.flush(LONGEST_S / 4)
        try:
            producer.flush(LONGEST_S / 4)
            for future in futures:
                assert future.result(0).has_offset
        except TimeoutError as error:
            raise AssertionError(f"interrupted at {interrupted.where}") from error
        if not interrupted.where:
            break
        assert not producer._accumulator.flushes, interrupted.where
    assert nth > 100
    producer.close()
    assert producer._pool.available_bytes == producer._pool.total_bytes


def test_memory_that_was_waited_for_comes_back_wherever_that_is_interrupted():
    for nth in count(1):
        pool = BufferPool(100)
        pool.grant(100).take(0)
        freed = taken = 0

        def free(pool: BufferPool = pool) -> None:
            nonlocal freed
            pool.available_bytes = freed = 100

        with interrupted_at(nth) as interrupted, pool.grant(60) as grant:
            grant.take(30, free)
            taken, grant.held = grant.held, 0  # as a batch does
        assert pool.waiting == 0, interrupted.where
        assert pool.available_bytes == freed - taken, interrupted.where
        if not interrupted.where:
            break
    assert nth > 10
    assert taken == 60
