"""Draw plots as inline SVG: lines over time, and bars.

They need no script, font or other file.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Final

WIDTH: Final = 900
_PANEL: Final = 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 20, 14, 52
_BAR: Final = 22
_NAMES: Final = 210
_VALUES: Final = 130
# The most letters of a bar's name: there is room for so many.
_NAME_LETTERS: Final = 28
# The palette of Okabe and Ito, which colour-blind readers can tell apart.
COLORS: Final = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#5c5c5c",
)

Points = Sequence[tuple[float, float]]


def lines(
    series: Mapping[str, Points],
    *,
    unit: str,
    logarithmic: bool = False,
    gap_s: float = math.inf,
) -> str:
    """Draw values over time, with a line for each name.

    Args:
        series: points by name: (seconds since 1970, value), in order of time.
        unit: the unit of the values.
        logarithmic: use a logarithmic axis; 0 is drawn at its lowest tick.
        gap_s: interrupt a line where the next point is more seconds away than this.
    """
    points = [point for each in series.values() for point in each]
    if not points:
        return _nothing()
    first, last = min(t for t, _ in points), max(t for t, _ in points)
    last = max(last, first + 1)
    ticks, place = (_log_axis if logarithmic else _axis)([value for _, value in points])
    height = _TOP + _PANEL + _BOTTOM

    def x(at: float) -> float:
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * (at - first) / (last - first)

    def y(value: float) -> float:
        return _TOP + _PANEL * (1 - place(value))

    parts = [_open(height)]
    for tick in ticks:
        parts.append(
            f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y(tick):.1f}"'
            f' y2="{y(tick):.1f}" stroke="#e5e7eb"/>'
            + _text(_LEFT - 8, y(tick) + 4, f"{_short(tick)} {unit}", anchor="end")
        )
    for number in range(5):
        at = first + (last - first) * number / 4
        anchor = ("start", "middle", "middle", "middle", "end")[number]
        parts.append(_text(x(at), _TOP + _PANEL + 18, _clock(at, last - first), anchor))
    for number, (name, each) in enumerate(series.items()):
        color = COLORS[number % len(COLORS)]
        for run in _runs(each, gap_s):
            path = " ".join(f"{x(t):.1f},{y(value):.1f}" for t, value in run)
            if len(run) == 1:
                t, value = run[0]
                parts.append(
                    f'<circle cx="{x(t):.1f}" cy="{y(value):.1f}" r="2"'
                    f' fill="{color}"/>'
                )
            parts.append(
                f'<polyline points="{path}" fill="none" stroke="{color}"'
                f' stroke-width="1.6"><title>{escape(name)}</title></polyline>'
            )
    parts.append(_legend(list(series), height - 10))
    return "\n".join([*parts, "</svg>"])


def bars(
    rows: Mapping[str, Mapping[str, float]], *, unit: str, note: Mapping[str, str]
) -> str:
    """Draw a horizontal bar for each row; its parts follow each other.

    Args:
        rows: values by part, by the row's name; all rows have the same parts.
        unit: the unit of the values.
        note: the text after a row's bar, by the row's name.
    """
    totals = {name: sum(parts.values()) for name, parts in rows.items()}
    if not totals or max(totals.values()) <= 0:
        return _nothing()
    names = list(next(iter(rows.values())))
    legend = 26 if len(names) > 1 else 0
    height = _TOP + _BAR * len(rows) + 22 + legend
    room = WIDTH - _NAMES - _VALUES
    scale = room / max(totals.values())
    parts = [_open(height)]
    for number, (name, values) in enumerate(rows.items()):
        top = _TOP + number * _BAR
        parts.append(_text(_NAMES - 8, top + 13, _fitting(name), anchor="end"))
        left = float(_NAMES)
        for color, part in zip(_cycle(len(values)), names, strict=True):
            width = values[part] * scale
            parts.append(
                f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}"'
                f' height="{_BAR - 6}" fill="{color}"><title>{escape(name)}:'
                f" {escape(part)} {_short(values[part])} {unit}</title></rect>"
            )
            left += width
        parts.append(_text(left + 6, top + 13, note.get(name, "")))
    if legend:
        parts.append(_legend(names, height - 10, left=_NAMES))
    return "\n".join([*parts, "</svg>"])


def _fitting(name: str) -> str:
    """Shorten a name in its middle.

    Topics differ at the beginning and partitions at the end.
    """
    if len(name) <= _NAME_LETTERS:
        return name
    half = _NAME_LETTERS // 2
    return f"{name[: half - 1]}…{name[-half:]}"


def _cycle(count: int) -> list[str]:
    return [COLORS[number % len(COLORS)] for number in range(count)]


def _runs(points: Points, gap_s: float) -> list[list[tuple[float, float]]]:
    """Return the points in groups without a gap longer than ``gap_s``."""
    runs: list[list[tuple[float, float]]] = []
    for point in points:
        if runs and point[0] - runs[-1][-1][0] <= gap_s:
            runs[-1].append(point)
        else:
            runs.append([point])
    return runs


def _axis(values: Sequence[float]) -> tuple[list[float], Callable[[float], float]]:
    """Return an axis: ticks from 0 on, and a function from a value to a height.

    The height is from 0, the foot of the plot, to 1, its top.
    """
    high = max(*values, 1e-9)
    size = 10 ** math.floor(math.log10(high))
    step = next(size * part for part in (0.2, 0.5, 1, 2) if high / (size * part) <= 5)
    top = step * math.ceil(high / step)
    ticks = [step * number for number in range(round(top / step) + 1)]
    return ticks, lambda value: value / top


def _log_axis(values: Sequence[float]) -> tuple[list[float], Callable[[float], float]]:
    """Return an axis as `_axis` does, but logarithmic, with powers of ten as ticks."""
    positive = [value for value in values if value > 0] or [1.0]
    low = math.floor(math.log10(min(positive)))
    high = max(math.ceil(math.log10(max(positive))), low + 1)
    ticks = [10.0**power for power in range(low, high + 1)]

    def place(value: float) -> float:
        return (math.log10(max(value, 10.0**low)) - low) / (high - low)

    return ticks, place


def _short(value: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}"[:5].rstrip(".") + letter
    return f"{value:.3g}"


def _clock(at: float, span_s: float) -> str:
    moment = datetime.datetime.fromtimestamp(at, datetime.UTC)
    if span_s > 2 * 86400:
        return f"{moment:%d %b %H:%M}"
    return f"{moment:%H:%M:%S}"


def _legend(names: Sequence[str], y: float, left: float = _LEFT) -> str:
    parts = []
    for color, name in zip(_cycle(len(names)), names, strict=True):
        parts.append(
            f'<rect x="{left:.0f}" y="{y - 9}" width="10" height="10" fill="{color}"/>'
            + _text(left + 15, y, name)
        )
        left += 15 + 7.2 * len(name) + 18
    return "".join(parts)


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _open(height: float) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}"'
        f' width="{WIDTH}" height="{height:.0f}" font-size="12" role="img">'
    )


def _nothing() -> str:
    return '<p class="none">None.</p>'
