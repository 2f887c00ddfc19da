"""Fuzz a broker over its socket: python -m tests.fuzz --seconds 60."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.fuzz.campaign import GROWTH_BYTES, Campaign, FuzzFailureError
from tests.support.broker import Broker


def main(argv: Sequence[str]) -> int:
    """Run one campaign; return the exit code: 1 if something broke."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
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
    seed = int(time.time()) if arguments.seed is None else arguments.seed
    with tempfile.TemporaryDirectory(prefix="mpbroker-fuzz-") as directory:
        broker = Broker(Path(directory) / "data")
        broker.start()
        growth_bytes = arguments.growth_mib << 20
        campaign = Campaign(broker, seed, arguments.save, growth_bytes)
        try:
            count = campaign.run(arguments.seconds, arguments.first, arguments.count)
        except FuzzFailureError as error:
            broker.kill()
            print(f"FAILED: {error}", file=sys.stderr)
            return 1
        broker.stop()
    print(f"seed {seed}: {count} scenarios, nothing broke")
    for name, times in sorted(campaign.played.items()):
        print(f"  {times:6d} {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
