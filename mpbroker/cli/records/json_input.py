"""Read back the JSON lines that `consume -J` writes, for `produce -J`."""

from __future__ import annotations

from base64 import b64decode
from typing import Any, NamedTuple

import orjson


class JsonRecord(NamedTuple):
    """A record of one line.

    Attributes:
        timestamp_ms: ms since 1970; None if the line does not say.
    """

    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]
    timestamp_ms: int | None


def parse_record(line: bytes) -> JsonRecord:
    """Return the record of a line; topic, partition and offset in it do not count.

    Raises:
        ValueError: the line is no JSON object with a "payload" as `consume -J` has it;
            the text says what is wrong.
    """
    try:
        found = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"no JSON: {error}") from None
    if not isinstance(found, dict) or "payload" not in found:
        raise ValueError('no JSON object with a "payload"')
    timestamp_ms = found.get("ts")
    if timestamp_ms is not None and type(timestamp_ms) is not int:
        raise ValueError('"ts" is no number of ms')
    headers = found.get("headers") or []
    if not isinstance(headers, list) or len(headers) % 2:
        raise ValueError('"headers" is no list of names and values')
    values = [_bytes("headers", each) for each in headers]
    if None in values[::2]:
        raise ValueError("a header has no name")
    names = [(name or b"").decode("utf-8", "surrogateescape") for name in values[::2]]
    return JsonRecord(
        _bytes("key", found.get("key")),
        _bytes("payload", found["payload"]),
        tuple(zip(names, values[1::2], strict=True)),
        # -1 is a record without a time.
        timestamp_ms if timestamp_ms is not None and timestamp_ms >= 0 else None,
    )


def _bytes(name: str, value: Any) -> bytes | None:
    if value is None:
        return None
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, dict) and isinstance(value.get("base64"), str):
        return b64decode(value["base64"], validate=True)
    raise ValueError(f'"{name}" is no text, null, or {{"base64": TEXT}}')
