"""What a producer holds is bounded by buffer.memory, sent or not."""

from __future__ import annotations

import random
import sys
import tracemalloc

import pytest

from mpbroker.producer.batch import record_size
from mpbroker.producer.partitioners import cached_partition_for_key
from mpbroker.protocol.api_key import ApiKey
from tests.producer.rig import SenderRig

LIMIT = 2_000_000
PARTITIONS = 4
BATCH = 16_384


@pytest.mark.parametrize("size", [100, 1000])
def test_what_is_in_flight_takes_little_more_than_buffer_memory(size):
    rig = SenderRig(
        {"t": [0] * PARTITIONS},
        buffer_memory=LIMIT,
        batch_size=BATCH,
        max_request_size=PARTITIONS * BATCH,
        enable_idempotence=False,  # else the first batch is waited for
    )
    rig.turns(8)
    rig.client.ready(0, rig.wire.now_ms)
    rig.turns(3)
    # As with a socket, what was sent is gone.
    deliver = rig.wire.send
    rig.wire.send = lambda node, data: (
        None if data[4:6] == ApiKey.PRODUCE.to_bytes(2, "big") else deliver(node, data)
    )
    rng = random.Random(1)
    accumulator, pool = rig.accumulator, rig.pool
    count = 0
    tracemalloc.start()
    try:
        while pool.available_bytes >= BATCH:
            record = 1_700_000_000_000 + count, None, rng.randbytes(size), ()
            queue = accumulator.topic("t").queue(count % PARTITIONS)
            count += 1
            length = record_size(record)
            if accumulator.try_append(queue, record, length, None) is not None:
                continue
            accumulator.seal_full(queue, length)
            grant = pool.grant(BATCH)
            grant.take(0)
            accumulator.append_new(queue, record, length, grant, None, rig.wire.now_ms)
            rig.turns()
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert rig.client.in_flight(0) == 5
    assert LIMIT * 0.7 < used < LIMIT * 1.2


@pytest.mark.parametrize("length", [64, 10_000])
def test_a_key_is_not_remembered_for_ever(length):
    key = b"k" * length
    references = sys.getrefcount(key)
    cached_partition_for_key(key, PARTITIONS)
    for number in range(1 << 14 if length == 64 else 0):  # 64 bytes each: some 4.5 MB
        cached_partition_for_key(b"%064d" % number, PARTITIONS)
    assert sys.getrefcount(key) == references
