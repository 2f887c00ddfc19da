"""`mpbroker ctl doctor`: check what a running broker depends on."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from typing import Any, Final

import click

from mpbroker.base.errors import MpbrokerError
from mpbroker.cli.ctl.ctl_connection import Target, target_options
from mpbroker.cli.ctl.ctl_host_checks import (
    FAIL,
    OK,
    WARN,
    Finding,
    check_clock,
    check_disk_space,
    check_file_system,
    check_open_files,
    check_permissions,
    check_python,
    check_remove_ipc,
    check_shared_memory,
    check_sync,
)
from mpbroker.cli.ctl.ctl_status import json_option
from mpbroker.cli.exit_codes import ExitCode
from mpbroker.cli.output import print_json

_DIAL_S: Final = 3.0
_STYLES: Final = {OK: "green", WARN: "yellow", FAIL: "red"}


@click.command("doctor")
@json_option
@target_options
def doctor(target: Target, as_json: bool) -> int:
    """Check the broker's addresses, limits, clock, disks and shared memory.

    It connects to the addresses that clients are told, and writes 64 KiB into each data
    directory to time the disk. To a remote store it writes an object, reads it and
    deletes it. Exits with 1 if a check fails; a warning is no failure.
    """
    state = target.request("status")
    findings = list(_examine(state))
    if as_json:
        print_json([finding._asdict() for finding in findings])
    else:
        for finding in findings:
            level = click.style(f"{finding.level:<4}", fg=_STYLES[finding.level])
            click.echo(f"{level}  {finding.check}: {finding.text}")
            if finding.level != OK and finding.fix:
                click.echo(f"      {finding.fix}")
    failed = any(finding.level == FAIL for finding in findings)
    return ExitCode.ERROR if failed else ExitCode.OK


def _examine(state: dict[str, Any]) -> Iterator[Finding]:
    yield from _check_broker(state)
    for name, address in state["listeners"].items():
        yield from check_listener(name, address)
    connections = sum(each["connections"] for each in state["processors"])
    yield check_open_files(state["pid"], connections)
    yield check_shared_memory()
    yield from check_clock(state.get("clock_jumps"))
    for path in state["log_dirs"]:
        yield check_file_system(path)
        yield check_permissions(path)
        yield check_disk_space(path)
        yield check_sync(path)
    if state.get("remote") is not None:
        # Imported here: most brokers have no remote store.
        from mpbroker.cli.ctl.ctl_remote_check import check_copies, check_remote_store

        remote = state["remote"]
        yield check_remote_store(remote["url"], state["cluster_id"], state["pid"])
        yield check_copies(remote)
    remove_ipc = check_remove_ipc(state["limits"]["uid"])
    if remove_ipc is not None:
        yield remove_ipc
    yield from check_python(
        state.get("python", "?"), state.get("core", "?"), os.uname().machine
    )


def _check_broker(state: dict[str, Any]) -> Iterator[Finding]:
    if state["phase"] == "SERVING":
        yield Finding(OK, "broker", f"version {state['version']} serves")
    else:
        yield Finding(
            FAIL, "broker", f"it does not serve: {state['phase']}", "see its log"
        )
    if state.get("why_closed"):
        yield Finding(
            WARN,
            "partitions",
            state["why_closed"],
            "wait; the log tells the progress",
        )
    for child in state["processes"]:
        if child["restarts"]:
            yield Finding(
                WARN,
                f"{child['role']} {child['id']}",
                f"died {child['restarts']} times, the last time of"
                f" {child['last_exit']}",
                "mpbroker ctl blackbox shows its last events",
            )
    for path in state.get("offline_log_dirs", ()):  # an older version has none
        yield Finding(
            FAIL,
            path,
            "offline: it is not there, or cannot be read; its partitions are refused",
            "bring it back, and start the broker again; or give it up: take it out of"
            " log.dirs, and call mpbroker log-dirs forget",
        )
    for topic, partition in state["offline"]:
        yield Finding(
            FAIL,
            f"{topic}-{partition}",
            "offline: its disk has failed",
            "see the log; replace the disk, start the broker again",
        )


def _check_socket_file(check: str, path: str) -> Finding:
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(_DIAL_S)
            sock.connect(path)
    except OSError as error:
        told = f"cannot connect to {path}: {error.strerror or error}"
        return Finding(FAIL, check, told, "restart the broker, which makes the socket")
    return Finding(OK, check, f"{path} accepts connections")


def check_listener(name: str, address: str) -> Iterator[Finding]:
    """Check a listener: connect to it, and to the addresses that it tells clients."""
    from mpbroker.client.addresses import Address, parse_addresses
    from mpbroker.client.cluster import Cluster

    check = f"listener {name}"
    if address.startswith("unix:"):
        yield _check_socket_file(check, address.removeprefix("unix:"))
        return
    try:
        with Cluster(parse_addresses(address), _DIAL_S) as cluster:
            brokers = cluster.metadata([]).brokers
    except MpbrokerError as error:
        yield Finding(
            FAIL, check, f"{address} does not serve: {error}", "mpbroker ctl status"
        )
        return
    for broker in brokers:
        told = Address(broker.host, broker.port)
        try:
            with Cluster([told], _DIAL_S) as cluster:
                cluster.metadata([])
        except MpbrokerError as error:
            yield Finding(
                FAIL,
                check,
                f"clients are told {told}, and it does not answer here: {error}",
                "set advertised.listeners to a name that the clients can resolve and"
                " reach",
            )
        else:
            yield Finding(OK, check, f"clients are told {told}, and it answers")
