"""`mpbroker cluster`: init, migrate, status."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from mpbroker.cli.command_group import CommandGroup
from mpbroker.cli.exit_codes import CliError, ExitCode
from mpbroker.cli.options import format_option, timeout_option
from mpbroker.cli.output import print_json, print_table
from mpbroker.metadata.meta_properties import (
    random_uuid,
    read_meta_properties,
    uuid_to_text,
)

if TYPE_CHECKING:
    from mpbroker.cluster.database import ClusterDatabase

_DATABASE_VARIABLE: Final = "MPBROKER_CLUSTER_DATABASE_URL"
_STORES: Final = ("s3://", "gs://", "az://", "file:///")
_T = TypeVar("_T")


@click.group("cluster", cls=CommandGroup)
def command() -> None:
    """Set up and show the database of a cluster.

    Under construction: nodes have one metadata, and share no records yet. Needs
    PostgreSQL 15 or newer, and `pip install mpbroker-server[cluster]`.
    """


_database_option = click.option(
    "--database",
    "url",
    envvar=_DATABASE_VARIABLE,
    show_envvar=True,
    required=True,
    metavar="URL",
    help="postgresql://user@host/database. Put a password into the environment or into"
    " ~/.pgpass: other users can see a command line.",
)


def _run(
    url: str, timeout_s: float, work: Callable[[ClusterDatabase], Awaitable[_T]]
) -> _T:
    """Connect to the database, run ``work`` with it, and return its result.

    Raises:
        CliError: asyncpg is not installed, or the database cannot be reached.
    """
    try:
        from mpbroker.cluster.database import ClusterDatabase
    except ImportError as error:
        raise CliError(
            f"a cluster needs asyncpg ({error}):"
            " pip install 'mpbroker-server[cluster]'",
            ExitCode.UNAVAILABLE,
        ) from error
    from mpbroker.cluster.errors import DatabaseUnavailableError

    async def call() -> _T:
        async with ClusterDatabase(url, timeout_s=timeout_s) as database:
            return await work(database)

    try:
        return asyncio.run(call())
    except DatabaseUnavailableError as error:
        raise CliError(str(error), ExitCode.UNAVAILABLE) from error


def _storage_url(ctx: click.Context, param: click.Parameter, value: str) -> str:
    if not value.startswith(_STORES) or len(value.split("//", 1)[1]) == 0:
        raise click.BadParameter(
            f"{value!r} is no URL of a store: it begins with {', '.join(_STORES)}"
        )
    if "?" in value and not value.startswith("file:"):
        raise click.BadParameter(
            f"{value!r} has options: leave them out here, and set"
            " diskless.storage.endpoint and diskless.storage.region on each node"
        )
    return value.rstrip("/")


@command.command("init")
@_database_option
@click.option(
    "--storage",
    "storage_url",
    required=True,
    metavar="URL",
    callback=_storage_url,
    help="Where the cluster's records are to be: s3://bucket/prefix, gs://, az://.",
)
@click.option(
    "--from-broker",
    "log_dir",
    metavar="DIRECTORY",
    type=click.Path(exists=True, file_okay=False),
    help="The first of log.dirs of a broker that is to be the first node: the cluster"
    " takes its id now, and its topics, settings, users and ACLs at its next start.",
)
@timeout_option
@format_option
def init(
    url: str,
    storage_url: str,
    log_dir: str | None,
    timeout_s: float,
    output_format: str,
) -> None:
    """Make a new cluster in an empty database."""
    cluster_id = _cluster_id(log_dir)

    async def work(database: ClusterDatabase) -> dict[str, object]:
        from mpbroker.cluster.migrations import create_cluster

        info = await create_cluster(database, cluster_id, storage_url)
        return {
            "cluster": info.cluster_id,
            "storage": info.storage_url,
            "schema": info.schema,
        }

    made = _run(url, timeout_s, work)
    if output_format == "json":
        print_json(made)
    else:
        print(f"Cluster {made['cluster']} is ready (schema {made['schema']}).")


def _cluster_id(log_dir: str | None) -> str:
    """Return the id for a new cluster: from a broker's directory, or a random one."""
    if log_dir is None:
        return uuid_to_text(random_uuid())
    found = read_meta_properties(log_dir)
    if found is None:
        raise CliError(
            f"{log_dir} has no meta.properties: no broker has used it",
            ExitCode.USAGE,
        )
    return found.cluster_id


@command.command("migrate")
@_database_option
@timeout_option
@format_option
def migrate(url: str, timeout_s: float, output_format: str) -> None:
    """Bring the database's schema to this version of mpbroker.

    Run it before the first node of a new version is started. Nodes of the version
    before go on working.
    """

    async def work(database: ClusterDatabase) -> list[str]:
        from mpbroker.cluster import migrations

        return [
            f"{each.version:04} {each.name}"
            for each in await migrations.migrate(database)
        ]

    applied = _run(url, timeout_s, work)
    if output_format == "json":
        print_json({"applied": applied})
    else:
        print("\n".join(applied) or "Nothing to do.")


@command.command("status")
@_database_option
@timeout_option
@format_option
def status(url: str, timeout_s: float, output_format: str) -> None:
    """Show a cluster's nodes, and how safe its commits are.

    A node is live as long as it renews its lease, which takes 6 seconds to end.
    """

    async def work(database: ClusterDatabase) -> dict[str, Any]:
        from mpbroker.cluster.cluster_status import read_status

        return await read_status(database)

    found = _run(url, timeout_s, work)
    if output_format == "json":
        print_json(found)
        return
    print(f"Cluster {found['cluster']}, objects in {found['storage']}")
    print(f"Schema {found['schema']} of {found['newest_schema']}, {found['server']}")
    for warning in found["warnings"]:
        print(f"Warning: {warning}")
    if not found["nodes"]:
        print("No node has joined yet.")
        return
    print()
    print_table(
        ("ID", "STATE", "EPOCH", "RACK", "SHARDS", "VERSION", "LISTENERS"),
        [
            (
                *(node["id"], "live" if node["is_live"] else "gone", node["epoch"]),
                *(node["rack"], node["shards"], node["version"]),
                ",".join(node["listeners"]),
            )
            for node in found["nodes"]
        ],
    )
