"""A PostgreSQL server for a worker's tests, and an empty database for each of them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Iterator

import asyncpg
import pytest

from mpbroker.cluster.database import ClusterDatabase
from mpbroker.cluster.migrations import create_cluster
from mpbroker.testing.postgresql import PostgreSQL, postgresql, programs, what_lacks

_numbers = itertools.count()


@contextlib.contextmanager
def _server() -> Iterator[PostgreSQL]:
    if programs() is None:
        pytest.skip(what_lacks())
    with postgresql() as server:
        yield server


@pytest.fixture(scope="session")
def shared_server() -> Iterator[PostgreSQL]:
    """A server that no test may stop."""
    with _server() as server:
        yield server


@pytest.fixture
def own_server() -> Iterator[PostgreSQL]:
    """A server for one test, which may stop it."""
    with _server() as server:
        yield server


def execute(url: str, statement: str, *arguments: object) -> list[asyncpg.Record]:
    """Execute one statement, as an administrator beside the cluster does."""

    async def call() -> list[asyncpg.Record]:
        connection = await asyncpg.connect(url)
        try:
            return await connection.fetch(statement, *arguments)
        finally:
            await connection.close()

    return asyncio.run(call())


@pytest.fixture
def empty_url(shared_server: PostgreSQL) -> str:
    """The URL of a database without anything."""
    name = f"empty{next(_numbers)}"
    execute(shared_server.url("postgres"), f"CREATE DATABASE {name}")
    return shared_server.url(name)


@pytest.fixture(scope="session")
def cluster_template(shared_server: PostgreSQL) -> str:
    """The name of a database with a new cluster, to copy."""
    execute(shared_server.url("postgres"), "CREATE DATABASE cluster_template")

    async def make() -> None:
        async with ClusterDatabase(shared_server.url("cluster_template")) as database:
            await create_cluster(database, "here", "s3://bucket/prefix")

    asyncio.run(make())
    return "cluster_template"


@pytest.fixture
def cluster_url(shared_server: PostgreSQL, cluster_template: str) -> str:
    """The URL of a database with a new cluster."""
    name = f"cluster{next(_numbers)}"
    execute(
        shared_server.url("postgres"),
        f"CREATE DATABASE {name} TEMPLATE {cluster_template}",
    )
    return shared_server.url(name)
