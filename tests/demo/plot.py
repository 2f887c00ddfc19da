"""A picture of values by day, as SVG: a panel a series, one under the other."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from html import escape
from typing import Final, NamedTuple

WIDTH: Final = 960
PANEL: Final = 210
LEFT, RIGHT, TOP, GAP = 64, 20, 56, 46
COLORS: Final = ("#2563eb", "#c2410c")


class Series(NamedTuple):
    """One panel."""

    title: str
    values: Sequence[float]


def draw(title: str, days: Sequence[datetime.date], panels: Sequence[Series]) -> str:
    """Return the picture."""
    height = TOP + len(panels) * (PANEL + GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}"'
        f' viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="26" font-size="17">{escape(title)}</text>',
    ]
    for number, series in enumerate(panels):
        top = TOP + number * (PANEL + GAP)
        parts += _panel(series, days, top, COLORS[number % len(COLORS)])
    return "\n".join([*parts, "</svg>", ""])


def _panel(
    series: Series, days: Sequence[datetime.date], top: float, color: str
) -> list[str]:
    low, high = min(0.0, *series.values), max(series.values)
    step = _step((high - low) / 4)
    low = step * (low // step)
    high = step * -(-high // step)
    first, last = days[0].toordinal(), days[-1].toordinal()

    def x(day: datetime.date) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (day.toordinal() - first) / (
            last - first
        )

    def y(value: float) -> float:
        return top + PANEL * (high - value) / (high - low)

    parts = [f'<text x="{LEFT}" y="{top - 8}">{escape(series.title)}</text>']
    tick = low
    while tick <= high + step / 2:
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tick):.1f}"'
            f' y2="{y(tick):.1f}" stroke="{"#9ca3af" if tick == 0 else "#e5e7eb"}"/>'
            f'<text x="{LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">'
            f"{tick:,.0f}</text>"
        )
        tick += step
    for day in days:
        if day.day == 1:
            parts.append(
                f'<text x="{x(day):.1f}" y="{top + PANEL + 18}" fill="#4b5563">'
                f"{day:%b}</text>"
            )
    points = " ".join(
        f"{x(day):.1f},{y(value):.1f}"
        for day, value in zip(days, series.values, strict=True)
    )
    parts.append(
        f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.4"/>'
    )
    return parts


def _step(about: float) -> float:
    """Return the round number nearest below a distance between ticks."""
    for size in (5000, 2000, 1000, 500, 200, 100, 50, 20, 10, 5, 2):
        if size <= about:
            return size
    return 1
