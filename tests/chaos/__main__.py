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
from pathlib import Path
from typing import Final

from tests.chaos.campaign import Campaign, Promises, Result, dying_command, table
from tests.chaos.stalls import Stalls

# Net of the time in which a core, or the clients' process, stood still meanwhile.
_HANDLER = Promises(disconnects=0, pause_ms=100)
_PROCESSOR = Promises(disconnects=0, pause_ms=200)
_RESIZE = Promises(disconnects=0, pause_ms=100)
_UPGRADE = Promises(disconnects=0, pause_ms=500)
# What leaves two cores mostly idle, the clients' own work included.
_PACED_RATE: Final = 500
# Of the time for all: starts, ends, and the last event of each stage have the rest.
_FOR_EVENTS: Final = 0.8


def main() -> int:
    arguments = _arguments()
    began = time.monotonic()
    where = "/dev/shm" if arguments.memory else None
    folder = Path(tempfile.mkdtemp(prefix="chaos-", dir=where))
    results: list[Result] = []
    try:
        clock = Clock(arguments.minutes)
        results += timed_kills(folder / "timed", arguments, clock)
        results += line_deaths(folder / "lines", arguments, clock)
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
    if arguments.pauses:
        return f"{what} Pauses of handlers, processors, resizes and upgrades, too."
    return f"{what} Not judged: how long pauses were (scripts/chaos --pauses)."


def _arguments() -> argparse.Namespace:
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
    count("resizes", 100, "resizes to random sizes from 1 to 8")
    count("upgrades", 10, "replacements of the whole broker in place")
    count("generations", 6, "replacements by another layout of memory")
    count("paced", 20, "kills of handlers, acceptors, processors, and resizes, paced")
    count("supervisors", 30, "timed kills of the supervisor")
    count("lines", 1000, "self-kills at random source lines")
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
        "--pauses",
        action="store_true",
        help="hold pauses to what is promised, net of the machine's own; what others"
        " compute at the same time is in them, so on a quiet machine only",
    )
    parser.add_argument(
        "--shared",
        action="store_true",
        help="with --pauses: others compute here, so that waiting for a core counts as"
        " the machine's, whoever had it; without, only that a core was away",
    )
    return parser.parse_args()


class Clock:
    """Shares a time out among the stages; what one leaves, those after it have."""

    _SHARES: Final = {
        "handler": 16,
        "acceptor": 11,
        "processor": 17,
        "resize": 8,
        "paced": 8,
        "upgrade": 12,
        "generation": 12,
        "supervisor": 12,
        "lines": 12,
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


def _promise(promises: Promises, arguments: argparse.Namespace) -> Promises:
    if arguments.pauses:
        return promises
    return Promises(promises.disconnects, promises.errors, None)


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
    )
    campaign.pace(arguments.rate)
    try:
        if stalls is not None and not stalls.are_the_cores_own:
            print("Waiting for a core counts as the machine's.", file=sys.stderr)
        if arguments.peace:
            say(campaign.peace(arguments.peace))
        for role, count, promises in (
            ("handler", arguments.handlers, _HANDLER),
            ("acceptor", arguments.acceptors, _HANDLER),
            ("processor", arguments.processors, _PROCESSOR),
        ):
            campaign.time_s = clock.time_s(role)
            if count:
                say(campaign.kills(role, count, _promise(promises, arguments)))
        campaign.time_s = clock.time_s("resize")
        if arguments.resizes:
            say(campaign.resizes(arguments.resizes, _promise(_RESIZE, arguments)))
        if not arguments.rate:
            paced_events(campaign, arguments, clock)
        campaign.time_s = clock.time_s("upgrade")
        if arguments.upgrades:
            say(campaign.upgrades(arguments.upgrades, _promise(_UPGRADE, arguments)))
        campaign.time_s = clock.time_s("generation")
        if arguments.generations:
            pairs = arguments.generations // 2  # the census knows one layout
            say(campaign.generations(2 * pairs, _promise(_UPGRADE, arguments)))
        say(campaign.leftovers())
        campaign.time_s = clock.time_s("supervisor")
        if arguments.supervisors:
            say(campaign.supervisor_kills(arguments.supervisors))
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
    say(campaign.kills("handler", count, _promise(_HANDLER, arguments)))
    campaign.time_s = clock.time_s("paced", 0.3)
    say(campaign.kills("acceptor", count, _promise(_HANDLER, arguments)))
    campaign.time_s = clock.time_s("paced", 0.5)
    say(campaign.kills("processor", count, _promise(_PROCESSOR, arguments)))
    campaign.time_s = clock.time_s("paced")
    say(campaign.resizes(count, _promise(_RESIZE, arguments)))
    campaign.pace(0.0)


def line_deaths(
    folder: Path, arguments: argparse.Namespace, clock: Clock
) -> list[Result]:
    """Let handlers, then processors, then both die at random source lines."""
    results = []
    shares = (("handler", 0.5, 1500), ("processor", 0.25, 1500), ("both", 0.25, 3000))
    for role, share, mean_lines in shares:
        count = int(arguments.lines * share)
        if not count:
            continue
        go = folder / f"{role}.go"
        campaign = Campaign(
            folder / role,
            min(arguments.connections, 16),
            arguments.seed,
            command=dying_command(go, "none", role, mean_lines),
        )
        promises = Promises(disconnects=0)
        # Of what is left: a half, then a half, then all.
        campaign.time_s = clock.time_s("lines", 1.0 if role == "both" else 0.5)
        try:
            say(campaign.own_deaths(f"self-kill {role} by line", count, promises, go))
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
