"""A broker's shared memory from outside: who serves, and what is in use.

Through /proc/PID/fd of the supervisor, read-only and without asking anyone; so it works
on a broker that is stuck.
"""

from __future__ import annotations

import mmap
import os
from collections import Counter
from typing import Final

from mpbroker.ipc import layout
from mpbroker.ipc.black_box import BOX_WORDS, BOXES, BlackBox, EventKind, box_number
from mpbroker.ipc.layout import (
    CONNECTION_ACTIVE,
    CONNECTION_LOCAL_PORT,
    CONNECTION_PEER_PORT,
    CONNECTION_SLOT,
    CONNECTION_STATE,
    HANDLER_ACTIVE,
    HANDLER_BUSY_SLOT,
    HANDLER_INCARNATION,
    HANDLER_PID,
    HANDLER_READY,
    HEADER,
    HEADER_BOOT_ID,
    MAX_HANDLERS,
    MAX_PROCESSORS,
    PROCESSOR_COUNTERS,
    PROCESSOR_HANDED,
    PROCESSOR_INCARNATION,
    PROCESSOR_LISTENER,
    PROCESSOR_PID,
    PROCESSOR_READY,
    PROCESSOR_REGISTERED,
    PROCESSOR_ROWS_USED,
    REQUEST_RING,
    RING_HEAD,
    RING_TAIL,
    ROW_INTENT,
    ROW_SYNC_OWNER,
    ROW_WORDS,
    SLOT_COMPLETED,
    SLOT_DEQUEUED,
    SLOT_PARKED,
    SLOT_RECEIVED,
    SLOT_STATE,
    STATE_MASK,
    SlotState,
    connection_row,
    handler_row,
    processor_row,
    response_ring,
    slot_row,
    slots_in_use,
)
from mpbroker.network.connection_rows import live_rows

_CONTROL: Final = "/memfd:mpbroker-control"
_PARTITIONS: Final = "/memfd:mpbroker-partitions"
_BLACK_BOXES: Final = "/memfd:mpbroker-black-boxes"
_ROWS_LOOKED_AT: Final = 512
# Of a request, in this order, and what a client's line says of them.
_STAMPS: Final = {
    "read": SLOT_RECEIVED,
    "taken by a handler": SLOT_DEQUEUED,
    "waits for disk or others": SLOT_PARKED,
    "answered": SLOT_COMPLETED,
}
_SEEN_IN_BOXES: Final = {
    EventKind.SPAWNED: "forked",
    EventKind.SERVING: "serves",
    EventKind.ENDING: "ends",
    EventKind.DIED: "reaped",
    EventKind.REPAIRED: "repaired after",
    EventKind.LOCK_REPAIRED: "repaired a lock",
}
_IN_BOXES: Final = {
    "processor": MAX_PROCESSORS,
    "handler": MAX_HANDLERS,
    "acceptor": 2,
    "coordinator": 1,
    "housekeeper": 1,
}


def events_in(boxes: bytes) -> list[tuple[int, str]]:
    """What processes, and the supervisor of them, have noted last: ns, text."""
    if len(boxes) < BOXES * BOX_WORDS * 8:
        return []
    words = memoryview(boxes).cast("q")
    return [
        (event.at_ns, f"{role} {number} {_SEEN_IN_BOXES[EventKind(event.kind)]}")
        for role, count in _IN_BOXES.items()
        for number in range(count)
        for event in BlackBox(words, box_number(role, number)).events()
        if event.kind in _SEEN_IN_BOXES
    ]


class Peek:
    """What one supervisor's segments say right now."""

    def __init__(self, pid: int) -> None:
        self._maps: list[mmap.mmap] = []
        self._pid = pid
        self._words = self._attach(_CONTROL)
        self._rows = self._attach(_PARTITIONS)

    def _attach(self, name: str) -> memoryview:
        opened = self._open(name)
        try:
            size = os.fstat(opened).st_size
            mapped = mmap.mmap(opened, size, prot=mmap.PROT_READ)
        finally:
            os.close(opened)
        self._maps.append(mapped)
        return memoryview(mapped).cast("q")

    def _open(self, name: str) -> int:
        folder = f"/proc/{self._pid}/fd"
        for fd in os.listdir(folder):
            if os.readlink(f"{folder}/{fd}").startswith(name):
                return os.open(f"{folder}/{fd}", os.O_RDONLY)
        raise FileNotFoundError(f"process {self._pid} has no {name}")

    def close(self) -> None:
        for words in (self._words, self._rows):
            words.release()
        for mapped in self._maps:
            mapped.close()

    @property
    def boot_ns(self) -> int:
        """Since when there is this memory, and what it counts: Unix time, ns."""
        boot: int = self._words[HEADER + HEADER_BOOT_ID]
        return boot

    def serving(self, role: str) -> dict[int, int]:
        """Process ids by number, of the handlers or processors that serve now."""
        words = self._words
        found = {}
        if role == "handler":
            for number in range(MAX_HANDLERS):
                row = handler_row(number)
                incarnation = words[row + HANDLER_INCARNATION]
                if (
                    words[row + HANDLER_ACTIVE]
                    and incarnation
                    and words[row + HANDLER_READY] == incarnation
                ):
                    found[number] = words[row + HANDLER_PID]
        else:
            for number in range(MAX_PROCESSORS):
                row = processor_row(number)
                incarnation = words[row + PROCESSOR_INCARNATION]
                if (
                    words[row + PROCESSOR_LISTENER]
                    and incarnation
                    and words[row + PROCESSOR_READY] == incarnation
                ):
                    found[number] = words[row + PROCESSOR_PID]
        return found

    def stamps(self, local_port: int, peer_port: int) -> dict[str, int]:
        """When a connection's last request passed each stage, ns; none: it is gone."""
        words = self._words
        for connection in live_rows(words):
            row = connection_row(connection)
            if (
                words[row + CONNECTION_PEER_PORT] == peer_port
                and words[row + CONNECTION_LOCAL_PORT] == local_port
                and words[row + CONNECTION_SLOT] > 0
            ):
                slot = slot_row(words[row + CONNECTION_SLOT] - 1)
                found = {what: words[slot + word] for what, word in _STAMPS.items()}
                if words[row + CONNECTION_ACTIVE] >= words[slot + SLOT_COMPLETED]:
                    found["sent"] = words[row + CONNECTION_ACTIVE]
                return found
        return {}

    def boxes(self) -> bytes:
        """All black boxes as they are now; for ``events_in``, which takes its time."""
        opened = self._open(_BLACK_BOXES)
        try:
            # Not mapped: to look at what nobody has written would give it memory.
            return os.pread(opened, os.fstat(opened).st_size, 0)
        finally:
            os.close(opened)

    def in_use(self) -> dict[str, int]:
        """What requests and connections hold; nothing, in a fresh or quiet broker."""
        words = self._words
        held: Counter[str] = Counter()
        for processor in range(MAX_PROCESSORS):
            row = processor_row(processor)
            for slot in slots_in_use(words, processor):
                state = words[slot_row(slot) + SLOT_STATE] & STATE_MASK
                if state != SlotState.FREE:
                    held[f"slots {SlotState(state).name}"] += 1
            first = processor * layout.CONNECTIONS_PER_PROCESSOR
            for index in range(first, first + words[row + PROCESSOR_ROWS_USED]):
                if words[connection_row(index) + CONNECTION_STATE] & STATE_MASK:
                    held["connection rows"] += 1
            held["connections counted"] += words[row + PROCESSOR_COUNTERS]
            held["connections on their way"] += max(
                0, words[row + PROCESSOR_HANDED] - words[row + PROCESSOR_REGISTERED]
            )
            ring = response_ring(processor)
            held["answers on a ring"] += (
                words[ring + RING_TAIL] - words[ring + RING_HEAD]
            )
        held["requests on the ring"] = (
            words[REQUEST_RING + RING_TAIL] - words[REQUEST_RING + RING_HEAD]
        )
        for handler in range(MAX_HANDLERS):
            held["busy handlers"] += words[handler_row(handler) + HANDLER_BUSY_SLOT] > 0
        for index in range(_ROWS_LOOKED_AT):
            held["intents"] += self._rows[index * ROW_WORDS + ROW_INTENT] != 0
            held["syncs owned"] += self._rows[index * ROW_WORDS + ROW_SYNC_OWNER] != 0
        return {name: count for name, count in held.items() if count}
