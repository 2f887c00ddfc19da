"""What the broker's keys for authorisation name: a class, and principals."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Final

from mpbroker.config_def import ConfigError

if TYPE_CHECKING:
    from mpbroker.server.authorizer import Authorizer

ENTRY_POINT_GROUP: Final = "mpbroker.authorizers"

_PYTHON: Final = "python:"
_STANDARD_NAME: Final = "org.apache.kafka.metadata.authorizer.StandardAuthorizer"
# Files written for any Kafka mean the same by these.
_STANDARD: Final = frozenset(
    {
        _STANDARD_NAME,
        "kafka.security.authorizer.AclAuthorizer",
        "kafka.security.auth.SimpleAclAuthorizer",
    }
)


def is_standard_authorizer(name: str) -> bool:
    """Whether a name is that of the authorizer that goes by ACLs in the log."""
    return name in _STANDARD


def parse_super_users(text: str) -> tuple[str, ...]:
    """Return the principals.

    Raises:
        ConfigError: one of them is not a type, a colon and a name.
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
    """Import the class of an authorizer that is not the standard one.

    Raises:
        ConfigError: there is none of that name, or it is no authorizer.
    """
    from mpbroker.server.authorizer import Authorizer

    try:
        found = _load(name)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"authorizer.class.name={name}: it cannot be imported: {error!r}"
        ) from error
    if not (isinstance(found, type) and issubclass(found, Authorizer)):
        raise ConfigError(
            f"authorizer.class.name={name}: {found!r:.200} is no subclass of"
            " mpbroker.server.authorizer.Authorizer"
        )
    missing: Sequence[str] = sorted(getattr(found, "__abstractmethods__", ()))
    if missing:
        raise ConfigError(
            f"authorizer.class.name={name}: it does not implement {', '.join(missing)}"
        )
    return found


def _load(name: str) -> object:
    if name.startswith(_PYTHON):
        module, colon, attribute = name.removeprefix(_PYTHON).partition(":")
        if not (module and colon and attribute):
            raise ConfigError(
                f"authorizer.class.name={name}: not python:MODULE:CLASS, for example"
                " python:company.kafka:CompanyAuthorizer"
            )
        return getattr(import_module(module), attribute)
    # Imported here: a start without an authorizer would feel its forty modules.
    from importlib.metadata import entry_points

    for entry_point in entry_points(group=ENTRY_POINT_GROUP, name=name):
        return entry_point.load()
    raise ConfigError(
        f"authorizer.class.name={name}: neither {_STANDARD_NAME} nor another"
        " name of Kafka's own, nor python:MODULE:CLASS, nor an entry point in the group"
        f" {ENTRY_POINT_GROUP}; a Java class cannot be used here"
    )
