"""DeathRecords: the evidence of every process that died, for ``ctl blackbox``.

A record has the request that the dead process was executing, its last events, and the
exception that ended it. It is made before the supervisor repairs shared memory and
gives the request to another process. The last few records are also published in the
named segment, which can be read when the broker does not answer.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any, Final

from mpbroker.base.exit_status import explain_exit
from mpbroker.inspect.broker_view import BrokerView, api_name
from mpbroker.ipc.black_box import BlackBox, EventKind, Fault
from mpbroker.ipc.layout import (
    COORDINATOR,
    HANDLER_BUSY_SINCE,
    HANDLER_BUSY_SLOT,
    MAX_SLOTS,
    SLOT_CONNECTION,
    SLOT_REQUEST_LENGTH,
    SLOT_REQUEST_OFFSET,
    SLOT_RETRIES,
    handler_row,
    slot_row,
)
from mpbroker.ipc.segment import Segment
from mpbroker.network.connection_rows import connection_name

_KEPT: Final = 64
_PUBLISHED: Final = 8
# Limits, so that the published records and all children fit into the named segment.
_PUBLISHED_EVENTS: Final = 8
_PUBLISHED_TEXT: Final = 1000
_MAX_CONNECTIONS: Final = 1 << 18


class DeathRecords:
    """Keeps a record of each of the last 64 deaths, oldest first."""

    def __init__(self, view: BrokerView, arena: Segment) -> None:
        self._view = view
        self._arena = arena
        self._kept: deque[dict[str, Any]] = deque(maxlen=_KEPT)
        self.total = 0

    def record(self, role: str, number: int, pid: int, reason: str) -> None:
        """Store a dead process's reason, request, last events and exception.

        Call it before the request is given to another process.
        """
        self.total += 1
        box = self._view.box(role, number)
        self._kept.append(
            {
                "role": role,
                "id": number,
                "pid": pid,
                "reason": reason,
                "at": time.time(),
                "request": self._request(role, number),
                "events": describe_events(box),
                "last_words": box.last_words(),
            }
        )
        box.forget_last_words()
        for fault in Fault:
            box.set_fault(fault, 0)  # injected into the dead process, not its successor

    def kept(self) -> list[dict[str, Any]]:
        """Return all records that are kept, oldest first."""
        return list(self._kept)

    def published(self) -> list[dict[str, Any]]:
        """Return the last eight records, with fewer events and shorter texts."""
        return [
            death
            | {
                "events": death["events"][-_PUBLISHED_EVENTS:],
                "last_words": death["last_words"][-_PUBLISHED_TEXT:],
            }
            for death in list(self._kept)[-_PUBLISHED:]
        ]

    def _request(self, role: str, number: int) -> dict[str, Any] | None:
        if role == "handler":
            return executed_request(self._view.control, self._arena.view, number)
        if role == "coordinator":
            return executed_request(self._view.control, self._arena.view, COORDINATOR)
        return None


def describe_events(box: BlackBox) -> list[dict[str, Any]]:
    """Return a black box's events for people and programs, oldest first."""
    now_ns, now = time.monotonic_ns(), time.time()
    return [
        {
            "at": now - (now_ns - event.at_ns) / 1e9,
            "event": _kind_name(event.kind),
            "detail": _detail(event.kind, event.a, event.b),
        }
        for event in box.events()
    ]


def executed_request(
    words: memoryview, arena: memoryview | None, handler: int
) -> dict[str, Any] | None:
    """Return a description of the request that a handler executes; None: it is idle.

    Of a dead handler it is the request that it was executing.

    Args:
        words: the words of the control segment.
        arena: the bytes of requests; None: the API of the request is left out.
        handler: the handler's id, or COORDINATOR.
    """
    row = handler_row(handler)
    slot = words[row + HANDLER_BUSY_SLOT] - 1
    if not 0 <= slot < MAX_SLOTS:
        return None
    slot_word = slot_row(slot)
    connection = words[slot_word + SLOT_CONNECTION]
    length = words[slot_word + SLOT_REQUEST_LENGTH]
    found: dict[str, Any] = {
        "slot": slot,
        "connection": (
            connection_name(words, connection)
            if 0 <= connection < _MAX_CONNECTIONS
            else None
        ),
        "bytes": length,
        "retries": words[slot_word + SLOT_RETRIES],
        "for_ms": (time.monotonic_ns() - words[row + HANDLER_BUSY_SINCE]) / 1e6,
        "api": None,
        "version": None,
        "correlation_id": None,
    }
    start = words[slot_word + SLOT_REQUEST_OFFSET]
    if arena is not None and length >= 8 and 0 <= start <= len(arena) - 8:
        head = bytes(arena[start : start + 8])
        found["api"] = api_name(int.from_bytes(head[:2], signed=True))
        found["version"] = int.from_bytes(head[2:4], signed=True)
        found["correlation_id"] = int.from_bytes(head[4:], signed=True)
    return found


def _kind_name(kind: int) -> str:
    try:
        return EventKind(kind).name
    except ValueError:
        return f"event {kind}"


def _detail(kind: int, a: int, b: int) -> str:
    if kind == EventKind.SPAWNED:
        return f"process {a}"
    if kind == EventKind.SERVING:
        return f"incarnation {a}"
    if kind == EventKind.DIED:
        return explain_exit(a)
    if kind == EventKind.BUG:
        return f"{api_name(a)} on connection {b}"
    return ""
