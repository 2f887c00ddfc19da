"""The `mpbroker` command.

`serve` is looked for first, and parsed without click: a broker has to answer its first
request within 250 ms of exec, and the import of click alone takes a quarter of that.
All other commands use click, and each is imported when it is named.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, and return its exit code (see `mpbroker.cli.exit_codes`).

    Args:
        argv: the command's name and its arguments; None: those of sys.argv.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if None in (sys.stdin, sys.stdout, sys.stderr):
        from mpbroker.cli.standard_streams import fill_closed_streams

        fill_closed_streams()
    from mpbroker.base.distribution import (
        WrongDistributionError,
        refuse_other_distribution,
    )

    try:
        refuse_other_distribution()
    except WrongDistributionError as error:
        print(f"mpbroker: {error}", file=sys.stderr)
        return 1
    if arguments[:1] == ["serve"]:
        if argv is None:
            # Imports make no garbage; broker/broker.py enables the collector again.
            gc.disable()
        from mpbroker.cli.serve import run_serve

        return run_serve(arguments[1:])
    from mpbroker.cli.root import run

    return run(arguments)
