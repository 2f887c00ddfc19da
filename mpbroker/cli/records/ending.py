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
def finished_first() -> Iterator[None]:
    """Let the block end first if SIGINT or SIGTERM comes meanwhile.

    So records that were written are committed, too. A second signal does not wait: the
    block itself may wait, for example for the reader of a pipe.

    Raises:
        KeyboardInterrupt: a signal came meanwhile.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    told: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if told:
            raise KeyboardInterrupt
        told.append(number)

    before = {
        number: signal.signal(number, note)
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if told:
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
