"""OverviewBoard: shared memory that takes the broker's overview to the console.

The supervisor makes this memory before it forks, so all its children share it. The
exporter writes, the console reads, and neither takes a lock. An exporter that is forked
after the death of another goes on with the history that is there. A new program (an
upgrade) begins with an empty board.

    word     field      notes
    0        version    odd while the document is being replaced
    1        length     of the document, in bytes
    2        published  when the document was published, ns (monotonic); 0: never
    8        rows       number of rows ever added to the history; stored after the row
    16..     history    KEPT rows of len(COLUMNS) doubles; the oldest is replaced
    ...      document   JSON
"""

from __future__ import annotations

import math
import mmap
import time
from collections.abc import Mapping
from typing import Final

# Of these, only "at" (Unix time) is always known.
COLUMNS: Final = (
    "at",
    "requests",
    "in_bytes",
    "out_bytes",
    "errors",
    "connections",
    "queue",
    "parked",
    "handlers_busy",
    "processors_busy",
    "produce_p99_ms",
    "queue_p99_ms",
    "idle_cores",
    "deaths",
)
STEP_S: Final = 5
KEPT: Final = 3600 // STEP_S

_VERSION: Final = 0
_LENGTH: Final = 1
_PUBLISHED: Final = 2
_ROWS: Final = 8
_HISTORY: Final = 16
_DOCUMENT: Final = (_HISTORY + KEPT * len(COLUMNS)) * 8
MAX_BYTES: Final = 256 * 1024
_SIZE: Final = -(-(_DOCUMENT + MAX_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE
_ATTEMPTS: Final = 100
_PAUSE_S: Final = 0.001


class OverviewBoard:
    """The overview and its history, in memory shared with later children.

    The overview is a JSON document; the history has a row of figures for every 5 s of
    the last hour.
    """

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, _SIZE)
        view = memoryview(self._map)
        self._words = view[:_DOCUMENT].cast("q")
        self._numbers = view[_HISTORY * 8 : _DOCUMENT].cast("d")

    def publish(self, document: bytes, now_ns: int) -> bool:
        """Replace the overview that the console shows.

        Return False if the new one is too long: then the last one stays.

        Args:
            document: the overview, in JSON.
            now_ns: the time of the monotonic clock.
        """
        if len(document) > MAX_BYTES:
            return False
        words = self._words
        # Odd before the first store and even after the last: a reader drops a document
        # whose version was odd or has changed. An exporter that died in between has
        # left an odd version.
        version = words[_VERSION] | 1
        words[_VERSION] = version
        self._replace(document)
        words[_LENGTH] = len(document)
        words[_PUBLISHED] = now_ns
        words[_VERSION] = version + 1
        return True

    def _replace(self, document: bytes) -> None:
        self._map[_DOCUMENT : _DOCUMENT + len(document)] = document

    def document(self) -> tuple[bytes, int] | None:
        """Return the overview, and when it was published (ns of the monotonic clock).

        Return None if none was published, or the exporter died while replacing it.
        """
        words = self._words
        for _ in range(_ATTEMPTS):
            before = words[_VERSION]
            length, at = words[_LENGTH], words[_PUBLISHED]
            if not before % 2 and at and 0 < length <= MAX_BYTES:
                found = self._map[_DOCUMENT : _DOCUMENT + length]
                if words[_VERSION] == before:
                    return found, at
            elif not before:
                return None
            time.sleep(_PAUSE_S)
        return None

    def add_row(self, row: Mapping[str, float | None]) -> None:
        """Add a row of figures to the history, which has the last hour.

        Args:
            row: the values by the names in COLUMNS; one that is absent or None is
                unknown.
        """
        rows = self._words[_ROWS]
        first = rows % KEPT * len(COLUMNS)
        for index, name in enumerate(COLUMNS):
            value = row.get(name)
            self._numbers[first + index] = math.nan if value is None else value
        self._words[_ROWS] = rows + 1  # last: readers read only the rows counted here

    def history(self, after: float = 0.0) -> dict[str, list[float | None]]:
        """Return the rows of the last hour, by column, the oldest row first.

        Args:
            after: only rows later than this Unix time, in seconds.
        """
        rows = self._words[_ROWS]
        width = len(COLUMNS)
        numbers = self._numbers.tolist()
        # The oldest row may be replaced while it is read, so it is left out.
        found = [
            numbers[number % KEPT * width :][:width]
            for number in range(max(0, rows - KEPT + 1), rows)
        ]
        oldest = max(after, (found[-1][0] if found else 0.0) - STEP_S * KEPT)
        found = [row for row in found if row[0] > oldest]
        return {
            name: [None if math.isnan(row[index]) else row[index] for row in found]
            for index, name in enumerate(COLUMNS)
        }
