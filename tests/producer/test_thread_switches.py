"""What a program's thread has begun is seen, or not yet there, by the sender's."""

from __future__ import annotations

import threading

import pytest

from mpbroker.producer import ProducerClosedError
from mpbroker.producer import accumulator as accumulator_module


def test_closing_reaches_a_batch_that_was_being_begun_meanwhile(
    make_producer, new_topic, read, monkeypatch
):
    topic = new_topic()
    producer = make_producer()
    producer.partitions_for(topic)
    closing = threading.Thread(target=producer.close)
    make = accumulator_module.ProducerBatch

    def close_before(*arguments):
        monkeypatch.undo()
        closing.start()
        producer._thread.join(1)  # unless it waits for who has begun
        return make(*arguments)

    monkeypatch.setattr(accumulator_module, "ProducerBatch", close_before)
    future = producer.send(topic, b"x")
    closing.join(30)
    assert future.result(0).offset == 0


def test_closing_reaches_a_batch_that_was_being_sealed_meanwhile(
    make_producer, new_topic, read, monkeypatch
):
    topic = new_topic()
    producer = make_producer(linger_ms=60_000, batch_size=1000)
    producer.partitions_for(topic)
    first = producer.send(topic, b"x" * 900)
    accumulator, sleeping = producer._accumulator, threading.Event()
    closing = threading.Thread(target=producer.close)
    seal, poll = accumulator.seal, producer._client.poll

    def poll_when_closed(wait_ms, now_ms):
        if accumulator.is_closed:
            sleeping.set()  # about to wait for whatever comes
        poll(wait_ms, now_ms)

    def close_before(batch):
        if threading.current_thread() is threading.main_thread():
            closing.start()
            assert sleeping.wait(90)
        seal(batch)

    monkeypatch.setattr(producer._client, "poll", poll_when_closed)
    monkeypatch.setattr(accumulator, "seal", close_before)
    with pytest.raises(ProducerClosedError):
        producer.send(topic, b"y" * 900)
    closing.join(60)
    assert not closing.is_alive()
    assert first.exception(0) is None


def test_who_waits_for_memory_is_in_line_before_the_sender_looks(
    make_producer, new_topic, monkeypatch
):
    topic = new_topic(3)
    producer = make_producer(buffer_memory=2000, batch_size=1000, linger_ms=60_000)
    futures = [producer.send(topic, b"x", partition=i) for i in range(2)]
    waited = []

    def wake_up():
        waited.append(producer._pool.waiting)
        wakeup()

    wakeup = producer._client.wakeup
    monkeypatch.setattr(producer._client, "wakeup", wake_up)
    futures.append(producer.send(topic, b"x", partition=2))
    assert waited[0] == 1
    producer.flush(30)
    assert all(future.result(0) for future in futures)
