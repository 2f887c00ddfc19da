"""Show the status of pipelines: as rows of text, as JSON, or as a web page."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any, Final

import msgspec

from mpbroker.spark.pipeline.progress import duration
from mpbroker.spark.pipeline.published_status import Found
from mpbroker.spark.pipeline.report_page import STYLE

HEADING: Final = (
    *("PIPELINE", "STATE", "ROWS/S", "BEHIND", "BYTES", "CATCH-UP", "COMMIT"),
    *("BATCH", "ROWS", "BAD", "LATE"),
)


def as_json(found: Found, now_s: float) -> Mapping[str, Any]:
    """Return a pipeline's status as values that can be written as JSON."""
    values: dict[str, Any] = {"name": found.name}
    if found.status is not None:
        values = msgspec.to_builtins(found.status)
        values["age_s"] = round(now_s - found.status.at_s, 1)
    return {**values, "state": found.state, "well": found.is_well}


def rows(found: Sequence[Found], now_s: float) -> Iterator[tuple[str | None, ...]]:
    """Yield a row of text for each pipeline, with the columns of HEADING.

    A cell is None if its value is not known.
    """
    for each in found:
        status = each.status
        if status is None:
            yield each.name, each.state, *[None] * (len(HEADING) - 2)
            continue
        state = each.state
        if not each.is_well:
            state += f" {duration(now_s - status.at_s)}"
        ended = each.state not in ("starting", "running")
        yield (
            each.name,
            state,
            None if ended else f"{status.rows_per_s:,.0f}",
            None if status.behind is None else f"{status.behind:,}",
            None if status.behind_bytes is None else _size(status.behind_bytes),
            None if ended else _catch_up(status.catch_up_s),
            None
            if status.committed_s is None
            else f"{duration(now_s - status.committed_s)} ago",
            None if status.last_batch is None else str(status.last_batch),
            f"{status.rows:,}",
            f"{status.bad:,}",
            f"{status.late:,}",
        )


def page(found: Sequence[Found], now_s: float, refresh_s: float | None) -> str:
    """Return a page of HTML that shows the status of pipelines.

    Args:
        refresh_s: seconds after which a browser reads the page again; None: never.
    """
    moment = datetime.datetime.fromtimestamp(now_s, datetime.UTC)
    again = ""
    if refresh_s is not None:
        again = f'<meta http-equiv="refresh" content="{max(1, round(refresh_s))}">'
    heads = "".join(f"<th>{name.lower()}</th>" for name in HEADING)
    lines = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"{again}<title>Pipelines</title><style>{STYLE}",
        ".ill { color: #b91c1c; font-weight: 600; }</style></head>",
        f"<body><h1>Pipelines</h1><p>{moment:%Y-%m-%d %H:%M:%S} UTC</p>",
        f'<div class="wide"><table><tr>{heads}</tr>',
    ]
    for each, row in zip(found, rows(found, now_s), strict=True):
        cells = ["-" if cell is None else escape(cell) for cell in row]
        first, state, *numbers = cells
        look = "" if each.is_well else ' class="ill"'
        lines.append(
            f"<tr><td>{first}</td><td{look}>{state}</td>"
            + "".join(f'<td class="n">{cell}</td>' for cell in numbers)
            + "</tr>"
        )
    lines.append("</table></div>")
    for each in found:
        if each.status is None:
            continue
        where = " to ".join(filter(None, (each.status.source, each.status.table)))
        lines.append(f"<h2>{escape(each.name)}</h2><p>{escape(where)}</p>")
        if each.status.error:
            lines.append(f'<p class="ill">{escape(each.status.error)}</p>')
    return "\n".join([*lines, "</body></html>", ""])


def _catch_up(seconds: float | None) -> str | None:
    return None if seconds is None else duration(seconds)


def _size(count: int) -> str:
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count} B"
