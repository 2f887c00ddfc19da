"""What the order of a cluster's records costs: commits of objects by four nodes.

Beside each figure is what the same database does when a commit is the update of a row,
by the same driver and as many connections; both in turn. PostgreSQL runs with fsync.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final
from uuid import uuid4

from mpbroker.cluster.database import ClusterDatabase
from mpbroker.cluster.migrations import create_cluster
from mpbroker.cluster.sequencer import ObjectBatch, Sequencer
from mpbroker.testing.postgresql import postgresql, programs
from tests.bench.cases import Case, Context

_WRITERS: Final = 4  # as many nodes, each with one commit on its way
_PAIRS: Final = 3
_KEYS: Final = 64
_BARE: Final = "UPDATE public.bare SET n = n + 1 WHERE id = $1"


class _Writer:
    """One node: its connection, its producer and its partitions."""

    def __init__(self, url: str, number: int, partitions: int) -> None:
        self.database = ClusterDatabase(url)
        self.sequencer = Sequencer(self.database)
        self.number = number
        self.partitions = partitions
        self.topic = uuid4()
        self.sequences = itertools.count()

    async def commit(self) -> None:
        """Commit one object after the other, with keys registered in blocks."""
        keys = await self.sequencer.register_objects(self.number, _KEYS)
        for key in keys:
            sequence = next(self.sequences)
            batches = [
                ObjectBatch(self.topic, part, 1, part * 1000, 1000, 1, 7, 0, sequence)
                for part in range(self.partitions)
            ]
            done = await self.sequencer.commit_object(key, 1, batches)
            assert not any(done.errors)
            self.note()

    async def update(self) -> None:
        """Commit one row after the other."""
        for _ in range(_KEYS):
            await self.database.rows(_BARE, self.number)
            self.note()

    async def repeat(self, call: Callable[[], Awaitable[None]], seconds: float) -> None:
        """Make calls until the time is over."""
        self.times: list[float] = []
        self.last = time.perf_counter()
        deadline = self.last + seconds
        while self.last < deadline:
            await call()

    def note(self) -> None:
        """Note that a commit was answered."""
        now = time.perf_counter()
        self.times.append(now - self.last)
        self.last = now


async def _measure(url: str, partitions: int, seconds: float) -> dict[str, float]:
    writers = [_Writer(url, number, partitions) for number in range(_WRITERS)]
    first = writers[0]
    await create_cluster(first.database, "bench", "s3://bench")
    await first.database.rows("CREATE TABLE public.bare (id int PRIMARY KEY, n int)")
    await first.database.rows(
        "INSERT INTO public.bare SELECT n, 0 FROM generate_series(0, $1) AS n", _WRITERS
    )
    for writer in writers:
        await writer.sequencer.create_partitions(writer.topic, partitions)

    async def rate(name: str) -> tuple[float, list[float]]:
        began = time.perf_counter()
        await asyncio.gather(
            *(each.repeat(getattr(each, name), seconds) for each in writers)
        )
        times = sorted(itertools.chain(*(each.times for each in writers)))
        return len(times) / (time.perf_counter() - began), times

    await rate("commit")
    turns = [(await rate("commit"), await rate("update")) for _ in range(_PAIRS)]
    for writer in writers:
        writer.database.close()
    times = sorted(itertools.chain(*(commit[1] for commit, _ in turns)))
    commits = statistics.median(commit[0] for commit, _ in turns)
    return {
        "commits_per_s": commits,
        "bare_commits_per_s": statistics.median(bare[0] for _, bare in turns),
        "extents_per_s": commits * partitions,
        "p50_ms": times[len(times) // 2] * 1e3,
        "p99_ms": times[len(times) * 99 // 100] * 1e3,
    }


def _commits(partitions: int, context: Context) -> dict[str, float]:
    assert programs() is not None, "needs PostgreSQL (Debian: postgresql)"
    with postgresql(fsync=True) as server:
        url = server.url("postgres")
        return asyncio.run(_measure(url, partitions, context.seconds))


CASES: Final = [
    Case(f"cluster/commits/{count}", partial(_commits, count), starts_brokers=True)
    for count in (1, 10, 100, 1000)
]
