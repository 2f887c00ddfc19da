"""The commands of `mpbroker ctl` that change a broker."""

from __future__ import annotations

import os
import select
import time
from typing import Any

import click

from mpbroker.cli.ctl.ctl_connection import (
    BrokerUnavailableError,
    Target,
    target_options,
    wait_for,
)
from mpbroker.cli.ctl.ctl_status import json_option
from mpbroker.cli.ctl.ctl_text import duration, plural
from mpbroker.cli.exit_codes import CliError, ExitCode
from mpbroker.cli.options import Seconds
from mpbroker.cli.output import print_json, print_table

_ROLES = (
    "processor",
    "handler",
    "acceptor",
    "coordinator",
    "housekeeper",
    "keeper",
    "console",
)


class SettingType(click.types.IntParamType):
    """A click type that parses and checks the values of one broker setting."""

    def __init__(self, setting: str) -> None:
        self._setting = setting

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        # Imported here, because the other commands do not need the table of settings.
        from mpbroker.config import BROKER_CONFIG_DEF, ConfigError

        try:
            return BROKER_CONFIG_DEF.key(self._setting).parse(str(value))
        except ConfigError as error:
            self.fail(str(error), param, ctx)


# The numbers that a control message can carry.
_NUMBER = click.IntRange(min=0, max=2**31 - 1)

wait_option = click.option(
    "--wait",
    "wait_s",
    type=Seconds(min=0, max=86400),
    default=60.0,
    show_default=True,
    help="Seconds to wait until it is done; 0: do not wait.",
)


@click.command("resize")
@click.option(
    "--handlers",
    type=SettingType("num.io.threads"),
    help="Processes that execute requests.",
)
@click.option(
    "--processors",
    type=SettingType("num.network.threads"),
    help="Processes that serve connections, for each listener.",
)
@wait_option
@target_options
def resize(
    target: Target, handlers: int | None, processors: int | None, wait_s: float
) -> int:
    """Change the numbers of processes; clients notice nothing.

    This sets num.io.threads and num.network.threads of this broker, which still count
    after the next start; `mpbroker config unset` removes them.
    """
    if handlers is None and processors is None:
        raise click.UsageError("name --handlers, --processors or both")
    target.request("resize", handlers=handlers, processors=processors)
    return _until_settled(target, wait_s)


@click.command("restart")
@click.argument("role", type=click.Choice(["processor", "handler", "acceptor"]))
@click.argument("number", metavar="[ID]", type=_NUMBER, required=False)
@wait_option
@target_options
def restart(target: Target, role: str, number: int | None, wait_s: float) -> int:
    """Replace one process, or one after another all processes of a role.

    The new process serves before the old one retires, and may have another ID.
    """
    numbers = [number]
    if number is None:
        processes = target.request("figures")["processes"]
        numbers = [each["id"] for each in processes if each["role"] == role]
    for each in numbers:
        target.request("restart", role=role, id=each)
        code = _until_settled(target, wait_s)
        if code:
            return code
    return ExitCode.OK


def _until_settled(target: Target, wait_s: float) -> int:
    if wait_s == 0:
        return ExitCode.OK
    started = time.monotonic()
    with target.connect() as client:
        figures: dict[str, Any] = {}

        def settled() -> bool:
            figures.update(client.request("figures"))
            return not figures["resizing"]

        if not wait_for(settled, wait_s):
            raise CliError(
                f"not done after {duration(wait_s)}, and still under way: see mpbroker"
                " ctl status"
            )
    roles = [each["role"] for each in figures["processes"]]
    print(
        f"{plural(roles.count('handler'), 'handler')},"
        f" {plural(roles.count('processor'), 'processor')} after"
        f" {duration(time.monotonic() - started)}"
    )
    return ExitCode.OK


@click.command("upgrade", context_settings={"ignore_unknown_options": True})
@click.argument("argv", nargs=-1, metavar="[COMMAND]...", type=click.UNPROCESSED)
@click.option(
    "--wait",
    "wait_s",
    type=Seconds(min=0, max=86400),
    default=180.0,
    show_default=True,
    help="Seconds to wait until it is done; 0: do not wait.",
)
@target_options
def upgrade(target: Target, argv: tuple[str, ...], wait_s: float) -> int:
    """Replace the running program with another version; clients stay connected.

    COMMAND, behind --, starts the other version. Without it, the command that started
    this broker is run again. The new version must first serve a request with data of
    its own. If it does not, or fails later, the old version goes on.
    """
    before = target.request("status")
    pidfd = _open_pidfd(before["pid"])  # an upgrade keeps the process id

    def look(patience_s: float) -> None:
        if pidfd is not None and _has_gone(pidfd, patience_s):
            raise BrokerUnavailableError(
                f"process {before['pid']} ended during the upgrade, and the broker with"
                " it; its log says why"
            )

    try:
        target.request("upgrade", argv=list(argv) or None)
    except BrokerUnavailableError:
        look(1)  # the broker may have ended before it answered
        raise
    if wait_s == 0:
        return ExitCode.OK
    said = ""

    def ended() -> bool:
        nonlocal said
        look(0)
        try:
            said = str(target.request("status").get("upgrade", ""))
        except BrokerUnavailableError:
            return False  # the old program has ended, the new one is starting
        return said.startswith(("done", "failed"))

    if not wait_for(ended, wait_s):
        raise CliError(
            f"the upgrade is not done after {duration(wait_s)} ({said or 'under way'});"
            " see mpbroker ctl status"
        )
    if said.startswith("failed"):
        raise CliError(f"version {before['version']} goes on; the upgrade {said}")
    print(f"upgrade {said}")
    return ExitCode.OK


@click.command("reload")
@json_option
@target_options
def reload(target: Target, as_json: bool) -> int:
    """Read the configuration file again, and apply settings that can change now.

    Processes that read a changed setting are replaced one by one.
    """
    answer = target.request("reload")
    if as_json:
        print_json(answer)
        return ExitCode.OK
    changes = [
        *((each, "applied") for each in answer["applied"]),
        *((each, "at the next start") for each in answer["needs_restart"]),
    ]
    if not changes:
        print("Nothing has changed.")
        return ExitCode.OK
    print_table(
        ["SETTING", "WAS", "IS", "WHEN"],
        [
            [each["setting"], each["from"] or None, each["to"] or None, when]
            for each, when in changes
        ],
    )
    return ExitCode.OK


@click.command("drain")
@click.option(
    "--for",
    "for_s",
    type=click.IntRange(min=0, max=86400),
    default=30,
    show_default=True,
    help="Seconds that connected clients may go on; it stops when all have left.",
)
@wait_option
@target_options
def drain(target: Target, for_s: int, wait_s: float) -> int:
    """Accept no new connections, let the others go on for a while, then stop.

    Requests that are in flight when it stops are still answered.
    """
    pid = target.request("status")["pid"]
    target.request("drain", for_s=for_s)
    return _until_gone(pid, for_s + wait_s if wait_s else 0)


@click.command("stop")
@wait_option
@target_options
def stop(target: Target, wait_s: float) -> int:
    """Stop the broker: requests in flight are answered, and logs are closed."""
    pid = target.request("status")["pid"]
    pidfd = _open_pidfd(pid)
    target.request("stop")
    return _until_gone(pid, wait_s, pidfd)


def _open_pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except OSError:  # the process has ended, or is in another container
        return None


def _has_gone(pidfd: int, wait_s: float) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(wait_s * 1000))


def _until_gone(pid: int, wait_s: float, pidfd: int | None = None) -> int:
    if not wait_s:
        return ExitCode.OK
    pidfd = _open_pidfd(pid) if pidfd is None else pidfd
    if pidfd is None:
        return ExitCode.OK
    gone = _has_gone(pidfd, wait_s)
    os.close(pidfd)
    if not gone:
        raise CliError(f"process {pid} still runs after {duration(wait_s)}")
    print(f"process {pid} has ended")
    return ExitCode.OK


@click.command("inject")
@click.argument(
    "fault",
    type=click.Choice(["kill", "stop", "continue", "slow", "fail-sync", "full-ring"]),
)
@click.argument("role", type=click.Choice(_ROLES))
@click.argument("number", metavar="ID", type=_NUMBER)
@click.option(
    "--value",
    type=_NUMBER,
    help="slow: milliseconds for each request; fail-sync: the errno; 0 ends the fault.",
)
@target_options
def inject(
    target: Target, fault: str, role: str, number: int, value: int | None
) -> int:
    """Cause a fault in one process, if the broker was started with --enable-inject.

    \b
    kill, stop, continue   send SIGKILL, SIGSTOP, SIGCONT to any process
    slow                   a handler takes longer for each request (100 ms)
    fail-sync              each fdatasync of a handler fails (EIO)
    full-ring              a processor finds the queue of requests full

    The last three faults go on until --value 0, or until the process ends.
    """
    arguments: dict[str, Any] = {"fault": fault, "role": role, "id": number}
    if value is not None:
        arguments["value"] = value
    target.request("inject", **arguments)
    return ExitCode.OK
