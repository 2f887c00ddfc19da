"""Handle standard streams that are closed, full, or without a reader."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Final

# How descriptors 0, 1 and 2 are opened if they are closed. Standard input is opened for
# writing and standard output for reading, so that their use fails as if they were still
# closed. Standard error is opened for writing: an error there could not be told.
_MODES: Final = (
    ("stdin", os.O_WRONLY, "r"),
    ("stdout", os.O_RDONLY, "w"),
    ("stderr", os.O_WRONLY, "w"),
)


def fill_closed_streams() -> None:
    """Put /dev/null where a standard stream is closed (`<&-`, `>&-`).

    Otherwise the first sockets and files that are opened get the descriptors 0, 1 and
    2, and text for stderr would be written into them.
    """
    for fd, (name, flags, mode) in enumerate(_MODES):
        if getattr(sys, name) is not None:
            continue
        try:
            os.fstat(fd)
            continue  # another file was opened there since
        except OSError:
            null = os.open(os.devnull, flags)
        if null != fd:
            os.dup2(null, fd)
            os.close(null)
        # It stays open until the process ends.
        stream = open(fd, mode, errors="backslashreplace", closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)


def abandon(fd: int) -> None:
    """Point descriptor 1 or 2 at /dev/null, to drop the output that is still buffered.

    Otherwise Python writes this output again at exit, fails, and exits with 120.
    """
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, fd)
    os.close(null)


def complain(message: str) -> None:
    """Write a message as one line to stderr; drop it if stderr cannot be written."""
    try:
        print(f"mpbroker: {message}", file=sys.stderr, flush=True)
    except OSError:
        with suppress(OSError):
            abandon(2)
