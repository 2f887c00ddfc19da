"""A cluster in one thread: the real writers and readers, without any I/O.

Database, store, network and time are models; one seed repeats everything. Nodes write
the batches of producers with ids and without, and copy all records. Meanwhile calls are
lost, executed without an answer, or executed long after their callers have given up;
puts fail or arrive late; writers and nodes are killed between any two of their steps,
or stand still for so long that their objects are given up.

At the end everything is well again, and what is there is compared with what was
acknowledged: see ``Site.check``.

    python -m tests.cluster.simulation FIRST_SEED COUNT
"""

from __future__ import annotations

import asyncio
import random
import selectors
import sys
import time
import uuid
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any, Final, TypeVar, cast
from unittest import mock

from mpbroker.base.storage_errors import RemoteUnreachableError
from mpbroker.cluster import materialiser, object_writer
from mpbroker.cluster.errors import DatabaseUnavailableError, ObjectGivenUpError
from mpbroker.cluster.materialiser import Materialiser, SharedPartition
from mpbroker.cluster.object_writer import (
    ObjectWriter,
    SharedBatch,
    WriterSettings,
    WrittenBatch,
    object_path,
)
from mpbroker.cluster.sequencer import ObjectBatch, ObjectCommit, Sequencer
from mpbroker.protocol.errors import ApiError
from tests.cluster.sequencer_model import SequencerModel
from tests.storage.batches import batch

NODES: Final = 2
PARTITIONS: Final = 2
PRODUCERS: Final = 4
BATCHES: Final = 5  # of each producer
GIVE_UP_S: Final = 600.0
DELETE_S: Final = 300.0
CALL_S: Final = 5.0  # the time limit of a call to the database
LATEST_S: Final = 60.0  # when a call or a put arrives at last that was on its way
_T = TypeVar("_T")


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop whose time is what its timers wait for: nothing ever waits."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_NoSelector(self))

    def time(self) -> float:
        return self.now


class _NoSelector(selectors.SelectSelector):
    """Instead of waiting, it lets the loop's time pass."""

    def __init__(self, loop: SimulatedLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("everything waits for something that will not happen")
        if timeout > 0:
            # A little more, so that rounding does not leave the timer for later.
            self._loop.now += timeout + 1e-6
        return []


@contextmanager
def simulated() -> Iterator[SimulatedLoop]:
    """Run in a loop with its own time, which the cluster's modules see, too."""
    loop = SimulatedLoop()
    clock = SimpleNamespace(
        monotonic=loop.time,
        monotonic_ns=lambda: int(loop.time() * 1e9),
        time_ns=lambda: int(loop.time() * 1e9),
    )
    quiet = SimpleNamespace(warning=_drop, error=_drop)  # what fails is no news here
    with (
        mock.patch.object(materialiser, "time", clock),
        mock.patch.object(materialiser, "logger", quiet),
        mock.patch.object(object_writer, "logger", quiet),
    ):
        yield loop
    loop.close()


def _drop(*_: object) -> None:
    pass


class Faults:
    """What goes wrong, and when; nothing does any more after ``end``."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.is_over = False
        self.rate = self.random.choice([0.02, 0.1, 0.3])

    def happens(self, share: float = 1.0) -> bool:
        return not self.is_over and self.random.random() < self.rate * share

    def delay(self, longest_s: float) -> float:
        return self.random.random() ** 3 * longest_s


class SimulatedSequencer(Sequencer):
    """Calls the model as a node calls the database, over a network that loses calls."""

    def __init__(
        self, model: SequencerModel, faults: Faults, die: Callable[[], None]
    ) -> None:
        self._model = model
        self._faults = faults
        self._die = die

    @property
    def sessions(self) -> int:
        return 0

    async def register_objects(self, node_id: int, count: int) -> list[uuid.UUID]:
        bits = self._faults.random.getrandbits
        keys = [uuid.UUID(int=bits(128), version=4) for _ in range(min(count, 4))]
        await self._call(lambda: self._model.register_objects(keys))
        return keys

    async def commit_object(
        self, key: uuid.UUID, size: int, batches: Sequence[ObjectBatch]
    ) -> ObjectCommit:
        return await self._call(lambda: self._model.commit_object(key, batches))

    async def settle_object(self, key: uuid.UUID) -> bool:
        return await self._call(lambda: self._model.settle_object(key))

    async def ends(self, partitions: Any) -> Any:
        return await self._call(lambda: self._model.ends(partitions))

    async def look(self, places: Any, *, max_extents: int, max_bytes: int) -> Any:
        return await self._call(lambda: self._model.look(places, max_extents))

    async def _call(self, execute: Callable[[], _T]) -> _T:
        faults, loop = self._faults, asyncio.get_running_loop()
        if faults.happens(0.3):
            loop.call_later(faults.delay(0.02), self._die)

        def late() -> None:
            with suppress(ObjectGivenUpError):
                execute()

        try:
            await asyncio.sleep(faults.delay(0.02))
        except asyncio.CancelledError:  # the process was killed, the call was not
            loop.call_later(faults.delay(LATEST_S), late)
            raise
        if faults.happens():
            fate = faults.random.choice(["lost", "late", "unanswered"])
            if fate == "unanswered":
                late()
            elif fate == "late":
                loop.call_later(faults.delay(LATEST_S), late)
            await asyncio.sleep(faults.delay(CALL_S))
            raise DatabaseUnavailableError(fate)
        found = execute()
        await asyncio.sleep(faults.delay(0.01))
        return found


class SimulatedStore:
    """Objects in memory, behind a network that loses and delays."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self.objects: dict[str, bytes] = {}

    async def put_async(self, key: str, content: bytes) -> None:
        faults, loop = self._faults, asyncio.get_running_loop()

        def arrive() -> None:
            self.objects[key] = content

        try:
            await asyncio.sleep(faults.delay(0.05))
        except asyncio.CancelledError:
            loop.call_later(faults.delay(LATEST_S), arrive)
            raise
        if faults.happens():
            if faults.random.random() < 0.5:
                loop.call_later(faults.delay(LATEST_S), arrive)
            raise RemoteUnreachableError("the store is away")
        arrive()
        if faults.happens(0.1):  # a node that stands still between put and commit
            await asyncio.sleep(2 * GIVE_UP_S)

    async def get_ranges_async(
        self, key: str, ranges: Sequence[tuple[int, int]]
    ) -> list[memoryview]:
        await asyncio.sleep(self._faults.delay(0.05))
        if self._faults.happens():
            raise RemoteUnreachableError("the store is away")
        view = memoryview(self.objects[key])
        return [view[start : start + size] for start, size in ranges]


class SimulatedLog:
    """What a materialiser uses of a local log."""

    directory = "simulated"

    def __init__(self) -> None:
        self.row = SimpleNamespace(log_start_offset=0, log_end_offset=0)
        self.view = SimpleNamespace(require_online=lambda: None)
        self.batches: list[tuple[int, bytes]] = []

    def append_at(self, validated: Any, base_offset: int, *, now_ms: int) -> None:
        row = self.row
        if base_offset < row.log_end_offset:
            return
        assert base_offset == row.log_end_offset, "a gap"
        self.batches.append((base_offset, bytes(validated.data)))
        row.log_end_offset = base_offset + validated.last_offset_delta + 1

    def raise_log_start(self, offset: int) -> None:
        self.row.log_start_offset = min(offset, self.row.log_end_offset)


class Node:
    """A node: its handlers remember requests; its writer and reader may be killed.

    Attributes:
        lives: the deaths of the whole node: a request does not outlive one.
    """

    def __init__(self, site: Site) -> None:
        self._site = site
        self.logs = {
            SharedPartition(site.topic, part): SimulatedLog()
            for part in range(PARTITIONS)
        }
        self.lives = 0
        self._death: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self.begin()

    def begin(self) -> None:
        site = self._site
        sequencer = SimulatedSequencer(site.model, site.faults, self._die)
        settings = WriterSettings(interval_s=0.25, uploads=3)
        clock = asyncio.get_running_loop().time
        self.writer = ObjectWriter(sequencer, site.store, 1, settings, clock)
        self.reader = Materialiser(
            sequencer,
            site.store,
            cast(Any, lambda: self.logs),
            settings=materialiser.MaterialiserSettings(poll_s=200.0),
        )
        self.spawn(self.writer.run())
        self.spawn(self.reader.run())

    def spawn(self, work: Awaitable[_T]) -> asyncio.Task[_T]:
        task: asyncio.Task[_T] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _die(self) -> None:
        if self._death is None or self._death.done():
            self._death = asyncio.ensure_future(self._kill())

    async def _kill(self) -> None:
        """Kill the process of writer and reader, or all; others take their places."""
        self.lives += self._site.faults.random.random() < 0.3
        await self.end()
        self.begin()

    async def end(self) -> None:
        tasks = sorted(self._tasks, key=lambda task: int(task.get_name().split("-")[1]))
        self._tasks = set()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def produce(
        self, producer: object, sent: SharedBatch, timeout_s: float, *, has_ids: bool
    ) -> WrittenBatch | None:
        """Do as a handler does; None: the node has died, and nobody knows."""
        life = self.lives
        intent: tuple[uuid.UUID, Sequence[int]] | None = None

        def committing(key: uuid.UUID, places: Sequence[int]) -> None:
            nonlocal intent
            intent = key, places

        async def execute(writer: ObjectWriter) -> list[WrittenBatch]:
            if intent is not None:
                done = await writer.recall(*intent, [sent])
                if done is not None:
                    return done
            told = None if has_ids else committing
            return await writer.write(producer, [sent], timeout_s, told)

        while self.lives == life:
            try:
                (done,) = await asyncio.shield(self.spawn(execute(self.writer)))
                return done if self.lives == life else None
            except asyncio.CancelledError:
                await asyncio.sleep(0)  # the next writer is there by then
            except DatabaseUnavailableError:
                await asyncio.sleep(1)
            except ApiError:
                return None  # it timed out
        return None


class Site:
    """A whole cluster, and what its clients were told."""

    def __init__(self, seed: int) -> None:
        self.faults = Faults(seed)
        self.topic = uuid.UUID(int=seed + 1)
        self.loop = asyncio.get_running_loop()
        self.model = SequencerModel(self.loop.time)
        self.model.create_partitions(self.topic, PARTITIONS)
        self.store = SimulatedStore(self.faults)
        # By value: partition, offset; and whether it may be there twice.
        self.acknowledged: dict[bytes, tuple[int, int]] = {}
        self.doubtful: set[bytes] = set()
        self.order: dict[int, list[bytes]] = defaultdict(list)
        self.sent: dict[bytes, bytes] = {}
        self.nodes = [Node(self) for _ in range(NODES)]

    async def produce(self, number: int) -> None:
        """Send one batch after the other, each until it is acknowledged."""
        chance = self.faults.random
        part, has_ids = chance.randrange(PARTITIONS), chance.random() < 0.6
        node = chance.choice(self.nodes)
        for index in range(BATCHES):
            value = b"%d-%d" % (number, index)
            data = bytes(
                batch(value, producer=(number, 0, index) if has_ids else None).data
            )
            self.sent[value] = data
            self.order[number].append(value)
            sent = SharedBatch(self.topic, part, data)
            while True:
                timeout_s = chance.choice([5.0, 30.0, 5000.0])
                done = await node.produce(number, sent, timeout_s, has_ids=has_ids)
                if done is not None:
                    break
                if not has_ids:
                    self.doubtful.add(value)
                node = chance.choice(self.nodes)
            assert done.error_code == 0, (value, done)
            self.acknowledged[value] = part, done.base_offset
            node.reader.wake([SharedPartition(self.topic, part)])
            await asyncio.sleep(self.faults.delay(1.0))

    async def collect(self) -> None:
        """Do as the collectors of all nodes do."""
        while True:
            await asyncio.sleep(30.0)
            self.collect_once()

    def collect_once(self) -> None:
        self.model.give_up_objects(GIVE_UP_S)
        for key in self.model.dead_objects(DELETE_S):
            self.store.objects.pop(object_path(key), None)
            self.model.forget_object(key)

    async def run(self) -> None:
        collector = asyncio.ensure_future(self.collect())
        await asyncio.gather(*map(self.produce, range(PRODUCERS)))
        self.faults.is_over = True
        collector.cancel()
        await asyncio.sleep(LATEST_S + CALL_S)
        for node in self.nodes:
            while any(
                log.row.log_end_offset < self.model.end(place)
                for place, log in node.logs.items()
            ):
                node.reader.wake()
                await asyncio.sleep(1.0)
        for node in self.nodes:
            await node.end()
        self.check()
        await self.check_that_all_can_go()

    def check(self) -> None:
        """Compare what is there with what was acknowledged.

        Nothing is lost, reordered or at another offset; only what was sent again
        without a producer's id after a node's death or a time-out may be there twice.
        All nodes have the same bytes, which are those that were sent.
        """
        values = {data: value for value, data in self.sent.items()}
        there: dict[bytes, list[tuple[int, int]]] = defaultdict(list)
        for part in range(PARTITIONS):
            place = SharedPartition(self.topic, part)
            one, *others = (node.logs[place].batches for node in self.nodes)
            assert all(each == one for each in others), "nodes differ"
            for base_offset, data in one:
                there[values[data]].append((part, base_offset))
            assert sum(1 for _ in one) == self.model.end(place)
        for value, place_and_offset in self.acknowledged.items():
            assert place_and_offset in there[value], (value, "is lost or elsewhere")
            assert len(there[value]) == 1 or value in self.doubtful, (value, "doubled")
        for number, sent in self.order.items():
            if not self.doubtful.intersection(sent):
                offsets = [self.acknowledged[value][1] for value in sent]
                assert offsets == sorted(offsets), (number, "reordered")

    async def check_that_all_can_go(self) -> None:
        """Remove all records: the store must be empty when all has been collected."""
        for part in range(PARTITIONS):
            self.model.trim(self.topic, part)
        await asyncio.sleep(2 * GIVE_UP_S)
        self.collect_once()
        await asyncio.sleep(2 * DELETE_S)
        self.collect_once()
        assert not self.store.objects, "objects are left"


def run(seed: int) -> None:
    """Run one simulation.

    Raises:
        AssertionError: something is wrong; the seed repeats it.
    """

    async def main() -> None:
        await Site(seed).run()

    with simulated() as loop, asyncio.Runner(loop_factory=lambda: loop) as runner:
        try:
            runner.run(main())
        except BaseException as error:
            error.add_note(f"seed {seed}: python -m tests.cluster.simulation {seed} 1")
            raise


if __name__ == "__main__":
    first, count = map(int, sys.argv[1:])
    began = time.monotonic()
    for each in range(first, first + count):
        run(each)
    print(f"{count} seeds in {time.monotonic() - began:.1f} s")
