"""`AsyncConsumer` and `AsyncAdminClient`, with the broker under test."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from mpbroker import (
    AdminClient,
    AsyncAdminClient,
    AsyncConsumer,
    AsyncProducer,
    Consumer,
    WakeupError,
)
from mpbroker.client.errors import ApiError, ClientError
from tests.client.test_consumer import fill


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        asyncio.run(test(**fixtures))

    return run


def names_of(kind: type) -> set[str]:
    return {
        name
        for name, member in inspect.getmembers(kind)
        if callable(member) and not name.startswith("_")
    }


def test_the_async_admin_client_has_all_methods():
    assert names_of(AsyncAdminClient) == names_of(AdminClient)


def test_the_async_consumer_has_all_methods_that_asyncio_needs():
    # A task is cancelled instead, and a commit of its own task is not waited for.
    others = {"wakeup", "forget_wakeup", "commit_async"}
    assert names_of(AsyncConsumer) == names_of(Consumer) - others


@in_a_loop
async def test_records_are_produced_and_consumed_by_tasks(bootstrap, topic_name):
    async def produce() -> None:
        async with AsyncProducer(bootstrap_servers=bootstrap) as producer:
            for number in range(20):
                await producer.send_and_wait(topic_name, b"%d" % number, partition=0)

    found = []
    async with (
        asyncio.TaskGroup() as tasks,
        AsyncConsumer(
            bootstrap_servers=bootstrap,
            group_id=topic_name,
            auto_offset_reset="earliest",
            value_deserializer=lambda topic, data: int(data),
        ) as consumer,
    ):
        tasks.create_task(produce())
        await consumer.subscribe([topic_name])
        async for record in consumer:
            found.append(record.value)
            if len(found) == 20:
                break
        await consumer.commit()
        assert await consumer.committed((topic_name, 0)) == 20
        assert consumer.group_metadata().generation_id >= 1
    assert found == list(range(20))


@pytest.mark.parametrize("how", ["poll", "poll_batches", "iteration"])
@in_a_loop
async def test_a_cancelled_task_loses_no_record(bootstrap, topic_name, how):
    fill(bootstrap, topic_name, range(3))
    async with AsyncConsumer(bootstrap_servers=bootstrap) as consumer:
        await consumer.assign([(topic_name, 0)])
        assert await consumer.position((topic_name, 0)) == 3

        async def read() -> object:
            if how == "poll":
                return await consumer.poll(3_600_000)
            if how == "poll_batches":
                return await consumer.poll_batches(3_600_000)
            return await anext(aiter(consumer))

        for _ in range(3):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await read()
        # The thread has read records, and the task is cancelled before it gets them.
        task = asyncio.create_task(read())
        await asyncio.sleep(0)
        fill(bootstrap, topic_name, range(3, 6))
        consumer._thread.submit(lambda: None).result(30)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        offsets = []
        while len(offsets) < 3:
            for records in (await consumer.poll(1000)).values():
                offsets += [record.offset for record in records]
        assert offsets == [3, 4, 5]


@in_a_loop
async def test_closing_ends_the_poll_of_another_task(bootstrap, topic_name):
    fill(bootstrap, topic_name, range(1))
    consumer = AsyncConsumer(bootstrap_servers=bootstrap)
    await consumer.assign([(topic_name, 0)])
    task = asyncio.create_task(consumer.poll(3_600_000))
    await asyncio.sleep(0)
    await consumer.close()
    with pytest.raises(WakeupError):
        await task


@in_a_loop
async def test_topics_groups_and_directories_are_administered(bootstrap, topic_name):
    async with AsyncAdminClient(bootstrap_servers=bootstrap) as admin:
        await admin.create_topic(topic_name, partitions=2, replication_factor=1)
        with pytest.raises(ApiError, match="TOPIC_ALREADY_EXISTS"):
            await admin.create_topic(topic_name)
        await asyncio.to_thread(fill, bootstrap, topic_name, range(5))
        ends = await admin.list_offsets({(topic_name, 0): -1})
        assert ends[topic_name, 0].offset == 5
        await admin.alter_group_offsets(
            topic_name, {(topic_name, 0): 3, (topic_name, 1): 0}
        )
        await admin.delete_group_offsets(topic_name, [(topic_name, 1)])
        assert await admin.list_group_offsets(topic_name) == {(topic_name, 0): 3}
        directories = await admin.describe_log_dirs()
        sizes = [each.partitions.get((topic_name, 0), 0) for each in directories]
        assert max(sizes) > 0
        assert all(each.error is None for each in directories)
        assert (await admin.describe_features())["transaction.version"].level == 2
    with pytest.raises(ClientError):
        await admin.list_topics()
