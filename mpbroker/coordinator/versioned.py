"""Encode the keys and values of the coordinator's records: version first, then fields.

Source: Kafka's CoordinatorRecordSerde.
"""

from __future__ import annotations

from struct import Struct as Packing
from typing import Final

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.message import Message

# Message needs an API key. Records belong to no API, and nothing reads it.
NO_API: Final = ApiKey.OFFSET_COMMIT

_VERSION: Final = Packing(">h")

KeyValue = tuple[bytes, bytes | None]


def versioned(message: Message, version: int) -> bytes:
    """Encode a key or a value, with its version (int16) first."""
    return _VERSION.pack(version) + message.encode(version)
