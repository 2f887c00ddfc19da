"""Report what a pipeline has done: a line for each batch, and a summary."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TextIO


@dataclass
class Progress:
    """Adds up the figures of a run, and prints a line for each batch.

    Attributes:
        name: of the pipeline; begins each line.
        rows: rows written, or records sent.
        bad: values that could not be decoded.
        late: rows older than the description allows.
        skipped: batches that an earlier run had already committed.
        notes: lines to print after the summary.
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
        """Print a line."""
        print(f"{self.name}: {text}", file=self.out, flush=True)

    def batch(self, batch_id: int, rows: int, seconds: float, **more: int) -> None:
        """Add up and print a finished batch.

        Args:
            seconds: how long the batch took.
            more: other counts by name, such as ``bad`` and ``late``; 0 is not printed.
        """
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
        """Count and print a batch that was committed before."""
        self.skipped += 1
        self.say(f"batch {batch_id} was committed before: nothing to do")

    def report(self) -> Mapping[str, object]:
        """Print the summary and return its figures."""
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
        # A report has no batches, a replay has one.
        plural = "" if self.batches == 1 else "es"
        batches = f" in {self.batches} batch{plural}" if self.batches else ""
        self.say(
            f"done: {self.rows:,} rows{batches}, {seconds:.1f} s;"
            f" {self.bad:,} bad, {self.late:,} late"
        )
        for note in self.notes:
            self.say(note)
        return found
