"""`mpbroker ctl status`: show the state of a broker as text or as JSON."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

import click

from mpbroker.cli.ctl.ctl_connection import (
    BrokerUnavailableError,
    Target,
    target_options,
)
from mpbroker.cli.ctl.ctl_text import duration, moment, plural, size
from mpbroker.cli.exit_codes import ExitCode
from mpbroker.cli.output import print_json, print_table
from mpbroker.inspect.attach import attach, names_of_rows
from mpbroker.inspect.cluster_figures import cluster_figures
from mpbroker.inspect.process_state import is_running, process_state
from mpbroker.inspect.remote_figures import remote_figures
from mpbroker.storage.full_directories import full_directories
from mpbroker.storage.offline_directories import offline_directories


def json_option(command: CommandT) -> CommandT:
    """Give a command --json, and --format as the commands outside ctl have it."""
    command = click.option(
        "--format",
        "output_format",
        type=click.Choice(["text", "json"]),
        expose_value=False,
        callback=_take_format,
        help="text for people (default), json as --json.",
    )(command)
    return click.option(
        "--json",
        "as_json",
        is_flag=True,
        callback=_take_json,
        help="Write one JSON document.",
    )(command)


def _take_format(
    context: click.Context, option: click.Parameter, form: str | None
) -> None:
    if form == "json":
        context.params["as_json"] = True


def _take_json(context: click.Context, option: click.Parameter, given: bool) -> bool:
    return given or bool(context.params.get("as_json"))


CommandT = TypeVar("CommandT", bound=Callable[..., object])

_SLOW_REQUEST_MS: Final = 1000.0
_STOPPED: Final = ("T", "t")
_ENDED: Final = ("Z", "X")


@click.command("status")
@json_option
@click.option(
    "-q", "--quiet", is_flag=True, help="Only exit: 0 if the broker serves, else 69."
)
@target_options
def status(target: Target, as_json: bool, quiet: bool) -> int:
    """Show processes, queues, connections, and the records that are not on disk yet.

    If the supervisor hangs or is dead, this is read from what it published and from
    shared memory, and the exit code is 69.
    """
    try:
        state = target.request("status") | {"supervisor": "answers"}
    except BrokerUnavailableError as error:
        state = status_without_supervisor(target, error)
    serves = state["supervisor"] == "answers" and state["phase"] == "SERVING"
    if not quiet:
        if as_json:
            print_json(state)
        else:
            _print_status(state)
    return ExitCode.OK if serves else ExitCode.UNAVAILABLE


def status_without_supervisor(
    target: Target, error: BrokerUnavailableError
) -> dict[str, Any]:
    """Return what is known about a broker whose supervisor does not answer.

    Raises:
        BrokerUnavailableError: ``error`` itself, if nothing is known.
    """
    found = target.found
    if found is None or found.state is None:
        raise error
    processes = [
        child | ({} if is_running(child["pid"]) else {"state": "GONE"})
        for child in found.state.get("children", ())
    ]
    state: dict[str, Any] = {
        **found.state,
        "processes": processes,
        "supervisor": supervisor_state(target),
        "why": str(error),
        "phase": "UNKNOWN",
        "uptime_s": round(time.time() - found.state.get("started", 0), 3),
    }
    state.pop("children", None)
    view = attach(found.pid) if found.alive else None
    if view is not None:
        state |= view.figures()
        names = names_of_rows(view, found.state["log_dirs"][0])
        state["power_cut"] = view.power_cut(view.rows_in_use(), names, None)
        state["full"] = full_directories(view.control, found.state["log_dirs"])
        state["offline_log_dirs"] = offline_directories(view.control, found.state)
    state["remote"] = remote_figures(found.state)
    state["cluster"] = cluster_figures(found.state)
    state["limits"] = found.state.get("limits", {})
    return state


def supervisor_state(target: Target) -> str:
    """Return the state of a supervisor that is silent: "stopped", "hangs" or "dead"."""
    if target.found is None or not target.found.alive:
        return "dead"
    state = process_state(target.pid)
    if state in _STOPPED:
        return "stopped"
    return "hangs" if state and state not in _ENDED else "dead"


# -- for people ------------------------------------------------------------------------


def warn_of_supervisor(state: dict[str, Any]) -> None:
    """Warn on stderr if the supervisor did not answer, so that figures may be old."""
    how, pid = state["supervisor"], state["pid"]
    if how == "dead":
        click.echo(
            f"The supervisor (process {pid}) is dead; this is what it published last.",
            err=True,
        )
    elif how != "answers":
        told = {"stopped": "is stopped (SIGSTOP or a debugger)", "hangs": "hangs"}[how]
        seen = (
            "read from its shared memory" if "handlers" in state else "published last"
        )
        click.echo(
            f"The supervisor (process {pid}) {told} and does not answer: until it does,"
            f" no process is started, replaced or stopped. This is {seen}.",
            err=True,
        )


def _print_status(state: dict[str, Any]) -> None:
    warn_of_supervisor(state)
    since = f"up {duration(state['uptime_s'])}, " if state["uptime_s"] > 0 else ""
    print(
        f"mpbroker {state['version']}: {state['phase']}"
        f"{' and resizing' if state.get('resizing') else ''}, {since}process"
        f" {state['pid']}, cluster {state['cluster_id']}"
    )
    # An older version has no "serving".
    for listener in state.get("serving", state["listeners"]):
        print(f"  listener     {listener}")
    print(f"  data         {', '.join(state['log_dirs'])}")
    if "handlers" in state:
        _print_queues(state)
    _print_page_cache(state.get("page_cache", {}))  # {}: an older version
    if state.get("remote") is not None:
        _print_remote(state["remote"])
    if state.get("cluster") is not None:
        _print_cluster(state["cluster"])
    if "upgrade_at" in state:
        ago = duration(max(0.0, time.time() - state["upgrade_at"]))
        print(f"  upgrade      {state['upgrade']} ({ago} ago)")
    if state.get("why_closed"):
        print(f"  CLOSED       {state['why_closed']}; see the log")
    for topic, partition in state.get("offline", ()):
        print(f"  OFFLINE      {topic}-{partition}: its disk has failed; see the log")
    unnamed = state.get("offline_partitions", 0) - len(state.get("offline", ()))
    if unnamed > 0:
        print(f"  OFFLINE      and {unnamed} more")
    for path in state.get("offline_log_dirs", ()):
        print(f"  OFFLINE      {path}: its partitions are refused; see the log")
    for path in state.get("full", ()):
        print(f"  FULL         {path}: appends are refused until there is room")
    print()
    _print_processes(state)
    if state.get("power_cut", {}).get("partitions"):
        print()
        _print_power_cut(state["power_cut"])
    for death in (
        state.get("deaths", ()) if isinstance(state.get("deaths"), list) else ()
    ):
        print(
            f"\n{death['role']} {death['id']} died {moment(death['at'])}:"
            f" {death['reason']}; see mpbroker ctl blackbox"
        )


def _print_page_cache(told: dict[str, Any]) -> None:
    if told.get("by_default"):
        print("  acks=all     does not wait for the disk: log.flush.acks.all=false")
    elif told.get("number"):
        named = ", ".join(told["topics"][:3])
        more = f" and {told['number'] - 3} more" if told["number"] > 3 else ""
        print(f"  acks=all     does not wait for the disk for {named}{more}")


def _print_remote(told: dict[str, Any]) -> None:
    print(f"  remote store {told['url']}")
    lag = "all is copied"
    if told["lag_segments"]:
        lag = (
            f"{plural(told['lag_segments'], 'segment')} of {size(told['lag_bytes'])}"
            " to be copied yet"
        )
    print(
        f"               {size(told['copied_bytes'])} in"
        f" {plural(told['copied_segments'], 'segment')} copied, {lag}"
    )
    print(
        f"               {size(told['stored_bytes'])} in the store;"
        f" {size(told['fetched_bytes'])} read, the cache has"
        f" {size(told['cache_bytes'])}{_hits(told)}"
    )
    records, metadata = (
        _ago(told[f"{what}_success_time_seconds"]) for what in ("copy", "metadata")
    )
    print(f"               last copied: records {records}, metadata {metadata}")
    if told["copy_errors"] or told["fetch_errors"]:
        print(
            f"  STORE FAILS  {plural(told['copy_errors'], 'error')} of copies,"
            f" {told['fetch_errors']} of reads; see the log"
        )


def _ago(time_s: float) -> str:
    """Return how long ago a time (in seconds since 1970) was; 0: never."""
    return f"{duration(max(0.0, time.time() - time_s))} ago" if time_s else "never"


def _print_cluster(told: dict[str, Any]) -> None:
    lease = f"its lease has {told['lease_s']:.0f} s left"
    if not told["lease_s"]:
        lease = "it has no lease: the database is away, or another node has its id"
    print(f"  cluster node {told['id']}: {lease}")
    lag = "all is copied"
    if told["lag_records"]:
        lag = f"{plural(told['lag_records'], 'record')} to be copied yet"
    print(f"  shared       {plural(told['partitions'], 'partition')}, {lag}")
    print(
        f"               {size(told['put_bytes'])} in"
        f" {plural(told['puts'], 'object')} put into {told['storage']},"
        f" {size(told['read_bytes'])} read, {size(told['buffered_bytes'])} waiting"
    )
    if told["store_errors"] or told["database_errors"]:
        print(
            f"  CALLS FAIL   {plural(told['store_errors'], 'call')} of the store,"
            f" {told['database_errors']} of the database; see the log"
        )


def _hits(told: dict[str, Any]) -> str:
    """Return the hit rate of reads from the remote store's cache, as " (97 % hits)".

    Return "" if there were no reads.
    """
    all_of_them = told["cache_hits"] + told["cache_misses"]
    if not all_of_them:
        return ""
    return f" ({100 * told['cache_hits'] / all_of_them:.0f} % hits)"


def _print_queues(state: dict[str, Any]) -> None:
    limit = state.get("limits", {}).get("queued_max_requests")
    parked = sum(handler["parked"] for handler in state["handlers"])
    connections = sum(each["connections"] for each in state["processors"])
    requests = sum(each["requests"] for each in state["processors"])
    print(f"  connections  {connections:,}")
    print(
        f"  requests     {state['ring_waiting']} waiting"
        f"{f' of at most {limit}' if limit else ''}, {parked} parked,"
        f" {requests:,} taken so far"
    )
    cut = state["power_cut"]
    if cut["partitions"]:
        oldest = (
            f", the oldest for {duration(cut['oldest_s'])}"
            if cut["oldest_s"] is not None
            else ""
        )
        print(
            f"  not on disk  {plural(cut['records'], 'record')}, about"
            f" {size(cut['bytes'])}{oldest}"
        )
    else:
        print("  not on disk  nothing")


def _print_processes(state: dict[str, Any]) -> None:
    loads = _loads(state)
    print_table(
        ["PROCESS", "ID", "PID", "STATE", "UP", "RESTARTS", "DIED OF", "NOW"],
        [
            [
                child["role"],
                child["id"],
                child["pid"],
                child["state"],
                duration(child["uptime_s"]) if "uptime_s" in child else None,
                child["restarts"],
                child["last_exit"] or None,
                loads.get((child["role"], child["id"]), ""),
            ]
            for child in sorted(
                state["processes"], key=lambda child: (child["role"], child["id"])
            )
        ],
    )


def _loads(state: dict[str, Any]) -> dict[tuple[str, int], str]:
    """Return a short text about the load of each process, by its role and id."""
    loads = {}
    for each in state.get("processors", ()):
        words = [plural(each["connections"], "connection")]
        if each["response_queue"]:
            words.append(f"{plural(each['response_queue'], 'answer')} to send")
        loads["processor", each["id"]] = ", ".join(words)
    for each in state.get("handlers", ()):
        words = [f"{each['requests']:,} done"]
        if each["parked"]:
            words.append(f"{each['parked']} parked")
        if each["busy_ms"] > _SLOW_REQUEST_MS:
            words.append(f"at one request for {duration(each['busy_ms'] / 1000)}")
        loads[each["role"], each["id"]] = ", ".join(words)
    return loads


def _print_power_cut(cut: dict[str, Any]) -> None:
    print(
        "A power cut now would lose at most these records (none that acks=all has"
        " acknowledged; the kernel writes them back by itself):"
    )
    print_table(
        ["TOPIC", "PARTITION", "RECORDS", "ABOUT", "FOR"],
        [
            [
                each["topic"],
                each["partition"] if each["partition"] >= 0 else None,
                f"{each['records']:,}",
                size(each["bytes"]),
                duration(each["age_s"]) if each["age_s"] is not None else None,
            ]
            for each in cut["worst"]
        ],
    )
    rest = cut["partitions"] - len(cut["worst"])
    if rest > 0:
        print(f"and {plural(rest, 'partition')} more")
