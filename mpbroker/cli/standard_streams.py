"""Standard streams that were closed, are full, or have nobody who reads them."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Final

# What each of 0, 1 and 2 is opened for if it is closed. The first two the wrong way
# round: reading the one and writing the other then fails as if it still were closed.
# Of what stderr does not take, nobody could be told.
_MODES: Final = (
    ("stdin", os.O_WRONLY, "r"),
    ("stdout", os.O_RDONLY, "w"),
    ("stderr", os.O_WRONLY, "w"),
)


def fill_closed_streams() -> None:
    """Put /dev/null where a standard stream is closed (`<&-`, `>&-`).

    Python has None there, and the first sockets and files that are opened would be
    0, 1 and 2, where whoever writes to stderr finds them.
    """
    for fd, (name, flags, mode) in enumerate(_MODES):
        if getattr(sys, name) is not None:
            continue
        try:
            os.fstat(fd)
            continue  # taken by what was opened since
        except OSError:
            null = os.open(os.devnull, flags)
        if null != fd:
            os.dup2(null, fd)
            os.close(null)
        # For the process's life, and it is the process that ends it.
        stream = open(fd, mode, errors="backslashreplace", closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)


def abandon(fd: int) -> None:
    """Point 1 or 2 at /dev/null: what is still buffered is not to be written.

    Python would flush it once more at exit, complain, and make it exit code 120.
    """
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, fd)
    os.close(null)


def complain(message: str) -> None:
    """Write one line to stderr, if that can be written."""
    try:
        print(f"mpbroker: {message}", file=sys.stderr, flush=True)
    except OSError:
        with suppress(OSError):
            abandon(2)
