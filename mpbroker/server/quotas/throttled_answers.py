"""Put a throttle time into an answer that was encoded without one."""

from __future__ import annotations

import importlib

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.errors import ProtocolError


def with_throttle_time(api_key: int, version: int, body: bytes, time_ms: int) -> bytes:
    """Return the answer with ``throttle_time_ms``; as it is, if it has none.

    A version from before that field is throttled by being muted alone.
    """
    name = ApiKey(api_key).name.lower()
    module = importlib.import_module(f"mpbroker.protocol.messages.{name}")
    response = getattr(
        module, "".join(word.title() for word in name.split("_")) + "Response"
    )
    # A future client's ApiVersions is answered in version 0.
    try:
        message = response.decode(version, memoryview(body))
        if not hasattr(message, "throttle_time_ms"):
            return body
        message.throttle_time_ms = time_ms
        encoded: bytes = message.encode(version)
    except ProtocolError:
        return body
    return encoded
