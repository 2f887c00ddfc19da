"""Tell a request that ends handlers from one that is only executed when they die.

The kind of death does not tell: the kernel ends a process that needs too much memory by
the same signal that an operator uses, SIGKILL. But a guilty request ends its handler
every time, also while no other process dies. So the decisive try is made in quiet. When
two handlers have died with a request, the second by SIGKILL, the request is held until
no process has been killed for a while, and then tried for the last time. If another
process is killed during that try or just after it, the try is repeated, a few times.

An exit or any other signal comes from within the handler; such a death counts at once.
"""

import math
from collections.abc import Set
from typing import Final

# An operator's script that kills all handlers, one by one, has ended by then.
QUIET_S: Final = 0.1
# A bound for the client's wait, if processes are killed all the time.
LONGEST_HOLD_S: Final = 0.5
MAX_EXCUSED: Final = 4
_LOOK_S: Final = 0.001


class LastTries:
    """Requests, by slot, whose next death of a handler is their last. Times in s."""

    def __init__(self) -> None:
        self._held: dict[int, float] = {}  # since when
        self._begun: dict[int, float] = {}  # when they were tried for the last time
        self._excused: dict[int, int] = {}
        self._killed_at = -math.inf

    @property
    def held(self) -> Set[int]:
        """The slots that no handler executes now: they wait for quiet, or a verdict."""
        return self._held.keys()

    def note_kill(self, now: float) -> None:
        """Note that a process was killed, and no request is known to be the reason."""
        self._killed_at = now

    def is_begun(self, slot: int) -> bool:
        """Whether a request's last try has been made."""
        return slot in self._begun

    def hold(self, slot: int, now: float) -> None:
        """Keep a request until its last try; if that was made, until the verdict."""
        self._held[slot] = now

    def forget(self, slot: int) -> None:
        """Forget what is known of a slot: it was of an earlier request."""
        self._begun.pop(slot, None)
        self._excused.pop(slot, None)

    def due(self, now: float) -> tuple[list[int], list[int]]:
        """Return the slots to be tried now and those to give up; release both."""
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
        """Whether other processes were killed, too; then the last try is repeated."""
        excused = self._excused.get(slot, 0)
        if self._killed_at < self._begun[slot] or excused == MAX_EXCUSED:
            return False
        self._excused[slot] = excused + 1
        del self._begun[slot]
        return True

    def take_all(self) -> list[int]:
        """Return all held slots and release them."""
        slots = list(self._held)
        self._held.clear()
        return slots

    def due_in(self, now: float) -> float | None:
        """Return in how many seconds to look again; None: no slot is held."""
        if not self._held:
            return None
        since = min(self._held.values())
        quiet = max(since, self._killed_at) + QUIET_S
        return max(_LOOK_S, min(since + LONGEST_HOLD_S, quiet) - now)
