"""Repair shared memory after a death, before the successor is forked.

Each request is in a slot of shared memory, which says how far the request has come.
Only the supervisor decides what happens to a dead process's slots, and it repairs one
death at a time. The order matters: the dead process's intents (notes of appends that it
had begun) are settled before any request is put back, or the next append would make a
batch that was never written look committed. After every repair all processes are woken.

No repair is interrupted and resumed later: if the supervisor is killed, its children
and the shared memory end with it. So the order of stores in here matters only to the
living processes, which take and answer requests all the while.
"""

from __future__ import annotations

import os
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
from mpbroker.ipc.tables.partition_table import note_offline_change
from mpbroker.ipc.tables.transaction_table import TransactionTable
from mpbroker.supervisor.child import is_kill
from mpbroker.supervisor.memory import BrokerMemory
from mpbroker.supervisor.repair.last_tries import LastTries

_LOG = get_logger(__name__)

# A request with which a third handler has died is not tried again.
MAX_RETRIES: Final = 2
_ENDED_HANDLERS: Final = f"has ended {MAX_RETRIES + 1} handlers"
_INTENT_ROW_MASK: Final = 0xFFFF_FFFF
# The lock of a dead process may have been taken by a living one, which then settles the
# append that the dead one had begun: a few instructions. A repair waits so long for it.
_SETTLE_S: Final = 0.1
_KEEP_GENERATION: Final = ~(STATE_MASK | STATE_HANDLER_MASK)


class _Fate(Enum):
    """What happens to a request whose handler has died."""

    AGAIN = auto()  # another handler executes it
    HELD = auto()  # another handler executes it later
    GUILTY = auto()  # the request has ended the handler


class Death(Enum):
    """How a process that executes requests has died."""

    CRASHED = auto()  # it ended from within, perhaps over a request
    KILLED = auto()  # by SIGKILL, perhaps from outside
    OVERRAN = auto()  # killed for computing over one request for a whole lease

    @classmethod
    def of(cls, status: int) -> Death:
        """Return the kind of a death by its wait status: CRASHED or KILLED."""
        return cls.KILLED if is_kill(status) else cls.CRASHED


class Repair:
    """Repairs shared memory after deaths.

    Attributes:
        quarantined: the number of requests that were put in quarantine: they are not
            tried again.
        on_quarantine: called with the slot (entry in shared memory) of each such
            request, to answer it.
    """

    def __init__(self, memory: BrokerMemory) -> None:
        self._memory = memory
        self._words = memory.control.words
        self.quarantined = 0
        # Slots in quarantine until they are answered: neither handlers nor processors
        # have them.
        self._condemned: set[int] = set()
        self._last_tries = LastTries()
        # Slots whose intent another process is about to settle, each with the reason
        # for which its request is quarantined afterwards; "": it is not quarantined.
        self._unsettled: dict[int, str] = {}
        self.on_quarantine: Callable[[int], None] = self.close_condemned

    def after_handler(
        self, handler: int, partition_rows: int, death: Death = Death.CRASHED
    ) -> None:
        """Put a dead handler's requests back in the queue, each to be executed once.

        Args:
            handler: the dead handler's id.
            partition_rows: the number of partitions' entries (rows) in use in shared
                memory.
            death: how the handler died. If it crashed while it executed no request, any
                request that it had parked or taken may be the reason.
        """
        # First: undo a take from the ring that was not committed. Its slots are marked
        # as the dead handler's and are still on the ring; if they counted as orphans,
        # they would be put there a second time.
        self._memory.ring.reclaim(handler)
        self._memory.control_ring.reclaim(handler)
        orphans = self._orphans_of(handler)
        has_crashed = death is Death.CRASHED
        suspects = self._suspects(handler, orphans if has_crashed else [], orphans)
        # Before any request is put back. An intent is judged by the log's end: after
        # the next append a batch that was never written would look committed.
        for slot in orphans:
            if not self._try_settle(slot):
                self._unsettled[slot] = ""
        # Before the notices of _finish(): a handler that looks at a log again and finds
        # the dead owner there would wait for its sync for ever.
        self._release_syncs(handler, partition_rows)
        fates = {slot: self._fate(slot, suspects, death) for slot in orphans}
        if death is Death.KILLED and _Fate.GUILTY not in fates.values():
            self._last_tries.note_kill(time.monotonic())
        again = [slot for slot, fate in fates.items() if fate is _Fate.AGAIN]
        self._redeliver([slot for slot in again if slot not in self._unsettled])
        self._finish()

    def _try_settle(self, slot: int) -> bool:
        """Find out whether an append that a dead process had begun was committed.

        The process had left a note of it (an intent) in the slot of the request. If the
        append was committed, that is noted in the slot.

        Returns:
            False: another process is settling the intent and has not finished in time.
            It may have been stopped (SIGSTOP); then it is killed later.
        """
        intent = self._words[slot_row(slot) + SLOT_INTENT]
        if not intent:
            return True
        row = self._memory.table.row((intent & _INTENT_ROW_MASK) - 1)
        give_up = time.monotonic() + _SETTLE_S
        while not row.try_settle(slot):
            if time.monotonic() > give_up:
                return False
            os.sched_yield()
        return True

    def _redeliver(self, slots: list[int]) -> None:
        if slots:
            self._memory.put_back(slots)

    def _fate(self, slot: int, suspects: set[int], death: Death) -> _Fate:
        """Decide whether a dead handler's request is tried again; see last_tries.py."""
        if slot not in suspects:
            return _Fate.AGAIN
        if death is Death.OVERRAN:
            self._last_tries.forget(slot)
            self._quarantine(slot, "has kept a process busy for a whole lease")
            return _Fate.GUILTY
        was_killed = death is Death.KILLED
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
            self._quarantine(slot, _ENDED_HANDLERS)
            return _Fate.GUILTY
        if self._words[retries] == MAX_RETRIES and may_hold:
            tries.hold(slot, now)
            return _Fate.HELD
        return _Fate.AGAIN

    def look_at_held(self) -> float | None:
        """Try requests again for the last time, or give them up, when that is due.

        Also find out about appends that a repair could not decide on in time.

        Returns:
            The seconds until the next look; None: no request is held.
        """
        now = time.monotonic()
        tried, given_up = self._last_tries.due(now)
        self._redeliver([slot for slot in tried if slot not in self._unsettled])
        for slot in given_up:
            self._words[slot_row(slot) + SLOT_RETRIES] += 1
            self._quarantine(slot, _ENDED_HANDLERS)
        for slot in [each for each in self._unsettled if self._try_settle(each)]:
            if reason := self._unsettled.pop(slot):
                self._quarantine(slot, reason)
            elif slot not in self._last_tries.held:
                self._redeliver([slot])
        return _SETTLE_S if self._unsettled else self._last_tries.due_in(now)

    def hold_no_more(self) -> None:
        """Have all requests that wait for a last try executed: the broker stops."""
        held = self._last_tries.take_all()
        self._redeliver([slot for slot in held if slot not in self._unsettled])

    @property
    def is_at_rest(self) -> bool:
        """Whether the supervisor itself has no request to decide on.

        None is in quarantine, none waits for a last try, and of none it is open whether
        its append was committed.
        """
        return not (self._condemned or self._last_tries.held or self._unsettled)

    def after_coordinator(
        self,
        partition_rows: int,
        death: Death = Death.CRASHED,
        *,
        was_dismissed: bool = False,
    ) -> None:
        """Put the dead coordinator's requests back: handlers forward them again.

        Each request may be executed twice. The coordinator's successor knows only what
        is in the log. A repeated commit is the same commit, and a member of an old
        generation is told to rejoin.

        Args:
            partition_rows: the number of partitions' entries (rows) in use in shared
                memory.
            death: how the coordinator died.
            was_dismissed: the coordinator was replaced on purpose, so its loading of
                the logs does not count as a failed try.
        """
        if was_dismissed:
            TransactionTable(self._memory.transactions).forget_try()
        self.after_handler(COORDINATOR, partition_rows, death)

    def _orphans_of(self, handler: int) -> list[int]:
        """Return the slots (entries) of unanswered requests a dead handler had taken.

        It was executing them, or had parked them.
        """
        # A slot on the coordinator's lane is, or is about to be, the coordinator's.
        answered = self._condemned | set(self._memory.lane.waiting())
        answered |= self._last_tries.held | self._unsettled.keys()
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
        """Return the slots of the requests that may have ended a dead handler.

        A slot is a request's entry in shared memory. The suspect is the request that
        the handler was executing; if it was executing none, those in ``waiting``. The
        other orphans were only taken in the same batch, or parked: they must not be
        given up because of another request.
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
        """Let other processes repeat the fsyncs of logs that a dead housekeeper made.

        The housekeeper's children have died with it. Their syncs are released, too:
        their process numbers are above its own.
        """
        table = self._memory.table
        words = table.row(0).words
        for index in range(partition_rows):
            owner = words[index * ROW_WORDS + ROW_SYNC_OWNER] - 1
            if owner >= HOUSEKEEPER:
                table.row(index).forget_sync(owner)
        self._finish()

    def _release_syncs(self, process: int, partition_rows: int) -> None:
        """Let other processes make the fsyncs of logs that a dead process had begun."""
        table = self._memory.table
        words = table.row(0).words  # of all rows: a row object each would be slow
        for index in range(partition_rows):
            if words[index * ROW_WORDS + ROW_SYNC_OWNER] == process + 1:
                table.row(index).forget_sync(process)

    def _quarantine(self, slot: int, reason: str) -> None:
        """Stop trying a request with which handlers have died, and have it answered.

        If it is still open whether the request's append was committed, this is done
        later: the response frees the slot (the request's entry in shared memory), and
        the process that finds out would note the append in the slot's next request.
        """
        if slot in self._unsettled:
            self._unsettled[slot] = reason
            return
        self.quarantined += 1
        self._condemned.add(slot)
        _LOG.error("a request %s and is not tried again", reason)
        self.on_quarantine(slot)

    def answer_condemned(self, slot: int, answer: tuple[int, int, int]) -> None:
        """Give the error response of a request in quarantine to its processor.

        Args:
            slot: the slot with which ``on_quarantine`` was called.
            answer: the ResponseKind, and the response's offset and length in bytes in
                the arena, the shared memory for bytes.
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
        """Close the connection of a request in quarantine: it gets no response."""
        self.answer_condemned(slot, (ResponseKind.CLOSE, 0, 0))

    def after_processor(self, processor: int) -> None:
        """Free slots (entries of requests) of a dead processor that no connection uses.

        The connections live on: their rows in shared memory say how far they are, and
        the keeper (a process) has their sockets. Responses stay on the response ring.
        If a handler still works on a request of a closed connection, its slot stays
        reserved until the request is answered.
        """
        self._last_tries.note_kill(time.monotonic())
        slots = slots_in_use(self._words, processor)
        # First: undo a put on the ring that was not committed. Its slots are marked as
        # published but are not on the ring, so no handler would ever see them.
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
        # It may have been killed between a partition's status and this note.
        note_offline_change(self._words)
        for notices in self._memory.notices:
            notices.overflow()
        self._memory.wake_everybody()
