"""Another version of the broker, for upgrades: it works, or fails where it is told to.

python -m tests.supervisor.newcomer VERSION FAULT serve ...
"""

from __future__ import annotations

import os
import sys

import mpbroker


def main() -> int:
    version, fault = sys.argv[1:3]
    del sys.argv[1:3]
    mpbroker.__version__ = version
    is_trial = os.environ.get("_MPBROKER_TAKEOVER", "").startswith("trial")
    if fault == "trial" and is_trial:
        sys.exit("the newcomer does not even start")
    if fault == "layout":
        from mpbroker.supervisor import takeover

        takeover.LAYOUT_VERSION += 1
    if fault == "handler" and not is_trial:
        from mpbroker.server.request_handler import RequestHandler

        RequestHandler.run = lambda self: os._exit(3)
    if fault == "takeover" and not is_trial:
        from mpbroker.supervisor import pool_settings

        def broken(*_: object) -> None:
            raise RuntimeError("cannot take over")

        pool_settings.PoolSettings.sizes = broken
    from mpbroker.cli import main

    return main()


if __name__ == "__main__":
    sys.exit(main())
