"""When a client asks: at times drawn beforehand, whatever becomes of the answers.

Clients in a closed loop ask when they have been answered, so a broker that pauses is
asked less, and a machine has always as much to do as it can: pauses are then mostly
what stands before a question in queues. In an open loop each question has a time at
which it is due, and its pause counts from there: those that could not be asked for a
pause that went on, they waited too (coordinated omission hides them).
"""

from __future__ import annotations

import math
import random


class Pace:
    """One client's times.

    Args:
        rate: questions a second; 0: the closed loop, in which one is always due.

    Attributes:
        due: when the next question is, seconds of time.monotonic().
    """

    def __init__(self, rng: random.Random, rate: float) -> None:
        self._rng = rng
        self._interval_s = 1 / rate if rate else 0.0
        self.due = -math.inf

    @property
    def is_open(self) -> bool:
        """Questions are asked at their times, and not after answers."""
        return self._interval_s > 0

    def begin(self, now: float) -> None:
        """Forget what is due; clients begin at different times."""
        if self._interval_s:
            self.due = now + self._rng.uniform(0, self._interval_s)

    def asked(self, patience_s: float) -> float:
        """Take the question that is due next; return since when it has been.

        Args:
            patience_s: so long the broker may wait before it answers this one; no other
                is due meanwhile, for it would stand behind it.
        """
        due = self.due
        if self._interval_s:
            self.due += patience_s + self._rng.uniform(0.5, 1.5) * self._interval_s
        return due

    def again(self, due: float) -> None:
        """A question was lost: another is asked in its place, as late as that is."""
        if self._interval_s:
            self.due = min(self.due, due)
