"""Build the objects that ask the authorizer, in each process that executes requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mpbroker.base.config_def import ConfigError
from mpbroker.config import BrokerConfig
from mpbroker.config.plug_ins import (
    is_standard_authorizer,
    load_authorizer_class,
    parse_super_users,
)
from mpbroker.supervisor.listen_sockets import Listener
from mpbroker.supervisor.memory import BrokerMemory

if TYPE_CHECKING:
    from mpbroker.metadata.delegation_tokens import TokenSettings
    from mpbroker.metadata.topics import TopicRegistry
    from mpbroker.server.authorization.authorization import Authorization
    from mpbroker.server.authorization.authorizer import Authorizer
    from mpbroker.server.request_context import RequestContexts


def check_authorizer(config: BrokerConfig) -> None:
    """Import the class that authorizer.class.name names, and try the settings on it.

    Call it once, before the first fork: so the command reports an error, and no child
    needs to import the class again.

    Raises:
        ConfigError: the class cannot be used.
    """
    parse_super_users(config.super_users)
    name = config.authorizer_class_name
    if name and not is_standard_authorizer(name):
        _foreign_authorizer(config)


def _foreign_authorizer(config: BrokerConfig) -> Authorizer:
    name = config.authorizer_class_name
    authorizer = load_authorizer_class(name)()
    try:
        authorizer.configure(config.static_texts())
    except ValueError as error:
        raise ConfigError(f"authorizer.class.name={name}: {error}") from error
    return authorizer


def request_contexts(
    memory: BrokerMemory, listeners: Sequence[Listener]
) -> RequestContexts:
    """Return the object that finds a request's sender: principal, host, listener."""
    from mpbroker.server.request_context import RequestContexts

    return RequestContexts(
        memory.control.words,
        memory.principals.name,
        [
            (listener.endpoint.listener_name, listener.endpoint.security_protocol)
            for listener in listeners
        ],
    )


def token_settings(config: BrokerConfig) -> TokenSettings | None:
    """Return the settings of delegation tokens; None: they are not served."""
    key = config.delegation_token_secret_key
    if not key:
        return None
    from mpbroker.metadata.delegation_tokens import TokenSettings

    return TokenSettings(
        key,
        config.delegation_token_max_lifetime_ms,
        config.delegation_token_expiry_time_ms,
    )


def make_authorization(
    config: BrokerConfig,
    memory: BrokerMemory,
    listeners: Sequence[Listener],
    registry: TopicRegistry,
) -> Authorization | None:
    """Return the object that asks the authorizer; None: all requests are allowed."""
    name = config.authorizer_class_name
    if not name:
        return None
    # Imported here: most brokers have no authorizer.
    from mpbroker.metadata.acl_records import MetadataAcls
    from mpbroker.server.authorization.authorization import Authorization
    from mpbroker.server.authorization.authorizer import StandardAuthorizer

    authorizer: Authorizer
    if is_standard_authorizer(name):
        authorizer = StandardAuthorizer(
            MetadataAcls(registry),
            parse_super_users(config.super_users),
            allow_everyone_if_no_acl_found=config.allow_everyone_if_no_acl_found,
        )
    else:
        authorizer = _foreign_authorizer(config)
    return Authorization(
        authorizer,
        request_contexts(memory, listeners),
        registry,
        auto_create_topics=config.auto_create_topics_enable,
    )
