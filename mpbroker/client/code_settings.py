"""Settings whose value is a function or class: itself, or its name as MODULE:NAME."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Final

from mpbroker.base.config_def import ConfigError

PRODUCER_CODE: Final = (
    "key.serializer",
    "value.serializer",
    "partitioner.class",
    "interceptor.classes",
)
CONSUMER_CODE: Final = "key.deserializer", "value.deserializer"
"""The keys of Kafka's that are settings of this kind."""


def load_code(key: str, value: object, what: str, forms: str) -> Any:
    """Return the function or class that a setting names; return any other value as is.

    Args:
        key: the setting's name.
        value: the object itself, or its name as MODULE:NAME.
        what: the kind of object that is wanted, for errors.
        forms: the names that are possible, for errors.

    Raises:
        ConfigError: there is no such object.
    """
    if not isinstance(value, str):
        return value
    module, _, name = value.partition(":")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{key}={value}: it must be {what}, or {forms}; no class of Java can be"
            f" used ({error})"
        ) from None


def take_code(
    given: Mapping[str, object], names: Mapping[str, object]
) -> tuple[dict[str, object], dict[str, object]]:
    """Split settings into plain values and code (functions, classes or their names).

    Args:
        given: all settings, with dots or underscores.
        names: the keys of the settings that are code, with dots. Each value is the
            client's own argument for that setting; None and () mean "not given".

    Returns:
        The plain settings, and the settings that are code by key.

    Raises:
        ConfigError: a setting is given in both.
    """
    plain: dict[str, object] = {}
    code = {key: value for key, value in names.items() if value not in (None, ())}
    for spelling, value in given.items():
        key = spelling.replace("_", ".")
        if key not in names:
            plain[spelling] = value
        elif key in code:
            raise ConfigError(f"{key} is given twice; give it once")
        elif value is not None:
            code[key] = value
    return plain, code
