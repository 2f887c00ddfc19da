"""Write the report of a request log as one HTML file that needs no network."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from html import escape
from typing import Any, Final

from mpbroker.spark.pipeline.report_findings import LOOK_S, Findings, Row
from mpbroker.spark.pipeline.report_plots import bars, lines

# The most lines in one plot: more are hard to tell apart.
_LINES: Final = 6
STYLE: Final = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2937; background: #fff;
       max-width: 1100px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.5em; margin-bottom: 0; }
h2 { font-size: 1.15em; margin: 2em 0 .3em; }
p { margin: .3em 0 .8em; color: #4b5563; }
svg { display: block; width: 100%; height: auto; font-family: system-ui, sans-serif; }
svg text { fill: #374151; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; margin: .6em 0; }
th, td { padding: 3px 7px; border-bottom: 1px solid #e5e7eb; text-align: left;
         white-space: nowrap; }
th { font-weight: 600; border-bottom: 1px solid #9ca3af; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
.none { color: #6b7280; }
"""

# A table's column: head, function from row to text, and whether it holds numbers.
Column = tuple[str, "Callable[[Row], str]", bool]


def page(name: str, found: Findings) -> str:
    """Return the report of a request log as an HTML page.

    Args:
        name: the pipeline's name, for the title.
    """
    span = found.span
    seconds = max(span["last_s"] - span["first_s"], 1e-9)
    head = (
        f"{_moment(span['first_s'])} to {_moment(span['last_s'])} UTC:"
        f" {span['requests']:,} requests, {span['requests'] / seconds:,.0f} a second;"
        f" {_bytes(span['bytes_in'])} in, {_bytes(span['bytes_out'])} out."
    )
    if span["lost"]:
        head += f" {span['lost']:,} more were not logged: the log could not keep up."
    if span["unreadable"]:
        head += f" {span['unreadable']:,} lines could not be read."
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(name)}: requests</title><style>{STYLE}</style></head>",
            f"<body><h1>{escape(name)}</h1><p>{escape(head)}</p>",
            *_traffic(found),
            *_latency(found),
            *_partitions(found),
            *_errors(found),
            *_talkers(found),
            "</body></html>",
            "",
        ]
    )


def _traffic(found: Findings) -> list[str]:
    names = [row["api"] for row in found.apis[:_LINES]]
    rates = {
        name: [
            (row["at_s"], row["requests"] / found.step_s)
            for row in found.timeline
            if row["api"] == name
        ]
        for name in names
    }
    return [
        "<h2>Requests a second</h2>",
        lines(rates, unit="/s", gap_s=found.step_s * 3),
    ]


def _latency(found: Findings) -> list[str]:
    whole = [row for row in found.timeline if row["api"] is None]
    ranks = {
        "p50": [(row["at_s"], row["served"][0]) for row in whole],
        "p99": [(row["at_s"], row["served"][2]) for row in whole],
    }
    stages = ("queue", "local", "response_queue", "send")
    shown = sorted(
        found.apis,
        key=lambda row: -row["requests"] * sum(row[stage] for stage in stages),
    )[:12]
    return [
        "<h2>Latency</h2>",
        "<p>From the last byte of a request to the last byte of its response, without"
        " waits: of a Fetch for records, and of a Produce for the disk.</p>",
        lines(ranks, unit="ms", logarithmic=True, gap_s=found.step_s * 3),
        "<h2>Where the time goes</h2><p>Mean of each stage by API, without waits.</p>",
        bars(
            {row["api"]: {stage: row[stage] for stage in stages} for row in shown},
            unit="ms",
            note={
                row["api"]: f"{_ms(sum(row[stage] for stage in stages))} ms"
                for row in shown
            },
        ),
        "<h2>By API</h2>",
        _table(found.apis, [_API, *_PERCENTILES]),
        "<h2>By API and client</h2>",
        _table(found.clients, [_API, _CLIENT, *_PERCENTILES]),
        "<h2>The slowest requests</h2>",
        _table(found.slowest, [_TIME, _API, _CLIENT, _PEER, *_SLOW]),
    ]


def _partitions(found: Findings) -> list[str]:
    def name(row: Row) -> str:
        return f"{row['topic']}-{row['partition']}"

    return [
        "<h2>Hot partitions</h2><p>By records appended, and their share of all.</p>",
        bars(
            {name(row): {"records": row["records"]} for row in found.partitions},
            unit="records",
            note={
                name(row): f"{row['records']:,} ({row['share']:.1%})"
                for row in found.partitions
            },
        ),
        _table(
            found.partitions,
            [
                ("partition", name, False),
                ("records", lambda row: f"{row['records']:,}", True),
                ("share", lambda row: f"{row['share']:.1%}", True),
                ("bytes", lambda row: _bytes(row["bytes"]), True),
                ("peak", lambda row: f"{row['peak_per_s']:,.0f}/s", True),
            ],
        ),
    ]


def _errors(found: Findings) -> list[str]:
    step_s = max(found.step_s, LOOK_S)
    totals: dict[str, int] = {}
    by_kind: dict[str, dict[float, float]] = {}
    for row in found.error_timeline:
        kind = f"{row['api']} {row['error']}"
        totals[kind] = totals.get(kind, 0) + row["count"]
        by_kind.setdefault(kind, {})[row["at_s"]] = row["count"] / step_s
    most = sorted(totals, key=lambda kind: -totals[kind])[:_LINES]
    moments = {row["at_s"] // step_s * step_s for row in found.timeline}
    rates = {
        # The log has no line for a time without errors: insert a zero.
        kind: [
            (at, by_kind[kind].get(at, 0.0))
            for at in sorted({*moments, *by_kind[kind]})
        ]
        for kind in most
    }
    return [
        "<h2>Errors a second</h2>",
        lines(rates, unit="/s"),
        "<h2>Error bursts</h2><p>Errors of one API and kind, no more than ten seconds"
        " apart.</p>",
        _table(
            found.bursts,
            [
                _API,
                ("error", lambda row: row["error"], False),
                ("from", lambda row: _moment(row["first_s"]), False),
                (
                    "lasted",
                    lambda row: f"{row['last_s'] - row['first_s']:,.0f} s",
                    True,
                ),
                ("errors", lambda row: f"{row['count']:,}", True),
                ("peak", lambda row: f"{row['peak_per_s']:,.1f}/s", True),
            ],
        ),
    ]


def _talkers(found: Findings) -> list[str]:
    return [
        "<h2>Clients with the most requests</h2>",
        _table(
            found.peers,
            [
                _PEER,
                _CLIENT,
                ("requests", lambda row: f"{row['requests']:,}", True),
                ("connections", lambda row: f"{row['connections']:,}", True),
                ("in", lambda row: _bytes(row["bytes_in"]), True),
                ("out", lambda row: _bytes(row["bytes_out"]), True),
            ],
        ),
    ]


def _table(rows: Sequence[Row], columns: Sequence[Column]) -> str:
    if not rows:
        return '<p class="none">None.</p>'
    parts = ['<div class="wide"><table><tr>']
    for head, _, is_number in columns:
        parts.append(f"<th{_class(is_number)}>{escape(head)}</th>")
    for row in rows:
        parts.append("</tr><tr>")
        for _, say, is_number in columns:
            parts.append(f"<td{_class(is_number)}>{escape(say(row))}</td>")
    return "".join([*parts, "</tr></table></div>"])


def _class(is_number: bool) -> str:
    return ' class="n"' if is_number else ""


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _percentile(head: str, kind: str, index: int) -> Column:
    return head, lambda row: _ms(row[kind][index]), True


def _stage(name: str, head: str) -> Column:
    return head, lambda row: _ms(row[name]), True


def _bytes(count: Any) -> str:
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count} B"


def _moment(seconds: float) -> str:
    moment = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return f"{moment:%Y-%m-%d %H:%M:%S}"


_API: Final[Column] = ("API", lambda row: row["api"], False)
_CLIENT: Final[Column] = ("client", lambda row: row["client"], False)
_PEER: Final[Column] = ("from", lambda row: row["peer"] or "unknown", False)
_TIME: Final[Column] = ("at", lambda row: _moment(row["time"]), False)
_PERCENTILES: Final[Sequence[Column]] = (
    ("requests", lambda row: f"{row['requests']:,}", True),
    _percentile("p50 ms", "served", 0),
    _percentile("p95", "served", 1),
    _percentile("p99", "served", 2),
    _percentile("p99.9", "served", 3),
    _percentile("with waits: p50", "total", 0),
    _percentile("p99", "total", 2),
    ("max", lambda row: _ms(row["max_ms"]), True),
)
_SLOW: Final[Sequence[Column]] = (
    _stage("served_ms", "ms"),
    _stage("queue", "queue"),
    _stage("local", "local"),
    _stage("response_queue", "resp. queue"),
    _stage("send", "send"),
    _stage("remote", "waited"),
)
