"""Repair shared memory after a death, before the successor is forked.

Only the supervisor decides what happens to a dead process's slots, and it repairs one
death at a time. The order matters: partition locks are taken over and their intents
settled before any request is put back, or the next append would make a batch that was
never written look committed. After every repair all processes are woken.

No repair can be cut short and then gone on with: a supervisor that is killed takes its
children and the shared memory along. So the order of stores in here matters to the
processes that live, and that take and answer requests all the while.
"""

import time
from collections.abc import Callable
from enum import Enum, auto
from typing import Final

from mpbroker.base.logger import get_logger
from mpbroker.ipc.layout import (
    CONNECTION_SLOT,
    CONNECTION_STATE,
    COORDINATOR,
    HANDLER_BUSY_SLOT,
    HEADER,
    HEADER_DEATH_EPOCH,
    HEADER_PHASE,
    HOUSEKEEPER,
    MAX_PROCESSORS,
    ROW_SYNC_OWNER,
    ROW_WORDS,
    SLOT_CONNECTION,
    SLOT_INTENT,
    SLOT_RESPONSE_KIND,
    SLOT_RESPONSE_LENGTH,
    SLOT_RESPONSE_OFFSET,
    SLOT_RETRIES,
    SLOT_STATE,
    SLOTS_PER_PROCESSOR,
    STATE_HANDLER_MASK,
    STATE_HANDLER_SHIFT,
    STATE_MASK,
    ConnectionState,
    Phase,
    ResponseKind,
    SlotState,
    connection_row,
    handler_row,
    slot_row,
    slots_in_use,
)
from mpbroker.ipc.tables.transaction_table import TransactionTable
from mpbroker.supervisor.memory import BrokerMemory
from mpbroker.supervisor.repair.last_tries import LastTries

_LOG = get_logger(__name__)

# A request with which a third handler has died is not tried again.
MAX_RETRIES: Final = 2
_INTENT_ROW_MASK: Final = 0xFFFF_FFFF
_KEEP_GENERATION: Final = ~(STATE_MASK | STATE_HANDLER_MASK)


class _Fate(Enum):
    """The decision about a request whose handler is dead."""

    AGAIN = auto()  # another handler executes it
    HELD = auto()  # another handler executes it later
    GUILTY = auto()  # the request has ended the handler


class Repair:
    """Repairs shared memory after deaths.

    Attributes:
        quarantined: how many requests are not tried again.
        on_quarantine: called with the slot of each such request, to answer it.
    """

    def __init__(self, memory: BrokerMemory) -> None:
        self._memory = memory
        self._words = memory.control.words
        self.quarantined = 0
        # Slots in quarantine until they are answered: neither handlers nor processors
        # have them.
        self._condemned: set[int] = set()
        self._last_tries = LastTries()
        self.on_quarantine: Callable[[int], None] = self.close_condemned

    def after_handler(
        self, handler: int, partition_rows: int, *, was_killed: bool = False
    ) -> None:
        """Put a dead handler's requests back, each to be executed exactly once.

        Args:
            handler: its id.
            partition_rows: how many rows of the partition table are in use.
            was_killed: it was ended by SIGKILL, perhaps from outside. Otherwise it
                ended from within; if it executed no request then, any request that it
                had parked or taken may be the reason.
        """
        # First: a take that was not committed. Its slots are marked as the dead
        # handler's and are still on the ring; taken for orphans they would be put there
        # a second time.
        self._memory.ring.reclaim(handler)
        self._memory.control_ring.reclaim(handler)
        orphans = self._orphans_of(handler)
        suspects = self._suspects(handler, [] if was_killed else orphans, orphans)
        table = self._memory.table
        # Before any request is put back. An intent is judged by the log's end: after
        # the next append a batch that was never written would look committed.
        for slot in orphans:
            intent = self._words[slot_row(slot) + SLOT_INTENT]
            if intent:
                table.row((intent & _INTENT_ROW_MASK) - 1).settle()
        # Before the notices of _finish(): a handler that looks at a log again and finds
        # the dead owner there would wait for its sync for ever.
        self._release_syncs(handler, partition_rows)
        fates = {slot: self._fate(slot, suspects, was_killed) for slot in orphans}
        if was_killed and _Fate.GUILTY not in fates.values():
            self._last_tries.note_kill(time.monotonic())
        self._redeliver([slot for slot, fate in fates.items() if fate is _Fate.AGAIN])
        self._finish()

    def _redeliver(self, slots: list[int]) -> None:
        if slots:
            self._memory.put_back(slots)

    def _fate(self, slot: int, suspects: set[int], was_killed: bool) -> _Fate:
        """Decide what happens to an orphan; see last_tries.py."""
        if slot not in suspects:
            return _Fate.AGAIN
        retries = slot_row(slot) + SLOT_RETRIES
        tries, now = self._last_tries, time.monotonic()
        may_hold = was_killed and self._words[HEADER + HEADER_PHASE] < Phase.DRAINING
        was_last = self._words[retries] == MAX_RETRIES
        if was_last and may_hold and tries.is_begun(slot):
            tries.hold(slot, now)
            return _Fate.GUILTY  # unless other processes turn out to die as well
        tries.forget(slot)
        # Before the slot is put back: from then on its next handler may die of it.
        self._words[retries] += 1
        if self._words[retries] > MAX_RETRIES:
            self._quarantine(slot)
            return _Fate.GUILTY
        if self._words[retries] == MAX_RETRIES and may_hold:
            tries.hold(slot, now)
            return _Fate.HELD
        return _Fate.AGAIN

    def look_at_held(self) -> float | None:
        """Try held requests for the last time, or give them up.

        Returns:
            Seconds until the next look; None: no request is held.
        """
        now = time.monotonic()
        tried, given_up = self._last_tries.due(now)
        self._redeliver(tried)
        for slot in given_up:
            self._words[slot_row(slot) + SLOT_RETRIES] += 1
            self._quarantine(slot)
        return self._last_tries.due_in(now)

    def hold_no_more(self) -> None:
        """Put all held requests back, because the broker stops."""
        self._redeliver(self._last_tries.take_all())

    @property
    def is_at_rest(self) -> bool:
        """Whether every request is with a processor or a handler."""
        return not self._condemned and not self._last_tries.held

    def after_coordinator(
        self,
        partition_rows: int,
        *,
        was_killed: bool = False,
        was_dismissed: bool = False,
    ) -> None:
        """Put the dead coordinator's requests back: handlers forward them again.

        Each may be executed twice. Its successor reads what is in the log; what is not
        in the log has not happened. A repeated commit is the same commit, and a member
        of an old generation is told to rejoin.
        """
        if was_dismissed:
            TransactionTable(self._memory.transactions).forget_try()
        self.after_handler(COORDINATOR, partition_rows, was_killed=was_killed)

    def _orphans_of(self, handler: int) -> list[int]:
        """Slots that the dead handler had claimed or parked and not answered."""
        # A slot on the coordinator's lane is, or is about to be, the coordinator's.
        answered = self._condemned | set(self._memory.lane.waiting())
        answered |= self._last_tries.held
        for ring in self._memory.responses:
            answered.update(ring.waiting())
        words = self._words
        orphans = []
        for slot in self._slots():
            row = slot_row(slot)
            state = words[row + SLOT_STATE]
            if (state & STATE_HANDLER_MASK) >> STATE_HANDLER_SHIFT != handler + 1:
                continue
            if state & STATE_MASK not in (SlotState.CLAIMED, SlotState.PARKED):
                continue
            if slot not in answered:
                orphans.append(slot)
        return orphans

    def _suspects(
        self, handler: int, waiting: list[int], orphans: list[int]
    ) -> set[int]:
        """Return the orphans that may have ended the handler.

        The one that it was executing; if it was executing none, those in ``waiting``.
        The others were only taken in the same batch, or parked: they must not be given
        up because of their neighbour.
        """
        busy_word = handler_row(handler) + HANDLER_BUSY_SLOT
        busy = self._words[busy_word] - 1
        # The successor has the same row, and has not begun with anything.
        self._words[busy_word] = 0
        return {busy} if busy in orphans else set(waiting)

    def _slots(self) -> list[int]:
        slots: list[int] = []
        for processor in range(MAX_PROCESSORS):
            slots.extend(slots_in_use(self._words, processor))
        return slots

    def after_housekeeper(self, partition_rows: int) -> None:
        """Release a dead housekeeper's syncs; tell those that wait for them."""
        self._release_syncs(HOUSEKEEPER, partition_rows)
        self._finish()

    def _release_syncs(self, process: int, partition_rows: int) -> None:
        """Release the syncs of a dead owner: a process that needs one starts it."""
        table = self._memory.table
        words = table.row(0).words  # of all rows: a row object each would be slow
        for index in range(partition_rows):
            if words[index * ROW_WORDS + ROW_SYNC_OWNER] == process + 1:
                table.row(index).forget_sync(process)

    def _quarantine(self, slot: int) -> None:
        """Take a request that has ended several handlers out of circulation."""
        self.quarantined += 1
        self._condemned.add(slot)
        _LOG.error(
            "a request has ended %d handlers and is not tried again", MAX_RETRIES + 1
        )
        self.on_quarantine(slot)

    def answer_condemned(self, slot: int, answer: tuple[int, int, int]) -> None:
        """Send the answer of a request in quarantine to its processor.

        Args:
            slot: what ``on_quarantine`` was called with.
            answer: ResponseKind, arena offset, length.
        """
        row = slot_row(slot)
        kind, offset, length = answer
        # All before the push: the processor reads them as soon as it finds the slot.
        self._words[row + SLOT_RESPONSE_KIND] = kind
        self._words[row + SLOT_RESPONSE_OFFSET] = offset
        self._words[row + SLOT_RESPONSE_LENGTH] = length
        self._condemned.discard(slot)
        self._memory.responses[slot // SLOTS_PER_PROCESSOR].push([slot])

    def close_condemned(self, slot: int) -> None:
        """Close the connection of a request in quarantine, for want of an answer."""
        self.answer_condemned(slot, (ResponseKind.CLOSE, 0, 0))

    def after_processor(self, processor: int) -> None:
        """Free the slots of a dead processor that none of its connections has.

        Its connections live on: their rows say how far they are, the keeper has their
        sockets. Answers stay on the response ring. Slots of closed connections that
        handlers still work on stay reserved until they are answered.
        """
        self._last_tries.note_kill(time.monotonic())
        slots = slots_in_use(self._words, processor)
        # First: a put that was not committed. Its slots are marked as published and are
        # not on the ring, where no handler would ever see them.
        self._memory.ring_of(processor).retract(slots)
        # What is pushed from here on stays on the ring, for the successor. It is still
        # CLAIMED: RESPONDING is stored by a processor that pops, and this one is dead.
        answered = set(self._memory.responses[processor].waiting())
        words = self._words
        for slot in slots:
            row = slot_row(slot)
            state = words[row + SLOT_STATE]
            if state & STATE_MASK == SlotState.RESPONDING:
                if slot in answered:
                    continue  # it was about to be taken, and will be again
            elif state & STATE_MASK != SlotState.HELD:
                continue
            connection = connection_row(words[row + SLOT_CONNECTION])
            row_state = words[connection + CONNECTION_STATE] & STATE_MASK
            if not row_state or words[connection + CONNECTION_SLOT] != slot + 1:
                words[row + SLOT_STATE] = state & _KEEP_GENERATION  # FREE
            elif row_state == ConnectionState.READING:
                # Answered to the last byte; or not yet published.
                words[row + SLOT_STATE] = state & _KEEP_GENERATION | SlotState.HELD
        self._finish()

    def _finish(self) -> None:
        # Flags before bells: a process that was woken and found nothing sleeps again.
        self._words[HEADER + HEADER_DEATH_EPOCH] += 1
        for notices in self._memory.notices:
            notices.overflow()
        self._memory.wake_everybody()
