"""The messages of an API, found by its key, and answers made without its handler.

A message module is imported when its API is first asked for. An error answer is needed
where a handler failed; a throttle time is put into an answer that is encoded already.
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
    """Return the body that says ``code``; None: the API has no place for it."""
    version, response = request.api_version, response_class(request.api_key)
    message = response()
    if not hasattr(message, "error_code"):
        return None
    message.error_code = code
    try:
        body = message.encode(version)
        decoded: Any = response.decode(version, memoryview(body))
    except ProtocolError:
        return None  # this version must not leave the field out, and has none
    # A version without the field encodes as if nothing was wrong.
    return body if decoded.error_code == code else None


def with_throttle_time(api_key: int, version: int, body: bytes, time_ms: int) -> bytes:
    """Return a body with ``throttle_time_ms``; the same body if it has no such field.

    A client of a version without the field is throttled all the same: it is muted.
    """
    response = response_class(api_key)
    try:
        message = response.decode(version, memoryview(body))
        if not hasattr(message, "throttle_time_ms"):
            return body
        message.throttle_time_ms = time_ms
        return message.encode(version)
    except ProtocolError:
        return body  # an ApiVersions of the future is answered in version 0
