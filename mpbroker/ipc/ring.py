"""The rings: requests down to the handlers, responses back up to one processor.

Each operation is one short critical section under a robust mutex. The single store to
head or tail commits it: if the process is killed before this store, nothing has
happened. Code inside a section neither raises nor allocates. Sleep flags are read and
written under the same mutex, so no wake-up is lost between live processes (without it,
pure Python lost 0.5 %). One store needs no mutex: a processor that is awake clears its
own flag, because it checks the ring under the mutex before it sleeps again.

    put    processor:  entries, READY, tail        wakes one sleeping handler
    take   handler:    CLAIMED, head               wakes another if more is left
    push   handler:    entries, tail               wakes the processor if it sleeps
    pop    processor:  RESPONDING, head            the only taker: without the mutex

A full ring is no error: ``put`` returns a smaller number, and the processor stops
reading.

These four operations are in C as well, in the compiled core (native/ipc/ring.c). The
classes here are their specification, and have all other operations.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from mpbroker.ipc.compiled import core
from mpbroker.ipc.doorbell import Doorbell
from mpbroker.ipc.layout import (
    NOTIFICATION_RING_CAPACITY,
    REQUEST_RING,
    REQUEST_RING_CAPACITY,
    RESPONSE_RING_CAPACITY,
    RING_ENTRIES,
    RING_HEAD,
    RING_MUTEX,
    RING_OVERFLOW,
    RING_SLEEPERS,
    RING_TAIL,
    SLOT_STATE,
    SLOT_WORDS,
    SLOTS,
    STATE_HANDLER_SHIFT,
    SlotState,
    notification_ring,
    response_ring,
)
from mpbroker.ipc.robust_mutex import (
    RobustMutex,
    owner_died,
    pthread_mutex_unlock,
    spin_lock,
)
from mpbroker.ipc.segment import Segment

_REQUEST_MASK: Final = REQUEST_RING_CAPACITY - 1
_RESPONSE_MASK: Final = RESPONSE_RING_CAPACITY - 1
_GENERATION: Final = ~0xFF_FFFF  # all bits except state and handler
_HELD: Final = int(SlotState.HELD)
_READY: Final = int(SlotState.READY)
_CLAIMED: Final = int(SlotState.CLAIMED)
_RESPONDING: Final = int(SlotState.RESPONDING)


class RequestRing:
    """The request queue: many processors put, many handlers take.

    Args:
        control: the control segment.
        doorbells: the handlers' doorbells, by handler id.
        limit: queued.max.requests: how many requests may wait at once.
        base: first word of the ring; the control plane has a ring of its own.
    """

    def __init__(
        self,
        control: Segment,
        doorbells: Sequence[Doorbell],
        limit: int,
        base: int = REQUEST_RING,
    ) -> None:
        self._words = control.words
        self._base = base
        self._mutex = RobustMutex(control, base + RING_MUTEX).argument
        self._doorbells = doorbells
        self._limit = limit
        self.compiled = None
        if core is not None and type(self) is RequestRing:
            bells = [doorbell.fd for doorbell in doorbells]
            self.compiled = core.RequestRing(
                control.view, base, REQUEST_RING_CAPACITY, limit, bells
            )
            # In place of the methods: one more call would cost all the time saved.
            self.put = self.compiled.put  # type: ignore[method-assign]
            self.take = self.compiled.take  # type: ignore[method-assign]

    @staticmethod
    def initialise(control: Segment, base: int = REQUEST_RING) -> None:
        RobustMutex.initialise(control, base + RING_MUTEX)

    def __len__(self) -> int:
        words, base = self._words, self._base
        return words[base + RING_TAIL] - words[base + RING_HEAD]

    def has_room(self) -> bool:
        return len(self) < self._limit

    def put(self, slots: Sequence[int]) -> int:
        """Publish slots in order, as many as fit; return their number.

        The others stay with the processor: this is backpressure, not an error.
        """
        words, base = self._words, self._base
        result = spin_lock(self._mutex)
        if result:
            owner_died(self._mutex, result)
        tail = words[base + RING_TAIL]
        room = self._limit - (tail - words[base + RING_HEAD])
        if room <= 0:
            pthread_mutex_unlock(self._mutex)
            return 0
        if room < len(slots):
            slots = slots[:room]
        self._write_entries(tail, slots)
        # Last, as one aligned store: before it no handler sees the entries.
        words[base + RING_TAIL] = tail + len(slots)
        sleepers = words[base + RING_SLEEPERS]
        if sleepers:
            words[base + RING_SLEEPERS] = sleepers & (sleepers - 1)
        pthread_mutex_unlock(self._mutex)
        if sleepers:
            self._doorbells[(sleepers & -sleepers).bit_length() - 1].ring()
        return len(slots)

    def _write_entries(self, tail: int, slots: Sequence[int]) -> None:
        words, base = self._words, self._base
        for slot in slots:
            words[base + RING_ENTRIES + (tail & _REQUEST_MASK)] = slot
            state = SLOTS + slot * SLOT_WORDS + SLOT_STATE
            words[state] = (words[state] & _GENERATION) | _READY
            tail += 1

    def take(
        self, max_slots: int, handler: int, handlers: int, *, arm: bool
    ) -> list[int]:
        """Claim up to a fair share of the waiting slots for a handler.

        Args:
            max_slots: at most this many.
            handler: the caller's id.
            handlers: the number of handlers that share the queue.
            arm: if nothing waits, mark the caller as asleep before returning; its
                doorbell will ring.
        """
        words, base = self._words, self._base
        if not arm and words[base + RING_TAIL] == (words[base + RING_HEAD]):
            return []  # a stale value is harmless: the caller asks again, with arm
        result = spin_lock(self._mutex)
        if result:
            owner_died(self._mutex, result)
        head, tail = words[base + RING_HEAD], words[base + RING_TAIL]
        queued = tail - head
        if queued <= 0:
            if arm:
                words[base + RING_SLEEPERS] |= 1 << handler
            pthread_mutex_unlock(self._mutex)
            return []
        count = -(-queued // handlers)
        count = min(count, max_slots)
        taken = []
        claimed = (handler + 1) << STATE_HANDLER_SHIFT | _CLAIMED
        for position in range(head, head + count):
            slot = words[base + RING_ENTRIES + (position & _REQUEST_MASK)]
            state = SLOTS + slot * SLOT_WORDS + SLOT_STATE
            words[state] = (words[state] & _GENERATION) | claimed
            taken.append(slot)
        words[base + RING_HEAD] = head + count
        sleepers = words[base + RING_SLEEPERS]
        woken = 0
        if sleepers:
            # Another event may have woken the caller. Its flag is cleared, or the next
            # put would wake the caller instead of a handler that sleeps.
            sleepers &= ~(1 << handler)
            if queued > count:
                woken = sleepers & -sleepers
            words[base + RING_SLEEPERS] = sleepers ^ woken
        pthread_mutex_unlock(self._mutex)
        if woken:
            self._doorbells[woken.bit_length() - 1].ring()
        return taken

    def put_back(self, slots: Sequence[int], *, wake_all: bool = True) -> None:
        """Redeliver claimed slots, without the limit.

        They go to the tail, although they have waited before: at the head, a request
        that kills handlers would delay all others again and again.

        Args:
            wake_all: the slots were claimed by a handler that has died or retires: a
                wake-up may have been lost with it, or sent to it in vain. Otherwise it
                is enough to wake one sleeper.
        """
        words, base = self._words, self._base
        result = spin_lock(self._mutex)
        if result:
            owner_died(self._mutex, result)
        tail = words[base + RING_TAIL]
        for position, slot in enumerate(slots, tail):
            words[base + RING_ENTRIES + (position & _REQUEST_MASK)] = slot
        words[base + RING_TAIL] = tail + len(slots)
        # The states follow the commit, unlike in put(). If a retiring handler dies
        # before the commit, the slots are still its claims, and the supervisor puts
        # them back. If it dies after the commit, the next handler that takes such a
        # slot marks it as its own.
        for slot in slots:
            state = SLOTS + slot * SLOT_WORDS + SLOT_STATE
            words[state] = (words[state] & _GENERATION) | _READY
        sleepers = words[base + RING_SLEEPERS]
        words[base + RING_SLEEPERS] = 0 if wake_all else sleepers & (sleepers - 1)
        pthread_mutex_unlock(self._mutex)
        if wake_all:
            for doorbell in self._doorbells:
                doorbell.ring()
        elif sleepers:
            self._doorbells[(sleepers & -sleepers).bit_length() - 1].ring()

    def retract(self, slots: Iterable[int]) -> list[int]:
        """Undo a put that a dead processor did not commit.

        Args:
            slots: the slots of the dead processor.

        Returns:
            The slots that were marked READY but not published; they are HELD again.
        """
        words, base = self._words, self._base
        result = spin_lock(self._mutex)
        if result:
            owner_died(self._mutex, result)
        head, tail = words[base + RING_HEAD], words[base + RING_TAIL]
        published = {
            words[base + RING_ENTRIES + (position & _REQUEST_MASK)]
            for position in range(head, tail)
        }
        retracted = []
        for slot in slots:
            state = SLOTS + slot * SLOT_WORDS + SLOT_STATE
            if words[state] & ~_GENERATION == _READY and slot not in published:
                words[state] = (words[state] & _GENERATION) | _HELD
                retracted.append(slot)
        pthread_mutex_unlock(self._mutex)
        return retracted

    def reclaim(self, handler: int) -> None:
        """Undo a take that a dead handler did not commit.

        The mutex is needed because live handlers may take these slots meanwhile.
        """
        words, base = self._words, self._base
        claimed = (handler + 1) << STATE_HANDLER_SHIFT | _CLAIMED
        result = spin_lock(self._mutex)
        if result:
            owner_died(self._mutex, result)
        head, tail = words[base + RING_HEAD], words[base + RING_TAIL]
        for position in range(head, tail):
            slot = words[base + RING_ENTRIES + (position & _REQUEST_MASK)]
            state = SLOTS + slot * SLOT_WORDS + SLOT_STATE
            if words[state] & ~_GENERATION == claimed:
                words[state] = (words[state] & _GENERATION) | _READY
        pthread_mutex_unlock(self._mutex)

    def waiting(self) -> list[int]:
        """The slots on the ring. For the supervisor's repair."""
        words, base = self._words, self._base
        result = spin_lock(self._mutex)
        if result:
            owner_died(self._mutex, result)
        head, tail = words[base + RING_HEAD], words[base + RING_TAIL]
        slots = [
            words[base + RING_ENTRIES + (position & _REQUEST_MASK)]
            for position in range(head, tail)
        ]
        pthread_mutex_unlock(self._mutex)
        return slots

    def forget_sleepers(self) -> None:
        """Clear all sleep flags. The caller must then ring every doorbell."""
        result = spin_lock(self._mutex)
        if result:
            owner_died(self._mutex, result)
        self._words[self._base + RING_SLEEPERS] = 0
        pthread_mutex_unlock(self._mutex)


class ResponseRing:
    """One processor's response queue: all handlers push, the processor pops."""

    def __init__(self, control: Segment, processor: int, doorbell: Doorbell) -> None:
        self.processor = processor
        self._words = control.words
        self._base = response_ring(processor)
        self._mutex = RobustMutex(control, self._base + RING_MUTEX).argument
        self._doorbell = doorbell
        self.compiled = None
        if core is not None and type(self) is ResponseRing:
            capacity = RESPONSE_RING_CAPACITY
            self.compiled = core.ResponseRing(
                control.view, self._base, capacity, capacity, [doorbell.fd]
            )
            self.push = self.compiled.push  # type: ignore[method-assign]
            self.pop = self.compiled.pop  # type: ignore[method-assign]

    @staticmethod
    def initialise(control: Segment, processor: int) -> None:
        RobustMutex.initialise(control, response_ring(processor) + RING_MUTEX)

    def __len__(self) -> int:
        words, base = self._words, self._base
        return words[base + RING_TAIL] - words[base + RING_HEAD]

    def push(self, slots: Sequence[int]) -> None:
        """Hand answered slots to the processor. The ring has room for every slot."""
        words, base = self._words, self._base
        result = spin_lock(self._mutex)
        if result:
            owner_died(self._mutex, result)
        tail = words[base + RING_TAIL]
        position = tail
        for slot in slots:
            words[base + RING_ENTRIES + (position & _RESPONSE_MASK)] = slot
            position += 1
        words[base + RING_TAIL] = position
        asleep = words[base + RING_SLEEPERS]
        if asleep:
            words[base + RING_SLEEPERS] = 0
        pthread_mutex_unlock(self._mutex)
        if asleep:
            self._doorbell.ring()

    def pop(self, *, arm: bool = False) -> list[int]:
        """Take all entries; if there are none and ``arm``, set the sleep flag."""
        words, base = self._words, self._base
        head, tail = words[base + RING_HEAD], words[base + RING_TAIL]
        if head == tail:
            if not arm:
                return []
            result = spin_lock(self._mutex)
            if result:
                owner_died(self._mutex, result)
            tail = words[base + RING_TAIL]
            if head == tail:
                words[base + RING_SLEEPERS] = 1
            pthread_mutex_unlock(self._mutex)
            if head == tail:
                return []
        taken = []
        for position in range(head, tail):
            slot = words[base + RING_ENTRIES + (position & _RESPONSE_MASK)]
            state = SLOTS + slot * SLOT_WORDS + SLOT_STATE
            # Before the head moves, so that a successor knows by the state RESPONDING
            # that the slot was popped.
            words[state] = (words[state] & _GENERATION) | _RESPONDING
            taken.append(slot)
        words[base + RING_HEAD] = tail
        return taken

    def waiting(self) -> list[int]:
        """The slots on the ring. For the supervisor's repair."""
        words, base = self._words, self._base
        result = spin_lock(self._mutex)
        if result:
            owner_died(self._mutex, result)
        slots = [
            words[base + RING_ENTRIES + (position & _RESPONSE_MASK)]
            for position in range(words[base + RING_HEAD], words[base + RING_TAIL])
        ]
        pthread_mutex_unlock(self._mutex)
        return slots


class NotificationRing:
    """One handler's notices "this partition has changed", put by any process.

    If the ring is full, a flag is set, and the handler checks everything it waits for.
    """

    def __init__(self, control: Segment, handler: int, doorbell: Doorbell) -> None:
        self._words = control.words
        self._base = notification_ring(handler)
        self._mutex = RobustMutex(control, self._base + RING_MUTEX).argument
        self._doorbell = doorbell

    @staticmethod
    def initialise(control: Segment, handler: int) -> None:
        RobustMutex.initialise(control, notification_ring(handler) + RING_MUTEX)

    def put(self, row: int) -> None:
        """Tell the handler that a partition's row has changed, and wake it."""
        words, base = self._words, self._base
        result = spin_lock(self._mutex)
        if result:
            owner_died(self._mutex, result)
        tail = words[base + RING_TAIL]
        if tail - words[base + RING_HEAD] < NOTIFICATION_RING_CAPACITY:
            words[base + RING_ENTRIES + tail % NOTIFICATION_RING_CAPACITY] = row
            words[base + RING_TAIL] = tail + 1
        else:
            words[base + RING_OVERFLOW] = 1
        pthread_mutex_unlock(self._mutex)
        self._doorbell.ring()

    def overflow(self) -> None:
        """Make the handler check everything: after a death, notices may be lost."""
        # Under the mutex, or a take at the same time could clear the flag unseen.
        result = spin_lock(self._mutex)
        if result:
            owner_died(self._mutex, result)
        self._words[self._base + RING_OVERFLOW] = 1
        pthread_mutex_unlock(self._mutex)

    def is_empty(self) -> bool:
        words, base = self._words, self._base
        return (
            words[base + RING_TAIL] == words[base + RING_HEAD]
            and not words[base + RING_OVERFLOW]
        )

    def take(self) -> tuple[list[int], bool]:
        """Take all notices: the partition rows, and whether to check everything."""
        words, base = self._words, self._base
        if self.is_empty():
            return [], False
        result = spin_lock(self._mutex)
        if result:
            owner_died(self._mutex, result)
        head, tail = words[base + RING_HEAD], words[base + RING_TAIL]
        rows = [
            words[base + RING_ENTRIES + position % NOTIFICATION_RING_CAPACITY]
            for position in range(head, tail)
        ]
        overflow = words[base + RING_OVERFLOW]
        words[base + RING_OVERFLOW] = 0
        words[base + RING_HEAD] = tail
        pthread_mutex_unlock(self._mutex)
        return rows, bool(overflow)
