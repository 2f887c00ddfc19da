"""`mpbroker log-dirs`: list and forget the log directories of a broker."""

from __future__ import annotations

import os

import click

from mpbroker.cli.command_group import CommandGroup
from mpbroker.cli.exit_codes import CliError
from mpbroker.cli.options import format_option
from mpbroker.cli.output import print_json, print_table
from mpbroker.metadata.meta_properties import read_meta_properties
from mpbroker.storage.used_directories import forget, used_directories

_FORGET_HELP = """\
Give up a log directory that is gone, named by its path or its directory.id.

The partitions that were only in it begin anew, empty, in the directories that are
there. Groups and transactions whose records were in it are gone, too. A running broker
does so at once, unless the directory is still in its log.dirs: then take it out there,
and start the broker again. With tiered storage start it again, too: the start makes
partitions of what the store has of them.

\b
  mpbroker log-dirs list --data-dir /disk1/mpbroker
  mpbroker log-dirs forget --data-dir /disk1/mpbroker /disk2/mpbroker
"""


@click.group("log-dirs", cls=CommandGroup)
def command() -> None:
    """List the directories of log.dirs that have partitions; give up a lost one."""


_home_option = click.option(
    "--data-dir",
    "home",
    required=True,
    metavar="DIR",
    help="The first directory of log.dirs.",
)


@command.command("list")
@_home_option
@format_option
def list_directories(home: str, output_format: str) -> None:
    """List the directories that have partitions, and their state.

    A directory is there, or it is not. The first one is not listed.
    """
    found = used_directories(_checked(home))
    if output_format == "json":
        print_json([each._asdict() for each in found])
        return
    rows = [
        [each.path, each.directory_id, "there" if each.is_there else "NOT THERE"]
        for each in found
    ]
    print_table(["PATH", "DIRECTORY ID", "STATE"], rows)


@command.command("forget", help=_FORGET_HELP, short_help="Give up a lost directory.")
@_home_option
@click.option("--yes", is_flag=True, help="Do it without asking.")
@click.argument("directory")
def forget_directory(home: str, directory: str, yes: bool) -> None:
    home = _checked(home)
    if not yes:
        click.confirm(f"Give up all partitions in {directory}?", abort=True, err=True)
    gone = forget(home, directory)
    click.echo(
        f"{gone.path} with directory.id={gone.directory_id} is given up: partitions"
        " that were only there begin anew, empty, or with what the remote store has."
        " If it is still in log.dirs, take it out; then, and with tiered storage, start"
        " the broker again."
    )


def _checked(home: str) -> str:
    """Return the absolute path of a first log directory.

    Raises:
        CliError: it is none.
    """
    path = os.path.abspath(home)
    if read_meta_properties(path) is None:
        raise CliError(
            f"--data-dir {home} has no meta.properties: name the first directory of"
            " log.dirs, which has the metadata log"
        )
    return path
