"""Format durations, sizes and times for people."""

from __future__ import annotations

import time
from typing import Final

_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def duration(seconds: float | None) -> str:
    """Return a duration in one or two units: 3 h 12 min; 4.2 s; 12 ms."""
    if seconds is None:
        return "unknown"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = int(seconds) // 60
    if minutes < 60:
        return f"{minutes} min {int(seconds) % 60} s"
    hours = minutes // 60
    if hours < 48:
        return f"{hours} h {minutes % 60} min"
    return f"{hours // 24} d {hours % 24} h"


def size(count: float) -> str:
    """Return a size (in bytes) with up to three digits and a unit: 1.4 MiB."""
    for unit in _UNITS:
        if count < 1000 or unit == _UNITS[-1]:
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"


def moment(at: float) -> str:
    """Return a time (seconds since 1970) as text: local, with milliseconds."""
    clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
    return f"{clock}.{int(at % 1 * 1000):03d}"


def plural(count: int, noun: str) -> str:
    """Return a number with its noun, in the plural if need be: 1,234 records."""
    if count == 1:
        return f"1 {noun}"
    return f"{count:,} {noun}es" if noun.endswith("s") else f"{count:,} {noun}s"
