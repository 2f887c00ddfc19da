"""A `send` that is interrupted (Ctrl-C, an alarm's handler) costs no other record."""

from __future__ import annotations

from itertools import count

import pytest

from tests.producer.conftest import TIMEOUT_S
from tests.producer.interrupts import interrupted_at


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
        futures.append(producer.send(topic, b"after", partition=0))
        try:
            for future in futures:
                assert future.result(TIMEOUT_S / 4).has_offset
            producer.flush(TIMEOUT_S / 4)
        except TimeoutError as error:
            raise AssertionError(f"interrupted at {interrupted.where}") from error
        if not interrupted.where:
            break
    assert nth > 100
