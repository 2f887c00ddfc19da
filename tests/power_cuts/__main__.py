"""Cut the power of a broker's disk, and see whether it keeps what it has acknowledged.

python -m tests.power_cuts [CUTS] [--help]    or scripts/power-cuts, which sets up what
                                              is missing
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.power_cuts.broken import DEFECTS
from tests.power_cuts.campaign import Cuts
from tests.power_cuts.disk import NoDiskError, enter_private_mounts


def main() -> int:
    parser = argparse.ArgumentParser(prog="power-cuts", description=__doc__)
    parser.add_argument("cuts", type=int, nargs="?", default=1000)
    parser.add_argument("--seed", type=int, default=1, help="of all that is random")
    parser.add_argument("--minutes", type=float, default=0.0, help="at most; 0: no end")
    parser.add_argument("--defect", default="", choices=["", *DEFECTS])
    parser.add_argument("--fast-commit", action="store_true", help="mkfs -O that")
    parser.add_argument("--keep", type=Path, help="copy what is on the disk to there")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="power-cuts-"))
    began = time.monotonic()
    until = began + arguments.minutes * 60 if arguments.minutes else float("inf")
    try:
        enter_private_mounts()
        cuts = Cuts(
            folder,
            arguments.seed,
            defect=arguments.defect,
            keep=arguments.keep,
            fast_commit=arguments.fast_commit,
        )
        cuts.run(arguments.cuts, until)
    except NoDiskError as error:
        print(f"no power can be cut here: {error}", file=sys.stderr)
        return 3
    else:
        if cuts.complaints:
            print(cuts.log_tail())
        for text in cuts.complaints:
            print("NOT KEPT:", text)
        print(
            f"{cuts.cuts} power cuts, {cuts.acknowledged} acknowledged answers,"
            f" {len(cuts.complaints)} not kept, {time.monotonic() - began:.0f} s,"
            f" seed {arguments.seed}"
        )
        return 1 if cuts.complaints else 0
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
