"""`mpbroker ctl connections`: list the connections of a broker's clients."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import click

from mpbroker.cli.ctl.ctl_connection import (
    BrokerUnavailableError,
    Target,
    target_options,
)
from mpbroker.cli.ctl.ctl_status import (
    json_option,
    supervisor_state,
    warn_of_supervisor,
)
from mpbroker.cli.ctl.ctl_text import duration, size
from mpbroker.cli.exit_codes import ExitCode
from mpbroker.cli.options import Seconds
from mpbroker.cli.output import print_json, print_table
from mpbroker.inspect.attach import attach

_STATES = ("READING", "IN_FLIGHT", "SENDING")


@click.command("connections")
@click.option(
    "--peer", metavar="PATTERN", help="Only clients whose address matches (* and ?)."
)
@click.option("--processor", type=int, help="Only connections of this processor.")
@click.option(
    "--state",
    type=click.Choice(_STATES, case_sensitive=False),
    help="Only connections in this state.",
)
@click.option(
    "--idle",
    "idle_s",
    type=Seconds(min=0),
    help="Only connections that were idle for so many seconds.",
)
@json_option
@target_options
def connections(
    target: Target,
    peer: str | None,
    processor: int | None,
    state: str | None,
    idle_s: float | None,
    as_json: bool,
) -> int:
    """List client connections: state, bytes, age, and the time without traffic.

    READING: waits for a request. IN_FLIGHT: the handlers have a request of it. SENDING:
    the response is being sent. IN and OUT leave out the request and the response that
    are under way. Exits with 10 if no connection matches.
    """
    try:
        every = all_connections(target)
    except BrokerUnavailableError:
        seen = seen_connections(target)
        if seen is None:
            raise
        every = seen
        warn_of_supervisor(
            {"supervisor": supervisor_state(target), "pid": target.pid, "handlers": ()}
        )
    found = [
        each
        for each in every
        if (peer is None or fnmatchcase(each["peer"], peer))
        and (processor is None or each["processor"] == processor)
        and (state is None or each["state"] == state)
        and (idle_s is None or each["idle_s"] >= idle_s)
    ]
    if as_json:
        print_json(found)
    else:
        print_table(
            ["ROW", "CLIENT", "PROCESSOR", "STATE", "IN", "OUT", "AGE", "IDLE"],
            [
                [
                    each["row"],
                    _address(each),
                    each["processor"],
                    each["state"],
                    size(each["bytes_in"]),
                    size(each["bytes_out"]),
                    duration(each["age_s"]),
                    duration(each["idle_s"]),
                ]
                for each in found
            ],
        )
    return ExitCode.OK if found else ExitCode.NOT_FOUND


def all_connections(target: Target) -> list[dict[str, Any]]:
    """Ask the supervisor for all open connections; return a dictionary for each.

    Raises:
        BrokerUnavailableError: the supervisor does not answer.
    """
    with target.connect() as client:
        found: list[dict[str, Any]] = []
        first = 0
        while first >= 0:
            answer = client.request("connections", **{"from": first})
            found += answer["connections"]
            first = answer["more_from"]
        return found


def seen_connections(target: Target) -> list[dict[str, Any]] | None:
    """Return the open connections from shared memory; None if it cannot be read."""
    view = attach(target.pid) if target.pid else None
    return None if view is None else view.connections(0, 1 << 30)[0]


def _address(connection: dict[str, Any]) -> str:
    host = connection["peer"]
    return (
        f"[{host}]:{connection['port']}"
        if ":" in host
        else f"{host}:{connection['port']}"
    )
