"""Prometheus' text format: families of samples, and their encoding.

Source: Prometheus documentation, "Exposition formats", version 0.0.4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from mpbroker.ipc.counters.request_metrics import Histogram, bounds_s

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
Labels = tuple[tuple[str, object], ...]
_BOUNDS: Final = [*(f"{bound:.9g}" for bound in bounds_s()), "+Inf"]
_ESCAPES: Final = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


class Family:
    """One metric: its name, its kind, its help text, and its samples."""

    def __init__(self, name: str, kind: str, text: str) -> None:
        self.name = name
        self.kind = kind
        self.text = text
        self.samples: list[tuple[str, Labels, float]] = []

    def add(self, value: float, **labels: object) -> None:
        """Add a sample (a value and its labels) to this metric."""
        self.samples.append(("", tuple(labels.items()), value))

    def add_histogram(self, histogram: Histogram, **labels: object) -> None:
        """Add a histogram to this metric: samples of buckets, sum (s) and count."""
        base, total = tuple(labels.items()), 0
        for bound, count in zip(_BOUNDS, histogram.counts, strict=True):
            total += count
            self.samples.append(("_bucket", (*base, ("le", bound)), total))
        self.samples.append(("_sum", base, histogram.sum_ns / 1e9))
        self.samples.append(("_count", base, total))

    def add_summary(self, total: float, count: int, **labels: object) -> None:
        """Add a summary to this metric: samples of sum and count, without quantiles."""
        base = tuple(labels.items())
        self.samples.append(("_sum", base, total))
        self.samples.append(("_count", base, count))


def counter(name: str, text: str) -> Family:
    return Family(name, "counter", text)


def gauge(name: str, text: str) -> Family:
    return Family(name, "gauge", text)


def histogram(name: str, text: str) -> Family:
    return Family(name, "histogram", text)


def summary(name: str, text: str) -> Family:
    return Family(name, "summary", text)


def figure_families(
    texts: Mapping[str, str], value: Callable[[str], float]
) -> list[Family]:
    """Return counters and gauges of one sample each.

    Args:
        texts: the help text of each, by its name, `mpbroker_PART_FIGURE`; the names of
            counters end in `_total`.
        value: gives the value of a figure, by its name in there.
    """
    found = []
    for name, text in texts.items():
        family = Family(name, "counter" if name.endswith("_total") else "gauge", text)
        family.add(value(_figure(name)))
        found.append(family)
    return found


def figure_status(
    texts: Mapping[str, str], by_name: Mapping[str, Family]
) -> dict[str, float] | None:
    """Return the values of such families by figure; None: there are none of them."""
    found = {
        _figure(name): by_name[name].samples[0][2] for name in texts if name in by_name
    }
    return found or None


def _figure(name: str) -> str:
    return name.split("_", 2)[2].removesuffix("_total")


def render(families: Iterable[Family]) -> bytes:
    """Encode families in Prometheus' text format; each name must occur once.

    Families without samples are left out.
    """
    lines: list[str] = []
    for family in families:
        if family.samples:
            lines.append(f"# HELP {family.name} {family.text}")
            lines.append(f"# TYPE {family.name} {family.kind}")
            for suffix, labels, value in family.samples:
                lines.append(f"{family.name}{suffix}{_labels(labels)} {_number(value)}")
    return "\n".join((*lines, "")).encode(errors="replace")


def _labels(labels: Sequence[tuple[str, object]]) -> str:
    if not labels:
        return ""
    pairs = ",".join(f'{k}="{str(v).translate(_ESCAPES)}"' for k, v in labels)
    return f"{{{pairs}}}"


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.9g}"
