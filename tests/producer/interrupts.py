"""Interrupts a test where a signal's handler may: Ctrl-C, an alarm."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class InterruptedAt:
    """Interrupts at the nth point at which Python looks for signals: calls' ends.

    ``where`` says where that was; it stays empty if there were not so many.
    """

    def __init__(self, nth: int) -> None:
        self.left = nth
        self.where = ""

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        module = frame.f_globals.get("__name__", "")
        ours = module == "threading" or module.startswith("mpbroker.")
        if event not in ("call", "c_return") or not ours:
            return
        self.left -= 1
        if not self.left:
            sys.setprofile(None)
            self.where = f"{module}:{frame.f_lineno}, {frame.f_code.co_name}"
            raise KeyboardInterrupt


@contextmanager
def interrupted_at(nth: int) -> Iterator[InterruptedAt]:
    """Interrupt what is done within, once, and go on behind it."""
    interrupted = InterruptedAt(nth)
    sys.setprofile(interrupted)
    try:
        yield interrupted
    except KeyboardInterrupt:
        pass
    finally:
        sys.setprofile(None)
