"""Every message class, and random messages of a given version of it."""

from __future__ import annotations

import importlib
import pkgutil
from random import Random
from typing import Any

import mpbroker.protocol.messages
from mpbroker.protocol.fields import (
    BOOLEAN,
    BYTES,
    FLOAT64,
    RECORDS,
    STRING,
    UINT16,
    UUID,
    Field,
    Kind,
    Struct,
)
from mpbroker.protocol.message import Message
from mpbroker.protocol.messages.produce import SOURCE_TAG

_BITS = {"int8": 8, "int16": 16, "int32": 32, "int64": 64}
_TEXTS = ["", "a", "hello", "größer", "日本語", "x" * 126, "y" * 127, "z" * 300]
_BYTES = [b"", b"\0", b"abc", b"q" * 126, b"r" * 127, b"s" * 20_000]


def all_messages() -> list[type[Message]]:
    found = []
    for module in pkgutil.iter_modules(mpbroker.protocol.messages.__path__):
        name = f"{mpbroker.protocol.messages.__name__}.{module.name}"
        for value in vars(importlib.import_module(name)).values():
            if (
                isinstance(value, type)
                and issubclass(value, Message)
                and value is not Message
            ):
                found.append(value)
    return found


MESSAGES = all_messages()
PAIRS = [(message, v) for message in MESSAGES for v in message.valid_versions]


def pair_name(value: Any) -> str:
    return value.__name__ if isinstance(value, type) else f"v{value}"


def random_message(rng: Random, cls: type[Struct], version: int) -> Any:
    """Return a message with random values in the fields that the version has."""
    return cls(
        **{
            row.name: _random_field(rng, row, version)
            for row in cls.__fields__
            if row.present_in(version) and is_of_kafka(row)
        }
    )


def is_of_kafka(row: Field) -> bool:
    """Return whether Kafka has a field; other implementations know no others."""
    return row.tag is None or row.tag < SOURCE_TAG


def _random_field(rng: Random, row: Field, version: int) -> Any:
    if row.nullable_in(version) and rng.random() < 0.25:
        return None
    if row.tag is not None and rng.random() < 0.5:
        return row.default if row.fresh_default is None else []
    if row.is_array:
        count = rng.choice([0, 1, 1, 2, 3])
        return [_random_value(rng, row, version) for _ in range(count)]
    value = _random_value(rng, row, version)
    if row.struct is not None and row.tag is not None and value == row.struct():
        return None  # what is the default throughout is not sent
    return value


def _random_value(rng: Random, row: Field, version: int) -> Any:
    if row.struct is not None:
        return random_message(rng, row.struct, version)
    kind = row.kind
    assert isinstance(kind, Kind)
    if row.name.endswith("error_code"):
        return rng.randint(-1, 133)  # kio knows no others
    if kind is STRING:
        return rng.choice(_TEXTS)
    if kind is BYTES or kind is RECORDS:
        return rng.choice(_BYTES)
    if kind is BOOLEAN:
        return rng.random() < 0.5
    if kind is FLOAT64:
        return rng.choice([0.0, -1.5, 1e300, float("inf")])
    if kind is UUID:
        return bytes(rng.randint(0, 255) for _ in range(16))
    times = ("timestamp", "time_ms", "timestamp_ms", "period_ms")
    if row.name.endswith(times) and kind.name == "int64":
        return rng.randint(-1, 4_000_000_000_000)  # kio makes datetimes of them
    if kind is UINT16:
        return rng.choice([0, 1, 9092, 65_535])
    top = 1 << (_BITS[kind.name] - 1)
    return rng.choice([0, 1, -1, top - 1, -top, rng.randint(-top, top - 1)])
