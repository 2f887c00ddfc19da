"""The command that starts this program again."""

from __future__ import annotations

import os
import sys


def own_command() -> list[str]:
    """Return the command line that starts the same program again.

    Arguments that belong to one start alone (--ready-fd) are left out.
    """
    return [sys.executable, *_arguments()]


def installed_command() -> list[str]:
    """Return the command line that starts the version that is installed now.

    It is the command line of this process. A script in it is run by the Python that the
    script's first line names today: where each version is installed with a Python of
    its own, the Python of this process would import this version again.
    """
    arguments = _arguments()
    if arguments and _is_script(arguments[0]):
        return [os.path.abspath(arguments[0]), *arguments[1:]]
    return own_command()


def _is_script(path: str) -> bool:
    if path.startswith("-") or not os.access(path, os.X_OK):
        return False
    try:
        with open(path, "rb") as file:
            first = file.readline(256)
    except OSError:
        return False
    # With "env" the Python that is found may differ from the one that ran us.
    return first.startswith(b"#!/") and b"/env " not in first


def _arguments() -> list[str]:
    kept, arguments = [], iter(sys.orig_argv[1:])
    for argument in arguments:
        if argument == "--ready-fd":
            next(arguments, None)
        elif not argument.startswith("--ready-fd="):
            kept.append(argument)
    return kept
