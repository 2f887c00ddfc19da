"""`AsyncProducer`: the same records, awaited."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from mpbroker.producer import (
    AsyncProducer,
    DeliveryTimeoutError,
    ProducerClosedError,
    RecordTooLargeError,
    SerializationError,
)
from tests.producer.conftest import until_known


def test_futures_are_awaited_and_the_loop_goes_on(bootstrap, new_topic, read):
    topic = new_topic()

    async def run():
        async with AsyncProducer(bootstrap_servers=bootstrap) as producer:
            futures = [await producer.send(topic, b"%d" % i) for i in range(500)]
            done = await asyncio.gather(*futures)
            assert await producer.partitions_for(topic) == 1
            one = await producer.send_and_wait(topic, b"last", b"key")
            await producer.flush()
            return [metadata.offset for metadata in done], one.offset

    assert asyncio.run(run()) == (list(range(500)), 500)
    assert len(read(topic)[0]) == 501


def test_little_memory_does_not_block_the_loop(bootstrap, new_topic):
    topic = new_topic()

    async def run():
        ticks = 0

        async def tick():
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        async with AsyncProducer(
            bootstrap_servers=bootstrap, buffer_memory=2000, batch_size=500
        ) as producer:
            ticking = asyncio.create_task(tick())
            futures = [await producer.send(topic, b"x" * 200) for _ in range(100)]
            before = ticks
            await asyncio.gather(*futures)
            ticking.cancel()
            return before

    assert asyncio.run(run()) > 100


def test_errors_are_raised_by_awaiting_and_a_cancelled_future_harms_nobody(
    bootstrap, new_topic
):
    topic = new_topic(max_message_bytes="1000")

    async def run():
        async with AsyncProducer(
            bootstrap_servers=bootstrap, max_block_ms=300
        ) as producer:
            with pytest.raises(SerializationError):
                await producer.send(topic, "text")
            await asyncio.to_thread(until_known, producer._producer, topic)
            with pytest.raises(DeliveryTimeoutError, match="no partition 7"):
                await producer.send_and_wait(topic, b"x", partition=7)
            cancelled = await producer.send(topic, b"x")
            cancelled.cancel()
            refused = await producer.send(topic, b"x" * 5000)
            with pytest.raises(Exception, match="TOO_LARGE"):
                await refused
            # Above max.request.size: the future fails, too, as in the other producer.
            refused = await producer.send(topic, b"x" * 2_000_000)
            with pytest.raises(RecordTooLargeError, match=r"max\.request\.size"):
                await refused
            assert (await producer.send_and_wait(topic, b"y")).offset == 1
            assert producer.metrics()["producer-metrics"]["record-send-total"] >= 3

    asyncio.run(run())


def test_closing_does_not_wait_for_sends_that_wait():
    """More of them than there are threads to wait in."""

    async def run():
        producer = AsyncProducer(
            bootstrap_servers="127.0.0.1:1", max_block_ms=3_600_000
        )
        sends = [asyncio.create_task(producer.send("t", b"x")) for _ in range(100)]
        await asyncio.sleep(0)
        await producer.close()
        return await asyncio.gather(*sends, return_exceptions=True)

    outcomes = asyncio.run(run())
    errors = [
        outcome if isinstance(outcome, Exception) else outcome.exception()
        for outcome in outcomes
    ]
    assert {type(error) for error in errors} == {ProducerClosedError}


def test_what_has_a_timeout_waits_for_none_of_the_loops_threads():
    """Sends that wait, and the program's own work, may have them all for long."""

    class NeverFree(ThreadPoolExecutor):
        def submit(self, *args, **kwargs):
            raise AssertionError("this waits until a thread is free")

    async def run():
        asyncio.get_running_loop().set_default_executor(NeverFree())
        producer = AsyncProducer(bootstrap_servers="127.0.0.1:1")
        try:
            await producer.flush(1)
            await producer.close(1)
        finally:
            producer._producer.close(0)
        with pytest.raises(ProducerClosedError):
            await producer.partitions_for("t")

    asyncio.run(run())
