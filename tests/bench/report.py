"""Figures of alternating runs: medians, ranges, ratios, and what they should be."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tests.bench.cases import LIMITS, UNITS

# Above this, what others computed shows in the figures.
OTHERS_CORES: Final = 0.1

Runs = Sequence[Mapping[str, float]]


class CaseResult:
    """Every run of one case: a list of figures by broker."""

    def __init__(
        self, name: str, runs: Mapping[str, Runs], others_cores: float
    ) -> None:
        self.name = name
        self.others_cores = others_cores
        self.runs = {label: rows for label, rows in runs.items() if rows}

    def metrics(self) -> list[str]:
        """Return the metrics that any run gave, in the order they were given."""
        seen: dict[str, None] = {}
        for rows in self.runs.values():
            for row in rows:
                seen.update(dict.fromkeys(row))
        return list(seen)

    def median(self, label: str, metric: str) -> float | None:
        values = self._values(label, metric)
        return statistics.median(values) if values else None

    def _values(self, label: str, metric: str) -> list[float]:
        return [row[metric] for row in self.runs.get(label, ()) if metric in row]

    def lines(self) -> list[str]:
        """Return the case as the report prints it: one line a metric."""
        labels = list(self.runs)
        lines = []
        for metric in self.metrics():
            unit = UNITS[metric]
            parts = [f"{unit.suffix:>17}"]
            for label in labels:
                parts.append(self._cell(label, metric, unit.digits))
            if len(labels) == 2:
                parts.append(self._ratio(labels, metric))
            parts.append(self._verdict(labels[0], metric))
            lines.append("  ".join(parts).rstrip())
        if self.others_cores > OTHERS_CORES:
            lines.append(
                f"{'':>19}DISTURBED: other processes had {self.others_cores:.2f} cores"
            )
        return lines

    def _cell(self, label: str, metric: str, digits: int) -> str:
        values = self._values(label, metric)
        if not values:
            return f"{'-':>34}"
        median = f"{statistics.median(values):,.{digits}f}"
        spread = f"({min(values):,.{digits}f} - {max(values):,.{digits}f})"
        return f"{median:>12} {spread if len(values) > 1 else '':<21}"

    def _ratio(self, labels: Sequence[str], metric: str) -> str:
        ours, theirs = (self.median(label, metric) for label in labels)
        if not ours or not theirs:
            return f"{'':>9}"
        return f"{ours / theirs:>8.2f}x"

    def _verdict(self, label: str, metric: str) -> str:
        limit = LIMITS.get((self.name, metric))
        median = self.median(label, metric)
        if limit is None or median is None:
            return ""
        word = "ok" if limit.is_met(median) else "MISSED"
        return f"{word}: {'>=' if limit.at_least else '<='} {limit.value:,g}"

    def missed(self) -> list[str]:
        """Return the figures that the first broker did not reach."""
        if not self.runs:
            return []
        label = next(iter(self.runs))
        verdicts = {m: self._verdict(label, m) for m in self.metrics()}
        return [
            f"{self.name}: {self.median(label, m):,.3g} {UNITS[m].suffix} ({verdict})"
            for m, verdict in verdicts.items()
            if verdict.startswith("MISSED")
        ]

    def as_json(self) -> dict[str, Any]:
        return {
            "case": self.name,
            "others_cores": round(self.others_cores, 3),
            "runs": {label: list(rows) for label, rows in self.runs.items()},
            "median": {
                label: {m: self.median(label, m) for m in self.metrics()}
                for label in self.runs
            },
        }


def heading(labels: Sequence[str]) -> str:
    """Return the line above all cases."""
    columns = "".join(f"  {label[:20]:>12}{'':<22}" for label in labels)
    ratio = f"  {'ratio':>9}" if len(labels) == 2 else ""
    return f"{'':>17}{columns}{ratio}  figure to reach"


def machine() -> dict[str, Any]:
    """Return what the figures depend on most."""
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def save(path: Path, results: Sequence[CaseResult]) -> None:
    """Write every run of every case as JSON."""
    document = {
        "machine": machine(),
        "results": [result.as_json() for result in results],
    }
    path.write_text(json.dumps(document, indent=1) + "\n")
