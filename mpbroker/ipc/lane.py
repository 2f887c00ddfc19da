"""The coordinator's lane: the ring by which handlers pass requests to the coordinator.

These are the requests about groups and transactions. A handler that finds one of them,
by the request's header, forwards the slot; in C, if the compiled core is there
(native/server/forward.c). While the slot waits here, its state still names the handler;
``take`` puts the coordinator's id there. So at every moment exactly one process, or
this ring, is responsible for a slot:

    forward  handler:      entry, tail      the handler's until the store to tail
    take     coordinator:  CLAIMED, head    the only taker; on the ring until then

The lane cannot overflow: it has one entry for every slot of the broker.
"""

from typing import Final

from mpbroker.ipc.compiled import core
from mpbroker.ipc.doorbell import Doorbell
from mpbroker.ipc.layout import (
    COORDINATOR,
    COORDINATOR_RING,
    REQUEST_RING_CAPACITY,
    RING_ENTRIES,
    RING_HEAD,
    RING_MUTEX,
    RING_SLEEPERS,
    RING_TAIL,
    SLOT_STATE,
    SLOT_WORDS,
    SLOTS,
    STATE_HANDLER_SHIFT,
    SlotState,
)
from mpbroker.ipc.robust_mutex import (
    RobustMutex,
    owner_died,
    pthread_mutex_unlock,
    spin_lock,
)
from mpbroker.ipc.segment import Segment

_MASK: Final = REQUEST_RING_CAPACITY - 1
_GENERATION: Final = ~0xFF_FFFF  # all bits except state and handler
_CLAIMED: Final = (COORDINATOR + 1) << STATE_HANDLER_SHIFT | int(SlotState.CLAIMED)


class CoordinatorLane:
    """The ring on which handlers put requests for the coordinator, by their slots."""

    def __init__(self, control: Segment, doorbell: Doorbell) -> None:
        self._words = control.words
        self._mutex = RobustMutex(control, COORDINATOR_RING + RING_MUTEX).argument
        self._doorbell = doorbell
        # A push onto a response ring makes the same stores as forward(), so the core
        # forwards slots with its class for response rings (native/server/forward.c).
        # Its pop must not be used here.
        self.compiled = None
        if core is not None:
            capacity = REQUEST_RING_CAPACITY
            self.compiled = core.ResponseRing(
                control.view, COORDINATOR_RING, capacity, capacity, [doorbell.fd]
            )

    @staticmethod
    def initialise(control: Segment) -> None:
        RobustMutex.initialise(control, COORDINATOR_RING + RING_MUTEX)

    def __len__(self) -> int:
        words = self._words
        return words[COORDINATOR_RING + RING_TAIL] - words[COORDINATOR_RING + RING_HEAD]

    def forward(self, slot: int) -> None:
        """Pass a request that the calling handler has taken to the coordinator.

        It is passed as its slot, its entry in the table of requests in flight, which
        the caller must not touch afterwards.
        """
        words = self._words
        result = spin_lock(self._mutex)
        if result:
            owner_died(self._mutex, result)
        tail = words[COORDINATOR_RING + RING_TAIL]
        words[COORDINATOR_RING + RING_ENTRIES + (tail & _MASK)] = slot
        # Last: if the handler is killed before this store, the slot is still its claim.
        words[COORDINATOR_RING + RING_TAIL] = tail + 1
        asleep = words[COORDINATOR_RING + RING_SLEEPERS]
        if asleep:
            words[COORDINATOR_RING + RING_SLEEPERS] = 0
        pthread_mutex_unlock(self._mutex)
        if asleep:
            self._doorbell.ring()

    def take(self, max_slots: int, *, arm: bool) -> list[int]:
        """Take waiting requests for the coordinator, and return their slots.

        Their slots become CLAIMED by the coordinator.

        Args:
            max_slots: at most this many.
            arm: if none waits, set the sleep flag: then ``forward`` wakes the caller.
        """
        words = self._words
        if (
            not arm
            and words[COORDINATOR_RING + RING_TAIL]
            == words[COORDINATOR_RING + RING_HEAD]
        ):
            return []  # a stale value is harmless: the caller asks again, with arm
        result = spin_lock(self._mutex)
        if result:
            owner_died(self._mutex, result)
        head, tail = (
            words[COORDINATOR_RING + RING_HEAD],
            words[COORDINATOR_RING + RING_TAIL],
        )
        taken = []
        end = min(tail, head + max_slots)
        for position in range(head, end):
            slot = words[COORDINATOR_RING + RING_ENTRIES + (position & _MASK)]
            state = SLOTS + slot * SLOT_WORDS + SLOT_STATE
            words[state] = (words[state] & _GENERATION) | _CLAIMED
            taken.append(slot)
        # After the states: a coordinator that is killed in between leaves the slots on
        # the lane, and its successor takes them.
        words[COORDINATOR_RING + RING_HEAD] = end
        words[COORDINATOR_RING + RING_SLEEPERS] = int(arm and not taken)
        pthread_mutex_unlock(self._mutex)
        return taken

    def waiting(self) -> list[int]:
        """Return the slots that wait on the lane, without taking them.

        The supervisor calls this after a death, to find requests that no process has.
        """
        words = self._words
        result = spin_lock(self._mutex)
        if result:
            owner_died(self._mutex, result)
        slots = [
            words[COORDINATOR_RING + RING_ENTRIES + (position & _MASK)]
            for position in range(
                words[COORDINATOR_RING + RING_HEAD], words[COORDINATOR_RING + RING_TAIL]
            )
        ]
        pthread_mutex_unlock(self._mutex)
        return slots
