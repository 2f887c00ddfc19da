"""Load the classes that settings name: authorizers, receivers of clients' metrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from mpbroker.base.config_def import ConfigError

if TYPE_CHECKING:
    from mpbroker.server.authorization.authorizer import Authorizer
    from mpbroker.server.telemetry.client_telemetry_receiver import (
        ClientTelemetryReceiver,
    )

_PYTHON: Final = "python:"
AUTHORIZER_GROUP: Final = "mpbroker.authorizers"

_STANDARD_NAME: Final = "org.apache.kafka.metadata.authorizer.StandardAuthorizer"
# Files made for earlier versions of Kafka use the other names.
_STANDARD: Final = frozenset(
    {
        _STANDARD_NAME,
        "kafka.security.authorizer.AclAuthorizer",
        "kafka.security.auth.SimpleAclAuthorizer",
    }
)
RECEIVER_GROUP: Final = "mpbroker.client_telemetry_receivers"
RECEIVER_KEY: Final = "client.telemetry.receiver.class.name"


def load_class(setting: str, name: str, base: type, group: str, known: str = "") -> Any:
    """Import a class by its name: python:MODULE:CLASS, or an entry point of a group.

    Args:
        setting: the key of the setting that names the class, for messages.
        base: the class of which it must be a subclass.
        group: the group of entry points.
        known: other names that are accepted, for messages.

    Raises:
        ConfigError: there is no such class, it is no subclass, or it is abstract.
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
        from importlib import import_module

        return getattr(import_module(module), attribute)
    # Imported here: it imports forty modules, which most brokers do not need.
    from importlib.metadata import entry_points

    for entry_point in entry_points(group=group, name=name):
        return entry_point.load()
    raise ConfigError(
        f"{said}: neither {known}python:MODULE:CLASS, nor an entry point in the group"
        f" {group}; a Java class cannot be used here"
    )


def is_standard_authorizer(name: str) -> bool:
    """Return whether a class name means the authorizer that uses Kafka's ACLs."""
    return name in _STANDARD


def parse_super_users(text: str) -> tuple[str, ...]:
    """Parse super.users: principals, separated by semicolons.

    Raises:
        ConfigError: a principal is not a type, a colon and a name.
    """
    users = tuple(user.strip() for user in text.split(";") if user.strip())
    for user in users:
        kind, colon, name = user.partition(":")
        if not (kind and colon and name):
            raise ConfigError(
                f"super.users: {user!r:.200} is not type:name, for example"
                " User:admin;User:CN=broker"
            )
    return users


def load_authorizer_class(name: str) -> type[Authorizer]:
    """Import the class of an authorizer that is not the standard authorizer.

    Raises:
        ConfigError: there is no such class, or it is no authorizer.
    """
    from mpbroker.server.authorization.authorizer import Authorizer

    found: type[Authorizer] = load_class(
        "authorizer.class.name",
        name,
        Authorizer,
        AUTHORIZER_GROUP,
        f"{_STANDARD_NAME} nor another name of Kafka's own, nor ",
    )
    return found


def load_receiver_class(name: str) -> type[ClientTelemetryReceiver]:
    """Import the class of a receiver of clients' metrics.

    Raises:
        ConfigError: there is no such class, or it is no receiver.
    """
    from mpbroker.server.telemetry.client_telemetry_receiver import (
        ClientTelemetryReceiver,
    )

    found: type[ClientTelemetryReceiver] = load_class(
        RECEIVER_KEY, name, ClientTelemetryReceiver, RECEIVER_GROUP
    )
    return found
