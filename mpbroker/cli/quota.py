"""`mpbroker quota`: list, set."""

from __future__ import annotations

from collections.abc import Sequence

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
from mpbroker.client.admin import quota_admin

_SET_HELP = """\
Set quotas for a user, a client id, both, or an address; KEY= removes a quota.

The name <default> stands for all entities that have no quota of their own.

\b
  mpbroker quota set --client-id loader producer_byte_rate=1048576
  mpbroker quota set --user '<default>' request_percentage=50
  mpbroker quota set --user alice --client-id app consumer_byte_rate=
  mpbroker quota set --ip 10.0.0.7 connection_creation_rate=10
"""
_DEFAULT = "<default>"


@click.group("quota", cls=CommandGroup)
def command() -> None:
    """List and set the quotas of clients."""


def _entity(
    user: str | None, client_id: str | None, address: str | None
) -> dict[str, str | None]:
    named = {"user": user, "client-id": client_id, "ip": address}
    return {
        kind: None if name == _DEFAULT else name
        for kind, name in named.items()
        if name is not None
    }


_user_option = click.option("--user", "-u", help="A user's name, or <default>.")
_client_option = click.option("--client-id", "-c", help="A client id, or <default>.")
_ip_option = click.option("--ip", "address", help="An address, or <default>.")


@command.command("list")
@_user_option
@_client_option
@_ip_option
@bootstrap_option
@timeout_option
@format_option
def list_quotas(
    user: str | None,
    client_id: str | None,
    address: str | None,
    bootstrap: str,
    timeout_s: float,
    output_format: str,
) -> None:
    """List all quotas, or those of the named entities."""
    with open_cluster(bootstrap, timeout_s) as cluster:
        found = quota_admin.describe_quotas(cluster, _entity(user, client_id, address))
    if output_format == "json":
        print_json([each._asdict() for each in found])
        return
    rows = [
        [
            *(_shown(each.entity, kind) for kind in ("user", "client-id", "ip")),
            key,
            f"{value:.15g}",
        ]
        for each in found
        for key, value in each.values.items()
    ]
    print_table(["USER", "CLIENT-ID", "IP", "QUOTA", "VALUE"], sorted(rows))


def _shown(entity: dict[str, str | None], kind: str) -> str:
    return (entity[kind] or _DEFAULT) if kind in entity else "-"


@command.command("set", help=_SET_HELP, short_help="Set or remove quotas.")
@click.argument("changes", nargs=-1, required=True, metavar="KEY=VALUE...")
@_user_option
@_client_option
@_ip_option
@bootstrap_option
@timeout_option
@format_option
def set_quotas(
    changes: Sequence[str],
    user: str | None,
    client_id: str | None,
    address: str | None,
    bootstrap: str,
    timeout_s: float,
    output_format: str,
) -> None:
    entity = _entity(user, client_id, address)
    if not entity:
        raise CliError(
            "no entity is named: give --user, --client-id, both, or --ip",
            ExitCode.USAGE,
        )
    wanted = dict(_change(text) for text in changes)
    with open_cluster(bootstrap, timeout_s) as cluster:
        quota_admin.alter_quotas(cluster, entity, wanted)
    if output_format == "json":
        print_json({"entity": entity, "values": wanted})
        return
    of = ", ".join(f"{kind} {name or _DEFAULT}" for kind, name in entity.items())
    for key, value in wanted.items():
        print(f"{of}: {key} " + ("removed" if value is None else f"= {value:.15g}"))


def _change(text: str) -> tuple[str, float | None]:
    key, equals, value = text.partition("=")
    try:
        if equals and key:
            return key, float(value) if value else None
    except ValueError:
        pass
    raise CliError(
        f"{text!r} is neither KEY=NUMBER nor KEY= (to remove it)", ExitCode.USAGE
    )
