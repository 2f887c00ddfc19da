"""`AsyncConsumer` offers the methods of `Consumer` to asyncio.

    async with AsyncConsumer(bootstrap_servers="b:9092", group_id="g") as consumer:
        await consumer.subscribe(["events"])
        async for record in consumer:
            print(record.partition, record.offset, record.value)

A thread of the consumer's own waits for the brokers, and calls the `RebalanceListener`
and the callbacks of commits. Calls are made one after another: a commit of one task
waits until the poll of another has ended.

A task that waits for records may be cancelled, by asyncio.timeout() say. Records that
come all the same are not lost: the next call returns them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import Self, TypeVar

from mpbroker.client.cluster import TopicPartition
from mpbroker.client.consumer.consumer import CLOSE_S, Consumer
from mpbroker.client.consumer.consumer_record import ConsumerRecord
from mpbroker.client.consumer.fetcher import FetchedBatch
from mpbroker.client.group_metadata import GroupMetadata
from mpbroker.client.own_thread import OwnThread, awaitable
from mpbroker.client.serialization import Deserializer

_T = TypeVar("_T")
_Starts = Mapping[TopicPartition, int]


class AsyncConsumer:
    """A consumer for one event loop; `Consumer` has the settings and errors."""

    def __init__(
        self,
        config: Mapping[str, object] | None = None,
        *,
        key_deserializer: Deserializer | str | None = None,
        value_deserializer: Deserializer | str | None = None,
        **settings: object,
    ) -> None:
        """Make a consumer; `Consumer` has the arguments."""
        self._client = Consumer(
            config,
            key_deserializer=key_deserializer,
            value_deserializer=value_deserializer,
            **settings,
        )
        self._thread = OwnThread("kafka-consumer-thread")
        self._iterator: Iterator[ConsumerRecord] | None = None

    # -- reading -----------------------------------------------------------------------

    async def poll(
        self, timeout_ms: float = 0, max_records: int | None = None
    ) -> dict[TopicPartition, list[ConsumerRecord]]:
        """Return records by partition, once there are some; see `Consumer.poll`."""
        poll = partial(self._client.poll, timeout_ms, max_records)
        return await self._read(poll, _starts_of_records)

    async def poll_batches(self, timeout_ms: float = 0) -> list[FetchedBatch]:
        """Return whole batches, which are cheaper than records.

        See `Consumer.poll_batches`.
        """
        poll = partial(self._client.poll_batches, timeout_ms)
        return await self._read(poll, _starts_of_batches)

    async def __aiter__(self) -> AsyncIterator[ConsumerRecord]:
        """Yield records for ever, as the iteration over a `Consumer` does.

        Each record costs a change of threads; `poll` is cheaper.
        """
        while True:
            yield await self._read(self._next, _start_of_record)

    def _next(self) -> ConsumerRecord:
        if self._iterator is None:
            self._iterator = iter(self._client)
        try:
            return next(self._iterator)
        except BaseException:
            self._iterator = None  # it has ended
            raise

    async def _read(
        self, poll: Callable[[], _T], starts_of: Callable[[_T], _Starts]
    ) -> _T:
        """Call ``poll`` in the consumer's thread, and return the records.

        If the task is cancelled meanwhile, the positions go back to the first of the
        records, so that the next call returns them.

        Args:
            poll: a function that returns records.
            starts_of: a function that returns their first offset, by partition.
        """
        result = self._thread.submit(poll)
        try:
            return await asyncio.wrap_future(result)
        except asyncio.CancelledError:
            if not result.cancelled():  # it runs, or has just ended
                self._client.wakeup()
                # Put the records back before all calls that come later.
                self._thread.submit(partial(self._take_back, result, starts_of))
            raise

    def _take_back(
        self, result: Future[_T], starts_of: Callable[[_T], _Starts]
    ) -> None:
        self._client.forget_wakeup()
        if result.exception() is None:
            assigned = self._client.assignment()
            for where, offset in starts_of(result.result()).items():
                if where in assigned:
                    self._client.seek(where, offset)

    # -- what does not wait ------------------------------------------------------------

    def assignment(self) -> list[TopicPartition]:
        """Return the assigned partitions, including paused ones."""
        return self._client.assignment()

    def paused(self) -> set[TopicPartition]:
        """Return the partitions that are paused."""
        return self._client.paused()

    def group_metadata(self) -> GroupMetadata:
        """Return the group's id and this member's; see `Consumer.group_metadata`."""
        return self._client.group_metadata()

    def metrics(self) -> dict[str, dict[str, float]]:
        """Return the metrics by Kafka's names, in groups; see `Consumer.metrics`."""
        return self._client.metrics()

    # -- what may wait -----------------------------------------------------------------

    assign = awaitable(Consumer.assign)
    subscribe = awaitable(Consumer.subscribe)
    unsubscribe = awaitable(Consumer.unsubscribe)
    pause = awaitable(Consumer.pause)
    resume = awaitable(Consumer.resume)
    seek = awaitable(Consumer.seek)
    seek_to = awaitable(Consumer.seek_to)
    offsets_for = awaitable(Consumer.offsets_for)
    beginning_offsets = awaitable(Consumer.beginning_offsets)
    end_offsets = awaitable(Consumer.end_offsets)
    position = awaitable(Consumer.position)
    commit = awaitable(Consumer.commit)
    committed = awaitable(Consumer.committed)

    async def close(self, timeout: float = CLOSE_S) -> None:
        """End the other tasks' polls, and close the consumer; see `Consumer.close`."""
        await self._close(partial(self._client.close, timeout))

    async def _close(self, close: Callable[[], None]) -> None:
        # End a poll of another task, for which this call would wait.
        self._client.wakeup()
        try:
            await self._thread.run(close)
        finally:
            self._thread.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        end = partial(self._client.__exit__, exc_type, exc, traceback)
        await self._close(end)


def _starts_of_records(
    found: Mapping[TopicPartition, list[ConsumerRecord]],
) -> _Starts:
    return {where: records[0].offset for where, records in found.items()}


def _starts_of_batches(found: Iterable[FetchedBatch]) -> _Starts:
    starts: dict[TopicPartition, int] = {}
    for batch in found:
        starts.setdefault(batch.partition, batch.first_offset)
    return starts


def _start_of_record(record: ConsumerRecord) -> _Starts:
    return {TopicPartition(record.topic, record.partition): record.offset}


__all__ = ["AsyncConsumer"]
