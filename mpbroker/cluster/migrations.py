"""Make and check the schema of a cluster's database.

The schema is made by the SQL files in schema/, applied in order; the number of the last
file is the schema's version. A file is never changed after its release. An operator
applies the files, by `mpbroker cluster init` and `mpbroker cluster migrate`; a node
only checks the version. So a long migration never delays a node's start. Nodes of two
versions can run side by side: the database is migrated first, and the functions that
nodes call have a version in their names. A function stays as it is. Only a migration
that raises usable_from above the last version whose nodes call it may drop it.

Each file is one transaction. A file whose name ends in `_concurrently` has a single
statement that PostgreSQL does not allow in a transaction, such as CREATE INDEX
CONCURRENTLY.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import asyncpg

from mpbroker.cluster.database import ClusterDatabase, Connection
from mpbroker.cluster.errors import ClusterError

DIRECTORY: Final = Path(__file__).with_name("schema")
_NAME: Final = re.compile(r"(\d{4})_(\w+)\.sql")
_ONE_AT_A_TIME: Final = "mpbroker.migrate"
_LONGEST_S: Final = 24 * 3600.0
# A migration that waits for a table's lock makes all commits behind it wait, too.
_LOCK_TIMEOUT: Final = "SET LOCAL lock_timeout = '3s'"


class Migration(NamedTuple):
    """One SQL file that makes or changes the schema of a cluster's database."""

    version: int
    name: str
    text: str

    @property
    def is_concurrent(self) -> bool:
        """Whether the migration's SQL must be executed outside of a transaction."""
        return self.name.endswith("_concurrently")


class ClusterInfo(NamedTuple):
    """The row about the cluster in its database, and the version of its schema.

    Attributes:
        schema: the version of the schema.
        usable_from: a node can use the database if it is written for this version of
            the schema or a later one.
    """

    cluster_id: str
    storage_url: str
    schema: int
    usable_from: int


def load_migrations(directory: Path = DIRECTORY) -> list[Migration]:
    """Return the migrations of this version of mpbroker, in order."""
    found = []
    for path in sorted(directory.glob("*.sql")):
        match = _NAME.fullmatch(path.name)
        assert match is not None, path.name
        found.append(Migration(int(match[1]), match[2], path.read_text("utf-8")))
    assert [each.version for each in found] == list(range(1, len(found) + 1))
    return found


async def create_cluster(
    database: ClusterDatabase, cluster_id: str, storage_url: str
) -> ClusterInfo:
    """Make a cluster's schema in a database that has none.

    Raises:
        ClusterError: the database has another cluster already, or another schema with
            the name 'mpbroker'.
    """
    first, *others = load_migrations()

    async def create(connection: Connection) -> None:
        async with connection.transaction():
            await connection.execute(first.text)
            await connection.execute(
                "INSERT INTO mpbroker.cluster (id, storage_url) VALUES ($1, $2)",
                cluster_id,
                storage_url,
            )
            await _note(connection, first)

    try:
        await database.run(create)
    except ClusterError as refused:
        if not isinstance(refused.__cause__, asyncpg.DuplicateSchemaError):
            raise
        try:
            info = await read_cluster(database)
        except ClusterError as error:
            raise ClusterError(
                "the database has a schema 'mpbroker' that is no cluster's: name"
                f" another database ({error})"
            ) from None
        if info.cluster_id != cluster_id:
            raise ClusterError(
                f"the database holds cluster {info.cluster_id} already; name another"
                " database, or run 'mpbroker cluster status' to see this one"
            ) from None
    await migrate(database, others)
    return await read_cluster(database)


async def migrate(
    database: ClusterDatabase, migrations: Sequence[Migration] | None = None
) -> list[Migration]:
    """Apply the migrations that the database does not have yet; return them.

    Raises:
        ClusterError: another `migrate` is running, or the database has no cluster.
    """
    known = load_migrations() if migrations is None else list(migrations)

    async def apply(connection: Connection) -> list[Migration]:
        # Do not wait for this lock: CREATE INDEX CONCURRENTLY waits for all waiting
        # sessions, so it would wait for this one for ever.
        if not await connection.fetchval(
            "SELECT pg_try_advisory_lock(hashtext($1))", _ONE_AT_A_TIME
        ):
            raise ClusterError("another 'mpbroker cluster migrate' is running")
        try:
            done = await connection.fetchval(
                "SELECT coalesce(max(version), 0) FROM mpbroker.migration"
            )
            applied = [each for each in known if each.version > done]
            for each in applied:
                await _apply(connection, each)
            return applied
        finally:
            if not connection.is_closed():
                await connection.execute("SELECT pg_advisory_unlock_all()")

    await read_cluster(database)
    # The time limit is long enough to make an index, and to get a table's lock by many
    # tries.
    return await database.run(apply, timeout_s=_LONGEST_S)


async def _apply(connection: Connection, migration: Migration) -> None:
    if migration.is_concurrent:
        await connection.execute("SET statement_timeout = 0")
        # Drop indexes that an earlier try has left unfinished.
        for name in await connection.fetch(_INVALID_INDEXES):
            await connection.execute(f"DROP INDEX CONCURRENTLY {name['index']}")
        await connection.execute(migration.text)
        await _note(connection, migration)
        return
    async with connection.transaction():
        await connection.execute(_LOCK_TIMEOUT)
        await connection.execute(migration.text)
        await _note(connection, migration)


_INVALID_INDEXES: Final = """\
SELECT i.indexrelid::regclass::text AS index
FROM pg_index AS i JOIN pg_class AS c ON c.oid = i.indexrelid
WHERE NOT i.indisvalid AND c.relnamespace = 'mpbroker'::regnamespace
"""


async def _note(connection: Connection, migration: Migration) -> None:
    await connection.execute(
        "INSERT INTO mpbroker.migration (version, name) VALUES ($1, $2)",
        migration.version,
        migration.name,
    )


async def read_cluster(database: ClusterDatabase) -> ClusterInfo:
    """Read the row about the cluster, and the schema's version, from the database.

    Raises:
        ClusterError: the database has no cluster.
    """
    row = await database.row(
        "SELECT id, storage_url, usable_from,"
        " (SELECT max(version) FROM mpbroker.migration) AS schema"
        " FROM mpbroker.cluster"
    )
    return ClusterInfo(row["id"], row["storage_url"], row["schema"], row["usable_from"])


def check_cluster(
    info: ClusterInfo,
    *,
    version: int,
    cluster_id: str | None = None,
    storage_url: str | None = None,
) -> None:
    """Check that a node may work with a cluster's database.

    Args:
        info: the cluster's row in the database.
        version: the version of the schema for which the node is written.
        cluster_id: the cluster id in the node's directories; None: they are new.
        storage_url: the store to which the node would write; None: do not check it.

    Raises:
        ClusterError: the node may not; the text tells the operator what to do.
    """
    if cluster_id is not None and cluster_id != info.cluster_id:
        raise ClusterError(
            f"the database holds cluster {info.cluster_id}, and the directories of this"
            f" broker belong to cluster {cluster_id}: correct the database's URL, or"
            " name other log.dirs, or begin a cluster with this broker's topics:"
            " 'mpbroker cluster init --from-broker', in another database"
        )
    if info.schema < version:
        raise ClusterError(
            f"the database's schema has version {info.schema}, and this mpbroker needs"
            f" {version}: run 'mpbroker cluster migrate'"
        )
    if info.usable_from > version:
        raise ClusterError(
            f"the database's schema (version {info.schema}) can be used by mpbroker for"
            f" schema {info.usable_from} and newer; this one is for {version}: upgrade"
            " mpbroker"
        )
    if storage_url is not None and storage_url.rstrip("/") != info.storage_url:
        raise ClusterError(
            f"the cluster's objects are in {info.storage_url}, not in {storage_url}:"
            " correct diskless.storage.url"
        )
