"""ProcessEvents: deaths and repairs of the broker's processes, as they happen.

They are read from the black boxes (each process's log of events in shared memory), so
they outlive the exporter.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any, Final

from mpbroker.base.exit_status import explain_exit
from mpbroker.inspect.broker_view import api_name
from mpbroker.ipc.black_box import ROLES, BlackBox, Event, EventKind, box_number

KEPT: Final = 100
_TEXTS: Final[dict[int, str]] = {
    EventKind.BUG: "met a bug of the broker",
    EventKind.FAILED: "failed",
    EventKind.LOCK_REPAIRED: "repaired a lock",
    EventKind.REPAIRED: "was repaired",
    EventKind.SERVING: "serves again",
}


class ProcessEvents:
    """Keeps the last 100 events of all processes, but no intended starts and ends.

    Args:
        boxes: the words of the black boxes, the logs of events in shared memory.
    """

    def __init__(self, boxes: memoryview) -> None:
        self._boxes = [
            (role, number, BlackBox(boxes, box_number(role, number)))
            for role, ids in ROLES.items()
            for number in range(ids)
        ]
        self._seen = [0] * len(self._boxes)
        self._died_ns = [0] * len(self._boxes)
        self._kept: deque[dict[str, Any]] = deque(maxlen=KEPT)

    def look(self) -> list[dict[str, Any]]:
        """Read processes' new events from shared memory; return the last 100 events."""
        ahead_ns = time.time_ns() - time.monotonic_ns()
        found = []
        for index, (role, number, box) in enumerate(self._boxes):
            noted = box.noted
            if noted == self._seen[index]:
                continue
            new = noted - self._seen[index]
            self._seen[index] = noted
            for event in box.events()[-new:]:
                text = self._text(index, event)
                if text:
                    at = (event.at_ns + ahead_ns) / 1e9
                    found.append({"at": at, "role": role, "id": number, "text": text})
        self._kept.extend(sorted(found, key=lambda each: each["at"]))
        return list(self._kept)

    def _text(self, index: int, event: Event) -> str:
        """Return an event in words; "" if it is not to be shown."""
        died_ns = self._died_ns[index]
        if event.kind == EventKind.DIED:
            if event.a == 0:
                return ""  # it ended as it was told to
            self._died_ns[index] = event.at_ns
            return f"died: {explain_exit(event.a)}"
        if event.kind == EventKind.SPAWNED and died_ns:
            return f"started again as process {event.a}"
        text = _TEXTS.get(event.kind, "")
        if event.kind == EventKind.BUG:
            return f"{text} in {api_name(event.a)}"
        if event.kind in (EventKind.REPAIRED, EventKind.SERVING):
            if not died_ns:
                return ""
            if event.kind == EventKind.SERVING:
                self._died_ns[index] = 0
            return f"{text} {(event.at_ns - died_ns) / 1e6:.1f} ms after its death"
        return text
