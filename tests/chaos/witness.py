"""What became of a long pause: the request's own time stamps, and what happened beside.

A slot keeps the stamps of its request until the next one is published in it, and a
process its last events in its black box; the supervisor notes there whom it has reaped
and repaired after. So who looks as soon as an answer has come can tell where the time
went. All is read from outside, and nobody is asked.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from tests.chaos.clients import Pause
from tests.chaos.peek import Peek, events_in

_KEPT: Final = 64
_TOLD: Final = 12
_BEFORE_S: Final = 0.1  # what happened so long before a pause may be its reason


class Moment(NamedTuple):
    """Something that happened, and when: seconds of time.monotonic()."""

    at: float
    what: str


class Witness:
    """Tells why clients waited.

    Args:
        pid: the supervisor's, now.
    """

    def __init__(self, pid: Callable[[], int]) -> None:
        self._pid = pid
        self._noted: deque[Moment] = deque(maxlen=_KEPT)

    def note(self, what: str) -> None:
        """Something is done to the broker just now."""
        self._noted.append(Moment(time.monotonic(), what))

    def __call__(self, pause: Pause) -> Callable[[], str]:
        """Look, which takes a millisecond or two; the tale is for later."""
        stamps: dict[str, int] = {}
        boxes = b""
        # There may be no supervisor just now, or one with another layout of memory.
        with contextlib.suppress(OSError, ValueError, IndexError):
            peek = Peek(self._pid())
            try:
                stamps = peek.stamps(pause.address[1], pause.port)
                boxes = peek.boxes()
            finally:
                peek.close()
        noted = list(self._noted)

        def story() -> str:
            stages = [Moment(ns / 1e9, what) for what, ns in stamps.items()]
            events = [Moment(ns / 1e9, what) for ns, what in events_in(boxes)]
            return tell(pause, stages, [*noted, *events])

        return story


def tell(pause: Pause, stages: Iterable[Moment], beside: Iterable[Moment]) -> str:
    """One line: what came when, in milliseconds after the beginning of the pause.

    Stamps from before the question, or of the next one, are left out.
    """
    own = [
        moment
        for moment in (Moment(pause.asked_at, "asked"), *sorted(stages))
        if pause.asked_at <= moment.at <= pause.end
    ]
    others = sorted(
        moment for moment in beside if pause.begin - _BEFORE_S <= moment.at <= pause.end
    )

    def line(moments: list[Moment]) -> str:
        return ", ".join(
            f"{moment.what} {(moment.at - pause.begin) * 1000:+.0f}"
            for moment in moments
        )

    told = f"{pause.what}: {line([*own, Moment(pause.end, 'answer seen')])} ms"
    told += f" ({pause.own_s * 1000:.0f} of it the clients' own work)"
    if others:
        told += f"; beside it: {line(others[-_TOLD:])}"
    return told
