"""Find the message classes of an API by its key, and make answers without its handler.

A message module is imported when it is first needed. ``error_answer`` makes the answer
to a request whose handler failed. ``with_throttle_time`` sets the throttle time of an
answer that is already encoded.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.errors import ProtocolError

if TYPE_CHECKING:
    from mpbroker.protocol.error_code import ErrorCode
    from mpbroker.protocol.message import Message
    from mpbroker.server.request import Request


def request_class(api_key: int) -> type[Message]:
    """Return the class of an API's requests."""
    return _message_class(api_key, "Request")


def response_class(api_key: int) -> type[Message]:
    """Return the class of an API's responses."""
    return _message_class(api_key, "Response")


def _message_class(api_key: int, suffix: str) -> type[Message]:
    name = ApiKey(api_key).name
    module = import_module(f"mpbroker.protocol.messages.{name.lower()}")
    camel_case = "".join(word.title() for word in name.split("_"))
    found: type[Message] = getattr(module, f"{camel_case}{suffix}")
    return found


def error_answer(request: Request, code: ErrorCode) -> bytes | None:
    """Return the encoded body of a response that has only a top-level error code.

    Returns:
        The body, or None if this version of the API has no top-level error code.
    """
    version, response = request.api_version, response_class(request.api_key)
    message = response()
    if not hasattr(message, "error_code"):
        return None
    message.error_code = code
    try:
        body = message.encode(version)
        decoded: Any = response.decode(version, memoryview(body))
    except ProtocolError:
        return None  # this version has no such field, and refuses to encode the code
    # Other versions without the field leave the code out: decode it to find out.
    return body if decoded.error_code == code else None


def with_throttle_time(api_key: int, version: int, body: bytes, time_ms: int) -> bytes:
    """Return an encoded body with ``throttle_time_ms`` set.

    A body of a version without this field is returned unchanged. Its client is
    throttled too, because its connection is muted.
    """
    response = response_class(api_key)
    try:
        message = response.decode(version, memoryview(body))
        if not hasattr(message, "throttle_time_ms"):
            return body
        message.throttle_time_ms = time_ms
        return message.encode(version)
    except ProtocolError:
        return body  # an unknown, newer ApiVersions is answered in version 0
