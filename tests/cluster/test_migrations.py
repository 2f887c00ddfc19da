"""The schema of a cluster's database: made, migrated and checked."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from mpbroker.cluster import migrations
from mpbroker.cluster.database import ClusterDatabase
from mpbroker.cluster.errors import ClusterError
from mpbroker.cluster.migrations import (
    ClusterInfo,
    Migration,
    check_cluster,
    create_cluster,
    load_migrations,
    migrate,
    read_cluster,
)
from tests.cluster.conftest import execute

T = TypeVar("T")
STORE = "s3://bucket/prefix"
NEWEST = load_migrations()[-1].version
# The begin of each migration's SHA-256.
RELEASED = {
    1: "307f33b93ee77b1a",
    2: "8b90f798074b7822",
    3: "1623ab3c4b1bb026",
    4: "7ed8f20f71b2906a",
    5: "6d886ddc1c055d7d",
    6: "d26e477a043d8a7e",
    7: "5009a267d880e173",
    8: "75cfd8c33c600ef8",
    9: "b3f36314e8daecce",
}
APPLIED = "SELECT version FROM mpbroker.migration ORDER BY version"


def run(url: str, work: Callable[[ClusterDatabase], Awaitable[T]]) -> T:
    async def call() -> T:
        async with ClusterDatabase(url) as database:
            return await work(database)

    return asyncio.run(call())


def create(url: str, cluster_id: str = "here") -> ClusterInfo:
    return run(url, lambda database: create_cluster(database, cluster_id, STORE))


def test_a_new_cluster_has_every_migration_and_knows_its_store(empty_url):
    info = create(empty_url)
    assert info == ClusterInfo("here", STORE, NEWEST, 1)
    check_cluster(info, version=NEWEST, cluster_id="here", storage_url=STORE + "/")
    assert run(empty_url, migrate) == []


def test_a_second_cluster_is_refused_and_the_first_stays(empty_url):
    create(empty_url)
    with pytest.raises(ClusterError, match="holds cluster here already"):
        create(empty_url, "there")
    assert run(empty_url, read_cluster).cluster_id == "here"


def test_an_init_that_is_repeated_after_a_lost_answer_is_the_same_cluster(empty_url):
    assert create(empty_url) == create(empty_url)


def test_a_schema_of_somebody_else_is_left_alone(empty_url):
    execute(empty_url, "CREATE SCHEMA mpbroker")
    with pytest.raises(ClusterError, match="name another database"):
        create(empty_url)


def test_a_migration_is_applied_whole_or_not_at_all(empty_url):
    create(empty_url)
    later = NEWEST + 1
    broken = Migration(later, "broken", "CREATE TABLE mpbroker.a (); SELECT 1 / 0")
    with pytest.raises(ClusterError, match="division by zero"):
        run(empty_url, lambda database: migrate(database, [broken]))
    whole = Migration(later, "whole", "CREATE TABLE mpbroker.a (b int)")
    index = Migration(
        later + 1, "a_b_concurrently", "CREATE INDEX CONCURRENTLY ON mpbroker.a (b)"
    )
    both = [whole, index]
    assert run(empty_url, lambda database: migrate(database, both)) == both
    assert run(empty_url, lambda database: migrate(database, both)) == []
    assert [row[0] for row in execute(empty_url, APPLIED)] == [*range(1, later + 2)]


def functions(url: str) -> dict[str, tuple[str, str]]:
    """Return the arguments and the result of each function in the schema."""
    rows = execute(
        url,
        "SELECT proname, pg_get_function_arguments(oid), pg_get_function_result(oid)"
        " FROM pg_proc WHERE pronamespace = 'mpbroker'::regnamespace",
    )
    return {name: (arguments, result) for name, arguments, result in rows}


def test_what_nodes_of_earlier_versions_call_stays(empty_url, monkeypatch):
    """A migration that needs another function makes one with another version.

    A function goes when no node may be left that calls it: the migration raises
    mpbroker.cluster.usable_from above the last version that did.
    """
    known = load_migrations()
    monkeypatch.setattr(migrations, "load_migrations", lambda: known[:1])
    create(empty_url)
    had = {}
    for each in known:
        one = [each]
        run(empty_url, lambda database, one=one: migrate(database, one))
        had[each.version] = functions(empty_url)
    usable_from = run(empty_url, read_cluster).usable_from
    assert 1 <= usable_from <= NEWEST
    last = had[NEWEST]
    for version in range(usable_from, NEWEST):
        assert had[version].items() <= last.items()
    assert all(re.search(r"_v\d+$", name) for name in last)


def test_a_released_migration_is_not_changed():
    """A database that has a migration does not get what is added to it later."""
    texts = {each.version: each.text.encode() for each in load_migrations()}
    assert {
        version: hashlib.sha256(text).hexdigest()[:16]
        for version, text in texts.items()
    } == RELEASED


def test_an_index_that_could_not_be_made_is_made_anew(empty_url):
    create(empty_url)
    tables = [
        Migration(NEWEST + 1, "a", "CREATE TABLE mpbroker.a AS SELECT 7 AS b, n FROM"),
        Migration(
            NEWEST + 2,
            "unique_concurrently",
            "CREATE UNIQUE INDEX CONCURRENTLY once ON mpbroker.a (b)",
        ),
    ]
    tables[0] = tables[0]._replace(text=f"{tables[0].text} generate_series(1, 2) AS n")
    with pytest.raises(ClusterError, match="could not create unique index"):
        run(empty_url, lambda database: migrate(database, tables))
    assert execute(empty_url, "SELECT 1 FROM pg_index WHERE NOT indisvalid")
    execute(empty_url, "DELETE FROM mpbroker.a WHERE n = 2")
    assert run(empty_url, lambda database: migrate(database, tables)) == tables[1:]
    assert not execute(empty_url, "SELECT 1 FROM pg_index WHERE NOT indisvalid")


def test_two_migrates_at_once_do_not_mix(empty_url):
    create(empty_url)
    slow = Migration(NEWEST + 1, "slow", "SELECT pg_sleep(3600)")

    async def both() -> None:
        async with (
            ClusterDatabase(empty_url) as one,
            ClusterDatabase(empty_url) as other,
        ):
            first = asyncio.ensure_future(migrate(one, [slow]))
            while not await other.rows(
                "SELECT 1 FROM pg_locks WHERE locktype='advisory'"
            ):
                assert not first.done()
            with pytest.raises(ClusterError, match=r"another .* is running"):
                await migrate(other, [slow])
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)

    asyncio.run(both())


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"cluster_id": "there"}, "directories of this broker belong to cluster there"),
        ({"version": 8}, "run 'mpbroker cluster migrate'"),
        ({"version": 4}, "upgrade mpbroker"),
        ({"storage_url": "s3://other"}, "correct diskless.storage.url"),
    ],
)
def test_a_node_is_told_what_to_do_about_a_database_that_is_not_for_it(changed, says):
    info = ClusterInfo("here", STORE, schema=7, usable_from=5)
    right = {"version": 7, "cluster_id": "here", "storage_url": STORE}
    check_cluster(info, **right)
    check_cluster(info, **right | {"version": 5})
    with pytest.raises(ClusterError, match=says):
        check_cluster(info, **right | changed)


def test_a_database_without_a_cluster_says_how_to_make_one(empty_url):
    for work in (read_cluster, migrate):
        with pytest.raises(ClusterError, match="run 'mpbroker cluster init'"):
            run(empty_url, work)


def test_a_user_without_rights_is_told_so(empty_url):
    role = "r" + empty_url.split("/")[3].split("?")[0]
    execute(empty_url, f"CREATE ROLE {role} LOGIN")
    theirs = empty_url.replace("//admin@", f"//{role}@")
    with pytest.raises(ClusterError, match=r"permission denied for database.*grant"):
        create(theirs)
    create(empty_url)
    with pytest.raises(ClusterError, match=r"permission denied for schema.*grant"):
        run(theirs, read_cluster)
