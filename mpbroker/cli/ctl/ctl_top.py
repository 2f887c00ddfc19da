"""`mpbroker ctl top`: show the load of a broker, again and again."""

from __future__ import annotations

import os
import select
import shutil
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import click

from mpbroker.cli.ctl.ctl_connection import (
    BrokerUnavailableError,
    Target,
    target_options,
)
from mpbroker.cli.ctl.ctl_connections import all_connections, seen_connections
from mpbroker.cli.ctl.ctl_rates import render
from mpbroker.cli.ctl.ctl_status import json_option, status_without_supervisor
from mpbroker.cli.ctl.ctl_text import duration
from mpbroker.cli.exit_codes import ExitCode
from mpbroker.cli.options import Seconds
from mpbroker.cli.output import print_json_line
from mpbroker.inspect.load import Look, Page, compare, cpu_seconds, idle_seconds

_BATCH_HEIGHT: Final = 10_000
_FIRST_LOOK_S: Final = 0.5

# Source: console_codes(4); xterm's ctlseqs for 1049.
_ENTER: Final = "\x1b[?1049h\x1b[?25l"
_LEAVE: Final = "\x1b[?25h\x1b[?1049l"
_HOME: Final = "\x1b[H"
_END_OF_LINE: Final = "\x1b[K"
_REST_OF_SCREEN: Final = "\x1b[J"
_BOLD: Final = "\x1b[1m"
_PLAIN: Final = "\x1b[0m"


@click.command("top")
@click.option(
    "-i",
    "--interval",
    "interval_s",
    type=Seconds(min=0.1, max=3600),
    default=1.0,
    show_default=True,
    help="Seconds between two pages.",
)
@click.option("--once", is_flag=True, help="Print one page.")
@click.option("--batch", is_flag=True, help="Print page after page, for pipes.")
@click.option(
    "-n", "--count", type=click.IntRange(min=1), help="End after so many pages."
)
@json_option
@target_options
def top(
    target: Target,
    interval_s: float,
    once: bool,
    batch: bool,
    count: int | None,
    as_json: bool,
) -> int:
    """Watch the load of processes, APIs and clients, and the bottleneck; q ends it.

    CPU is a share of one core; BUSY is the share of the time in which a process had
    something to do. With --json each page is one line. Without a terminal one page is
    printed, unless --batch, --json or --count asks for more.
    """
    on_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    once = once or not (on_terminal or batch or as_json or count)
    pages = _pages(target, min(interval_s, _FIRST_LOOK_S) if once else interval_s)
    limit = 1 if once else count
    if as_json or batch or once or not on_terminal:
        for number, (page, figures) in enumerate(pages, 1):
            if as_json:
                print_json_line(_as_json(page))
            else:
                print("\n".join(render(page, _title(figures), _BATCH_HEIGHT)))
            if number == limit:
                break
            if not as_json:
                print()
            sys.stdout.flush()
        return ExitCode.OK
    with _full_screen():
        for number, (page, figures) in enumerate(pages, 1):
            _draw(page, figures)
            if number == limit or _quits():
                break
    return ExitCode.OK


def _pages(target: Target, interval_s: float) -> Iterator[tuple[Page, dict[str, Any]]]:
    before = take_look(target)
    while True:
        deadline = time.monotonic() + interval_s
        # A key ends the wait, so that q need not wait for the interval to pass.
        while (left := deadline - time.monotonic()) > 0 and not _key_waits(left):
            pass
        after = take_look(target)
        yield compare(before, after), after.figures
        before = after


def _key_waits(timeout_s: float) -> bool:
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        time.sleep(timeout_s)
        return False
    return bool(select.select([sys.stdin], [], [], timeout_s)[0])


def take_look(target: Target) -> Look:
    """Read the figures, the connections and the CPU times of a broker.

    Raises:
        BrokerUnavailableError: the broker does not answer, and its shared memory cannot
            be read.
    """
    try:
        figures = target.request("figures")
        connections = all_connections(target)
    except BrokerUnavailableError as error:
        figures = status_without_supervisor(target, error)
        if "handlers" not in figures:
            raise
        connections = seen_connections(target) or []
    if "pid" in figures:
        supervisor = {"role": "supervisor", "id": 0, "pid": figures["pid"]}
        figures["processes"].append(supervisor | {"state": "READY", "last_exit": ""})
    pids = {child["pid"] for child in figures["processes"]}
    clients: dict[str, tuple[int, int, int]] = {}
    for each in connections:
        had = clients.get(each["peer"], (0, 0, 0))
        clients[each["peer"]] = (
            had[0] + 1,
            had[1] + each["bytes_in"],
            had[2] + each["bytes_out"],
        )
    return Look(
        figures, {pid: cpu_seconds(pid) for pid in pids}, idle_seconds(), clients
    )


def _title(figures: dict[str, Any]) -> str:
    clock = time.strftime("%H:%M:%S")
    resizing = ", resizing" if figures.get("resizing") else ""
    if figures.get("supervisor", "answers") != "answers":
        return f"mpbroker, {clock}: the supervisor does not answer"
    return f"mpbroker, {clock}: {figures['phase']}{resizing}"


def _as_json(page: Page) -> dict[str, Any]:
    return page._asdict() | {
        name: [each._asdict() for each in getattr(page, name)]
        for name in ("processes", "apis", "clients")
    }


# -- the screen ------------------------------------------------------------------------


@contextmanager
def _full_screen() -> Iterator[None]:
    """Use the terminal's whole screen; restore it at the end, also after an error."""
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    try:
        tty.setcbreak(fd)
        sys.stdout.write(_ENTER)
        yield
    finally:
        sys.stdout.write(_LEAVE)
        sys.stdout.flush()
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def _draw(page: Page, figures: dict[str, Any]) -> None:
    width, height = shutil.get_terminal_size()
    lines = [line[:width] for line in render(page, _title(figures), height - 1)]
    lines = [
        f"{_BOLD}{line}{_PLAIN}" if line.startswith(("Bottleneck", "PROCESS")) else line
        for line in lines
    ]
    sys.stdout.write(_HOME)
    sys.stdout.write("".join(f"{line}{_END_OF_LINE}\r\n" for line in lines))
    sys.stdout.write(f"{_REST_OF_SCREEN}every {duration(page.seconds)}; q ends")
    sys.stdout.flush()


def _quits() -> bool:
    pressed = ""
    while select.select([sys.stdin], [], [], 0)[0]:
        key = os.read(sys.stdin.fileno(), 64).decode(errors="replace")
        if not key:  # the terminal is closed
            return True
        pressed += key
    return "q" in pressed.lower()
