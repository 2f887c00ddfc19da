"""Classes of somebody else's that a setting names."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, Final

from mpbroker.base.config_def import ConfigError

_PYTHON: Final = "python:"


def load_class(setting: str, name: str, base: type, group: str, known: str = "") -> Any:
    """Import a class: python:MODULE:CLASS, or an entry point of a group.

    Args:
        setting: whose value the name is, for messages.
        base: what the class must be a subclass of.
        known: names that would have been understood too, for messages.

    Raises:
        ConfigError: there is none of that name, or it is not finished.
    """
    said = f"{setting}={name}"
    try:
        found = _load(said, name, group, known)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{said}: it cannot be imported: {error!r}") from error
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ConfigError(
            f"{said}: {found!r:.200} is no subclass of"
            f" {base.__module__}.{base.__qualname__}"
        )
    missing: Sequence[str] = sorted(getattr(found, "__abstractmethods__", ()))
    if missing:
        raise ConfigError(f"{said}: it does not implement {', '.join(missing)}")
    return found


def _load(said: str, name: str, group: str, known: str) -> object:
    if name.startswith(_PYTHON):
        module, colon, attribute = name.removeprefix(_PYTHON).partition(":")
        if not (module and colon and attribute):
            raise ConfigError(
                f"{said}: not python:MODULE:CLASS, for example"
                " python:company.kafka:OurClass"
            )
        return getattr(import_module(module), attribute)
    # Imported here: a start without a plug-in would feel its forty modules.
    from importlib.metadata import entry_points

    for entry_point in entry_points(group=group, name=name):
        return entry_point.load()
    raise ConfigError(
        f"{said}: neither {known}python:MODULE:CLASS, nor an entry point in the group"
        f" {group}; a Java class cannot be used here"
    )
