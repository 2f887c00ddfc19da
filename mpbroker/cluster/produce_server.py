"""Serve the handlers' Produce requests in the process that writes shared topics.

An answer is kept until the slot of its request (the place in shared memory) has another
one. If a handler is killed, another handler sends its request again, and gets the
answer of the first execution.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, Protocol
from uuid import UUID

from mpbroker.base.logger import get_logger
from mpbroker.cluster.errors import ClusterError
from mpbroker.cluster.materialiser import SharedPartition
from mpbroker.cluster.object_writer import Committing, SharedBatch, WrittenBatch
from mpbroker.cluster.produce_link import LinkPath, receive_message, send_message
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError

logger = get_logger(__name__)
_BACKLOG: Final = 512
# How often to look for a request that another handler is about to send.
_LOOK_S: Final = 0.01


class Writer(Protocol):
    """Writes batches of shared topics to the store and commits them: ObjectWriter."""

    def write(
        self,
        connection: int,
        batches: list[SharedBatch],
        timeout_s: float,
        committing: Committing | None,
        entered: Callable[[], None],
    ) -> Awaitable[list[WrittenBatch]]: ...

    def recall(
        self, key: UUID, places: list[int], batches: list[SharedBatch]
    ) -> Awaitable[list[WrittenBatch] | None]: ...


class Topics(Protocol):
    """A node's shared topics, whose records are in the object store."""

    def ready(self, topic_id: UUID) -> Awaitable[None]:
        """Wait until the cluster's database has the partitions of a topic.

        Raises:
            ApiError: there is no such topic.
        """

    def visible(self, ends: Mapping[SharedPartition, int]) -> Awaitable[None]:
        """Wait until this node's local copies of partitions reach these end offsets."""

    def up_to_date(
        self, places: Sequence[SharedPartition], timeout_s: float
    ) -> Awaitable[list[bool]]:
        """Wait until local copies have what the cluster has; return which ones do."""


class Deletions(Protocol):
    """What removes records; ``SharedDeletions`` is one."""

    def delete(
        self, wanted: Sequence[tuple[UUID, int, int]], timeout_s: float
    ) -> Awaitable[list[tuple[int, int]]]:
        """Remove records below offsets; return each partition's start and error."""


class _Link:
    """The connection to a handler process, and the messages that do not fit it yet."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.unsent: deque[dict[str, Any]] = deque()
        self.is_open = True


class _Produce:
    """A request that the writer is executing, or has executed.

    Attributes:
        link: the connection to the handler that has the request.
        intent: the message that tells that handler the object's key before the commit;
            {}: it was not sent yet.
        is_ordered: set when no later request can overtake this one: its batches are in
            the writer's buffer, or it has its answer.
    """

    def __init__(self, generation: int, link: _Link) -> None:
        self.generation = generation
        self.link = link
        self.intent: dict[str, Any] = {}
        self.is_ordered = asyncio.Event()
        self.work: asyncio.Task[dict[str, Any]]


class ProduceServer:
    """Receives requests from handlers, has them written, and answers them.

    Args:
        directory: the directory of the socket.
        writer: writes the batches.
        topics: makes partitions in the database; see SharedTopics.
        deletions: removes records; see SharedDeletions.
        notify: sends a notice about a row to a handler.
        is_waiting: returns whether the request of a slot and generation has no answer
            yet, so that a handler has it, or will have it.
    """

    def __init__(
        self,
        directory: str,
        writer: Writer,
        topics: Topics,
        deletions: Deletions,
        notify: Callable[[int, int], None],
        is_waiting: Callable[[int, int], bool],
    ) -> None:
        self._path = LinkPath(directory)
        self._writer = writer
        self._topics = topics
        self._deletions = deletions
        self._notify = notify
        self._is_waiting = is_waiting
        self._produces: dict[int, _Produce] = {}  # by slot
        self._answering: set[asyncio.Task[None]] = set()
        self._links: set[_Link] = set()

    async def run(self, listening: Callable[[], None]) -> None:
        """Receive and answer the handlers' Produce requests until this is cancelled.

        Args:
            listening: called once, when handlers can connect.
        """
        address = self._path.address
        with suppress(FileNotFoundError):
            os.unlink(address)  # the socket of an earlier process
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.setblocking(False)
            listener.bind(address)
            os.chmod(address, 0o600)
            listener.listen(_BACKLOG)
            listening()
            try:
                await self._accept(listener)
            finally:
                for link in list(self._links):
                    self._close(link)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            sock, _ = await loop.sock_accept(listener)
            sock.setblocking(False)
            link = _Link(sock)
            self._links.add(link)
            loop.add_reader(sock.fileno(), self._receive, link)

    def _receive(self, link: _Link) -> None:
        """Start a task for each Produce that a handler process has sent."""
        while link.is_open:
            try:
                message = receive_message(link.socket)
            except BlockingIOError:
                return
            if message is None:
                self._close(link)
                return
            head, content = message
            task = asyncio.create_task(self._answer(link, head, content))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)

    def _close(self, link: _Link) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(link.socket.fileno())
        loop.remove_writer(link.socket.fileno())
        link.is_open = False
        link.socket.close()
        self._links.discard(link)

    # -- a request ---------------------------------------------------------------------

    async def _answer(
        self, link: _Link, head: dict[str, Any], content: memoryview
    ) -> None:
        slot, generation = head["slot"], head["generation"]
        known = self._produces.get(slot)
        if known is None or known.generation != generation:
            known = self._produces[slot] = _Produce(generation, link)
            known.work = asyncio.create_task(self._execute(known, head, content))
        elif known.intent:
            self._send(link, known.intent)
        known.link = link
        await known.is_ordered.wait()
        if not known.work.done() and link.is_open:
            # The connection may send its next request: network/pipelining/pipelines.py.
            self._send(link, {"slot": slot, "generation": generation, "taken": True})
            self._notify(head["handler"], head["row"])
        answer = await asyncio.shield(known.work)
        if link.is_open:
            self._send(link, answer)
            self._notify(head["handler"], head["row"])

    async def _execute(
        self, produce: _Produce, head: dict[str, Any], content: memoryview
    ) -> dict[str, Any]:
        """Execute a request; return the answer for its handler."""
        answer = {"slot": head["slot"], "generation": head["generation"]}
        try:
            if "deletions" in head:
                results: Sequence[Sequence[int]] = await self._delete(head)
            elif "looks" in head:
                results = await self._look(head)
            else:
                results = await self._write(produce, head, content)
        except ApiError as error:
            return {**answer, "error": [error.error_code, str(error)]}
        except ClusterError as error:
            return {**answer, "error": [ErrorCode.KAFKA_STORAGE_ERROR, str(error)]}
        except Exception:
            logger.exception("a request about shared topics failed")
            code = ErrorCode.UNKNOWN_SERVER_ERROR
            return {**answer, "error": [code, "a bug; see the broker's log"]}
        finally:
            produce.is_ordered.set()
        return {**answer, "results": [[*each] for each in results]}

    async def _delete(self, head: dict[str, Any]) -> list[tuple[int, int]]:
        wanted = [
            (UUID(topic), index, before) for topic, index, before in head["deletions"]
        ]
        return await self._deletions.delete(wanted, head["timeout_ms"] / 1000)

    async def _look(self, head: dict[str, Any]) -> list[tuple[int]]:
        places = [SharedPartition(UUID(topic), index) for topic, index in head["looks"]]
        found = await self._topics.up_to_date(places, head["timeout_ms"] / 1000)
        return [(int(has_all),) for has_all in found]

    async def _write(
        self, produce: _Produce, head: dict[str, Any], content: memoryview
    ) -> list[WrittenBatch]:
        """Write a request's batches; return the result of each."""
        deadline = time.monotonic() + head["timeout_ms"] / 1000
        written = await self._commit(produce, head, content, deadline)
        ends = {
            SharedPartition(UUID(topic), partition): each.base_offset + records
            for (topic, partition, records, _), each in zip(
                head["batches"], written, strict=True
            )
            if not each.error_code
        }
        # Wait until readers of this node can read the records. At the deadline the
        # records are acknowledged nevertheless: they are committed.
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                await self._topics.visible(ends)
        return written

    async def _commit(
        self,
        produce: _Produce,
        head: dict[str, Any],
        content: memoryview,
        deadline: float,
    ) -> list[WrittenBatch]:
        batches = []
        at = 0
        for topic, partition, _, size in head["batches"]:
            batches.append(SharedBatch(UUID(topic), partition, content[at : at + size]))
            at += size
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                for topic_id in {batch.topic_id for batch in batches}:
                    await self._topics.ready(topic_id)
                if before := head.get("before"):
                    await self._follow(*before)
                if intent := head["intent"]:
                    key = UUID(intent["key"])
                    done = await self._writer.recall(key, intent["places"], batches)
                    if done is not None:
                        return done
        except TimeoutError:
            raise ApiError(
                ErrorCode.REQUEST_TIMED_OUT, "the cluster's database gives no answer"
            ) from None
        left_s = max(0.0, deadline - time.monotonic())

        def committing(key: UUID, places: Sequence[int]) -> None:
            produce.intent = {
                "slot": head["slot"],
                "generation": head["generation"],
                "key": key.hex,
                "places": places,
            }
            self._send(produce.link, produce.intent)

        return await self._writer.write(
            head["connection"],
            batches,
            left_s,
            None if head["has_ids"] else committing,
            produce.is_ordered.set,
        )

    async def _follow(self, slot: int, generation: int) -> None:
        """Wait until a connection's earlier request is in the buffer, or answered.

        When a writer begins, handlers send it all waiting requests, in any order.
        """
        while self._is_waiting(slot, generation):
            known = self._produces.get(slot)
            if known is not None and known.generation == generation:
                await known.is_ordered.wait()
                return
            await asyncio.sleep(_LOOK_S)

    def _send(self, link: _Link, message: dict[str, Any]) -> None:
        """Send an answer to a handler, now or when its socket has room."""
        link.unsent.append(message)
        self._flush(link)

    def _flush(self, link: _Link) -> None:
        """Send what waits for a handler, now or when its socket has room."""
        loop = asyncio.get_running_loop()
        while link.unsent and link.is_open:
            try:
                send_message(link.socket, link.unsent[0], ())
            except BlockingIOError:
                loop.add_writer(link.socket.fileno(), self._flush, link)
                return
            except OSError:
                self._close(link)
                return
            link.unsent.popleft()
        if link.is_open:
            loop.remove_writer(link.socket.fileno())
