"""Fuzz a broker over its socket: python -m tests.fuzz --seconds 60.

The time is shared by made requests (half of it), and bent ones that were recorded from
real clients (a quarter with the compiled core, a quarter in pure Python).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.fuzz.campaign import GROWTH_BYTES, Campaign, FuzzFailureError
from tests.fuzz.recorded import RecordedCampaign
from tests.fuzz.recorder import load
from tests.support.broker import Broker

# The share of the time that each has.
KINDS: Final = {"made": 0.5, "recorded": 0.25, "recorded-pure": 0.25}


def main(argv: Sequence[str]) -> int:
    """Run one campaign of each kind; return the exit code: 1 if something broke."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--only", choices=KINDS, help="one kind, for all the time")
    parser.add_argument("--seed", type=int, help="default: the time")
    parser.add_argument("--first", type=int, default=0, help="number of a scenario")
    parser.add_argument("--count", type=int, help="play so many scenarios at most")
    parser.add_argument(
        "--save", type=Path, default=Path("fuzz-failures"), help="for failing input"
    )
    parser.add_argument(
        "--growth-mib",
        type=int,
        default=GROWTH_BYTES >> 20,
        help="how much larger the broker may be afterwards",
    )
    arguments = parser.parse_args(argv)
    if arguments.seed is None:
        arguments.seed = int(time.time())
    kinds = {arguments.only: 1.0} if arguments.only else KINDS
    try:
        for kind, share in kinds.items():
            with tempfile.TemporaryDirectory(prefix="mpbroker-fuzz-") as directory:
                seconds = arguments.seconds * share
                if kind == "made":
                    _play_made(Path(directory), seconds, arguments)
                else:
                    _play_recorded(kind, Path(directory), seconds, arguments)
    except FuzzFailureError as error:
        print(f"FAILED: {error}", file=sys.stderr)
        return 1
    return 0


def _play_made(directory: Path, seconds: float, arguments: argparse.Namespace) -> None:
    broker = Broker(directory / "data")
    broker.start()
    growth_bytes = arguments.growth_mib << 20
    campaign = Campaign(broker, arguments.seed, arguments.save, growth_bytes)
    try:
        count = campaign.run(seconds, arguments.first, arguments.count)
    except FuzzFailureError:
        broker.kill()
        raise
    broker.stop()
    print(f"seed {arguments.seed}: {count} scenarios, nothing broke")
    for name, times in sorted(campaign.played.items()):
        print(f"  {times:6d} {name}")


def _play_recorded(
    kind: str, directory: Path, seconds: float, arguments: argparse.Namespace
) -> None:
    environ = {"MPBROKER_PURE_PYTHON": "1"} if kind == "recorded-pure" else {}
    made = 0

    def make_broker(config: dict[str, object]) -> Broker:
        nonlocal made
        made += 1
        return Broker(directory / f"data-{made}", config, environ=environ)

    growth_bytes = arguments.growth_mib << 20
    campaign = RecordedCampaign(
        make_broker, load(), arguments.seed, arguments.save, kind, growth_bytes
    )
    count = campaign.run(seconds, arguments.first, arguments.count)
    print(
        f"seed {arguments.seed}, {kind}: {count} volleys, {campaign.requests} requests"
        f" of real clients, bent and not; of {len(campaign.served)} APIs some were"
        " answered without an error; nothing broke"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
