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
        ends = [end for pair in (*memory.handovers, memory.keeper_pair) for end in pair]
        owned = {end.fileno() for end in ends}
        for end in ends:
            end.close()
        for fds in memory.parts.fds.values():
            for fd in fds:
                if fd not in owned:
                    os.close(fd)


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
