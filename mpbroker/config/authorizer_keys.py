"""What the broker's keys for authorization name: a class, and principals."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mpbroker.base.config_def import ConfigError

if TYPE_CHECKING:
    from mpbroker.server.authorization.authorizer import Authorizer

ENTRY_POINT_GROUP: Final = "mpbroker.authorizers"

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
    from mpbroker.config.plug_ins import load_class
    from mpbroker.server.authorization.authorizer import Authorizer

    found: type[Authorizer] = load_class(
        "authorizer.class.name",
        name,
        Authorizer,
        ENTRY_POINT_GROUP,
        f"{_STANDARD_NAME} nor another name of Kafka's own, nor ",
    )
    return found
