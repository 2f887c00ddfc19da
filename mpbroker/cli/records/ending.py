"""Let SIGTERM end a command as Ctrl-C does, so that it leaves its group."""

from __future__ import annotations

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
