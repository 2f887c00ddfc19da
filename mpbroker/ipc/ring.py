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
    MASK_BITS,
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
from mpbroker.ipc.masks import lowest_of, read_mask, write_mask
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
    """The request queue: processors put published requests, and handlers take them.

    A request is passed as its slot: the number of its entry in the table of requests in
    flight.

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
        """Publish requests in order, as many as fit into the ring; return their number.

        They are given as slots. The others stay with the processor: this is
        backpressure, not an error.
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
        sleepers = read_mask(words, base + RING_SLEEPERS)
        if sleepers:
            write_mask(words, base + RING_SLEEPERS, sleepers & (sleepers - 1))
        pthread_mutex_unlock(self._mutex)
        if sleepers:
            self._doorbells[lowest_of(sleepers)].ring()
        return len(slots)

    def _write_entries(self, tail: int, slots: Sequence[int]) -> None:
        words, base = self._words, self._base
        for slot in slots:
            words[base + RING_ENTRIES + (tail & _REQUEST_MASK)] = slot
            state = SLOTS + slot * SLOT_WORDS + SLOT_STATE
            # Before the commit, while the slot is still the processor's. If the
            # processor is killed before the commit, retract() undoes this store.
            words[state] = (words[state] & _GENERATION) | _READY
            tail += 1

    def take(
        self, max_slots: int, handler: int, handlers: int, *, arm: bool
    ) -> list[int]:
        """Claim up to a fair share of the waiting requests for a handler, as slots.

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
                word = base + RING_SLEEPERS + handler // MASK_BITS
                words[word] |= 1 << handler % MASK_BITS
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
        # After the states: if the handler is killed in between, its claims are still on
        # the ring, where reclaim() finds them.
        words[base + RING_HEAD] = head + count
        sleepers = read_mask(words, base + RING_SLEEPERS)
        woken = 0
        if sleepers:
            # Another event may have woken the caller. Its flag is cleared, or the next
            # put would wake the caller instead of a handler that sleeps.
            sleepers &= ~(1 << handler)
            if queued > count:
                woken = sleepers & -sleepers
            write_mask(words, base + RING_SLEEPERS, sleepers ^ woken)
        pthread_mutex_unlock(self._mutex)
        if woken:
            self._doorbells[lowest_of(woken)].ring()
        return taken

    def put_back(self, slots: Sequence[int], *, wake_all: bool = True) -> None:
        """Put slots that were claimed on the ring again, even beyond the limit.

        They go to the tail, although they have waited before: at the head, a request
        that kills handlers would delay all others again and again.

        Args:
            slots: the claimed slots.
            wake_all: wake all handlers, because the slots were claimed by a handler
                that has died or retires: a wake-up may have been lost with it, or sent
                to it in vain. Otherwise one sleeping handler is woken.
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
        sleepers = read_mask(words, base + RING_SLEEPERS)
        left = 0 if wake_all or not sleepers else sleepers & (sleepers - 1)
        write_mask(words, base + RING_SLEEPERS, left)
        pthread_mutex_unlock(self._mutex)
        if wake_all:
            for doorbell in self._doorbells:
                doorbell.ring()
        elif sleepers:
            self._doorbells[lowest_of(sleepers)].ring()

    def retract(self, slots: Iterable[int]) -> list[int]:
        """Undo a ``put`` that was not complete when its processor died.

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
        """Undo a ``take`` that was not complete when its handler died.

        The slots that it had claimed, but that are still on the ring, become READY. The
        mutex is needed because live handlers may take these slots meanwhile.
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
        """Return the slots of requests that wait on the ring, without taking them.

        The supervisor calls this after the death of a process.
        """
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
        """Clear the sleep flags of all handlers.

        The caller must then ring every handler's doorbell.
        """
        result = spin_lock(self._mutex)
        if result:
            owner_died(self._mutex, result)
        write_mask(self._words, self._base + RING_SLEEPERS, 0)
        pthread_mutex_unlock(self._mutex)


class ResponseRing:
    """One processor's queue of answered requests: handlers push, the processor pops.

    A request is passed as its slot, the number of its entry in shared memory.
    """

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

    def wake(self) -> None:
        """Wake the processor to look at words in shared memory other than the ring."""
        self._doorbell.ring()

    def push(self, slots: Sequence[int]) -> None:
        """Pass slots with answered requests to the processor, which they belong to.

        The ring has room for all slots of this processor.
        """
        words, base = self._words, self._base
        result = spin_lock(self._mutex)
        if result:
            owner_died(self._mutex, result)
        tail = words[base + RING_TAIL]
        position = tail
        for slot in slots:
            words[base + RING_ENTRIES + (position & _RESPONSE_MASK)] = slot
            position += 1
        # Last, as one aligned store: before it the processor does not see the entries.
        words[base + RING_TAIL] = position
        asleep = words[base + RING_SLEEPERS]
        if asleep:
            words[base + RING_SLEEPERS] = 0
        pthread_mutex_unlock(self._mutex)
        if asleep:
            self._doorbell.ring()

    def pop(self, *, arm: bool = False) -> list[int]:
        """Take all answered requests from the ring, and return their slots.

        Args:
            arm: if there are no slots, set the sleep flag: then ``push`` rings the
                processor's doorbell.
        """
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
        """Return the slots of answers that wait on the ring, without taking them.

        The supervisor calls this after the death of a process.
        """
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
    """One handler's queue of notices, which any process may put.

    A notice is the row of a partition that has changed; or, as a negative number, the
    slot of a request that must not wait any longer (``slot_notice``). If there is no
    room for a row, a flag is set, and the handler checks all requests that it has
    parked.
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
        """Tell the handler that the partition of a row has changed, and wake it."""
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

    def try_put_slot(self, slot: int) -> bool:
        """Tell the handler that a parked request must not wait any longer.

        Returns:
            Whether there was room for the notice; if False, try again later.
        """
        words, base = self._words, self._base
        result = spin_lock(self._mutex)
        if result:
            owner_died(self._mutex, result)
        tail = words[base + RING_TAIL]
        has_room = tail - words[base + RING_HEAD] < NOTIFICATION_RING_CAPACITY
        if has_room:
            place = base + RING_ENTRIES + tail % NOTIFICATION_RING_CAPACITY
            words[place] = slot_notice(slot)
            words[base + RING_TAIL] = tail + 1
        pthread_mutex_unlock(self._mutex)
        self._doorbell.ring()
        return has_room

    def overflow(self) -> None:
        """Make the handler check all requests that it has parked.

        To be called after the death of a process, with which notices may be lost.
        """
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
        """Take all notices.

        Returns:
            The notices, and whether the handler must check all its parked requests,
            because there was no room for some notices.
        """
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


def slot_notice(slot: int) -> int:
    """Convert a slot's number to its notice, a negative number, or back."""
    return ~slot
