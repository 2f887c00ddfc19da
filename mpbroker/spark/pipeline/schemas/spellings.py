"""Read timestamps and dates in the spellings that producers use.

Text without an offset is UTC, unless the pipeline's TOML file names a zone. Eight
digits as the text of a timestamp are YYYYMMDD. Text of fewer or more digits is refused:
it may be a date, or a count of seconds or milliseconds since 1970. The TOML file can
say which it is, by the type `timestamp(ms)` or by a pattern. A number, which is not
text, is in milliseconds since 1970.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Mapping
from email.utils import parsedate_to_datetime
from typing import Any, Final
from zoneinfo import ZoneInfo

EPOCH: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_EPOCH_DAY: Final = datetime.date(1970, 1, 1)
# Units of numbers since 1970, in microseconds; nanoseconds are cut to microseconds.
UNITS: Final[Mapping[str, float]] = {"s": 1e6, "ms": 1e3, "us": 1, "ns": 1e-3}
# "2013-01-01 05:00:00 +0100", "... UTC": what stands between a time and its offset.
_SPACED_OFFSET: Final = re.compile(r"\s+(?=[+-]\d\d)|\s*(UTC|GMT)$")
_JAVA_ZONE: Final = re.compile(r"\[[A-Za-z_/+-]+\]$")  # ...+01:00[Europe/Paris]
_SLASHED: Final = re.compile(r"^(\d{4})/(\d\d)/(\d\d)")
_DOT_NET: Final = re.compile(r"^/Date\((-?\d+)([+-]\d{4})?\)/$")
_WEEKDAY: Final = re.compile(r"^(Mon|Tue|Wed|Thu|Fri|Sat|Sun), ")


def timestamp(
    value: Any, zone: datetime.tzinfo = datetime.UTC
) -> datetime.datetime | None:
    """Convert text, milliseconds since 1970, or Java's list of numbers to a timestamp.

    Text is ISO 8601 in any of its forms, with "T" or a space, "/" for "-", "UTC" or
    an offset after a space; the form of HTTP and mail ("Tue, 01 Jan 2013 05:00:00
    GMT"); or .NET's "/Date(1357016400000)/". A list is [2013, 1, 1, 5, 0, 0,
    nanoseconds], as Jackson writes it.

    Args:
        zone: the time zone of a value without an offset; the form of HTTP and mail is
            in UTC then.

    Raises:
        ValueError, OverflowError: the value is none of these.
    """
    if value is None:
        return None
    if isinstance(value, datetime.datetime):
        return value if value.tzinfo else value.replace(tzinfo=zone)
    if isinstance(value, str):
        return _from_text(value, zone)
    if type(value) in (int, float):
        return EPOCH + datetime.timedelta(milliseconds=value)
    if isinstance(value, list) and 3 <= len(value) <= 7:
        numbers = [*value, *[0] * (7 - len(value))]
        if all(type(each) is int for each in numbers):
            year, month, day, hour, minute, second, nanoseconds = numbers
            microsecond = nanoseconds // 1000
            return datetime.datetime(
                year, month, day, hour, minute, second, microsecond, zone
            )
    raise ValueError(f"{value!r} is not a timestamp")


def _from_text(text: str, zone: datetime.tzinfo) -> datetime.datetime:
    try:
        # By far the most frequent form; its digits would be misread, see below.
        if not text.isdecimal():
            found = datetime.datetime.fromisoformat(text)
            return found if found.tzinfo else found.replace(tzinfo=zone)
    except ValueError:
        pass
    text = text.strip()
    if text.isdecimal():
        # fromisoformat() reads "1312011400000", milliseconds of 2011, as the year 1312.
        if len(text) != 8:
            raise ValueError(f"{text} may be a number or a date")
        return datetime.datetime.strptime(text, "%Y%m%d").replace(tzinfo=zone)
    if _WEEKDAY.match(text):
        found = parsedate_to_datetime(text)
        return found if found.tzinfo else found.replace(tzinfo=datetime.UTC)
    dot_net = _DOT_NET.match(text)
    if dot_net:
        return EPOCH + datetime.timedelta(milliseconds=int(dot_net[1]))
    text = _SLASHED.sub(r"\1-\2-\3", _JAVA_ZONE.sub("", text))
    text = _SPACED_OFFSET.sub(lambda found: "Z" if found[1] else "", text)
    found = datetime.datetime.fromisoformat(text.upper())
    return found if found.tzinfo else found.replace(tzinfo=zone)


def timestamp_of_unit(unit: str) -> Callable[[Any], datetime.datetime | None]:
    """Return a function that converts a number since 1970 to a timestamp.

    The number may be given as text.

    Args:
        unit: the number's unit, one of UNITS.
    """
    factor = UNITS[unit]

    def convert(value: Any) -> datetime.datetime | None:
        if value is None:
            return None
        if isinstance(value, str):
            value = float(value) if "." in value else int(value)
        elif type(value) not in (int, float):
            # Decimal too: where a description has decimals, so are all fractions.
            value = _number(value)
        if unit == "ns" and isinstance(value, int):
            microseconds = value // 1000
        else:
            microseconds = value * factor
        return EPOCH + datetime.timedelta(microseconds=microseconds)

    return convert


def _number(value: Any) -> float:
    import decimal

    if isinstance(value, decimal.Decimal):
        return float(value)
    raise ValueError(f"{value!r} is no number")


def timestamp_of_pattern(
    pattern: str, zone: str
) -> Callable[[Any], datetime.datetime | None]:
    """Return a function that converts text to a timestamp by a pattern of strptime().

    Args:
        zone: the time zone of text without an offset; empty: UTC.
    """
    home = ZoneInfo(zone) if zone else datetime.UTC

    def convert(value: Any) -> datetime.datetime | None:
        if value is None:
            return None
        if not isinstance(value, str):
            raise ValueError(f"{value!r} is no text")
        found = datetime.datetime.strptime(value, pattern)
        return found if found.tzinfo else found.replace(tzinfo=home)

    return convert


def local_timestamp(value: Any) -> datetime.datetime | None:
    """Convert ISO 8601 text without an offset to a date and time without a time zone.

    Raises:
        ValueError: the value is something else, or has an offset.
    """
    if isinstance(value, str) and not value.isdecimal():
        value = datetime.datetime.fromisoformat(value)
    if value is None or (isinstance(value, datetime.datetime) and not value.tzinfo):
        return value
    raise ValueError(f"{value!r} is no local timestamp")


def date(value: Any) -> datetime.date | None:
    """Convert ISO 8601 text, also with "/" for "-", to a date.

    Raises:
        ValueError: the value is something else, for example a timestamp.
    """
    if value is None or type(value) is datetime.date:
        return value
    if isinstance(value, str):
        return datetime.date.fromisoformat(_SLASHED.sub(r"\1-\2-\3", value))
    raise ValueError(f"{value!r} is not a date")


def date_of_days(value: Any) -> datetime.date | None:
    """Convert the number of days since 1970, as Avro and Debezium count, to a date."""
    if value is None:
        return None
    if type(value) is not int:
        raise ValueError(f"{value!r} is no number of days")
    return _EPOCH_DAY + datetime.timedelta(days=value)


def days_of(value: datetime.date) -> int:
    """Return a date as the number of days since 1970-01-01."""
    return (value - _EPOCH_DAY).days


def date_of_pattern(pattern: str) -> Callable[[Any], datetime.date | None]:
    """Return a function that converts text to a date by a pattern of strptime()."""

    def convert(value: Any) -> datetime.date | None:
        if value is None:
            return None
        if not isinstance(value, str):
            raise ValueError(f"{value!r} is no text")
        return datetime.datetime.strptime(value, pattern).date()

    return convert
