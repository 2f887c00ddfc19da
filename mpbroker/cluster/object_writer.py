"""Write the records produced to shared topics into objects, and commit the objects.

A shared topic is one whose records are in the cluster's object store. An object
consists of the record batches of some requests, as the clients sent them, sorted by
topic, partition and producer. The database knows which of its bytes are valid, and
their offsets.

    write()      a request's batches wait in the buffer; the request waits, too
    rotation     the buffer becomes an object: after an interval, at a size, or at once
                 when every connection that produced lately waits in it
    key          the object's key is registered in the database before its first byte is
                 written to the store
    put          the bytes are written to the store, for several objects at a time
    commit       the database gives offsets to the batches, or refuses them, in the
                 order of the rotations
    answer       the requests are answered after the commit

If this process dies, no acknowledged record is lost, because records are acknowledged
after the commit. An object that was not committed is given up after some minutes.

A request is answered at its timeout at the latest. Then its outcome is unknown: the
commit may be on its way. A producer with an id may send the batch again.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Hashable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol
from uuid import UUID

from mpbroker.base.logger import get_logger
from mpbroker.base.storage_errors import RemoteStorageError
from mpbroker.cluster.errors import (
    ClusterError,
    DatabaseUnavailableError,
    ObjectGivenUpError,
)
from mpbroker.cluster.sequencer import (
    LOG_APPEND_TIME,
    ObjectBatch,
    ObjectCommit,
    Sequencer,
)
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.records.batch_header import (
    TIMESTAMP_TYPE_FLAG,
    parse_batch_header,
)

if TYPE_CHECKING:
    Buffer = bytes | bytearray | memoryview

logger = get_logger(__name__)
# The number of keys that are registered in one call, so that few objects wait for it.
_KEYS_AT_ONCE: Final = 64
# Half of the age at which the collector gives up an object that was not committed.
_KEY_LIFE_S: Final = 300.0
_RETRY_PAUSE_S: Final = 0.2


class Store(Protocol):
    """The store to which objects are written, such as ``ObjectStore``."""

    def put_async(self, key: str, content: bytes) -> Awaitable[None]: ...


class SharedBatch(NamedTuple):
    """A validated record batch for a shared partition, which is in no transaction."""

    topic_id: UUID
    partition: int
    data: Buffer


class WrittenBatch(NamedTuple):
    """The result of writing a batch to a shared topic: its offset, or an error.

    Attributes:
        base_offset: the offset of its first record, also if it repeats an earlier
            batch; -1: the batch was refused.
        error_code: the reason of the refusal; 0: the batch was written.
        log_append_time_ms: the time of the commit, if it is the timestamp of the
            records; -1: they have the producer's timestamps.
    """

    base_offset: int
    error_code: int
    log_append_time_ms: int


# A function that is called before a commit. It gets the object's key, and the index of
# each of a request's batches among the batches of the object.
Committing = Callable[[UUID, Sequence[int]], None]


class WriterSettings(NamedTuple):
    """The interval and the limits of a writer.

    Attributes:
        interval_s: diskless.append.commit.interval.ms, in seconds.
        object_bytes: diskless.append.buffer.max.bytes, the size of one object.
        held_bytes: the most bytes of unanswered requests in the buffer; further
            requests wait outside of it.
        uploads: the number of objects that are put at the same time.
    """

    interval_s: float = 0.25
    object_bytes: int = 8 << 20
    held_bytes: int = 64 << 20
    uploads: int = 8


class _Write:
    """A Produce request whose batches are in the buffer or in an object.

    It waits until they are committed.
    """

    __slots__ = ("batches", "committing", "done", "size")

    def __init__(
        self, batches: Sequence[SharedBatch], committing: Committing | None
    ) -> None:
        self.batches = batches
        self.committing = committing
        self.size = sum(len(batch.data) for batch in batches)
        self.done: asyncio.Future[list[WrittenBatch]] = asyncio.Future()


def object_path(key: UUID) -> str:
    """Return the path of an object, relative to diskless.storage.url."""
    text = str(key)
    # Stores distribute their load by the beginning of a name.
    return f"{text[:2]}/{text}"


class ObjectWriter:
    """Writes one node's batches of shared topics into objects, and commits them.

    Args:
        sequencer: commits objects in the database, which gives offsets.
        store: stores the objects' bytes.
        node_id: the id with which objects are registered.
        settings: the interval and the limits.
        clock: returns a time in seconds; tests replace it.

    Attributes:
        held_bytes: the bytes of all unanswered requests in the buffer.
    """

    def __init__(
        self,
        sequencer: Sequencer,
        store: Store,
        node_id: int,
        settings: WriterSettings = WriterSettings(),  # noqa: B008 - it cannot be changed
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sequencer = sequencer
        self._store = store
        self._node_id = node_id
        self._settings = settings
        self._clock = clock
        self.held_bytes = 0
        self._entrance = asyncio.Lock()  # keeps the order of requests that wait outside
        self._left = asyncio.Event()  # set when requests have left the buffer
        self._open: deque[_Write] = deque()
        self._open_bytes = 0
        self._open_since = 0.0
        self._changed = asyncio.Event()  # set when the next rotation may be due
        self._in_flight = 0
        self._uploads = asyncio.Semaphore(settings.uploads)
        # The number of waiting requests of each connection.
        self._waiting: Counter[Hashable] = Counter()
        # The connections without a waiting request, and when each was last answered;
        # the oldest comes first.
        self._answered: dict[Hashable, float] = {}
        self._keys: deque[tuple[UUID, float]] = deque()
        self._key_turn = asyncio.Lock()

    # -- a request -----------------------------------------------------------------

    async def write(
        self,
        connection: Hashable,
        batches: Sequence[SharedBatch],
        timeout_s: float,
        committing: Committing | None = None,
        entered: Callable[[], None] | None = None,
    ) -> list[WrittenBatch]:
        """Write a request's batches; return the result of each, after the commit.

        A connection's requests are committed in the order of the calls. The bytes must
        not be changed before this returns or raises.

        Args:
            committing: called before the commit with the object's key, and the index of
                each batch among the object's batches. With these, the next writer can
                find the results if this process dies (``recall``).
            entered: called when the batches are in the buffer: no later batches can
                overtake them.

        Raises:
            ApiError: REQUEST_TIMED_OUT: the batches may have been written nevertheless;
                KAFKA_STORAGE_ERROR: the database refuses; an operator must act.
        """
        write = _Write(batches, committing)
        self._waiting[connection] += 1
        self._answered.pop(connection, None)
        try:
            async with asyncio.timeout(timeout_s):
                await self._enter(write)
                if entered is not None:
                    entered()
                return await write.done
        except TimeoutError:
            raise ApiError(
                ErrorCode.REQUEST_TIMED_OUT,
                f"the store or the database of the cluster took longer than"
                f" {timeout_s:g} s",
            ) from None
        finally:
            if write in self._open:
                self._open.remove(write)
                self._open_bytes -= write.size
                self._release(write.size)
            self._waiting[connection] -= 1
            if not self._waiting[connection]:
                del self._waiting[connection]
                self._answered[connection] = self._clock()
            self._changed.set()

    async def recall(
        self, key: UUID, places: Sequence[int], batches: Sequence[SharedBatch]
    ) -> list[WrittenBatch] | None:
        """Return the results of the batches that a dead writer was about to commit.

        Return None if they were not committed: then their object is given up, so that
        it can never be committed.

        Args:
            places: the index of each batch among the object's batches.

        Raises:
            ClusterError: as `ClusterDatabase.rows`.
        """
        if not await self._sequencer.settle_object(key):
            return None
        done = await self._sequencer.commit_object(key, 0, [])  # its first answer
        return [
            _written(done, place, by_broker=_has_commit_time(batch))
            for place, batch in zip(places, batches, strict=True)
        ]

    async def _enter(self, write: _Write) -> None:
        async with self._entrance:
            # A request that is larger than the limit is let in when the buffer is
            # empty.
            while self.held_bytes and (
                self.held_bytes + write.size > self._settings.held_bytes
            ):
                self._left.clear()
                await self._left.wait()
        self.held_bytes += write.size
        if not self._open:
            self._open_since = self._clock()
        self._open.append(write)
        self._open_bytes += write.size
        self._changed.set()

    def _release(self, size: int) -> None:
        self.held_bytes -= size
        self._left.set()

    # -- rotation ------------------------------------------------------------------

    async def run(self) -> None:
        """Write the buffered batches as objects and commit them, until cancelled."""
        before = asyncio.Event()
        before.set()
        async with asyncio.TaskGroup() as group:
            while True:
                await self._uploads.acquire()
                writes = await self._rotation()
                ended = asyncio.Event()
                self._in_flight += 1
                group.create_task(self._finish(writes, before, ended))
                before = ended

    async def _rotation(self) -> list[_Write]:
        """Wait until buffered batches must become an object; return their requests."""
        while True:
            left_s = self._time_left()
            if left_s is not None and left_s <= 0:
                return self._take()
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._changed.wait()

    def _time_left(self) -> float | None:
        """Return the seconds until the buffered batches become an object.

        None: no batch is buffered.
        """
        if not self._open:
            return None
        if self._open_bytes >= self._settings.object_bytes:
            return 0
        now, interval_s = self._clock(), self._settings.interval_s
        due = self._open_since + interval_s
        awaited_until = now
        while self._answered:
            connection, answered = next(iter(self._answered.items()))
            awaited_until = answered + interval_s
            if awaited_until > now:
                break
            del self._answered[connection]
        if not self._in_flight:
            # No object is under way, so no client waits for one: wait only for the
            # clients that were answered lately. So the clients of a node come to share
            # objects, and a single client never waits for the interval.
            due = min(due, awaited_until if self._answered else now)
        return due - now

    def _take(self) -> list[_Write]:
        taken: list[_Write] = []
        size = 0
        while self._open:
            size += self._open[0].size
            if taken and size > self._settings.object_bytes:
                break
            taken.append(self._open.popleft())
            self._open_bytes -= taken[-1].size
        self._open_since = self._clock()
        return taken

    # -- an object -----------------------------------------------------------------

    async def _finish(
        self, writes: Sequence[_Write], before: asyncio.Event, ended: asyncio.Event
    ) -> None:
        """Write and commit an object; stop if all its requests have timed out.

        Args:
            before: set when the object before this one is committed or has failed.
            ended: set here when this object is committed or has failed.
        """
        waiting = asyncio.ensure_future(asyncio.wait([each.done for each in writes]))
        work = asyncio.ensure_future(self._write_object(writes, before))
        try:
            await asyncio.wait({waiting, work}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
            # If the commit is cancelled, its outcome is unknown, which is what the
            # requests were told. An object that is not committed is the collector's.
            work.cancel()
            with suppress(asyncio.CancelledError):
                await work
            ended.set()
            self._in_flight -= 1
            self._uploads.release()
            self._release(sum(each.size for each in writes))
            self._changed.set()

    async def _write_object(
        self, writes: Sequence[_Write], before: asyncio.Event
    ) -> None:
        content, batches, owners = _lay_out(writes)
        while True:
            try:
                key = await self._key()
                await self._put(key, content)
                await before.wait()
                _tell(key, owners)
                done = await self._commit(key, len(content), batches)
                break
            except ObjectGivenUpError:
                # This took so long that the collector has given the object up. Write it
                # again under a new key: the bytes of the old key may be deleted at any
                # time.
                logger.warning("an object was given up before its commit: once more")
            except ClusterError as error:
                logger.error("shared topics cannot be written: %s", error)
                for write in writes:
                    _fail(write, ApiError(ErrorCode.KAFKA_STORAGE_ERROR, str(error)))
                return
        answers: dict[_Write, list[WrittenBatch]] = {
            write: [WrittenBatch(-1, 0, -1)] * len(write.batches) for write in writes
        }
        for place, (write, index) in enumerate(owners):
            by_broker = batches[place].max_timestamp == LOG_APPEND_TIME
            answers[write][index] = _written(done, place, by_broker=by_broker)
        for write, answer in answers.items():
            if not write.done.done():
                write.done.set_result(answer)

    async def _key(self) -> UUID:
        """Return a new object's key, which is registered in the database already."""
        async with self._key_turn:
            while True:
                while self._keys:
                    key, usable_until = self._keys.popleft()
                    if self._clock() < usable_until:
                        return key
                asked = self._clock()
                with suppress(DatabaseUnavailableError):
                    keys = await self._sequencer.register_objects(
                        self._node_id, _KEYS_AT_ONCE
                    )
                    self._keys.extend((key, asked + _KEY_LIFE_S) for key in keys)

    async def _put(self, key: UUID, content: bytes) -> None:
        while True:
            try:
                await self._store.put_async(object_path(key), content)
                return
            except RemoteStorageError as error:
                # The next try puts the same bytes, so it does no harm if this put
                # arrives late.
                logger.warning("%s; it is tried again", error)
            await asyncio.sleep(_RETRY_PAUSE_S)

    async def _commit(
        self, key: UUID, size: int, batches: Sequence[ObjectBatch]
    ) -> ObjectCommit:
        while True:
            # If there is no answer, commit again: the key makes it a single commit.
            with suppress(DatabaseUnavailableError):
                return await self._sequencer.commit_object(key, size, batches)


def _lay_out(
    writes: Sequence[_Write],
) -> tuple[bytes, list[ObjectBatch], list[tuple[_Write, int]]]:
    """Put the batches of some requests together to the content of one object.

    Returns:
        The object's bytes; its batches, sorted; and for each batch the request that it
        comes from, and its index in that request.
    """
    parsed = [
        (batch, parse_batch_header(batch.data), (write, index))
        for write in writes
        for index, batch in enumerate(write.batches)
    ]
    # Sorted as commit_object_v1 orders them: so the batches of a partition are one
    # extent. The sort keeps the order of one producer's batches.
    parsed.sort(key=lambda row: (row[0].topic_id, row[0].partition, row[1].producer_id))
    batches = []
    position = 0
    for batch, header, _ in parsed:
        by_broker = header.attributes & TIMESTAMP_TYPE_FLAG
        batches.append(
            ObjectBatch(
                batch.topic_id,
                batch.partition,
                header.last_offset_delta + 1,
                position,
                len(batch.data),
                LOG_APPEND_TIME if by_broker else header.max_timestamp,
                header.producer_id,
                header.producer_epoch,
                header.base_sequence,
            )
        )
        position += len(batch.data)
    # A copy, because a request may be answered, and its memory used again, while the
    # store is still reading the bytes.
    content = b"".join(batch.data for batch, _, _ in parsed)
    return content, batches, [owner for _, _, owner in parsed]


def _tell(key: UUID, owners: Sequence[tuple[_Write, int]]) -> None:
    """Tell each request, before the commit, which object has its batches.

    Its function ``committing`` is called with the object's key, and the index in the
    object of each of its batches.
    """
    places: dict[_Write, list[int]] = {}
    for place, (write, index) in enumerate(owners):
        if write.committing is not None:
            of_write = places.setdefault(write, [-1] * len(write.batches))
            of_write[index] = place
    for write, of_write in places.items():
        assert write.committing is not None
        write.committing(key, of_write)


def _written(done: ObjectCommit, place: int, *, by_broker: bool) -> WrittenBatch:
    """Return the result (offset or error) of one batch of a committed object.

    Args:
        place: the index of the batch in the object.
        by_broker: whether the time of the commit is the timestamp of its records.
    """
    code = done.errors[place]
    time_ms = done.committed_ms if by_broker and not code else -1
    return WrittenBatch(done.base_offsets[place], code, time_ms)


def _has_commit_time(batch: SharedBatch) -> bool:
    return bool(parse_batch_header(batch.data).attributes & TIMESTAMP_TYPE_FLAG)


def _fail(write: _Write, error: ApiError) -> None:
    if not write.done.done():
        write.done.set_exception(error)
