"""One metadata log for several nodes, in a real database."""

from __future__ import annotations

import asyncio
import uuid

import pytest

from mpbroker.cluster.database import ClusterDatabase
from mpbroker.cluster.errors import ClusterError
from mpbroker.cluster.shared_metadata_log import SharedMetadataLog
from tests.cluster.test_sequencer_faults import kill_sessions

APPEND = "SELECT mpbroker.append_metadata_v1($1, $2, $3)"
NODES = 4
NAMES = 12


class Node:
    """A node's copy: names, each of which only one node may take."""

    def __init__(self, url: str, number: int) -> None:
        self.url = url
        self.database = ClusterDatabase(url)
        self.log = SharedMetadataLog(self.database)
        self.number = number
        self.copy: list[bytes] = []

    def take(self, name: int) -> list[bytes]:
        """Decide to take a name, in two records, unless it is taken."""
        if any(record.startswith(b"%d " % name) for record in self.copy):
            return []
        return [b"%d by %d" % (name, self.number), b"%d ready" % name]

    async def read(self) -> None:
        self.copy += await self.log.read(len(self.copy))

    async def take_all(self) -> None:
        for name in range(NAMES):
            while (records := self.take(name)) and not await self.log.append(
                len(self.copy), records
            ):
                await self.read()
            await self.read()
            await kill_sessions(self.url, name % 3)


def test_nodes_that_decide_at_once_agree_while_their_sessions_die(cluster_url):
    async def run() -> None:
        nodes = [Node(cluster_url, number) for number in range(NODES)]
        follower = Node(cluster_url, -1)

        async def follow() -> None:
            while len(follower.copy) < 2 * NAMES:
                await follower.read()
                assert len(follower.copy) % 2 == 0  # never a part of an append

        await asyncio.gather(follow(), *(node.take_all() for node in nodes))
        taken = [record.split()[0] for record in follower.copy]
        assert sorted(taken) == sorted([b"%d" % n for n in range(NAMES)] * 2)
        assert taken[::2] == taken[1::2]  # the records of one append are side by side
        for node in nodes:
            await node.read()
            assert node.copy == follower.copy
            node.database.close()
        follower.database.close()

    asyncio.run(run())


def test_an_append_that_is_repeated_after_a_lost_answer_counts_once(cluster_url):
    async def run() -> None:
        async with ClusterDatabase(cluster_url) as database:
            request = uuid.uuid4()
            for _ in range(2):
                assert (await database.row(APPEND, request, 0, [b"a", b"b"]))[0] == 2
            # Others have appended in between.
            assert (await database.row(APPEND, uuid.uuid4(), 2, [b"c"]))[0] == 3
            assert (await database.row(APPEND, request, 0, [b"a", b"b"]))[0] == 2
            assert (await database.row(APPEND, uuid.uuid4(), 0, [b"d"]))[0] == -1
            log = SharedMetadataLog(database)
            assert await log.read(0) == [b"a", b"b", b"c"]
            assert not await log.append(0, [b"d"])
            assert await log.append(0, [b"a", b"b"], request)
            assert await log.read(2) == [b"c"]

    asyncio.run(run())


def test_a_long_append_is_read_as_a_whole(cluster_url):
    async def run() -> None:
        async with ClusterDatabase(cluster_url) as database:
            log = SharedMetadataLog(database)
            sent = [b"%d" % number for number in range(2500)]
            assert await log.append(0, sent)
            assert await log.read(0) == sent
            assert await log.read(1500) == sent[1500:]

    asyncio.run(run())


def test_a_log_that_ends_before_a_copy_of_it_is_refused(cluster_url):
    async def run() -> None:
        async with ClusterDatabase(cluster_url) as database:
            log = SharedMetadataLog(database)
            await log.append(0, [b"a", b"b"])
            await log.check_reaches(0)
            await log.check_reaches(2)
            with pytest.raises(ClusterError, match=r"ends before record 2.* anew"):
                await log.check_reaches(3)

    asyncio.run(run())
