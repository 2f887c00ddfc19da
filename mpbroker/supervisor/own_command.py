"""How this program was started, for whoever starts it again."""

from __future__ import annotations

import os
import sys


def own_command() -> list[str]:
    """The command line, but for what belongs to that one start: the same program."""
    return [sys.executable, *_arguments()]


def installed_command() -> list[str]:
    """The command that was typed, which may be another version by now.

    A script is run as it is, by the Python that its first line names today: where each
    version is installed with a Python of its own, ours would import ours once more.
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
    # Which Python env finds may be another than the one it was given to by name.
    return first.startswith(b"#!/") and b"/env " not in first


def _arguments() -> list[str]:
    kept, arguments = [], iter(sys.orig_argv[1:])
    for argument in arguments:
        if argument == "--ready-fd":
            next(arguments, None)
        elif not argument.startswith("--ready-fd="):
            kept.append(argument)
    return kept
