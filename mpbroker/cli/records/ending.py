"""Let SIGTERM end a command in order: it leaves its group, or ends its lines."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def until_told() -> Iterator[None]:
    """End the block, without an error, at SIGINT or SIGTERM.

    A process that died of SIGTERM would leave its partitions to nobody until its
    session ends.
    """
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, _interrupt) if is_main else None
    try:
        yield
    except KeyboardInterrupt:
        pass
    finally:
        if is_main:
            signal.signal(signal.SIGTERM, before)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@contextmanager
def told_to_end() -> Iterator[int]:
    """Let SIGTERM make a file descriptor readable, and interrupt nothing.

    So a command that polls it can finish what it has begun.
    """
    told = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    is_main = threading.current_thread() is threading.main_thread()
    before = (
        signal.signal(signal.SIGTERM, lambda *_: os.eventfd_write(told, 1))
        if is_main
        else None
    )
    try:
        yield told
    finally:
        if is_main:
            signal.signal(signal.SIGTERM, before)
        os.close(told)
