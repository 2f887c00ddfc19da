"""The serializers and deserializers that Kafka's settings name.

`key.serializer` and similar settings name a class of Kafka's own (`StringSerializer`,
with or without its package), or a function of the user as MODULE:FUNCTION. The function
itself can be given, too. A serializer gets the topic and the value, and returns the
bytes. A deserializer gets the topic and the bytes, and returns the value; it is not
called for null.

Source: the package org.apache.kafka.common.serialization of Apache Kafka.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any, Final
from uuid import UUID

from mpbroker.client.code_settings import load_code

Serializer = Callable[[str, Any], bytes | None]
"""Return the bytes of a key or value, given the topic and it; may raise any error."""

Deserializer = Callable[[str, bytes], Any]
"""Return a key or value, given the topic and its bytes; may raise any error."""

_PACKAGE: Final = "org.apache.kafka.common.serialization."


def _packs(form: str) -> tuple[Serializer, Deserializer]:
    packed = struct.Struct(form)
    return (
        lambda topic, value: None if value is None else packed.pack(value),
        lambda topic, data: packed.unpack(data)[0],
    )


_BYTES: Final = None, None  # keys and values are bytes anyway

_PAIRS: Final[Mapping[str, tuple[Serializer | None, Deserializer | None]]] = {
    "ByteArray": _BYTES,
    "ByteBuffer": _BYTES,
    "Bytes": _BYTES,
    "String": (
        lambda topic, value: None if value is None else value.encode(),
        lambda topic, data: data.decode(),
    ),
    "UUID": (
        lambda topic, value: None if value is None else str(value).encode(),
        lambda topic, data: UUID(data.decode()),
    ),
    "Boolean": _packs(">?"),
    "Short": _packs(">h"),
    "Integer": _packs(">i"),
    "Long": _packs(">q"),
    "Float": _packs(">f"),
    "Double": _packs(">d"),
    "Void": (lambda topic, value: None, lambda topic, data: None),
}


def arguments_hint(error: Exception, second: str) -> str:
    """Return what a function that takes the value alone gets instead, or "".

    kafka-python's serializers and deserializers take the value alone.

    Args:
        error: the error of a serializer or deserializer.
        second: the name of its second argument.
    """
    # The errors of f(a) and of str.encode when they are called with two arguments.
    is_likely = isinstance(error, (TypeError, LookupError))
    return f" (it is called with the topic and the {second})" if is_likely else ""


def load_serializer(key: str, value: object) -> Serializer | None:
    """Return the serializer that a setting names; None: keys and values are bytes.

    Raises:
        ConfigError: there is none of that name.
    """
    kafkas = {f"{name}Serializer": pair[0] for name, pair in _PAIRS.items()}
    return _load(key, value, kafkas)


def load_deserializer(key: str, value: object) -> Deserializer | None:
    """Return the deserializer that a setting names; None: keys and values are bytes.

    Raises:
        ConfigError: there is none of that name.
    """
    kafkas = {f"{name}Deserializer": pair[1] for name, pair in _PAIRS.items()}
    return _load(key, value, kafkas)


def _load(
    key: str, value: object, kafkas: Mapping[str, Callable[..., Any] | None]
) -> Callable[..., Any] | None:
    if isinstance(value, str) and (name := value.removeprefix(_PACKAGE)) in kafkas:
        return kafkas[name]
    found = load_code(
        key, value, "a function", f"MODULE:FUNCTION, or one of {', '.join(kafkas)}"
    )
    return found  # type: ignore[no-any-return]
