"""`AsyncProducer` does for asyncio what `Producer` does for threads.

    async with AsyncProducer(bootstrap_servers="localhost:9092") as producer:
        future = await producer.send("events", b"value")
        print((await future).offset)

As with `Producer`, the producer's own thread has the sockets. So a busy event loop does
not delay records that were handed over. Acknowledgements reach the loop in groups: one
wake-up for all that have come meanwhile.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

from mpbroker.client.cluster import TopicPartition
from mpbroker.client.group_metadata import GroupMetadata, group_of
from mpbroker.client.serialization import Serializer
from mpbroker.producer.batch import RecordMetadata
from mpbroker.producer.partitioners import Partitioner
from mpbroker.producer.producer import Producer
from mpbroker.producer.record import Headers, ProducerInterceptor
from mpbroker.producer.transactions import OffsetAndMetadata

_T = TypeVar("_T")
_Outcome = tuple[
    "asyncio.Future[RecordMetadata]", RecordMetadata | None, Exception | None
]


class AsyncProducer:
    """A producer for one event loop; `Producer` has the settings and errors."""

    def __init__(
        self,
        config: Mapping[str, object] | None = None,
        *,
        key_serializer: Serializer | str | None = None,
        value_serializer: Serializer | str | None = None,
        partitioner: Partitioner | None = None,
        interceptors: Sequence[ProducerInterceptor] = (),
        **settings: object,
    ) -> None:
        """Start a producer for the running event loop; `Producer` has the arguments."""
        self._loop = asyncio.get_running_loop()
        self._outcomes: deque[_Outcome] = deque()
        self._is_scheduled = False
        self._lock = threading.Lock()
        self._producer = Producer(
            config,
            key_serializer=key_serializer,
            value_serializer=value_serializer,
            partitioner=partitioner,
            interceptors=interceptors,
            **settings,
        )

    async def send(
        self,
        topic: str,
        value: Any = None,
        key: Any = None,
        *,
        headers: Headers = (),
        partition: int | None = None,
        timestamp_ms: int | None = None,
    ) -> asyncio.Future[RecordMetadata]:
        """Hand a record over; return a future of its acknowledgement.

        Waits for metadata and for memory without blocking the loop. Cancelling the
        future does not take the record back. A failed future that is never awaited logs
        nothing.

        Raises:
            SerializationError, ProducerClosedError, TransactionStateError, FatalError:
                as `Producer.send`.
        """
        future: asyncio.Future[RecordMetadata] = self._loop.create_future()

        def acknowledged(
            metadata: RecordMetadata | None, error: Exception | None
        ) -> None:
            self._tell((future, metadata, error))

        send = partial(
            self._producer.send,
            topic,
            value,
            key,
            headers=headers,
            partition=partition,
            timestamp_ms=timestamp_ms,
            callback=acknowledged,
        )
        if self._producer.would_block(topic, partition):
            await asyncio.to_thread(send)
        else:
            send()
        return future

    async def send_and_wait(
        self, topic: str, value: Any = None, key: Any = None, **options: Any
    ) -> RecordMetadata:
        """Send a record, as `send` does, and wait until it is acknowledged."""
        return await (await self.send(topic, value, key, **options))

    def _tell(self, outcome: _Outcome) -> None:
        with self._lock:
            self._outcomes.append(outcome)
            if self._is_scheduled:
                return
            self._is_scheduled = True
        try:
            self._loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:
            pass  # the loop is closed: no task waits any more

    def _deliver(self) -> None:
        with self._lock:
            outcomes, self._outcomes = self._outcomes, deque()
            self._is_scheduled = False
        for future, metadata, error in outcomes:
            if future.done():
                continue  # cancelled
            if error is None:
                assert metadata is not None
                future.set_result(metadata)
            else:
                future.set_exception(error)
                future.exception()  # so that asyncio logs nothing if it is not awaited

    async def _run(self, function: Callable[[], _T]) -> _T:
        # Use a thread of its own. The loop's threads may all be taken, for longer than
        # a timeout, by sends that wait or by other work of the program.
        thread = ThreadPoolExecutor(1)
        try:
            context = contextvars.copy_context()
            return await self._loop.run_in_executor(thread, context.run, function)
        finally:
            thread.shutdown(wait=False)

    async def partitions_for(self, topic: str) -> int:
        """Return how many partitions a topic has; see `Producer.partitions_for`."""
        return await self._run(partial(self._producer.partitions_for, topic))

    async def flush(self, timeout: float | None = None) -> None:
        """Wait until all records are done; see `Producer.flush`."""
        await self._run(partial(self._producer.flush, timeout))

    async def init_transactions(self) -> None:
        """Get ready for transactions; see `Producer.init_transactions`."""
        await self._run(self._producer.init_transactions)

    async def begin_transaction(self) -> None:
        """Open a transaction; see `Producer.begin_transaction`."""
        self._producer.begin_transaction()

    async def send_offsets_to_transaction(
        self,
        offsets: Mapping[TopicPartition, OffsetAndMetadata | int],
        group: GroupMetadata | str,
    ) -> None:
        """Commit a consumer group's offsets together with the transaction.

        See `Producer.send_offsets_to_transaction`.
        """
        member = group_of(group, 2)
        await self._run(
            partial(self._producer.send_offsets_to_transaction, offsets, member)
        )

    async def commit_transaction(self) -> None:
        """Commit the transaction; see `Producer.commit_transaction`."""
        await self._run(self._producer.commit_transaction)

    async def abort_transaction(self) -> None:
        """Abort the transaction; see `Producer.abort_transaction`."""
        await self._run(self._producer.abort_transaction)

    def metrics(self) -> dict[str, dict[str, float]]:
        """Return the metrics in groups, by Kafka's names; see `Producer.metrics`."""
        return self._producer.metrics()

    async def close(self, timeout: float | None = None) -> None:
        """Send all records, and end the producer; see `Producer.close`."""
        # At once, so that sends of the loop's other tasks are refused from now on.
        self._producer.begin_close()
        await self._run(partial(self._producer.close, timeout))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close(0 if exc_type is not None else None)
