"""Find the message classes of an API by its key, and make answers without its handler.

A message module is imported when it is first needed. ``error_answer`` makes the answer
to a request whose handler failed, ``refusal`` the one to a request that was not decoded
to its end. ``with_throttle_time`` sets the throttle time of an answer that is already
encoded.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.errors import ProtocolError

if TYPE_CHECKING:
    from mpbroker.protocol.error_code import ErrorCode
    from mpbroker.protocol.fields import Struct
    from mpbroker.protocol.message import Message
    from mpbroker.server.request import Request


# The names of a row's error code; AddPartitionsToTxn has the second one.
_CODES: Final = ("error_code", "partition_error_code")


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


def refusal(request: Request, code: ErrorCode) -> bytes | None:
    """Return the encoded body of a response that has only an error code.

    If the response has no code for the whole request, it has one row, without a name,
    that has the code. The client finds no answer for the names that it has sent.

    Returns:
        The body, or None if this version of the API has no error code at all.
    """
    body = error_answer(request, code)
    if body is not None:
        return body
    version = request.api_version
    response = response_class(request.api_key)()
    try:
        return response.encode(version) if _add_row(response, version, code) else None
    except ProtocolError:
        return None


def _add_row(message: Struct, version: int, code: ErrorCode) -> bool:
    """Give the first array whose elements can have an error code one such element."""
    for row in message.__fields__:
        if not (row.is_array and row.struct and row.present_in(version)):
            continue
        element: Any = row.struct()
        for each in row.struct.__fields__:
            if each.name in _CODES and each.present_in(version):
                setattr(element, each.name, code)
                break
        else:
            if not _add_row(element, version, code):
                continue
        setattr(message, row.name, [element])
        return True
    return False


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
