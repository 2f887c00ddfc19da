"""Calls to a database that restarts, hangs, or ends what it was told to do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg
import pytest

from mpbroker.cluster.database import ClusterDatabase
from mpbroker.cluster.errors import ClusterError, DatabaseUnavailableError
from mpbroker.cluster.migrations import create_cluster
from mpbroker.cluster.sequencer import ObjectBatch, Sequencer
from tests.cluster.conftest import execute

LOCK = "CREATE TABLE public.t (n int); INSERT INTO public.t VALUES (1)"
UPDATE = "UPDATE public.t SET n = 7 RETURNING n"
WAITERS = (
    "SELECT pid FROM pg_stat_activity WHERE application_name = 'mpbroker'"
    " AND datname = current_database() AND wait_event = $1"
)


@asynccontextmanager
async def held_row(url: str) -> AsyncIterator[asyncpg.Connection]:
    """Hold the lock of a row which calls of ours then wait for."""
    holder = await asyncpg.connect(url)
    try:
        await holder.execute(LOCK)
        await holder.execute("BEGIN; UPDATE public.t SET n = 2")
        yield holder
    finally:
        holder.terminate()


async def waiting(
    url: str, event: str, call: asyncio.Future[object], than: int = 0
) -> int:
    """Wait until the session of a call waits for something; return its process id."""
    connection = await asyncpg.connect(url)
    try:
        while not call.done():
            for row in await connection.fetch(WAITERS, event):
                if row["pid"] != than:
                    return int(row["pid"])
        raise AssertionError(f"{call} did not wait")
    finally:
        connection.terminate()


def test_a_call_outlives_the_restart_of_the_database(own_server):
    url = own_server.url("postgres")

    async def restart() -> None:
        async with ClusterDatabase(url, timeout_s=200) as database:
            async with held_row(url):
                call = asyncio.ensure_future(database.rows(UPDATE))
                await waiting(url, "transactionid", call)
                own_server.kill()
                late = asyncio.ensure_future(database.rows("SELECT 1"))
                own_server.start()
            assert (await call)[0]["n"] == 7
            assert (await late)[0][0] == 1

    asyncio.run(restart())


def test_a_call_to_a_database_that_is_away_ends_in_time(own_server):
    url = own_server.url("postgres")

    async def ask() -> None:
        async with ClusterDatabase(url, timeout_s=0.3) as database:
            own_server.stop()
            with pytest.raises(DatabaseUnavailableError, match=r"no answer in 0.3 s"):
                await database.rows("SELECT 1")

    asyncio.run(ask())


def test_a_late_call_is_dropped_and_the_next_one_gets_a_connection(empty_url):
    async def ask() -> None:
        async with ClusterDatabase(empty_url) as database, held_row(empty_url):
            with pytest.raises(DatabaseUnavailableError):
                await database.rows(UPDATE, timeout_s=0.3)
            assert (await database.rows("SELECT n FROM public.t"))[0]["n"] == 1

    asyncio.run(ask())


def test_calls_share_as_many_connections_as_they_may_have(empty_url):
    async def ask() -> int:
        async with ClusterDatabase(empty_url, connections=2) as database:
            pids = await asyncio.gather(
                *(database.row("SELECT pg_backend_pid(), pg_sleep(0)") for _ in "12345")
            )
            return len({row[0] for row in pids})

    assert asyncio.run(ask()) <= 2


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("/empty", "/missing"), r"does not exist; create the database"),
        (("//admin@", "//nobody@"), r"role .* does not exist; check the user"),
        (("postgresql:", "mysql:"), "cannot be reached: invalid DSN"),
    ],
)
def test_what_an_operator_has_to_change_is_said_at_once(empty_url, change, says):
    async def ask() -> None:
        url = empty_url.replace(*change)
        async with ClusterDatabase(url, timeout_s=3600) as database:
            with pytest.raises(ClusterError, match=says):
                await database.rows("SELECT 1")

    asyncio.run(ask())


def test_commits_wait_for_the_disk_whatever_the_default_is(empty_url):
    name = empty_url.split("/")[3].split("?")[0]
    execute(empty_url, f"ALTER DATABASE {name} SET synchronous_commit = off")

    async def ask() -> str:
        async with ClusterDatabase(empty_url) as database:
            return str((await database.row("SHOW synchronous_commit"))[0])

    assert asyncio.run(ask()) == "on"


def test_a_commit_whose_wait_for_the_standby_was_cancelled_is_not_answered(own_server):
    url = own_server.url("postgres")
    name_standby = "ALTER SYSTEM SET synchronous_standby_names = '{}'"

    def set_standby(name: str) -> None:
        execute(url, name_standby.format(name))
        execute(url, "SELECT pg_reload_conf()")

    async def commit() -> None:
        async with ClusterDatabase(url, timeout_s=200) as database:
            await create_cluster(database, "here", "s3://bucket")
            sequencer = Sequencer(database)
            (key,) = await sequencer.register_objects(1, 1)
            await sequencer.create_partitions(key, 1)
            await asyncio.to_thread(set_standby, "away")
            call = asyncio.ensure_future(
                sequencer.commit_object(key, 1, [ObjectBatch(key, 0, 3, 0, 1, 1)])
            )
            first = await waiting(url, "SyncRep", call)
            await asyncio.to_thread(execute, url, f"SELECT pg_cancel_backend({first})")
            # It counts by now, and the client asks again, which waits as well.
            await waiting(url, "SyncRep", call, than=first)
            assert not call.done()
            await asyncio.to_thread(set_standby, "")
            assert (await call).base_offsets == [0]
            (ends,) = await sequencer.ends([(key, 0)])
            assert ends.high_watermark == 3

    asyncio.run(commit())
