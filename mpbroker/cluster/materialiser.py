"""Materialiser: copy committed records of shared partitions into local logs.

A local log is a cache: it has the same batches at the same offsets, begins wherever it
was begun, and may be thrown away. All that reads logs reads it as any other. Each round
asks the database once for the extents behind the ends of all logs, and for starts that
were raised; it reads the extents' bytes from the store, and appends them. So it goes on
behind the end of a log, wherever a process before it was killed.

Bytes from the store are checked before they are appended: they must be whole batches
with right checksums, and with as many offsets as the database has counted. If the bytes
of a partition are wrong or missing, its log does not grow until a later try succeeds;
the other partitions go on.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Final, NamedTuple, Protocol
from uuid import UUID

from mpbroker.base.logger import get_logger
from mpbroker.base.storage_errors import RemoteStorageError
from mpbroker.cluster.errors import ClusterError
from mpbroker.cluster.object_writer import object_path
from mpbroker.cluster.sequencer import (
    Extent,
    PartitionEnds,
    PartitionNews,
    Sequencer,
)
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.records.batch_header import (
    ATTRIBUTES_POSITION,
    BATCH_HEADER_SIZE,
    TIMESTAMP_TYPE_FLAG,
    BatchHeader,
    RecordBatchError,
    iter_batches,
    pack_header,
)
from mpbroker.protocol.records.crc32c import crc32c
from mpbroker.protocol.records.log_validator import ValidatedBatch
from mpbroker.storage.log.partition_log import PartitionLog

logger = get_logger(__name__)
_EXTENTS_AT_ONCE: Final = 64
_GETS_AT_ONCE: Final = 8
_ERROR_PAUSE_S: Final = 1.0
_LOG_STARTS_EVERY_S: Final = 1.0
# The partitions of one question: the process serves commits between two of them.
_PLACES_AT_ONCE: Final = 1000
# So many times as long as a look at all partitions has taken, none follows: with
# 10,000 partitions a look takes 0.2 s of the database, which all nodes ask.
_REST: Final = 4.0


class SharedPartition(NamedTuple):
    """Names a partition of a shared topic (its records are in the object store)."""

    topic_id: UUID
    partition: int


class Store(Protocol):
    """The store from which objects are read, such as ``ObjectStore``."""

    def get_ranges_async(
        self, key: str, ranges: Sequence[tuple[int, int]]
    ) -> Awaitable[list[memoryview]]: ...


class WrongBytesError(Exception):
    """The store has returned other bytes than were committed."""


class LogAheadError(Exception):
    """The local copy of a shared partition has records that the database has not."""


class MaterialiserSettings(NamedTuple):
    """The interval and the limits of copying records into local logs.

    Attributes:
        poll_s: the pause in seconds after a look at all partitions that has found
            nothing, if the look was short.
        partition_bytes: the most bytes of a partition in a round; a single extent (run
            of batches in an object) may be larger.
        round_bytes: the most bytes of a round, which is about up to 1000 partitions;
            its first extent may be larger.
    """

    poll_s: float = 0.05
    partition_bytes: int = 1 << 20
    round_bytes: int = 16 << 20


class Materialiser:
    """Keeps a node's local logs of shared partitions up to date.

    Args:
        sequencer: looks up in the database which extents (runs of batches in objects)
            a partition has.
        store: has the bytes of extents.
        logs: returns the logs to keep; called in each round.
        appended: called with each log that has grown.
        settings: its interval and limits.
        caught_up: called with the time before a look (CLOCK_MONOTONIC, ns) when all
            that the look has found for all logs is copied.

    Attributes:
        extents: how many were copied.
        lag_records: those that the logs lacked, by the last count, a second ago.
        partitions: the number of logs that are kept.
    """

    def __init__(
        self,
        sequencer: Sequencer,
        store: Store,
        logs: Callable[[], Mapping[SharedPartition, PartitionLog]],
        appended: Callable[[PartitionLog], None] = lambda _: None,
        settings: MaterialiserSettings = MaterialiserSettings(),  # noqa: B008 - constant
        caught_up: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._caught_up = caught_up
        self._sequencer = sequencer
        self._store = store
        self._logs = logs
        self._appended = appended
        self._settings = settings
        self._wanted = asyncio.Event()
        # Where records are waited for: their turn comes before that of all others.
        self._urgent: set[SharedPartition] = set()
        self._is_urgent_only = True  # no call of `wake` was about all partitions
        self._seen_in: Mapping[SharedPartition, PartitionLog] = {}
        self._seen: set[SharedPartition] = set()
        # The partitions whose logs are online and agree with this database.
        self._known: set[SharedPartition] = set()
        self._log_starts_at = 0.0
        # The last offset that was copied of a partition, and its object.
        self._copied: dict[SharedPartition, tuple[int, UUID]] = {}
        self._lost: set[SharedPartition] = set()  # that differ from this database
        self._sessions = 0  # by which the copies were compared with the database
        self._first = 0  # whose turn it is to be served first
        self._blocked: dict[SharedPartition, float] = {}  # until when
        self.extents = 0
        self.lag_records = 0

    @property
    def partitions(self) -> int:
        return len(self._known)

    def wake(self, places: Iterable[SharedPartition] = ()) -> None:
        """Have new records copied now, because some may have been committed.

        This only saves time: the next look at all partitions comes without it, too.

        Args:
            places: where they may be; none: anywhere.
        """
        named = set(places)
        self._urgent |= named
        if not named:
            self._is_urgent_only = False
        self._wanted.set()

    async def run(self) -> None:
        """Copy new records into the local logs, round after round, until cancelled."""
        look_at = 0.0  # when all partitions are looked at again
        while True:
            try:
                self._wanted.clear()
                is_partial = self._is_urgent_only and time.monotonic() < look_at
                self._is_urgent_only = True
                if is_partial:
                    await self.catch_up(only_urgent=True)
                else:
                    began = time.monotonic()
                    done = await self.catch_up()
                    now = time.monotonic()
                    pause_s = max(self._settings.poll_s, _REST * (now - began))
                    look_at = now if done else now + pause_s
            except ClusterError as error:
                # Readers get the records that are in the local logs already.
                logger.warning("new records cannot be looked for: %s", error)
                look_at = time.monotonic() + _ERROR_PAUSE_S
                await asyncio.sleep(_ERROR_PAUSE_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, look_at - time.monotonic())):
                    await self._wanted.wait()

    async def catch_up(self, *, only_urgent: bool = False) -> int:
        """Copy what the local logs lack, up to the limits of a round.

        Return the number of extents (runs of batches in objects) that were appended.

        Args:
            only_urgent: look only where records are waited for.

        Raises:
            ClusterError: the database does not answer.
        """
        began_ns = time.monotonic_ns()
        now = time.monotonic()
        logs = self._logs()
        await self._compare_copies()
        await self._follow_log_starts(logs, now)
        if only_urgent:
            return (await self._round(logs, self._take_urgent(logs)))[0]
        places = [place for place in logs if self._is_usable(place, now)]
        if not places:
            return 0
        is_whole = len(places) == len(logs)
        self._first = (self._first + 1) % len(places)
        places = places[self._first :] + places[: self._first]
        done = 0
        for start in range(0, len(places), _PLACES_AT_ONCE):
            part = dict.fromkeys(self._take_urgent(logs))
            part.update(dict.fromkeys(places[start : start + _PLACES_AT_ONCE]))
            copied, has_all = await self._round(logs, list(part))
            done += copied
            is_whole = is_whole and has_all
        if is_whole:
            self._caught_up(began_ns)
        return done

    def _is_usable(self, place: SharedPartition, now: float) -> bool:
        return (
            place in self._known
            and place not in self._lost
            and self._blocked.get(place, now) <= now
        )

    def _take_urgent(
        self, logs: Mapping[SharedPartition, PartitionLog]
    ) -> list[SharedPartition]:
        now = time.monotonic()
        urgent, self._urgent = self._urgent, set()
        return [
            place for place in urgent if place in logs and self._is_usable(place, now)
        ]

    async def _round(
        self,
        logs: Mapping[SharedPartition, PartitionLog],
        places: Sequence[SharedPartition],
    ) -> tuple[int, bool]:
        """Copy what the logs of some partitions lack, up to the limits of a round.

        Returns:
            The number of extents that were appended; whether nothing is lacking now of
            what there was before.
        """
        if not places:
            return 0, True
        while True:
            news = await self._sequencer.look(
                [
                    (*place, row.log_end_offset, row.log_start_offset)
                    for place in places
                    for row in (logs[place].row,)
                ],
                max_extents=_EXTENTS_AT_ONCE,
                max_bytes=self._settings.partition_bytes,
            )
            if self._sequencer.sessions == self._sessions:
                break
            # By another server, perhaps: first compare, and then copy.
            await self._compare_copies()
            places = [place for place in places if place not in self._lost]
        found = dict(zip(places, news, strict=True))
        self._raise_log_starts(logs, found)
        chosen = self._choose({place: each.extents for place, each in found.items()})
        contents = await self._read(chosen)
        done = 0
        for place, extents in chosen.items():
            try:
                for extent in extents:
                    content = contents[extent.object_key, extent.position]
                    if isinstance(content, RemoteStorageError):
                        raise content
                    _append(logs[place], extent, content)
                    self._copied[place] = extent.last_offset, extent.object_key
                    done += 1
            except (RemoteStorageError, WrongBytesError, ApiError) as error:
                self._block(place, error)
            self._appended(logs[place])
        self.extents += done
        has_all = done == sum(len(each.extents) for each in news)
        return done, has_all and not any(map(self._is_cut_short, news))

    def _is_cut_short(self, news: PartitionNews) -> bool:
        """Return whether a partition may have more extents than were asked for."""
        return (
            len(news.extents) >= _EXTENTS_AT_ONCE
            or sum(each.size for each in news.extents) >= self._settings.partition_bytes
        )

    def _raise_log_starts(
        self,
        logs: Mapping[SharedPartition, PartitionLog],
        news: Mapping[SharedPartition, PartitionNews],
    ) -> None:
        """Raise the starts of logs; of one that lacks records, as far as it goes."""
        for place, each in news.items():
            log = logs[place]
            if each.log_start is None or not _can_raise(log):
                continue
            try:
                log.raise_log_start(each.log_start)
            except ApiError as error:
                self._block(place, error)
            else:
                self._appended(log)

    def _block(self, place: SharedPartition, error: Exception) -> None:
        """Log why a partition's records cannot be copied; try again in a second."""
        logger.error(
            "partition %d of the shared topic %s does not go on: %s",
            *(place.partition, place.topic_id, error),
        )
        self._blocked[place] = time.monotonic() + _ERROR_PAUSE_S

    async def _compare_copies(self) -> None:
        """See whether another server has other records where this one has copied some.

        A standby without synchronous replication that becomes the server may lack the
        last commits, and gives their offsets again. A log that has such records is left
        as it is.
        """
        sessions = self._sequencer.sessions
        if sessions == self._sessions:
            return
        copied = list(self._copied.items())
        for start in range(0, len(copied), _PLACES_AT_ONCE):
            part = copied[start : start + _PLACES_AT_ONCE]
            found = await self._sequencer.find_extents(
                [(*place, offset) for place, (offset, _) in part],
                max_extents=1,
                max_bytes=1,
            )
            for (place, (offset, key)), extents in zip(part, found, strict=True):
                if (
                    extents
                    and extents[0].base_offset <= offset
                    and extents[0].object_key != key
                    and place not in self._lost
                ):
                    self._lost.add(place)
                    logger.error(
                        "partition %d of the shared topic %s does not go on: the"
                        " cluster's database has lost commits, and has given offset %d"
                        " again; stop the broker and remove the partition's directory",
                        *(place.partition, place.topic_id, offset),
                    )
        self._sessions = sessions

    async def _follow_log_starts(
        self, logs: Mapping[SharedPartition, PartitionLog], now: float
    ) -> None:
        """Check new logs, and raise log start offsets to those in the database.

        Do this once a second, and whenever the set of logs has changed.
        """
        # The same mapping has the same keys: the comparison of many takes long.
        is_same = logs is self._seen_in and len(logs) == len(self._seen)
        if now < self._log_starts_at and (is_same or self._seen == logs.keys()):
            self._seen_in = logs
            return
        self._log_starts_at = 0.0  # at once again, if the database gives no answer
        self._seen_in, self._seen = logs, set(logs)
        self._known.clear()
        if len(self._copied) > len(logs):  # topics were deleted
            self._copied = {
                place: last for place, last in self._copied.items() if place in logs
            }
        self._blocked = {
            place: until for place, until in self._blocked.items() if until > now
        }
        places = list(logs)
        ends: list[PartitionEnds] = []
        for start in range(0, len(places), _PLACES_AT_ONCE):
            part = places[start : start + _PLACES_AT_ONCE]
            ends += await self._sequencer.ends(part)
        took_s = time.monotonic() - now
        self._log_starts_at = now + max(_LOG_STARTS_EVERY_S, _REST * took_s)
        self.lag_records = sum(
            max(0, end.high_watermark - log.row.log_end_offset)
            for log, end in zip(logs.values(), ends, strict=True)
        )
        for (place, log), (log_start, high_watermark, _) in zip(
            logs.items(), ends, strict=True
        ):
            if log_start < 0:
                continue  # the topic is being deleted
            try:
                log.view.require_online()
                if log.row.log_end_offset > high_watermark:
                    raise LogAheadError(
                        f"{log.directory} ends at {log.row.log_end_offset}, the"
                        f" cluster's database at {high_watermark}: the log is another"
                        " database's, or this one has lost commits; stop the broker"
                        " and remove the directory"
                    )
                if log_start > log.row.log_start_offset and _can_raise(log):
                    log.raise_log_start(log_start)
                    self._appended(log)
            except (ApiError, LogAheadError) as error:
                self._block(place, error)
            else:
                self._known.add(place)

    def _choose(
        self, found: Mapping[SharedPartition, Sequence[Extent]]
    ) -> dict[SharedPartition, list[Extent]]:
        """Choose the extents (runs of batches in objects) to copy in a round.

        Take the first of each partition, then the second ones, and so on. Stop when
        they exceed the bytes of a round.
        """
        left = self._settings.round_bytes
        chosen: dict[SharedPartition, list[Extent]] = defaultdict(list)
        for number in range(_EXTENTS_AT_ONCE):
            for place, extents in found.items():
                if number < len(extents):
                    left -= extents[number].size
                    if left < 0 and chosen:
                        return chosen
                    chosen[place].append(extents[number])
        return chosen

    async def _read(
        self, chosen: Mapping[SharedPartition, Sequence[Extent]]
    ) -> dict[tuple[UUID, int], memoryview | RemoteStorageError]:
        """Read extents (runs of batches) from the store, several objects at a time.

        Returns:
            The bytes of each extent, or the error, by object key and position.
        """
        objects: dict[UUID, list[tuple[int, int]]] = defaultdict(list)
        for extents in chosen.values():
            for extent in extents:
                objects[extent.object_key].append((extent.position, extent.size))
        turns = asyncio.Semaphore(_GETS_AT_ONCE)
        contents: dict[tuple[UUID, int], memoryview | RemoteStorageError] = {}

        async def read(key: UUID, ranges: Sequence[tuple[int, int]]) -> None:
            async with turns:
                try:
                    parts: Sequence[memoryview | RemoteStorageError]
                    parts = await self._store.get_ranges_async(object_path(key), ranges)
                except RemoteStorageError as error:
                    parts = [error] * len(ranges)
            for (position, _), part in zip(ranges, parts, strict=True):
                contents[key, position] = part

        async with asyncio.TaskGroup() as group:
            for key, ranges in objects.items():
                group.create_task(read(key, sorted(ranges)))
        return contents


def _can_raise(log: PartitionLog) -> bool:
    return log.row.log_start_offset < log.row.log_end_offset


def _append(log: PartitionLog, extent: Extent, content: memoryview) -> None:
    """Append the batches of an extent (run of batches in an object) to a local log.

    Batches that the log already has are skipped.

    Raises:
        WrongBytesError: the bytes are not those of the extent; nothing was appended.
        ApiError: as ``PartitionLog.append_at``.
    """
    now_ms = time.time_ns() // 1_000_000
    for base_offset, batch in list(_batches(extent, content)):
        log.append_at(batch, base_offset, now_ms=now_ms)


def _batches(
    extent: Extent, content: memoryview
) -> Iterator[tuple[int, ValidatedBatch]]:
    """Yield the base offset and the batch for each batch of an extent.

    An extent is a run of batches of one partition in an object.

    Args:
        content: the extent's bytes, as the store has returned them.

    Raises:
        WrongBytesError: these are not the bytes that were committed.
    """
    where = f"object {extent.object_key}, {extent.size} bytes from {extent.position}"
    base_offset, seen = extent.base_offset, 0
    try:
        for header, data in iter_batches(content):
            if crc32c(data[ATTRIBUTES_POSITION:]) != header.crc:
                raise WrongBytesError(f"{where}: a batch has a wrong checksum")
            yield base_offset, _batch(header, data, extent.committed_ms)
            base_offset += header.last_offset_delta + 1
            seen += len(data)
    except RecordBatchError as error:
        raise WrongBytesError(f"{where}: {error}") from error
    if seen != extent.size or base_offset != extent.last_offset + 1:
        raise WrongBytesError(
            f"{where}: whole batches are {seen} bytes of it, with offsets up to"
            f" {base_offset - 1}, not {extent.last_offset}"
        )


def _batch(header: BatchHeader, data: memoryview, committed_ms: int) -> ValidatedBatch:
    """Return a batch from the store, ready to be appended to a local log.

    Its bytes are copied.

    If the topic's timestamps are the broker's (LogAppendTime), set the time of the
    commit.
    """
    if header.attributes & TIMESTAMP_TYPE_FLAG:
        # The writer of the object did not know the time of the commit yet.
        header = header._replace(max_timestamp=committed_ms)
        records = data[BATCH_HEADER_SIZE:]
        own = pack_header(header, records) + records
    else:
        own = bytearray(data)
    delta = header.last_offset_delta
    return ValidatedBatch(
        header,
        delta,
        header.max_timestamp,
        header.record_count,
        delta,
        memoryview(own),
        -1,
    )
