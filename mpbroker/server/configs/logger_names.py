"""List the names of all loggers that any process of a broker may have.

A process knows the loggers of the modules that it has imported, and no process imports
all modules. So this module searches the installed source files for loggers.
"""

from __future__ import annotations

import functools
import os
from typing import Final

import mpbroker
from mpbroker.base.logger import ROOT

# The packages that a broker's processes import.
_PACKAGES: Final = (
    "broker",
    "config",
    "coordinator",
    "exporter",
    "ipc",
    "metadata",
    "network",
    "server",
    "storage",
    "supervisor",
)
_MARK: Final = b" = get_logger(__name__)"


@functools.cache
def logger_names() -> frozenset[str]:
    """Return the names of all loggers, of the packages above them, and of the root.

    The first call reads some 2 MB.
    """
    top = os.path.dirname(mpbroker.__file__)
    names = {ROOT}
    for package in _PACKAGES:
        for directory, _, files in os.walk(os.path.join(top, package)):
            for file in files:
                path = os.path.join(directory, file)
                if file.endswith(".py") and _has_logger(path):
                    module = os.path.relpath(path, os.path.dirname(top))[: -len(".py")]
                    names |= _with_parents(module.replace(os.sep, "."))
    return frozenset(names)


def _has_logger(path: str) -> bool:
    with open(path, "rb") as file:
        return _MARK in file.read()


def _with_parents(name: str) -> set[str]:
    parts = name.split(".")
    return {".".join(parts[:depth]) for depth in range(1, len(parts) + 1)}
