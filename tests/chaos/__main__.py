"""Kill everything, many times, under a load that knows every answer.

python -m tests.chaos [--help]        or scripts/chaos, which sets up what is missing
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from mpbroker.ipc.compiled import IS_COMPILED
from tests.chaos.campaign import Campaign, Promises, Result, dying_command, table
from tests.chaos.stalls import LOADED, Stalls, crowd

# Net of the time in which a core, or the clients' process, stood still meanwhile.
_HANDLER = Promises(disconnects=0, pause_ms=100)
_PROCESSOR = Promises(disconnects=0, pause_ms=200)
# Of clients that ask nothing of it.
_COORDINATOR = Promises(disconnects=0, pause_ms=100)
# The shortest that a broker allows, unless it is told otherwise.
_SHORT_SESSION_MS: Final = 6000
_RESIZE = Promises(disconnects=0, pause_ms=100)
_UPGRADE = Promises(disconnects=0, pause_ms=500)
# What leaves two cores mostly idle, the clients' own work included.
_PACED_RATE: Final = 500
# By points: the role that dies, its share of the deaths, and how many points a process
# lives for, on average.
_OWN_DEATHS: Final = {
    "lines": (
        ("handler", 0.5, 1500),
        ("processor", 0.25, 1500),
        ("both", 0.25, 3000),
    ),
    "steps": (("handler", 0.5, 300), ("processor", 0.25, 300), ("both", 0.25, 600)),
}
# Of the time for all: starts, ends, and the last event of each stage have the rest.
_FOR_EVENTS: Final = 0.8


def main() -> int:
    arguments = parse(sys.argv[1:])
    began = time.monotonic()
    where = "/dev/shm" if arguments.memory else None
    folder = Path(tempfile.mkdtemp(prefix="chaos-", dir=where))
    results: list[Result] = []
    try:
        clock = Clock(arguments.minutes)
        results += timed_kills(folder / "timed", arguments, clock)
        results += own_deaths(folder / "lines", "lines", arguments, clock)
        if IS_COMPILED:
            results += own_deaths(folder / "steps", "steps", arguments, clock)
        elif arguments.steps:
            print("No self-kills by step: there is no compiled core.", file=sys.stderr)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(table(results))
    broken = [result.stage for result in results if not result.ok]
    events = sum(result.events for result in results)
    print(
        f"{events} events in {time.monotonic() - began:.0f} s:",
        f"BROKEN: {', '.join(broken)}" if broken else f"kept. {judged(arguments)}",
    )
    return 1 if broken else 0


def judged(arguments: argparse.Namespace) -> str:
    """Return what the verdict is about, and what it is not about."""
    what = (
        "Judged: no record lost, doubled, reordered or given to another; no wrong"
        " answer, no error, no disconnect, nobody stuck, nothing left behind."
    )
    if arguments.pauses or arguments.limits:
        return f"{what} Pauses, too, but for those of a killed supervisor."
    return f"{what} Not judged: how long pauses were (scripts/chaos --pauses)."


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return what the command line asks for."""
    parser = argparse.ArgumentParser(prog="chaos", description=__doc__)

    def count(name: str, default: int, what: str) -> None:
        variable = f"MPBROKER_CHAOS_{name.upper().replace('-', '_')}"
        parser.add_argument(
            f"--{name}",
            type=int,
            default=int(os.environ.get(variable, default)),
            help=f"{what} (default {default}; or ${variable})",
        )

    count("peace", 3, "seconds without any kill, to compare with")
    count("handlers", 300, "timed kills of handlers")
    count("processors", 300, "timed kills of processors")
    count("acceptors", 100, "timed kills of acceptors")
    count("coordinators", 60, "timed kills of the coordinator")
    count("resizes", 100, "resizes to random sizes from 1 to 8")
    count("upgrades", 10, "replacements of the whole broker in place")
    count("generations", 6, "replacements by another layout of memory")
    count("paced", 20, "kills of handlers, acceptors, processors, and resizes, paced")
    count("supervisors", 30, "timed kills of the supervisor")
    count("lines", 1000, "self-kills at random source lines of pure Python")
    count("steps", 1000, "self-kills at random steps of the compiled core")
    count("connections", 64, "clients")
    count("seed", 1, "of all that is random")
    parser.add_argument(
        "--minutes",
        type=float,
        default=0.0,
        help="the time for all: on a slow machine there is less of each kind, and the"
        " table says so (default 0: as long as it takes)",
    )
    parser.add_argument(
        "--rate",
        type=float,
        default=0.0,
        help="questions a second, of all clients, but for self-kills: they ask at times"
        " drawn beforehand, and pauses count from there (default 0: whenever they"
        f" are answered, but for the paced stages, at {_PACED_RATE})",
    )
    parser.add_argument(
        "--memory",
        action="store_true",
        help="the log in memory (/dev/shm): what is left are pauses without a disk",
    )
    parser.add_argument(
        "--alone",
        action="store_true",
        help="no groups and no transactions beside the clients whose pauses count",
    )
    parser.add_argument(
        "--pauses",
        action="store_true",
        help="hold pauses to what is promised, net of the machine's own; what others"
        " compute at the same time is in them, so on a quiet machine only",
    )
    parser.add_argument(
        "--limits",
        type=float,
        default=0.0,
        metavar="TIMES",
        help="hold pauses to so many times what is promised, net of the time in which"
        " the clients themselves were late, as others may compute, too. Where"
        f" the load average is above {LOADED} a core, the limit grows with it"
        " (default 0: to nothing)",
    )
    parser.add_argument(
        "--shared",
        action="store_true",
        help="with --pauses: others compute here, so that waiting for a core counts as"
        " the machine's, whoever had it; without, only that a core was away",
    )
    return parser.parse_args(argv)


class Clock:
    """Shares a time out among the stages; what one leaves, those after it have."""

    _SHARES: Final = {
        "handler": 16,
        "acceptor": 11,
        "processor": 17,
        "coordinator": 10,
        "resize": 8,
        "paced": 8,
        "upgrade": 12,
        "generation": 12,
        "supervisor": 12,
        "lines": 12,
        "steps": 8,
    }

    def __init__(self, minutes: float) -> None:
        self._ends = time.monotonic() + minutes * 60 * _FOR_EVENTS
        self._left = dict(self._SHARES) if minutes else {}

    def time_s(self, stage: str, share: float = 1.0) -> float | None:
        """How long a stage may go on; None: as long as it takes."""
        if not self._left:
            return None
        left = max(0.0, self._ends - time.monotonic())
        time_s = left * self._left[stage] * share / sum(self._left.values())
        self._left[stage] *= 1 - share + 1e-9
        return time_s


def promise(promises: Promises, arguments: argparse.Namespace) -> Promises:
    """Return what a stage is held to: the same, with the limit that was asked for."""
    times = 1.0 if arguments.pauses else arguments.limits * crowd()
    limit_ms = times * promises.pause_ms if promises.pause_ms and times else None
    return replace(promises, pause_ms=limit_ms)


def held(
    run: Callable[[Promises], Result], promises: Promises, arguments: argparse.Namespace
) -> Result:
    """Run a stage, and hold it to what is promised; others may have come meanwhile."""
    result = run(promise(promises, arguments))
    now = promise(promises, arguments)
    if now.pause_ms and now.pause_ms > (result.promises.pause_ms or 0.0):
        result.promises = now
    return result


def timed_kills(
    folder: Path, arguments: argparse.Namespace, clock: Clock
) -> list[Result]:
    """Kill processes of each kind once they have served for half a second."""
    stalls = Stalls(real_time=not arguments.shared) if arguments.pauses else None
    campaign = Campaign(
        folder,
        arguments.connections,
        arguments.seed,
        stalls=stalls,
        compares=arguments.pauses,
    )
    campaign.pace(arguments.rate)
    try:
        if stalls is not None and not stalls.are_the_cores_own:
            print("Waiting for a core counts as the machine's.", file=sys.stderr)
        if not arguments.alone:
            campaign.accompany()
        if arguments.peace:
            say(campaign.peace(arguments.peace))
        for role, count, promises in (
            ("handler", arguments.handlers, _HANDLER),
            ("acceptor", arguments.acceptors, _HANDLER),
            ("processor", arguments.processors, _PROCESSOR),
            ("coordinator", arguments.coordinators, _COORDINATOR),
        ):
            campaign.time_s = clock.time_s(role)
            if count:
                say(held(partial(campaign.kills, role, count), promises, arguments))
        campaign.time_s = clock.time_s("resize")
        if arguments.resizes:
            say(held(partial(campaign.resizes, arguments.resizes), _RESIZE, arguments))
        if not arguments.rate:
            paced_events(campaign, arguments, clock)
        campaign.time_s = clock.time_s("upgrade")
        if arguments.upgrades:
            say(
                held(
                    partial(campaign.upgrades, arguments.upgrades), _UPGRADE, arguments
                )
            )
        campaign.time_s = clock.time_s("generation")
        if arguments.generations:
            pairs = arguments.generations // 2  # the census knows one layout
            say(held(partial(campaign.generations, 2 * pairs), _UPGRADE, arguments))
        if not arguments.alone:
            say(campaign.part())
        say(campaign.leftovers())
        campaign.time_s = clock.time_s("supervisor")
        if arguments.supervisors:
            if not arguments.alone:
                campaign.accompany(_SHORT_SESSION_MS)
            say(campaign.supervisor_kills(arguments.supervisors))
            if not arguments.alone:
                say(campaign.part())
            say(campaign.leftovers())
        return campaign.results
    finally:
        campaign.close()
        if stalls is not None:
            stalls.close()


def paced_events(
    campaign: Campaign, arguments: argparse.Namespace, clock: Clock
) -> None:
    """A few of each kind while the machine has time: what pauses are the broker's."""
    count = arguments.paced
    if not count:
        return
    campaign.pace(_PACED_RATE)
    campaign.time_s = clock.time_s("paced", 0.3)
    say(held(partial(campaign.kills, "handler", count), _HANDLER, arguments))
    campaign.time_s = clock.time_s("paced", 0.3)
    say(held(partial(campaign.kills, "acceptor", count), _HANDLER, arguments))
    campaign.time_s = clock.time_s("paced", 0.5)
    say(held(partial(campaign.kills, "processor", count), _PROCESSOR, arguments))
    campaign.time_s = clock.time_s("paced")
    say(held(partial(campaign.resizes, count), _RESIZE, arguments))
    campaign.pace(0.0)


def own_deaths(
    folder: Path, points: str, arguments: argparse.Namespace, clock: Clock
) -> list[Result]:
    """Let handlers, then processors, then both die at random points.

    Args:
        folder: where the brokers' data goes.
        points: lines or steps.
        arguments: the command line's.
        clock: has the time for it.
    """
    results = []
    for role, share, mean in _OWN_DEATHS[points]:
        count = int(getattr(arguments, points) * share)
        if not count:
            continue
        go = folder / f"{role}.go"
        campaign = Campaign(
            folder / role,
            min(arguments.connections, 16),
            arguments.seed,
            command=dying_command(go, "none", role, mean, points),
        )
        promises = Promises(disconnects=0)
        # Of what is left: a half, then a half, then all.
        campaign.time_s = clock.time_s(points, 1.0 if role == "both" else 0.5)
        name = f"self-kill {role} by {points.removesuffix('s')}"
        try:
            say(campaign.own_deaths(name, count, promises, go))
            results += campaign.results
        finally:
            campaign.close()
    return results


def say(result: Result) -> None:
    """One line as soon as a stage is over."""
    verdict = "ok" if result.ok else "BROKEN: " + "; ".join(result.broken)
    verdict = "\n  ".join([verdict, *result.complaints, *result.stories])
    print(
        f"{result.stage}: {result.events} in {result.seconds:.0f} s,"
        f" {result.answers} answers, worst pause {result.worst_pause_ms:.0f} ms,"
        f" net {result.worst_net_ms:.0f} ms: {verdict}",
        file=sys.stderr,
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
