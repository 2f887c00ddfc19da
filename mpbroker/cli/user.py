"""`mpbroker user`: list, set, delete."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import click

from mpbroker.cli.command_group import CommandGroup
from mpbroker.cli.exit_codes import CliError, ExitCode
from mpbroker.cli.options import (
    bootstrap_option,
    format_option,
    open_cluster,
    timeout_option,
)
from mpbroker.cli.output import print_json, print_table
from mpbroker.client.admin import scram_admin
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError

_SET_HELP = """\
Add a user for SASL SCRAM, or change the password.

The password is asked for, or is the first line of standard input if that is no
terminal. The broker gets a salted hash, never the password. A change counts from the
next login on.

\b
  mpbroker user set alice
  mpbroker user set alice --mechanism SCRAM-SHA-256 < password.txt
"""


@click.group("user", cls=CommandGroup)
def command() -> None:
    """List, add and delete users of SASL SCRAM."""


_mechanism_option = click.option(
    "--mechanism",
    "-m",
    "mechanisms",
    multiple=True,
    type=click.Choice(scram_admin.MECHANISMS, case_sensitive=False),
    help="Only this mechanism; may be repeated.  [default: both]",
)


@command.command("list")
@click.argument("names", nargs=-1, metavar="[NAME]...")
@bootstrap_option
@timeout_option
@format_option
def list_users(
    names: Sequence[str], bootstrap: str, timeout_s: float, output_format: str
) -> None:
    """List all users, or the named ones, with their mechanisms.

    Exits with 10 if a named user does not exist.
    """
    with open_cluster(bootstrap, timeout_s) as cluster, _not_found():
        users = scram_admin.list_users(cluster, sorted(set(names)))
    if output_format == "json":
        print_json([user._asdict() for user in users])
        return
    rows = [
        [user.name, mechanism, iterations]
        for user in users
        for mechanism, iterations in sorted(user.mechanisms.items())
    ]
    print_table(["USER", "MECHANISM", "ITERATIONS"], rows)


@command.command("set", help=_SET_HELP, short_help="Add a user, or set the password.")
@click.argument("name")
@_mechanism_option
@click.option(
    "--iterations",
    type=click.IntRange(4096, 16384),
    default=4096,
    show_default=True,
    help="Rounds of the hash: more make guessing harder, and each login slower.",
)
@bootstrap_option
@timeout_option
@format_option
def set_user(
    name: str,
    mechanisms: Sequence[str],
    iterations: int,
    bootstrap: str,
    timeout_s: float,
    output_format: str,
) -> None:
    # Before connecting: a connection may time out while the user types.
    password = _password()
    wanted = dict.fromkeys(mechanisms or scram_admin.MECHANISMS, iterations)
    with open_cluster(bootstrap, timeout_s) as cluster:
        for mechanism in wanted:
            scram_admin.set_password(cluster, name, mechanism, password, iterations)
            if output_format == "text":
                print(f"user {name}: {mechanism} set")
    if output_format == "json":
        print_json(scram_admin.ScramUser(name, wanted)._asdict())


def _password() -> str:
    if sys.stdin.isatty():
        asked = click.prompt("Password", hide_input=True, confirmation_prompt=True)
        return str(asked)
    try:
        password = sys.stdin.buffer.readline().decode().rstrip("\r\n")
    except UnicodeDecodeError:
        raise CliError("standard input: the password is not UTF-8") from None
    if not password:
        raise CliError(
            "standard input: its first line must be the password", ExitCode.USAGE
        )
    return password


@command.command("delete", short_help="Delete users, or one of their mechanisms.")
@click.argument("name")
@_mechanism_option
@bootstrap_option
@timeout_option
@format_option
def delete_user(
    name: str,
    mechanisms: Sequence[str],
    bootstrap: str,
    timeout_s: float,
    output_format: str,
) -> None:
    """Delete a user of SASL SCRAM, or some of the user's mechanisms.

    It counts from the next login on. Exits with 10 if there is no such user.
    """
    with open_cluster(bootstrap, timeout_s) as cluster, _not_found():
        if not mechanisms:
            (user,) = scram_admin.list_users(cluster, [name])
            mechanisms = tuple(user.mechanisms)
        gone = list(dict.fromkeys(mechanisms))
        for mechanism in gone:
            scram_admin.remove_credential(cluster, name, mechanism)
            if output_format == "text":
                print(f"user {name}: {mechanism} deleted")
    if output_format == "json":
        print_json({"name": name, "deleted": gone})


@contextmanager
def _not_found() -> Iterator[None]:
    try:
        yield
    except ApiError as error:
        if error.error_code != ErrorCode.RESOURCE_NOT_FOUND:
            raise
        raise CliError(str(error), ExitCode.NOT_FOUND) from error
