"""GroupStore: a thread that keeps a node's shards of groups, and writes their records.

The coordinator's loop never waits for the database. It gives records to this thread,
and takes events when the eventfd has told of them:

    loop                                    thread
    put(), stop(), drop(), end()  ───────▶  takes, loads, writes, releases
    take_events()                 ◀───────  events, eventfd

What is given while a write is on its way, is the next write: one transaction for all
shards. A shard goes through

    Taken      the node has it, and no other node may have it any more
    Loaded     all its records; from now on it can be served
    Spare      the node has more than its share: stop serving it, then call stop()
    Lost       another node may have it

A shard's epoch is raised whenever this thread begins with it. So nothing is written any
more that a process before this one has sent, or that was sent before it was dropped.

`Held` says until when the shards may be served without another word from the database.
That is before the node's lease ends, by this machine's clock.

The thread also carries what nodes tell each other about offsets in transactions: see
`transaction_exchange`.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

from mpbroker.base.logger import get_logger
from mpbroker.cluster.database import ClusterDatabase
from mpbroker.cluster.errors import ClusterError, DatabaseUnavailableError
from mpbroker.cluster.groups.group_shards import (
    GroupShards,
    HeldShard,
    OwnedShard,
    adopt_records,
)
from mpbroker.cluster.groups.transaction_exchange import (
    ExchangeEvent,
    OffsetsEnd,
    Question,
    TransactionExchange,
)
from mpbroker.cluster.membership import boot_time
from mpbroker.metadata.cluster_nodes import NodeEpoch, read_node_epoch

_LOG = get_logger(__name__)
# A node that dies is noticed by the end of its lease, and this much later.
_HOLD_EVERY_S: Final = 0.5
_UNKNOWN_EVERY_S: Final = 0.05  # until this node has joined the cluster
_HOLD_TIMEOUT_S: Final = 2.0
# An answer that is under way when a lease ends is at most so old.
_MARGIN_S: Final = 1.0
_CALL_TIMEOUT_S: Final = 10.0
_WRITE_TIMEOUT_S: Final = 4.0  # then it is tried again, while the shard is kept
_END_TIMEOUT_S: Final = 2.0
# One writes, one takes, one releases, one exchanges, and these load.
_LOADS: Final = 2
_CONNECTIONS: Final = 4 + _LOADS
# A write has no more than this, but for one shard's records.
_WRITE_BYTES: Final = 8 * 1024 * 1024


class ShardTerm(NamedTuple):
    """A shard, from when this thread begins with it until it is lost or released.

    Attributes:
        serial: another one for each term.
    """

    number: int
    serial: int


class Taken(NamedTuple):
    """The node has a shard, whose records are being read."""

    term: ShardTerm


class Loaded(NamedTuple):
    """A shard's records were read; they are sorted by key."""

    term: ShardTerm
    records: Sequence[tuple[bytes, bytes]]


class Spare(NamedTuple):
    """The node has more shards than its share: this one is to be stopped."""

    term: ShardTerm


class Lost(NamedTuple):
    """A shard is lost, and what was not written."""

    term: ShardTerm


class Written(NamedTuple):
    """So many puts of a shard, counted from its first one, are in the database."""

    term: ShardTerm
    puts: int


class Held(NamedTuple):
    """The database has told what the node has.

    Attributes:
        until_s: the shards may be served until then, in seconds of `boot_time`.
        shards: the numbers of those that are taken, or are to be taken.
    """

    until_s: float
    shards: frozenset[int]


Records = Sequence[tuple[bytes, bytes | None]]
Event = Taken | Loaded | Spare | Lost | Written | Held | ExchangeEvent


class _Shard:
    """What the thread knows of a shard that it keeps.

    Attributes:
        waiting: the newest value of each key that is to be written.
        puts: how many were given, with those that are written.
        ends: puts that write a transaction's end, with the end's serial.
        is_stopping: the loop has stopped serving it, and gives no more.
    """

    __slots__ = (
        "ends",
        "is_spare",
        "is_stopping",
        "owned",
        "puts",
        "size",
        "term",
        "waiting",
    )

    def __init__(self, term: ShardTerm, epoch: int) -> None:
        self.term = term
        self.owned = OwnedShard(term.number, epoch)
        self.waiting: dict[bytes, bytes | None] = {}
        self.size = 0
        self.puts = 0
        self.ends: dict[int, int] = {}  # by the serial
        self.is_spare = False
        self.is_stopping = False


class _Write(NamedTuple):
    """What one transaction writes of a shard, up to one of its puts."""

    shard: _Shard
    records: dict[bytes, bytes | None]
    puts: int


class _Adoption(NamedTuple):
    """The records of a broker that has become a node, and the mark for their end.

    Attributes:
        records: None: they could not be read yet.
    """

    records: Sequence[tuple[int, bytes, bytes]] | None
    mark_path: str


class GroupStore:
    """Keeps the shards of this node. Its methods are for the coordinator's loop.

    Args:
        url: of the cluster's database.
        epoch_path: the file with the node's epoch.

    Attributes:
        event_fd: becomes readable with each event; poll it edge-triggered.
    """

    def __init__(self, url: str, epoch_path: str) -> None:
        self._url = url
        self._epoch_path = epoch_path
        self.event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._events: deque[Event] = deque()
        self._has_failed = False
        self._loop = asyncio.new_event_loop()
        self._keeper = _Keeper(epoch_path, self._tell)
        self._thread = threading.Thread(
            target=self._run, name="group-store", daemon=True
        )

    def adopt(
        self, records: Sequence[tuple[int, bytes, bytes]] | None, mark_path: str
    ) -> None:
        """Have records copied into the database before any shard is loaded.

        The node holds its shards meanwhile, so that no other node loads them.

        Call it before `start`.

        Args:
            records: each with its shard, as `adopt_records`. None: they cannot be read
                now. No shard is loaded until another call, at any time, gives them.
            mark_path: the file to make when this is done.
        """
        self._keeper.adoption = _Adoption(records, mark_path)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def put(
        self,
        term: ShardTerm,
        records: Sequence[tuple[bytes, bytes | None]],
        end: int | None = None,
    ) -> None:
        """Write records of a shard, after those given before; `Written` tells of it.

        Args:
            records: one at least.
            end: the serial of the transaction's end that they carry out.
        """
        self._call(self._keeper.put, term, records, end)

    def stop(self, term: ShardTerm) -> None:
        """Release a shard, which is not served any more, when all is written."""
        self._call(self._keeper.stop, term)

    def drop(self, term: ShardTerm) -> None:
        """Forget a shard, and what is not written; it may be taken again."""
        self._call(self._keeper.drop, term)

    def take_no_more(self) -> None:
        """Take no shards any more: the broker is about to stop."""
        self._call(self._keeper.take_no_more)

    # -- offsets in transactions: see transaction_exchange -------------------------

    def ask(self, question: Question) -> None:
        """Ask the transaction's coordinator, which any node may be."""
        self._call(self._keeper.exchange.ask, question)

    def forget(self, question_id: uuid.UUID) -> None:
        """Wait no longer for the answer to a question."""
        self._call(self._keeper.exchange.forget, question_id)

    def answer(self, question_id: uuid.UUID, code: int) -> None:
        """Answer another node's question."""
        self._call(self._keeper.exchange.answer, question_id, code)

    def end_offsets(self, end: OffsetsEnd) -> None:
        """Tell a shard, of whichever node, how a transaction ends."""
        self._call(self._keeper.exchange.end, end)

    def coordinate(self, is_coordinator: bool) -> None:
        """Tell whether this node coordinates the cluster's transactions."""
        self._call(self._keeper.exchange.coordinate, is_coordinator)

    def end(self) -> None:
        """Write what was given, release all shards, and end the thread."""
        self._call(self._keeper.end)
        self._thread.join(_END_TIMEOUT_S + 1.0)

    def take_events(self) -> list[Event]:
        """Return the events since the last call.

        Raises:
            RuntimeError: the thread has failed, and said why in the log.
        """
        if self._has_failed:
            raise RuntimeError("the thread that keeps groups' records has failed")
        found = []
        while self._events:
            found.append(self._events.popleft())
        return found

    def _call(self, work: Callable[..., object], *arguments: object) -> None:
        with suppress(RuntimeError):  # the thread has ended: see take_events()
            self._loop.call_soon_threadsafe(work, *arguments)

    def _tell(self, event: Event) -> None:
        self._events.append(event)
        os.eventfd_write(self.event_fd, 1)

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._serve())
        except BaseException:  # noqa: BLE001 - every failure is logged
            _LOG.exception("the records of groups cannot be written")
            self._has_failed = True
            os.eventfd_write(self.event_fd, 1)

    async def _serve(self) -> None:
        async with ClusterDatabase(
            self._url, timeout_s=_CALL_TIMEOUT_S, connections=_CONNECTIONS
        ) as database:
            await self._keeper.run(database)


class _Keeper:
    """The thread's side of the store. All its methods are called in the thread."""

    def __init__(self, epoch_path: str, tell: Callable[[Event], None]) -> None:
        self._epoch_path = epoch_path
        self._tell = tell
        self._node: NodeEpoch | None = None
        self._shards: dict[int, _Shard] = {}
        self._serials = itertools.count(1)
        self._beginning: asyncio.Task[None] | None = None
        self._loads = asyncio.Semaphore(_LOADS)
        self._to_release: set[int] = set()
        self._releasing: set[int] = set()
        self._writing: set[_Shard] = set()
        self._has_records = asyncio.Event()
        self._has_releases = asyncio.Event()
        self._has_fewer = asyncio.Event()  # shards, or releases on their way
        self._ended = asyncio.Event()
        self._takes = True
        self._complained = ""
        self.adoption: _Adoption | None = None
        self.exchange = TransactionExchange(epoch_path, tell, self._terms)

    def _terms(self) -> dict[int, int]:
        return {number: each.term.serial for number, each in self._shards.items()}

    # -- what the loop asks for ----------------------------------------------------

    def put(self, term: ShardTerm, records: Records, end: int | None = None) -> None:
        shard = self._find(term)
        if shard is None:
            return  # an event that says so is on its way
        for key, value in records:
            shard.waiting[key] = value
            shard.size += len(key) + len(value or b"")
        shard.puts += 1
        if end is not None:
            shard.ends[end] = shard.puts
        self._has_records.set()

    def stop(self, term: ShardTerm) -> None:
        shard = self._find(term)
        if shard is not None:
            shard.is_stopping = True
            self._release_if_written(shard)

    def drop(self, term: ShardTerm) -> None:
        shard = self._find(term)
        if shard is not None:
            self._remove(shard)

    def take_no_more(self) -> None:
        self._takes = False

    def end(self) -> None:
        self._takes = False
        if self._beginning is not None:
            self._beginning.cancel()
        for shard in list(self._shards.values()):
            self.stop(shard.term)
        self._ended.set()

    def _find(self, term: ShardTerm) -> _Shard | None:
        shard = self._shards.get(term.number)
        return shard if shard is not None and shard.term == term else None

    def _remove(self, shard: _Shard) -> None:
        del self._shards[shard.term.number]
        shard.owned.is_dropped = True
        self._has_fewer.set()

    # -- the thread's tasks --------------------------------------------------------

    async def run(self, database: ClusterDatabase) -> None:
        """Keep the shards until `end` is called."""
        work = asyncio.gather(
            self._keep(database),
            self._write_all(database),
            self._release_all(database),
            self.exchange.run(database),
        )
        ended = asyncio.ensure_future(self._ended.wait())
        either: set[asyncio.Future[Any]] = {work, ended}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            with suppress(TimeoutError):
                async with asyncio.timeout(_END_TIMEOUT_S):
                    await self._all_stopped()
            work.cancel()
        with suppress(asyncio.CancelledError):
            await work  # raises the error of a task that has failed

    async def _all_stopped(self) -> None:
        while self._shards or self._to_release or self._releasing:
            self._has_fewer.clear()
            await self._has_fewer.wait()

    # -- taking and losing ---------------------------------------------------------

    async def _keep(self, database: ClusterDatabase) -> None:
        while True:
            node = read_node_epoch(self._epoch_path)
            if node is not None and self._takes:
                try:
                    if self.adoption is not None:
                        await self._adopt(database, node, self.adoption)
                    if self.adoption is None:
                        await self._hold(database, node)
                    self._complained = ""
                except (ClusterError, OSError) as error:
                    self._complain(error)
            await asyncio.sleep(_UNKNOWN_EVERY_S if node is None else _HOLD_EVERY_S)

    async def _adopt(
        self, database: ClusterDatabase, node: NodeEpoch, adoption: _Adoption
    ) -> None:
        # First, so that no other node loads one while only a part of it is copied.
        if not await GroupShards(database, node).hold(_HOLD_TIMEOUT_S):
            raise DatabaseUnavailableError("this node has no shards of groups yet")
        if adoption.records is None:
            return
        await adopt_records(database, adoption.records)
        with open(adoption.mark_path, "w"):
            pass
        _LOG.info(
            "%d records of groups were copied into the cluster's database",
            len(adoption.records),
        )
        self.adoption = None

    def _complain(self, error: Exception) -> None:
        if isinstance(error, DatabaseUnavailableError):
            return  # told by the process that has the node's lease
        if str(error) != self._complained:
            self._complained = str(error)
            _LOG.error("groups cannot be coordinated: %s", error)

    async def _hold(self, database: ClusterDatabase, node: NodeEpoch) -> None:
        """Take what is this node's share; lose what is not this node's any more."""
        shards = GroupShards(database, node)
        asked = boot_time()
        held = await shards.hold(_HOLD_TIMEOUT_S)
        if not held and node != read_node_epoch(self._epoch_path):
            return  # it has just joined again, and keeps its shards: asked at once
        if node != self._node:
            self._lose(self._shards.values())
            self._node = node
        found = {each.number: each for each in held}
        self._lose(
            shard
            for number, shard in self._shards.items()
            # This thread may have raised the epoch while the database was asked.
            if number not in found or found[number].epoch > shard.owned.epoch
        )
        left_s = min((each.lease_left_s for each in held), default=0.0)
        here = {each.number for each in held if each.keep}.union(self._shards)
        self._tell(Held(asked + left_s - _MARGIN_S, frozenset(here)))
        self._note_shares(held)
        new = [
            each.number
            for each in held
            if each.keep
            and each.number not in self._shards
            and each.number not in self._releasing | self._to_release
        ]
        if self._beginning is not None and self._beginning.done():
            await self._beginning  # raises what has failed
            self._beginning = None
        if new and self._takes and self._beginning is None:
            self._beginning = asyncio.ensure_future(self._begin(shards, new))

    def _note_shares(self, held: Sequence[HeldShard]) -> None:
        for each in held:
            shard = self._shards.get(each.number)
            if each.keep:
                if shard is not None:
                    shard.is_spare = False
            elif shard is None:
                self._release(each.number)  # a process before this one had it
            elif not shard.is_spare:
                shard.is_spare = True
                self._tell(Spare(shard.term))

    def _lose(self, shards: Iterable[_Shard]) -> None:
        for shard in list(shards):
            if self._find(shard.term) is shard:
                self._remove(shard)
                self._tell(Lost(shard.term))

    async def _begin(self, shards: GroupShards, numbers: Sequence[int]) -> None:
        """Begin with shards that this node has: raise their epochs, and load them."""
        try:
            epochs = await shards.fence(numbers)
        except ClusterError as error:
            self._complain(error)
            return  # tried again, as long as the node has them
        began = []
        for number, epoch in epochs.items():
            term = ShardTerm(number, next(self._serials))
            shard = self._shards[number] = _Shard(term, epoch)
            self._tell(Taken(term))
            began.append(shard)
        await asyncio.gather(*(self._load(shards, shard) for shard in began))

    async def _load(self, shards: GroupShards, shard: _Shard) -> None:
        try:
            async with self._loads:
                records = await shards.records(shard.term.number)
        except ClusterError as error:
            self._complain(error)
            self._lose([shard])  # and taken again
            return
        if self._find(shard.term) is shard:
            self._tell(Loaded(shard.term, records))

    # -- writing -------------------------------------------------------------------

    async def _write_all(self, database: ClusterDatabase) -> None:
        while True:
            await self._has_records.wait()
            self._has_records.clear()
            while writes := self._take_waiting():
                await self._write(database, writes)
                self._writing.clear()
                for each in writes:
                    self._release_if_written(each.shard)

    def _take_waiting(self) -> list[_Write]:
        found: list[_Write] = []
        size = 0
        for shard in self._shards.values():
            if shard.waiting and size < _WRITE_BYTES:
                size += shard.size
                found.append(_Write(shard, shard.waiting, shard.puts))
                shard.waiting, shard.size = {}, 0
        self._writing.update(each.shard for each in found)
        return found

    async def _write(self, database: ClusterDatabase, writes: list[_Write]) -> None:
        """Write, as often as it takes, what is not lost meanwhile."""
        is_repeated = False
        while True:
            writes = [each for each in writes if self._find(each.shard.term)]
            if not writes or self._node is None:
                return
            try:
                lost = await GroupShards(database, self._node).put(
                    {each.shard.owned: each.records for each in writes},
                    is_repeated=is_repeated,
                    timeout_s=_WRITE_TIMEOUT_S,
                )
                break
            except DatabaseUnavailableError:
                is_repeated = True
            except ClusterError as error:
                self._complain(error)
                self._lose(each.shard for each in writes)
                return
        self._lose(each.shard for each in writes if each.shard.term.number in lost)
        for each in writes:
            if self._find(each.shard.term):
                self._tell(Written(each.shard.term, each.puts))
                self._note_ends(each.shard, each.puts)

    def _note_ends(self, shard: _Shard, puts: int) -> None:
        """Have the ends of transactions deleted that a shard has written."""
        if done := [serial for serial, put in shard.ends.items() if put <= puts]:
            for serial in done:
                del shard.ends[serial]
            self.exchange.written(done)

    # -- releasing -----------------------------------------------------------------

    def _release_if_written(self, shard: _Shard) -> None:
        if (
            shard.is_stopping
            and not shard.waiting
            and shard not in self._writing
            and self._find(shard.term) is shard
        ):
            self._remove(shard)
            self._release(shard.term.number)

    def _release(self, number: int) -> None:
        self._to_release.add(number)
        self._has_releases.set()

    async def _release_all(self, database: ClusterDatabase) -> None:
        while True:
            await self._has_releases.wait()
            self._has_releases.clear()
            self._releasing, self._to_release = self._to_release, set()
            if self._node is not None:
                try:
                    await GroupShards(database, self._node).release(self._releasing)
                except ClusterError as error:
                    self._complain(error)  # the next look finds what is left
            self._releasing = set()
            self._has_fewer.set()
