"""The message classes of an API, imported when they are first asked for."""

from __future__ import annotations

from importlib import import_module

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.message import Message


def request_class(api_key: ApiKey) -> type[Message]:
    return _message_class(api_key, "Request")


def response_class(api_key: ApiKey) -> type[Message]:
    return _message_class(api_key, "Response")


def _message_class(api_key: ApiKey, suffix: str) -> type[Message]:
    module = import_module(f"mpbroker.protocol.messages.{api_key.name.lower()}")
    camel_case = "".join(word.title() for word in api_key.name.split("_"))
    found: type[Message] = getattr(module, f"{camel_case}{suffix}")
    return found
