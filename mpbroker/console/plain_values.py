"""Turn decoded values into those that JSON has, for people to read."""

from __future__ import annotations

from datetime import date, time
from decimal import Decimal
from typing import Any


def plain(value: Any) -> Any:
    """Return a value of msgpack or Avro as one of JSON: bytes as hex, times as text."""
    if isinstance(value, dict):
        return {
            each if isinstance(each, str) else repr(each): plain(inner)
            for each, inner in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, bytes):
        return f"0x{value.hex()}"
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (date, time)):  # a datetime is a date
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    return repr(value)
