"""A callback that sends waits for nothing: its thread would wait for itself."""

from __future__ import annotations

import threading

import pytest

from mpbroker.producer import BufferExhaustedError, ProducerError, RetriableError
from mpbroker.producer.buffer_pool import BufferPool
from tests.producer.conftest import until_known
from tests.support.patience import LONGEST_S


def in_a_callback(producer, topic, call):
    """Return what a call returns, or raises, in a callback."""
    outcome, over = [], threading.Event()

    def callback(metadata, error):
        try:
            outcome.append(call())
        except ProducerError as raised:
            outcome.append(raised)
        over.set()

    producer.send(topic, b"x", partition=0, callback=callback)
    assert over.wait(LONGEST_S)
    return outcome[0]


def test_a_topic_that_is_not_known_is_asked_for_and_the_record_refused(
    make_producer, new_topic
):
    topic, other = new_topic(), new_topic()
    producer = make_producer(max_block_ms=2000)
    until_known(producer, topic)

    def send_other():
        return producer.send(other, b"x")

    error = in_a_callback(producer, topic, send_other).exception(0)
    assert isinstance(error, RetriableError)
    assert "a callback cannot wait for it" in str(error)
    until_known(producer, other)
    assert in_a_callback(producer, topic, send_other).result(LONGEST_S).offset == 0


def test_partitions_that_are_not_known_are_not_waited_for(make_producer, new_topic):
    topic, other = new_topic(), new_topic()
    producer = make_producer(max_block_ms=2000)
    until_known(producer, topic)
    error = in_a_callback(producer, topic, lambda: producer.partitions_for(other))
    assert "a callback cannot wait for it" in str(error)


def test_memory_is_lent_although_others_wait_for_it(make_producer, new_topic):
    topic = new_topic(2)
    producer = make_producer(buffer_memory=2000, batch_size=1000, max_block_ms=2000)
    until_known(producer, topic)
    pool = producer._pool
    pool.grant(1000).take(0)
    record = in_a_callback(
        producer, topic, lambda: producer.send(topic, b"again", partition=1)
    )
    assert record.result(LONGEST_S).offset == 0
    producer.close()
    assert pool.available_bytes == 1000


def test_no_more_memory_is_lent_than_there_is():
    pool = BufferPool(100)
    pool.grant(60).take(0)
    pool.grant(100).overdraw()
    pool.grant(40).overdraw()
    with pytest.raises(BufferExhaustedError, match="callbacks"):
        pool.grant(1).overdraw()
    assert pool.metrics(1)["buffer-available-bytes"] == 0
    pool.free(200)
    pool.grant(100).take(0)
