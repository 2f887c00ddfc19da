"""A process that has no descriptor left, or hardly any."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """Have no more than so many that could be opened."""
    gc.collect()  # what earlier tests have left open must give us none
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.dup(0)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(taken[0] + 100, 512), hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        for _ in range(count):
            os.close(taken.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in taken:
            os.close(fd)
