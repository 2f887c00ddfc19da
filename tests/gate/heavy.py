"""A token for heavy tests: those that keep all cores busy by themselves take turns.

What computes on all cores (a JVM, Spark, a campaign of kills) makes others late, and
two of them at once make each other late. A test with `@pytest.mark.heavy`, with one of
HEAVY_FIXTURES or in one of HEAVY_FOLDERS waits for the token before its time-out begins
to count. Light tests go on beside it.

The token is a lock on this very file: all runs in this checkout share it, the kernel
gives it back if its holder is killed, and nothing is left behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from typing import Final

import pytest

# Spark's JVM and its Python workers.
HEAVY_FIXTURES: Final = ("spark",)
# Folders of tests/: hundreds of kills under clients that ask as fast as they can.
HEAVY_FOLDERS: Final = ("chaos",)


def is_heavy(item: pytest.Item) -> bool:
    """Whether a test computes on all cores by itself."""
    folder = item.nodeid.removeprefix("tests/").partition("/")[0]
    return (
        folder in HEAVY_FOLDERS
        or not set(HEAVY_FIXTURES).isdisjoint(getattr(item, "fixturenames", ()))
        or item.get_closest_marker("heavy") is not None
    )


@contextlib.contextmanager
def token() -> Iterator[None]:
    """Hold the token; wait for it as long as others have it."""
    descriptor = os.open(__file__, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        # Not only closed: a child that the test has forked may have it, too.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)
