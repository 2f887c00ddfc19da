"""What a pipeline says while it runs, and at its end."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TextIO


@dataclass
class Progress:
    """Counts what is done; a line for each batch, and a report.

    Attributes:
        rows: written, or records sent.
        bad: values that could not be read.
        late: rows older than the description allows.
        skipped: batches that were committed already, by a run that was killed.
    """

    name: str
    out: TextIO = field(default_factory=lambda: sys.stderr)
    rows: int = 0
    bad: int = 0
    late: int = 0
    batches: int = 0
    skipped: int = 0
    notes: list[str] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    def say(self, text: str) -> None:
        print(f"{self.name}: {text}", file=self.out, flush=True)

    def batch(self, batch_id: int, rows: int, seconds: float, **more: int) -> None:
        """Say that a batch is done; ``more`` are counts to be named if not 0."""
        self.batches += 1
        self.rows += rows
        self.bad += more.get("bad", 0)
        self.late += more.get("late", 0)
        extra = "".join(f", {count:,} {what}" for what, count in more.items() if count)
        rate = rows / max(seconds, 1e-6)
        self.say(
            f"batch {batch_id}: {rows:,} rows{extra} in {seconds:.1f} s, {rate:,.0f}/s"
        )

    def skip(self, batch_id: int) -> None:
        self.skipped += 1
        self.say(f"batch {batch_id} was committed before: nothing to do")

    def report(self) -> Mapping[str, object]:
        """Say the final report; return it."""
        seconds = time.monotonic() - self.started
        found: dict[str, object] = {
            "pipeline": self.name,
            "rows": self.rows,
            "bad": self.bad,
            "late": self.late,
            "batches": self.batches,
            "skipped_batches": self.skipped,
            "seconds": round(seconds, 1),
        }
        # A report is made without any, and a replay in one.
        plural = "" if self.batches == 1 else "es"
        batches = f" in {self.batches} batch{plural}" if self.batches else ""
        self.say(
            f"done: {self.rows:,} rows{batches}, {seconds:.1f} s;"
            f" {self.bad:,} bad, {self.late:,} late"
        )
        for note in self.notes:
            self.say(note)
        return found
