"""Kill the nodes of a cluster, and see whether a record or an offset is lost.

python -m tests.cluster_faults [DEATHS] [--help]    or scripts/cluster-faults, which
                                                    sets up what is missing
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

from mpbroker.ipc.named_segment import remove_leftovers
from mpbroker.testing.postgresql import programs, what_lacks
from tests.cluster_faults.campaign import Campaign


def main() -> int:
    parser = argparse.ArgumentParser(prog="cluster-faults", description=__doc__)
    parser.add_argument("deaths", type=int, nargs="?", default=200, help="of nodes")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--rate", type=int, default=200, help="records a second")
    parser.add_argument("--calm", type=float, default=5.0, help="longest s between two")
    parser.add_argument("--keep", type=Path, help="move all files to there")
    arguments = parser.parse_args()
    if programs() is None:
        print(f"cluster-faults {what_lacks()}", file=sys.stderr)
        return 3
    folder = Path(tempfile.mkdtemp(prefix="cluster-faults-"))
    began = time.monotonic()
    print(f"seed {arguments.seed}", flush=True)
    campaign = Campaign(
        folder, arguments.seed, arguments.rate, lambda line: print(line, flush=True)
    )
    try:
        campaign.run(arguments.deaths, arguments.calm)
    finally:
        if arguments.keep:
            shutil.move(folder, arguments.keep)
        shutil.rmtree(folder, ignore_errors=True)
        remove_leftovers()
    ledger, harmed = campaign.ledger, campaign.cluster
    for text in ledger.complaints:
        print("BROKEN:", text)
    kinds = ", ".join(
        f"{kind} {count}" for kind, count in sorted(harmed.deaths.items())
    )
    print(f"deaths: {kinds}")
    pauses = ", ".join(
        f"{name} {each.longest_s:.1f} s" for name, each in campaign.pauses.items()
    )
    print(f"longest pauses: {pauses}")
    print(
        f"{harmed.node_deaths} nodes died, {campaign.replaced} members were replaced,"
        f" {ledger.records()} records acknowledged, {ledger.checked} read and compared,"
        f" {campaign.answers} answers with offsets of groups,"
        f" {len(ledger.complaints)} complaints, {time.monotonic() - began:.0f} s, seed"
        f" {arguments.seed}"
    )
    return 1 if ledger.complaints else 0


if __name__ == "__main__":
    sys.exit(main())
