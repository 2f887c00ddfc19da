"""Repair shared memory after a death, before the successor is forked.

Only the supervisor decides what becomes of a dead process's slots, and it repairs one
death at a time. The order matters: partition locks are taken over and their intents
settled before any request is put back, or the next append would make a batch that was
never written look committed. After every repair everybody is woken.
"""

import logging
from collections.abc import Callable
from typing import Final

from mpbroker.ipc.layout import (
    CONNECTION_SLOT,
    CONNECTION_STATE,
    COORDINATOR,
    HANDLER_BUSY_SLOT,
    HEADER,
    HEADER_DEATH_EPOCH,
    MAX_PROCESSORS,
    ROW_SYNC_OWNER,
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
    ResponseKind,
    SlotState,
    connection_row,
    handler_row,
    slot_row,
    slots_in_use,
)
from mpbroker.supervisor.memory import BrokerMemory

_LOG = logging.getLogger(__name__)

# A request that its third handler did not survive is not tried again.
MAX_RETRIES: Final = 2
_INTENT_ROW_MASK: Final = 0xFFFF_FFFF
_KEEP_GENERATION: Final = ~(STATE_MASK | STATE_HANDLER_MASK)


class Repair:
    """What is done about the dead."""

    def __init__(self, memory: BrokerMemory) -> None:
        self._memory = memory
        self._words = memory.control.words
        self.redelivered = 0
        self.quarantined = 0
        # Slots that are with neither handlers nor processors: they are being answered.
        self._condemned: set[int] = set()
        self.on_quarantine: Callable[[int], None] = self.close_condemned

    def after_handler(
        self, handler: int, partition_rows: int, *, blame_waiting: bool = True
    ) -> None:
        """Put a dead handler's requests back, each to be executed exactly once.

        Args:
            handler: its id.
            partition_rows: how many rows of the partition table are in use.
            blame_waiting: if it was at no request, any that it had parked or taken may
                be what ended it; else its death came from outside.
        """
        self._memory.ring.reclaim(handler)
        orphans = self._orphans_of(handler)
        suspects = self._suspects(handler, orphans if blame_waiting else [], orphans)
        table = self._memory.table
        for slot in orphans:
            intent = self._words[slot_row(slot) + SLOT_INTENT]
            if intent:
                table.row((intent & _INTENT_ROW_MASK) - 1).settle()
        self._release_syncs(handler, partition_rows)
        again = []
        for slot in orphans:
            row = slot_row(slot)
            if slot in suspects:
                self._words[row + SLOT_RETRIES] += 1
            if self._words[row + SLOT_RETRIES] <= MAX_RETRIES:
                again.append(slot)
            else:
                self._quarantine(slot)
        if again:
            self.redelivered += len(again)
            self._memory.ring.put_back(again)
        self._finish()

    def after_coordinator(self, partition_rows: int) -> None:
        """Put the dead coordinator's requests back: handlers forward them again.

        Every one may be executed twice. What it wrote to its log is found there by its
        successor, and what it did not write has not happened; a commit is the same
        commit again, and a member whose generation is gone is told to rejoin.
        """
        self.after_handler(COORDINATOR, partition_rows)

    def _orphans_of(self, handler: int) -> list[int]:
        """Slots that the dead handler had claimed or parked and not answered."""
        # On the coordinator's lane they are the coordinator's, or are still to be.
        answered = self._condemned | set(self._memory.lane.waiting())
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
        """The orphans that may have killed it: the one it was executing, or who waited.

        The others were taken in the same batch, or wait; a poisonous request must not
        take its neighbours along.
        """
        busy_word = handler_row(handler) + HANDLER_BUSY_SLOT
        busy = self._words[busy_word] - 1
        self._words[busy_word] = 0
        return {busy} if busy in orphans else set(waiting)

    def _slots(self) -> list[int]:
        slots: list[int] = []
        for processor in range(MAX_PROCESSORS):
            slots.extend(slots_in_use(self._words, processor))
        return slots

    def _release_syncs(self, handler: int, partition_rows: int) -> None:
        """A sync whose owner died: whoever needs it starts another."""
        for index in range(partition_rows):
            row = self._memory.table.row(index)
            if row.words[row.base + ROW_SYNC_OWNER] == handler + 1:
                with row.locked():
                    row.words[row.base + ROW_SYNC_OWNER] = 0

    def _quarantine(self, slot: int) -> None:
        """A request that keeps killing handlers: somebody else answers it."""
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
        self._words[row + SLOT_RESPONSE_KIND] = kind
        self._words[row + SLOT_RESPONSE_OFFSET] = offset
        self._words[row + SLOT_RESPONSE_LENGTH] = length
        self._condemned.discard(slot)
        self._memory.responses[slot // SLOTS_PER_PROCESSOR].push([slot])

    def close_condemned(self, slot: int) -> None:
        """Close the connection of a request in quarantine, for want of an answer."""
        self.answer_condemned(slot, (ResponseKind.CLOSE, 0, 0))

    def after_processor(self, processor: int) -> None:
        """Free what none of a dead processor's connections has.

        Its connections live on: their rows say where they were, the keeper has their
        sockets. Answers stay on the response ring. What handlers work on for
        connections that are gone stays reserved until they answer.
        """
        slots = slots_in_use(self._words, processor)
        self._memory.ring.retract(slots)
        # What is pushed from here on stays on the ring, for the successor.
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
        self._words[HEADER + HEADER_DEATH_EPOCH] += 1
        for notices in self._memory.notices:
            notices.overflow()
        self._memory.wake_everybody()
