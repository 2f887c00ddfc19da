"""`mpbroker ctl blackbox`: show the last events of processes, dead or alive."""

from __future__ import annotations

from typing import Any

import click

from mpbroker.base.logger import quoted
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
from mpbroker.cli.ctl.ctl_text import duration, moment
from mpbroker.cli.exit_codes import ExitCode
from mpbroker.cli.output import print_json
from mpbroker.inspect.attach import attach
from mpbroker.inspect.deaths import describe_events, executed_request


@click.command("blackbox")
@click.option("--living", is_flag=True, help="Show processes that are alive, too.")
@json_option
@target_options
def blackbox(target: Target, living: bool, as_json: bool) -> int:
    """Show the last events of processes that died, and the requests they executed.

    If the broker is dead or hangs, this is what it published last. Exits with 10 if no
    process has died.
    """
    try:
        state = target.request("blackbox")
    except BrokerUnavailableError as error:
        state = _without_supervisor(target, error)
    if as_json:
        print_json(state)
    else:
        for death in state["deaths"]:
            _print_box(death, f"died {moment(death['at'])}: {death['reason']}")
        for each in state["living"] if living else ():
            _print_box(each, "is alive")
        if not state["deaths"]:
            print("No process has died.")
    return ExitCode.OK if state["deaths"] or living else ExitCode.NOT_FOUND


def _without_supervisor(
    target: Target, error: BrokerUnavailableError
) -> dict[str, Any]:
    found = target.found
    if found is None or found.state is None:
        raise error
    view = attach(found.pid) if found.alive else None
    warn_of_supervisor(
        {"supervisor": supervisor_state(target), "pid": found.pid}
        | ({"handlers": 1} if view is not None else {})
    )
    living: list[dict[str, Any]] = []
    for child in found.state.get("children", ()):
        if view is None:
            break
        role, number = child["role"], child["id"]
        living.append(
            child
            | {
                "request": (
                    executed_request(view.control, None, number)
                    if role == "handler"
                    else None
                ),
                "events": describe_events(view.box(role, number)),
            }
        )
    return {"deaths": found.state.get("deaths", []), "living": living}


def _print_box(box: dict[str, Any], title: str) -> None:
    print(f"{box['role']} {box['id']} (process {box['pid']}) {title}")
    request = box["request"]
    if request is not None:
        api = (
            f"{request['api']} v{request['version']}, correlation id"
            f" {request['correlation_id']}"
            if request["api"]
            else "a request"
        )
        print(
            f"  it was executing {api}: {request['bytes']} bytes of"
            f" {request['connection']}, in slot {request['slot']}, for"
            f" {duration(request['for_ms'] / 1000)}, after {request['retries']} deaths"
        )
    for event in box["events"]:
        print(
            f"  {moment(event['at'])}  {event['event']:<14} {event['detail']}".rstrip()
        )
    if box.get("last_words"):
        print(quoted(box["last_words"].rstrip()))
    print()
