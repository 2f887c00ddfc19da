"""Tell a request that ends handlers from one that was only there when they were killed.

How a handler died does not say it: the kernel kills whoever needs too much memory with
the signal that an operator kills with. But what a request does it does every time, and
while nobody else dies. So the try that decides is made in peace. A request that two
handlers did not survive, the last of them killed, is held until nobody has been killed
for a while; and if another process is killed during that try or just after it, it is
made again, a few times.

An exit or any other signal comes from inside, and such a death counts at once.
"""

import math
from collections.abc import Set
from typing import Final

# Whoever kills all handlers, one after the other, has done it by then.
QUIET_S: Final = 0.1
# A client shall not wait for ever because somebody kills for ever.
LONGEST_HOLD_S: Final = 0.5
MAX_EXCUSED: Final = 4
_LOOK_S: Final = 0.001


class LastTries:
    """Requests, by slot, that may end one more handler and no second. Times in s."""

    def __init__(self) -> None:
        self._held: dict[int, float] = {}  # since when
        self._begun: dict[int, float] = {}  # when they were tried for the last time
        self._excused: dict[int, int] = {}
        self._killed_at = -math.inf

    @property
    def held(self) -> Set[int]:
        """Those that nobody executes: they wait for peace, or for a verdict."""
        return self._held.keys()

    def note_kill(self, now: float) -> None:
        """A process was killed, and no request is known to be the reason."""
        self._killed_at = now

    def is_begun(self, slot: int) -> bool:
        """Whether its last try was made."""
        return slot in self._begun

    def hold(self, slot: int, now: float) -> None:
        """Keep it for its last try; if that was begun, for what becomes of it."""
        self._held[slot] = now

    def forget(self, slot: int) -> None:
        """What is known is of an earlier request, or of no use any more."""
        self._begun.pop(slot, None)
        self._excused.pop(slot, None)

    def due(self, now: float) -> tuple[list[int], list[int]]:
        """Return those to be tried, and those to be given up; they are held no more."""
        tried, given_up = [], []
        for slot, since in list(self._held.items()):
            if slot in self._begun:
                if now - since >= QUIET_S and not self._is_excused(slot):
                    given_up.append(slot)
                    del self._held[slot]
            elif self._is_peace(since, now):
                tried.append(slot)
                del self._held[slot]
                self._begun[slot] = now
        return tried, given_up

    def _is_peace(self, since: float, now: float) -> bool:
        waited = now - max(since, self._killed_at)
        return waited >= QUIET_S or now - since >= LONGEST_HOLD_S

    def _is_excused(self, slot: int) -> bool:
        """Whether others were killed too; then its last try is still to be made."""
        excused = self._excused.get(slot, 0)
        if self._killed_at < self._begun[slot] or excused == MAX_EXCUSED:
            return False
        self._excused[slot] = excused + 1
        del self._begun[slot]
        return True

    def take_all(self) -> list[int]:
        """Hold none any more; return those that were."""
        slots = list(self._held)
        self._held.clear()
        return slots

    def due_in(self, now: float) -> float | None:
        """In how many seconds to look again; None: none is held."""
        if not self._held:
            return None
        since = min(self._held.values())
        quiet = max(since, self._killed_at) + QUIET_S
        return max(_LOOK_S, min(since + LONGEST_HOLD_S, quiet) - now)
