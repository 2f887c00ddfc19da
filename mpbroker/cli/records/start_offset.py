"""Parse and resolve kcat's `-o`: the offsets where `consume` starts and stops.

beginning   start at the first record
end         start after the last record
N           start at offset N
-N          start at the last N records of each partition
s@T         start at the first record of time T or later
e@T         stop before the first record of time T or later

A time is in ms since 1970, or in ISO 8601: 2026-11-28T12:00:00, in UTC if it has no
zone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

import click

from mpbroker.cli.records.last_records import start_of_last
from mpbroker.client.admin.topic_admin import EARLIEST, LATEST, list_offsets
from mpbroker.client.cluster import Cluster, TopicPartition

_OFFSET_MAX: Final = 2**63 - 1
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MS: Final = timedelta(milliseconds=1)
# Seconds from 2001 on. As ms they are in January 1970, so a time of today that is given
# in seconds would mean the beginning.
_SECONDS: Final = range(10**9, 10**10)


class OffsetRange(NamedTuple):
    """The `-o` options together.

    At most one of the first three attributes is set. If none is, reading starts at the
    beginning.

    Attributes:
        offset: start at this offset.
        from_end: start so many records before the end; 0: at the end.
        start_time_ms: start at the first record of this time (ms since 1970) or later.
        stop_time_ms: stop before the first record of this time or later; None: do not.
    """

    offset: int | None = None
    from_end: int | None = None
    start_time_ms: int | None = None
    stop_time_ms: int | None = None


def parse_offsets(texts: Sequence[str]) -> OffsetRange:
    """Parse the values of all `-o` options.

    Raises:
        click.BadParameter: an option cannot be parsed, or two say where to start.
    """
    start = OffsetRange()
    stop_time_ms = None
    starts = 0
    for text in texts:
        if text.startswith("e@"):
            stop_time_ms = _time_ms(text, text[2:])
            continue
        start = _parse_start(text)
        starts += 1
    if starts > 1:
        raise _refusal("two of them say where to start")
    return start._replace(stop_time_ms=stop_time_ms)


def _parse_start(text: str) -> OffsetRange:
    if text in ("beginning", "earliest"):
        return OffsetRange()
    if text in ("end", "latest"):
        return OffsetRange(from_end=0)
    if text == "stored":
        raise _refusal(
            "only consumer groups have stored offsets: join one with -G, or give"
            " beginning, end, an offset, -N, s@TIME or e@TIME"
        )
    if text.startswith("s@"):
        return OffsetRange(start_time_ms=_time_ms(text, text[2:]))
    if text.startswith("-"):
        return OffsetRange(from_end=_number(text, text[1:]))
    return OffsetRange(offset=_number(text, text))


def _time_ms(text: str, time: str) -> int:
    if not time.isdigit():
        try:
            moment = datetime.fromisoformat(time)
        except ValueError:
            raise _refusal(
                f"{text!r}: a time is in ms since 1970, or like 2026-11-28T12:00:00Z"
            ) from None
        moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        return max(0, (moment - _EPOCH) // _MS)
    found = _number(text, time)
    if found in _SECONDS:
        raise _refusal(
            f"{text!r} looks like seconds; times are in ms: {text[:2]}{found}000"
        )
    return found


def _number(text: str, digits: str) -> int:
    readable = digits.isascii() and digits.isdigit() and len(digits) < 20
    if not readable or int(digits) > _OFFSET_MAX:
        raise _refusal(
            f"{text!r} is none of beginning, end, OFFSET, -N, s@TIME, e@TIME"
        )
    return int(digits)


def _refusal(message: str) -> click.BadParameter:
    return click.BadParameter(message, param_hint="'-o' / '--offset'")


class Bounds(NamedTuple):
    """The offset to start at and the offset to stop before, of each partition."""

    starts: dict[TopicPartition, int]
    stops: dict[TopicPartition, int]


def resolve_bounds(
    cluster: Cluster,
    leaders: Mapping[TopicPartition, int],
    wanted: OffsetRange,
    *,
    stop_at_end: bool,
    settings: Mapping[str, object],
) -> Bounds:
    """Ask the brokers for the offsets that the `-o` options mean now.

    Args:
        cluster: the brokers.
        leaders: the leader's node id, by partition.
        wanted: the options.
        stop_at_end: whether to stop at the offsets that are the ends now.
        settings: those of a consumer. With isolation.level=read_committed an end is the
            last stable offset, else the high watermark.
    """
    read_committed = settings.get("isolation.level") == "read_committed"

    def ask(timestamp: int) -> dict[TopicPartition, int]:
        answers = list_offsets(
            cluster,
            dict.fromkeys(leaders, timestamp),
            leaders,
            read_committed=read_committed,
        )
        return {partition: answer.offset for partition, answer in answers.items()}

    earliest, latest = ask(EARLIEST), ask(LATEST)

    def ask_time(timestamp_ms: int) -> dict[TopicPartition, int]:
        found = ask(timestamp_ms)
        return {
            partition: latest[partition] if offset < 0 else offset
            for partition, offset in found.items()
        }

    if wanted.start_time_ms is not None:
        starts = ask_time(wanted.start_time_ms)
    elif wanted.from_end == 0:
        starts = latest
    elif wanted.from_end is not None:
        starts = start_of_last(settings, earliest, latest, wanted.from_end)
    elif wanted.offset is not None:
        starts = dict.fromkeys(leaders, wanted.offset)
    else:
        starts = earliest
    if wanted.stop_time_ms is not None:
        stops = ask_time(wanted.stop_time_ms)
    else:
        stops = latest if stop_at_end else {}
    return Bounds(starts, stops)
