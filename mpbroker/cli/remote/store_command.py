"""`mpbroker store`: check a remote store."""

from __future__ import annotations

import click

from mpbroker.cli.command_group import CommandGroup
from mpbroker.cli.exit_codes import CliError, ExitCode


@click.group("store", cls=CommandGroup)
def command() -> None:
    """Check the remote store of a broker (tiered storage)."""


@command.command("check")
@click.option(
    "--from",
    "url",
    required=True,
    metavar="URL",
    help="The store, as in remote.storage.url.",
)
@click.option("--repair", is_flag=True, help="Delete objects that no manifest names.")
@click.option("--yes", is_flag=True, help="Delete them without asking.")
@click.option(
    "--contents", is_flag=True, help="Read all copied segments, and compare checksums."
)
def check_command(url: str, repair: bool, yes: bool, contents: bool) -> int:
    """Compare the objects of a store with the manifests that name them.

    The broker may run. Sizes are compared; with --contents also the checksums of what
    the store has, which reads all of it. An object that is missing or damaged cannot be
    repaired; restore it from a backup or an older version in the store. Objects that no
    manifest names only cost money; --repair deletes them.

    Exits with 1 if something was found and not repaired.
    """
    try:
        from mpbroker.storage.remote.object_store import ObjectStore
    except ModuleNotFoundError as error:
        raise CliError(
            f"{error.name} is missing: pip install 'mpbroker-server[tiered]'"
        ) from error
    from mpbroker.cli.remote.store_check import check

    store = ObjectStore(url)
    found = check(store, contents=contents)
    for line in found.damage:
        click.echo(line)
    for key in found.orphans:
        click.echo(f"{key}: no manifest names it")
    click.echo(
        f"{found.segments} copied segments, {len(found.damage)} damaged or missing"
        f" objects, {len(found.orphans)} objects without a manifest"
    )
    left = bool(found.orphans)
    if left and repair:
        question = f"Delete {len(found.orphans)} objects?"
        if yes or click.confirm(question):
            store.delete(found.orphans)
            left = False
    return ExitCode.ERROR if found.damage or left else ExitCode.OK
