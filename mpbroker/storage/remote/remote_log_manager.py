"""RemoteLogManager: the process that talks to the remote store.

    copier thread      goes over the partitions of the housekeeper's plan
    copier pool        copies and removes the segments of several partitions at a time
    metadata thread    copies the metadata log and the coordinators' topics
    reader threads     bring chunks into the cache
    main thread        takes handlers' requests for chunks; tells them when a chunk came

The process takes no lock of a partition, and changes no row of shared memory. If it is
killed, the process started after it begins with an empty cache, and handlers ask again.

Source: KIP-405; Kafka's RemoteLogManager.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import inf
from queue import SimpleQueue
from typing import Final, NamedTuple

import msgpack

from mpbroker.base.errors import MpbrokerError
from mpbroker.base.logger import get_logger
from mpbroker.base.storage_errors import RemoteStorageError
from mpbroker.storage.files.throttler import Throttler
from mpbroker.storage.remote.chunk_fetcher import ChunkFetcher
from mpbroker.storage.remote.fetch_failures import FetchFailures
from mpbroker.storage.remote.metadata_copy import MetadataCopy
from mpbroker.storage.remote.object_store import ObjectStore
from mpbroker.storage.remote.remote_cache import (
    CACHE_DIRECTORY,
    INDEXES_ONLY,
    SOCKET_FILE,
)
from mpbroker.storage.remote.remote_manifest import CHUNK_BYTES, RemoteSegment
from mpbroker.storage.remote.remote_partition import RemotePartition
from mpbroker.storage.remote.remote_plan import (
    KnownPartition,
    PartitionPlan,
    RemotePlan,
    plan_path,
    read_known,
    read_plan,
    write_known,
)
from mpbroker.storage.remote.remote_stats import SharedStats
from mpbroker.storage.remote.retry_backoff import (
    DEFAULT_BACKOFF,
    BackoffLimits,
    RetryBackoff,
)
from mpbroker.storage.remote.store_owner import StoreOwner, require_owner

logger = get_logger(__name__)

_MAX_REQUEST_BYTES: Final = 65_536
_TURN_MS: Final = 1000
# A connection opens the file of an answer within this many turns.
_TURNS_BETWEEN_REMOVALS: Final = 10


class Copier:
    """Copies and removes segments as the housekeeper's plan says.

    A pass goes once over all partitions of the plan. A partition that has much to copy
    copies a part, so that the others need not wait, and another pass follows at once,
    with the plan as it is then. A failure of the store itself ends the pass, and
    another one is begun later. After a failure of one partition the others go on, and
    this partition is tried again later.

    Args:
        store: the store, which this broker owns.
        home: the first log directory.
        stats: the numbers of this process.
        fence: raises NotOwnerError if the store belongs to another broker by now.
        copy_rate: the largest number of bytes to copy in a second.
        backoff: the limits of the time between two attempts.
        threads: the number of partitions whose segments are copied at the same time.
            Of segments that go up in parts only one is copied at a time.
    """

    def __init__(
        self,
        store: ObjectStore,
        home: str,
        stats: SharedStats,
        fence: Callable[[], None] = lambda: None,
        copy_rate: float = inf,
        backoff: BackoffLimits = DEFAULT_BACKOFF,
        threads: int = 1,
    ) -> None:
        self._throttle = _shared_rate(copy_rate)
        # Guards what is known of the store as a whole: self._away.
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(threads, "remote-log-copier")
        self._each: Callable[..., Iterable[bool]] = (
            self._pool.map if threads > 1 else map
        )
        self._store = store
        self._fence = fence
        self._home = home
        self._stats = stats
        # Read by the first pass: if it is damaged, the process serves readers all the
        # same.
        self._known: set[KnownPartition] | None = None
        self._partitions: dict[KnownPartition, RemotePartition] = {}
        self._version: tuple[int, int] | None = None
        self._has_more = False  # a partition has had its turn, and is not done
        self._backoff = backoff
        self._away = RetryBackoff(backoff)  # the store as a whole
        self._failing: dict[KnownPartition, RetryBackoff] = {}

    def look(self) -> bool:
        """Go over all partitions if the plan has changed, or a failure is due again.

        Returns:
            Whether that was done.
        """
        try:
            found = os.stat(plan_path(self._home))
        except FileNotFoundError:
            return False
        version = (found.st_ino, found.st_mtime_ns)
        if version == self._version and not self._has_more and not self._is_due():
            return False
        plan = read_plan(self._home)
        if plan is not None:
            self.run(plan)
        self._version = version
        return True

    def _is_due(self) -> bool:
        if self._away.is_failing:
            return self._away.is_due()
        return any(each.is_due() for each in self._failing.values())

    def run(self, plan: RemotePlan) -> None:
        """Copy and remove segments as the plan of the housekeeper says.

        A failure is logged, and ends the work on that partition only.
        """
        left: Iterable[PartitionPlan] = plan.partitions
        if self._away.is_due() and self._may_write():
            known = self._note({_known(each) for each in plan.partitions})
            had_turn = self._each(self._take_turn, plan.partitions)
            left = [
                each
                for each, done in zip(plan.partitions, had_turn, strict=True)
                if not done
            ]
            self._forget(plan, known)
            if not (self._away.is_failing or self._failing):
                self._stats.set(copy_success_time_seconds=int(time.time()))
        for each in left:
            self._measure(each)
        lags = [self._partition(_known(each)).lag for each in plan.partitions]
        self._has_more = not self._away.is_failing and any(
            lag and _known(each) not in self._failing
            for each, lag in zip(plan.partitions, lags, strict=True)
        )
        stored = [partition.stored for partition in self._partitions.values()]
        self._stats.set(
            lag_segments=sum(map(len, lags)),
            lag_bytes=sum(map(sum, lags)),
            stored_segments=sum(segments for segments, _ in stored),
            stored_bytes=sum(size for _, size in stored),
        )

    def _take_turn(self, plan: PartitionPlan) -> bool:
        """Copy and remove a partition's segments; False: the store has failed before.

        Several threads call this, each for another partition.
        """
        if self._away.is_failing:
            return False
        self._try(_known(plan), plan)
        return True

    def _still_works(self) -> bool:
        """Whether a failure is not the store's own, as far as is known or can be asked.

        One thread asks for all.
        """
        with self._lock:
            return not self._away.is_failing and self._may_write()

    def _may_write(self) -> bool:
        """Whether the store answers, and still belongs to this broker.

        If it begins or ceases to answer, that is logged.
        """
        try:
            self._fence()
        except RemoteStorageError as error:  # a restore may have given it to another
            self._stats.add(copy_errors=1)
            if not self._away.is_failing:  # once, however long it lasts
                logger.error("nothing is copied: %s", error)
            self._away.failed()
            return False
        if self._away.is_failing:
            logger.info("the remote store works again")
            self._away.worked()
        return True

    def _count(self, size: int) -> None:
        self._stats.add(copied_segments=1, copied_bytes=size)
        self._stats.set(copy_success_time_seconds=int(time.time()))

    def _note(self, found: set[KnownPartition]) -> set[KnownPartition]:
        """Add partitions to the list of those with objects; return the whole list.

        Raises:
            ManifestError: the list is damaged.
            OSError: it cannot be read or written.
        """
        if self._known is None:
            self._known = read_known(self._home)
        if not found <= self._known:
            write_known(self._home, self._known | found)
            self._known |= found
        return self._known

    def _forget(self, plan: RemotePlan, known: set[KnownPartition]) -> None:
        """Remove the objects of deleted topics from the remote store.

        Args:
            plan: names the topics that exist.
            known: the partitions that may have objects; those without are taken out.
        """
        before = len(known)
        for each in sorted(known):
            if each.topic_id in plan.topic_ids:
                continue
            if self._away.is_failing:
                break
            if self._try(each, None):
                known.discard(each)
                self._partitions.pop(each, None)
        if len(known) != before:
            write_known(self._home, known)

    def _measure(self, plan: PartitionPlan) -> None:
        """Count, for metrics, what of a partition must be copied to the store."""
        try:
            self._partition(_known(plan)).measure(plan)
        except (MpbrokerError, OSError) as error:
            logger.debug("%s: %s", plan.directory, error)  # told when it is tried

    def _partition(self, known: KnownPartition) -> RemotePartition:
        partition = self._partitions.get(known)
        if partition is None:
            partition = RemotePartition(
                self._store,
                *known,
                fence=self._fence,
                throttle=self._throttle,
            )
            self._partitions[known] = partition
        return partition

    def _try(self, known: KnownPartition, plan: PartitionPlan | None) -> bool:
        """Copy and remove one partition's segments; return whether that is done.

        Args:
            known: the partition.
            plan: the housekeeper's plan for it; None: remove all of its objects.
        """
        failing = self._failing.get(known)
        if failing is not None and not failing.is_due():
            if plan is not None:
                self._measure(plan)
            return False
        partition = self._partition(known)
        is_done = True
        try:
            if plan is None:
                is_done = partition.remove()
            else:
                partition.run(plan, self._count)
        except (MpbrokerError, OSError) as error:
            if plan is not None:
                self._measure(plan)
            if isinstance(error, RemoteStorageError) and not self._still_works():
                return False  # not a fault of this partition
            self._stats.add(copy_errors=1)
            if failing is None:  # once, however long it lasts
                failing = self._failing[known] = RetryBackoff(self._backoff)
                logger.error("%s-%d: %s", known.topic, known.partition, error)
            failing.failed()
            return False
        if failing is not None:
            del self._failing[known]
            logger.info("%s-%d: the store works again", known.topic, known.partition)
        return is_done


class MetadataCopier:
    """Copies the metadata log and topics such as __consumer_offsets to the store.

    It does so at an interval.

    Args:
        copy: makes the copies.
        home: the first log directory.
        interval_s: the shortest time between two copies, in seconds.
        stats: the numbers of this process.
        backoff: the limits of the time between two attempts.
    """

    def __init__(
        self,
        copy: MetadataCopy,
        home: str,
        interval_s: float,
        stats: SharedStats,
        backoff: BackoffLimits = DEFAULT_BACKOFF,
    ) -> None:
        self._copy = copy
        self._home = home
        self._interval_s = interval_s
        self._stats = stats
        self._due = 0.0
        self._retry = RetryBackoff(backoff)

    def look(self) -> None:
        """Copy the metadata if that is due; log failures.

        Without a plan of the housekeeper, which says what to copy, nothing is done.
        """
        if not self._retry.is_due() or (
            not self._retry.is_failing and time.monotonic() < self._due
        ):
            return
        try:
            plan = read_plan(self._home)
            if plan is not None:
                self._copy.run(plan)
                self._stats.set(metadata_success_time_seconds=int(time.time()))
        except (MpbrokerError, OSError) as error:
            self._stats.add(copy_errors=1)
            if not self._retry.is_failing:  # once, however long it lasts
                logger.error("the metadata cannot be copied: %s", error)
            self._retry.failed()
        else:
            self._retry.worked()
        self._due = time.monotonic() + self._interval_s


class _Segment:
    """The chunks of one segment that handlers (they execute requests) ask for."""

    def __init__(
        self, prefix: str, segment: RemoteSegment, cache: ChunkFetcher
    ) -> None:
        self.prefix = prefix
        self.segment = segment
        self.cache = cache
        self.chunks: deque[int] = deque()
        self.rows: dict[int, set[int]] = {}  # by chunk, the rows that wait for it


class _Done(NamedTuple):
    segment_id: str
    chunk: int


class RemoteLimits(NamedTuple):
    """The limits of the remote log manager: space, threads and rates.

    Attributes:
        cache_bytes: the largest size of all caches together.
        threads: the number of chunks that are fetched at the same time.
        metadata_interval_s: the shortest time between two copies of the metadata.
        copy_rate: the largest number of bytes to copy in a second.
        fetch_rate: the largest number of bytes to fetch in a second.
        backoff: the limits of the time after which a failed store is asked again.
        copier_threads: the number of partitions that are copied at the same time.
    """

    cache_bytes: int
    threads: int
    metadata_interval_s: float
    copy_rate: float = inf
    fetch_rate: float = inf
    backoff: BackoffLimits = DEFAULT_BACKOFF
    copier_threads: int = 1


class RemoteLogManager:
    """The process that talks to the remote store: its threads and its main loop.

    The loop takes requests of handlers, which serve fetches, for chunks of segments.

    Args:
        store: the store, which this broker owns.
        directories: the log directories; each has a cache.
        notify: called with the index of a partition's row; tells the handlers that wait
            for this partition that a chunk came.
        owner: this broker.
        limits: the limits of space, threads and rates.
        readers: the store's client for the reader threads; None: ``store``.
    """

    def __init__(
        self,
        store: ObjectStore,
        directories: Sequence[str],
        notify: Callable[[int], None],
        owner: StoreOwner,
        limits: RemoteLimits,
        readers: ObjectStore | None = None,
    ) -> None:
        home = directories[0]
        self._notify = notify
        self._stats = SharedStats(home)

        def fence() -> None:
            require_owner(store, owner)

        self._copier = Copier(
            store,
            home,
            self._stats,
            fence,
            limits.copy_rate,
            limits.backoff,
            limits.copier_threads,
        )
        copy = MetadataCopy(store, home, owner.cluster_id, owner.node_id, fence)
        self._metadata = MetadataCopier(
            copy, home, limits.metadata_interval_s, self._stats, limits.backoff
        )
        throttle = _shared_rate(limits.fetch_rate)
        self._pool = ThreadPoolExecutor(limits.threads, "remote-log-reader")
        self._wanted: dict[str, _Segment] = {}
        self._done: SimpleQueue[_Done] = SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._wake, select.POLLIN)
        self._sockets: dict[int, tuple[socket.socket, ChunkFetcher]] = {}
        self._turns = 0  # the turns that have written the statistics, one a second
        self._next_write = 0.0
        self._told = ""  # the error of the last attempt to write the statistics
        failures = FetchFailures(limits.backoff)
        for directory in directories:
            cache = f"{directory}/{CACHE_DIRECTORY}"
            fetcher = ChunkFetcher(
                readers or store,
                cache,
                limits.cache_bytes // len(directories),
                self._stats,
                throttle,
                failures,
            )
            sock = _bound(cache)
            self._sockets[sock.fileno()] = sock, fetcher
            self._poll.register(sock.fileno(), select.POLLIN)

    def run(self) -> None:
        """Start the copiers' threads; serve requests until the process is killed."""
        for name, look in (
            ("remote-log-copier", self._copier.look),
            # Apart: a large segment may take longer than the interval.
            ("remote-metadata-copier", self._metadata.look),
        ):
            threading.Thread(
                target=_repeat, args=(look,), name=name, daemon=True
            ).start()
        while True:
            self.turn(_TURN_MS)

    def close(self) -> None:
        """End the reader threads and close the sockets; only tests call this."""
        self._pool.shutdown(cancel_futures=True)
        for sock, _ in self._sockets.values():
            sock.close()
        os.close(self._wake)

    def turn(self, timeout_ms: int) -> None:
        """Pass handlers' requests for chunks to the reader threads, and tell who waits.

        Args:
            timeout_ms: the longest time to wait for a request or a chunk.
        """
        self._poll.poll(timeout_ms)
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            pass
        for sock, fetcher in self._sockets.values():
            self._take(sock, fetcher)
        while not self._done.empty():
            self._tell(self._done.get())
        caches = sum(fetcher.size for _, fetcher in self._sockets.values())
        self._stats.set(cache_bytes=caches)
        now = time.monotonic()
        if now >= self._next_write:
            self._next_write = now + _TURN_MS / 1000
            self._told = attempt(self._stats.write, self._told)
            self._turns += 1
        else:
            return
        if self._turns % _TURNS_BETWEEN_REMOVALS == 0:
            for _, fetcher in self._sockets.values():
                fetcher.remove_evicted()

    def _take(self, sock: socket.socket, fetcher: ChunkFetcher) -> None:
        while True:
            try:
                message = sock.recv(_MAX_REQUEST_BYTES)
            except BlockingIOError:
                return
            try:
                found = msgpack.unpackb(message)
                if isinstance(found, int):
                    self._stats.add(cache_hits=found)
                    continue
                row, prefix, fields, chunk = found
                segment = RemoteSegment(*fields)
            except (ValueError, TypeError):
                continue
            wanted = self._wanted.get(segment.segment_id)
            is_new = wanted is None
            if wanted is None:
                wanted = _Segment(prefix, segment, fetcher)
                self._wanted[segment.segment_id] = wanted
            self._want(wanted, chunk, row)
            following = chunk + 1
            if chunk != INDEXES_ONLY and following * CHUNK_BYTES < segment.size:
                self._want(wanted, following, -1)  # the reader will be there soon
            if is_new:
                self._pool.submit(self._fetch_next, wanted)

    def _want(self, wanted: _Segment, chunk: int, row: int) -> None:
        waiting = wanted.rows.get(chunk)
        if waiting is None:
            waiting = wanted.rows[chunk] = set()
            wanted.chunks.append(chunk)
        if row >= 0 and row not in waiting:
            waiting.add(row)
            self._stats.add(cache_misses=1)

    def _fetch_next(self, wanted: _Segment) -> None:
        """Fetch the next chunk of a segment that handlers wait for; in a reader thread.

        Only one thread at a time fetches chunks of the same segment.
        """
        chunk = wanted.chunks[0]
        try:
            wanted.cache.fetch(wanted.prefix, wanted.segment, chunk)
        except Exception:
            logger.exception("a chunk could not be fetched")
        self._done.put(_Done(wanted.segment.segment_id, chunk))
        os.eventfd_write(self._wake, 1)

    def _tell(self, done: _Done) -> None:
        wanted = self._wanted[done.segment_id]
        wanted.chunks.popleft()
        for row in wanted.rows.pop(done.chunk):
            self._notify(row)
        if wanted.chunks:
            self._pool.submit(self._fetch_next, wanted)
        else:
            del self._wanted[done.segment_id]


def _shared_rate(rate: float) -> Callable[[int], None]:
    """Return a function that sleeps so that all its callers together keep to a rate.

    Args:
        rate: in bytes a second. The function takes the number of bytes of a transfer.
    """
    throttler = Throttler(rate, _no_beat)
    one_at_a_time = threading.Lock()

    def done(size: int) -> None:
        with one_at_a_time:
            throttler.done(size)

    return done


def _no_beat() -> None:
    """Do nothing between two sleeps of a Throttler."""


def _repeat(look: Callable[[], object]) -> None:
    """Let a copier copy what is due, once a second, for ever; runs in a thread."""
    pause = threading.Event()
    told = ""
    while True:
        told = attempt(look, told)
        pause.wait(_TURN_MS / 1000)


def attempt(act: Callable[[], object], told: str) -> str:
    """Do something that is done again soon; log its error, but the same one only once.

    So a full disk ends nothing: the copies that go on make room.

    Args:
        act: does it.
        told: the result of the attempt before; "" at first.

    Returns:
        The error, as text; "": there was none.
    """
    try:
        act()
    except Exception as error:
        text = repr(error)
        if text != told:
            is_bug = not isinstance(error, (MpbrokerError, OSError))
            logger.error(
                "a pass of the remote log manager failed: %s", error, exc_info=is_bug
            )
        return text
    return ""


def _known(plan: PartitionPlan) -> KnownPartition:
    return KnownPartition(plan.topic, plan.topic_id, plan.partition)


def _bound(cache: str) -> socket.socket:
    """Open the Unix socket through which handlers ask for chunks of remote segments."""
    parent = os.open(cache, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        # By the descriptor: a socket's path has 107 bytes at most.
        sock.bind(f"/proc/self/fd/{parent}/{SOCKET_FILE}")
        return sock
    finally:
        os.close(parent)
