"""What was written, and whether a record that was read is the one that was written.

Each partition has one idempotent producer, whose n-th record says so. So the record at
an offset is known, whatever has happened: a lost record, a doubled one and one with
other bytes are the same finding.
"""

from __future__ import annotations

import random
from threading import Lock
from typing import Final

_MOST_COMPLAINTS: Final = 20


def value(partition: int, offset: int) -> bytes:
    """Return the record that belongs at an offset."""
    draw = random.Random(partition << 40 | offset)
    return b"%d:%d:" % (partition, offset) + draw.randbytes(draw.randint(50, 400))


class Ledger:
    """May be used by several threads.

    Attributes:
        checked: how many records were read and compared.
        complaints: what was wrong, in words.
    """

    def __init__(self, partitions: int) -> None:
        self._lock = Lock()
        self._acknowledged = [0] * partitions
        self._starts = [0] * partitions
        self.checked = 0
        self.complaints: list[str] = []

    def acknowledge(self, partition: int, offset: int, content: bytes) -> None:
        """Note an answer of a producer."""
        with self._lock:
            expected = self._acknowledged[partition]
            if offset != expected or content != value(partition, offset):
                self._complain(
                    f"partition {partition}: offset {offset} was given to"
                    f" {content[:20]!r}, and {expected} follows"
                )
            self._acknowledged[partition] = offset + 1

    def end(self, partition: int) -> int:
        """Return the offset below which all was acknowledged."""
        with self._lock:
            return self._acknowledged[partition]

    def start(self, partition: int) -> int:
        """Return the offset below which a DeleteRecords may have deleted."""
        with self._lock:
            return self._starts[partition]

    def delete(self, partition: int, before_offset: int) -> None:
        """Note a DeleteRecords, before it is sent."""
        with self._lock:
            self._starts[partition] = max(self._starts[partition], before_offset)

    def read(
        self, partition: int, offset: int, content: bytes | None, expected: int
    ) -> None:
        """Compare a record that was read.

        Args:
            partition: its partition.
            offset: its offset.
            content: its value.
            expected: the offset that was to come next.
        """
        with self._lock:
            self.checked += 1
            if offset != expected and expected >= self._starts[partition]:
                self._complain(f"partition {partition}: {offset} follows {expected}")
            if content != value(partition, offset):
                self._complain(
                    f"partition {partition}: offset {offset} has {content!r:.60}"
                )

    def complain(self, text: str) -> None:
        with self._lock:
            self._complain(text)

    def _complain(self, text: str) -> None:
        if len(self.complaints) < _MOST_COMPLAINTS:
            self.complaints.append(text)
