"""Report what a pipeline has done: a line for each batch, and a summary."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TextIO

from mpbroker.spark.lag import offsets_behind

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

# Seconds between two lines about the lag.
_SAY_S: Final = 10.0
# The longest name of a field that is printed whole, in characters.
_NAME_MAX: Final = 60
# The largest number of untaken fields that are named.
_NAMES_MAX: Final = 20


@dataclass
class Progress:
    """Adds up the figures of a run, and prints a line for each batch.

    Attributes:
        name: the pipeline's name, with which each line begins.
        rows: rows written, or records sent.
        bad: values that could not be decoded.
        late: rows older than the pipeline's TOML file allows.
        late_label: the words for late rows in a line: "late", "late and dropped".
        fields: the fields of values, if there are some, those inside of others as
            ``from.airport``, ``legs[].to``.
        seen: those of them that were not null in each row.
        untaken: fields of the values that no column takes, some of them at least.
        skipped: batches that an earlier run had already committed.
        last_batch: the id of the newest batch.
        committed_s: the time of that batch's commit, in seconds since 1970.
        notes: lines to print after the summary.
        watches: functions to call about once a second with the query, while it runs.
        stopping: an event that is set when the user wants the run to end.
    """

    name: str
    out: TextIO = field(default_factory=lambda: sys.stderr)
    rows: int = 0
    bad: int = 0
    late: int = 0
    late_label: str = "late"
    batches: int = 0
    fields: set[str] = field(default_factory=set)
    seen: set[str] = field(default_factory=set)
    untaken: set[str] = field(default_factory=set)
    skipped: int = 0
    last_batch: int | None = None
    committed_s: float | None = None
    notes: list[str] = field(default_factory=list)
    watches: list[Callable[[StreamingQuery], None]] = field(default_factory=list)
    stopping: threading.Event = field(default_factory=threading.Event)
    started: float = field(default_factory=time.monotonic)

    def say(self, text: str) -> None:
        """Print a line of text about the pipeline."""
        print(f"{self.name}: {text}", file=self.out, flush=True)

    def batch(self, batch_id: int, rows: int, seconds: float, **more: int) -> None:
        """Add a finished batch to the totals, and print its line.

        Args:
            seconds: the time that the batch took.
            more: other counts by name, such as ``bad`` and ``late``; 0 is not printed.
        """
        self.batches += 1
        self.last_batch, self.committed_s = batch_id, time.time()
        self.rows += rows
        self.bad += more.get("bad", 0)
        self.late += more.get("late", 0)
        names = {"late": self.late_label}
        extra = "".join(
            f", {count:,} {names.get(what, what)}"
            for what, count in more.items()
            if count
        )
        rate = rows / max(seconds, 1e-6)
        self.say(
            f"batch {batch_id}: {rows:,} rows{extra} in {seconds:.1f} s, {rate:,.0f}/s"
        )

    def say_nulls(self) -> None:
        """Name the fields that were null in each row: their names may be misspelt."""
        missing = self.fields - self.seen
        # All that is inside of a missing field is missing.
        names = [
            name
            for name in sorted(missing)
            if not any(name.startswith((f"{each}.", f"{each}[")) for each in missing)
        ]
        if names and self.rows:
            self.say(
                f"null in all {self.rows:,} rows: {', '.join(names)} (do the values"
                " have fields of these names?)"
            )

    def say_untaken(self) -> None:
        """Name fields of the values that no column takes: one may have been meant."""
        # A registry's newer schema may have made a column of one since.
        names = sorted(self.untaken - self.fields)
        if not names:
            return
        shown = ", ".join(map(_spelt, names[:_NAMES_MAX]))
        if len(names) > _NAMES_MAX:
            self.say(
                f"more than {_NAMES_MAX} fields of the values are in no column: {shown}"
                " and others"
            )
            return
        what = "1 field" if len(names) == 1 else f"{len(names)} fields"
        are = "is" if len(names) == 1 else "are"
        self.say(f"{what} of the values {are} in no column: {shown}")

    def skip(self, batch_id: int) -> None:
        """Count and print a batch that an earlier run has committed."""
        self.skipped += 1
        self.say(f"batch {batch_id} was committed before: nothing to do")

    def report(self) -> Mapping[str, object]:
        """Print a summary of the run, and return its figures by name."""
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
            f" {self.bad:,} bad, {self.late:,} {self.late_label}"
        )
        self.say_nulls()
        self.say_untaken()
        for note in self.notes:
            self.say(note)
        return found


def _spelt(name: str) -> str:
    """Return a name in the form that a line can have: short and printable."""
    short = name if len(name) <= _NAME_MAX else f"{name[:_NAME_MAX]}..."
    return short if short.isprintable() and short.strip() else repr(short)


class LagWatch:
    """Prints how far a query is behind, and when it will have caught up.

    A line comes at most every ten seconds, and none while nothing is left to read.
    """

    def __init__(
        self, progress: Progress, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._progress, self._now = progress, now
        # When the last line was printed, and what it said.
        self._said: tuple[float, int] | None = None

    def look(self, query: StreamingQuery) -> None:
        """Print how many offsets a query is behind, at most every ten seconds."""
        done = query.lastProgress
        if done is None:
            return
        now = self._now()
        if self._said is not None and now - self._said[0] < _SAY_S:
            return
        behind = sum(sum(offsets_behind(each).values()) for each in done["sources"])
        if behind:
            self._progress.say(f"{behind:,} offsets behind{self._outlook(now, behind)}")
        self._said = now, behind

    def _outlook(self, now: float, behind: int) -> str:
        if self._said is None or not self._said[1]:
            return ""
        before_s, before = self._said
        rate = (before - behind) / (now - before_s)
        if rate <= 0:
            return ", and not catching up"
        return f", caught up in {duration(behind / rate)} at this pace"


def duration(seconds: float) -> str:
    """Return a duration as text: whole seconds below 120, else minutes or hours."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"
