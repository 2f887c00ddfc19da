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
    """Decides when to try or give up requests with which two handlers have died.

    A request is named by its slot (its entry in shared memory). Times are in seconds.
    """

    def __init__(self) -> None:
        self._held: dict[int, float] = {}  # since when
        self._begun: dict[int, float] = {}  # when they were tried for the last time
        self._excused: dict[int, int] = {}
        self._killed_at = -math.inf

    @property
    def held(self) -> Set[int]:
        """The slots of requests that wait for their last try, or for its result.

        A slot is the entry of a request in shared memory.
        """
        return self._held.keys()

    def note_kill(self, now: float) -> None:
        """Note that a process was killed and that no request is blamed for it.

        Args:
            now: the time in seconds, as everywhere in this class.
        """
        self._killed_at = now

    def is_begun(self, slot: int) -> bool:
        """Whether a request, with which two handlers have died, had its last try."""
        return slot in self._begun

    def hold(self, slot: int, now: float) -> None:
        """Keep a request, with which two handlers have died, until its last try.

        After that, keep it until it is clear whether it is to blame.
        """
        self._held[slot] = now

    def forget(self, slot: int) -> None:
        """Forget the tries of the request in a slot, which may have another by now.

        A slot is the entry of a request in shared memory.
        """
        self._begun.pop(slot, None)
        self._excused.pop(slot, None)

    def due(self, now: float) -> tuple[list[int], list[int]]:
        """Return the requests to try a last time now, and those to give up, by slot.

        They are not held any longer. A slot is a request's entry in shared memory.
        """
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
        """Return whether a last try is repeated because other processes were killed.

        It is repeated at most MAX_EXCUSED times.
        """
        excused = self._excused.get(slot, 0)
        if self._killed_at < self._begun[slot] or excused == MAX_EXCUSED:
            return False
        self._excused[slot] = excused + 1
        del self._begun[slot]
        return True

    def take_all(self) -> list[int]:
        """Return the slots (entries) of all held requests; hold none any longer."""
        slots = list(self._held)
        self._held.clear()
        return slots

    def due_in(self, now: float) -> float | None:
        """Return the seconds until ``due`` must be called; None: nothing is held."""
        if not self._held:
            return None
        since = min(self._held.values())
        quiet = max(since, self._killed_at) + QUIET_S
        return max(_LOOK_S, min(since + LONGEST_HOLD_S, quiet) - now)
