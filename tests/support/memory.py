"""A broker's shared memory without its processes, and what must be true of it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Final

from mpbroker.ipc.layout import (
    SLOT_STATE,
    SLOTS_PER_PROCESSOR,
    STATE_HANDLER_MASK,
    STATE_HANDLER_SHIFT,
    STATE_MASK,
    SlotState,
    slot_row,
)
from mpbroker.supervisor.memory import BrokerMemory

MAX_REQUEST_BYTES: Final = 4 * 1024 * 1024


@contextlib.contextmanager
def broker_memory(
    max_request_bytes: int = MAX_REQUEST_BYTES, queued_max_requests: int = 500
) -> Iterator[BrokerMemory]:
    """Everything that a broker's processes share; its descriptors close at the end."""
    memory = BrokerMemory(max_request_bytes, queued_max_requests)
    try:
        yield memory
    finally:
        for segment in (
            memory.control,
            memory.arena,
            memory.table.segment,
            memory.sessions,
        ):
            os.close(segment.fd)
        for bell in (
            *memory.handler_bells,
            *memory.processor_bells,
            memory.acceptor_bell,
            memory.housekeeper_bell,
            memory.supervisor_bell,
        ):
            os.close(bell.fd)
        for pair in (*memory.handovers, memory.keeper_pair):
            for end in pair:
                end.close()


def state_of(memory: BrokerMemory, slot: int) -> SlotState:
    word = memory.control.words[slot_row(slot) + SLOT_STATE]
    return SlotState(word & STATE_MASK)


def claimer_of(memory: BrokerMemory, slot: int) -> int:
    """The handler that has claimed a slot."""
    word = memory.control.words[slot_row(slot) + SLOT_STATE]
    return ((word & STATE_HANDLER_MASK) >> STATE_HANDLER_SHIFT) - 1


def slots_of(processor: int, count: int) -> range:
    first = processor * SLOTS_PER_PROCESSOR
    return range(first, first + count)
