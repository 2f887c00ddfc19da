"""Records that differ in everything a record has."""

from __future__ import annotations

import time
from typing import Final

from tests.compat.adapters import Message, Outgoing

# Milliseconds that no broker's clock produces by accident, and yet young enough for
# every retention time that is not a test's subject.
T0: Final = (int(time.time()) // 3600 - 1) * 3_600_000


def some_records(count: int, partition: int = 0) -> list[Outgoing]:
    """Return records with and without keys, values and headers, empty ones among them.

    None lacks both key and value, and no header is null: not every client can publish
    those.
    """
    return [
        Outgoing(
            value=None if i % 7 == 3 else f"value {i} ".encode() * 9 * (i % 5),
            key=None if i % 4 == 1 and i % 7 != 3 else f"key {i}".encode() * (i % 3),
            headers=(
                *((("trace", bytes([i % 256, 0, 255])),) if i % 2 else ()),
                *((("trace", b""), ("ключ", "значение".encode())) if i % 3 else ()),
            ),
            timestamp_ms=T0 + i,
            partition=partition,
        )
        for i in range(count)
    ]


def as_messages(records: list[Outgoing], first_offset: int = 0) -> list[Message]:
    """Return what a consumer should be given for them."""
    return [
        Message(first_offset + i, r.key, r.value, r.headers, r.timestamp_ms or 0)
        for i, r in enumerate(records)
    ]
