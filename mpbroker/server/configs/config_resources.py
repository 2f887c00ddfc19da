"""Resources of config requests: which there are, and changes to one of them.

What AlterConfigs and IncrementalAlterConfigs have in common: a resource is named, a
function makes its new overrides of the old, and the result is checked and kept.

Source: KIP-133 and KIP-339; ConfigAdminManager and ConfigurationControlManager.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from mpbroker.base.config_def import (
    ConfigDef,
    ConfigError,
    ConfigKey,
    UnusableConfigError,
    UpdateMode,
)
from mpbroker.metadata.metadata_image import MetadataImage, MetadataRecord
from mpbroker.metadata.topics import TopicRegistry
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.server.configs.client_metrics_config import (
    check_client_metrics_configs,
    check_subscription_name,
    subscription_records,
)
from mpbroker.server.configs.config_entries import (
    BROKER_LOGGER_RESOURCE,
    BROKER_RESOURCE,
    CLIENT_METRICS_RESOURCE,
    GROUP_RESOURCE,
    TOPIC_RESOURCE,
    BrokerConfigs,
)
from mpbroker.server.configs.group_config_def import (
    check_group_configs,
    check_group_name,
)

ConfigChange = Callable[[dict[str, str]], Mapping[str, str]]


class Broker(Protocol):
    """The part of a handler's Broker that is used here."""

    @property
    def node_id(self) -> int: ...

    @property
    def definition(self) -> ConfigDef: ...

    @property
    def static_configs(self) -> Mapping[str, str]: ...

    @property
    def registry(self) -> TopicRegistry: ...


def unsupported_resource(resource_type: int) -> ApiError:
    """Return the error for a resource of a kind that is not served."""
    text = "there is no such resource"
    if resource_type == BROKER_LOGGER_RESOURCE:
        text = "levels of loggers are changed by IncrementalAlterConfigs"
    return ApiError(
        ErrorCode.INVALID_REQUEST,
        f"Unsupported resource type {resource_type}: {text}; TOPIC (2), BROKER (4),"
        " CLIENT_METRICS (16) and GROUP (32) are.",
    )


def check_broker_name(name: str, node_id: int) -> None:
    """Raise ApiError INVALID_REQUEST unless it is this broker's id."""
    if name != str(node_id):
        raise ApiError(
            ErrorCode.INVALID_REQUEST,
            f"Unexpected broker id, expected {node_id} or empty string, but received"
            f" {name}",
        )


class Resource(Protocol):
    """A resource in a request, whatever is asked of it."""

    resource_type: int
    resource_name: str


class NamedOnce:
    """The resources of one request, which must all differ."""

    def __init__(self, resources: Iterable[Resource]) -> None:
        self._counts = Counter(
            (each.resource_type, each.resource_name) for each in resources
        )

    def check(self, resource: Resource) -> None:
        """Raise ApiError INVALID_REQUEST if the request names a resource twice."""
        if self._counts[resource.resource_type, resource.resource_name] > 1:
            raise ApiError(
                ErrorCode.INVALID_REQUEST, "Each resource must appear at most once."
            )


def alter_resource(
    resource_type: int,
    name: str,
    change: ConfigChange,
    broker: Broker,
    *,
    validate_only: bool,
) -> None:
    """Change the configs of one resource.

    Args:
        change: from the resource's overrides to the wanted ones; may raise ApiError.

    Raises:
        ApiError: INVALID_REQUEST, INVALID_CONFIG, UNKNOWN_TOPIC_OR_PARTITION,
            KAFKA_STORAGE_ERROR, or what ``change`` raises; nothing was changed.
    """
    registry, definition = broker.registry, broker.definition
    if resource_type == TOPIC_RESOURCE:
        if not name:
            raise ApiError(
                ErrorCode.INVALID_REQUEST, "Default topic resources are not allowed."
            )
        registry.alter_topic_config(name, change, validate_only=validate_only)
        return
    if resource_type == GROUP_RESOURCE:
        check_group_name(name)
        configs = broker_configs(broker)

        def of_group(before: dict[str, str]) -> Mapping[str, str]:
            after = change(before)
            check_group_configs(after, configs)
            return after

        registry.alter_group_config(name, of_group, validate_only=validate_only)
        return
    if resource_type == CLIENT_METRICS_RESOURCE:
        check_subscription_name(name)

        def of_subscription(image: MetadataImage) -> Sequence[MetadataRecord]:
            before = dict(image.config(CLIENT_METRICS_RESOURCE, name))
            after = change(dict(before))
            check_client_metrics_configs(after)
            return () if validate_only else subscription_records(name, before, after)

        registry.change(of_subscription)
        return
    if resource_type != BROKER_RESOURCE:
        raise unsupported_resource(resource_type)
    if name:
        check_broker_name(name, broker.node_id)

    def checked(before: dict[str, str]) -> Mapping[str, str]:
        after = change(dict(before))
        changed = {key: text for key, text in after.items() if before.get(key) != text}
        _check_broker_configs(changed, definition, is_default=not name)
        other = registry.broker_overrides("" if name else str(broker.node_id))
        own, of_all = (after, other) if name else (other, after)
        try:
            touched = changed.keys() | before.keys() - after.keys()
            if touched:
                definition.check_together(own, of_all, touched)
        except UnusableConfigError as error:
            raise ApiError(ErrorCode.INVALID_CONFIG, str(error)) from None
        except ConfigError as error:
            raise ApiError(ErrorCode.INVALID_REQUEST, str(error)) from None
        return after

    registry.alter_broker_config(name, checked, validate_only=validate_only)


def broker_configs(broker: Broker) -> BrokerConfigs:
    """Return the broker's configs in their layers."""
    return BrokerConfigs(
        broker.definition,
        broker.registry.broker_overrides(str(broker.node_id)),
        broker.registry.broker_overrides(""),
        broker.static_configs,
    )


def _check_broker_configs(
    changed: Mapping[str, str], definition: ConfigDef, *, is_default: bool
) -> None:
    for name, text in changed.items():
        prefixed = definition.of_listener(name)
        if prefixed is not None:
            key = prefixed[1]
            _check_may_change(key, name, is_prefixed=True)
            if is_default and key.update_mode is UpdateMode.PER_BROKER:
                raise ApiError(
                    ErrorCode.INVALID_REQUEST,
                    "Cannot update these configs at default cluster level, broker id"
                    f" must be specified: {name}",
                )
        else:
            try:
                key = definition.key(name)
            except ConfigError as error:
                raise ApiError(ErrorCode.INVALID_CONFIG, str(error)) from None
            _check_may_change(key, name, is_prefixed=False)
        try:
            key.parse(text)
        except ConfigError as error:
            prefix = name.removesuffix(key.name) if prefixed else ""
            raise ApiError(ErrorCode.INVALID_REQUEST, f"{prefix}{error}") from None


def _check_may_change(key: ConfigKey, name: str, *, is_prefixed: bool) -> None:
    """Raise ApiError INVALID_REQUEST if a key cannot be set in a running broker."""
    if key.update_mode is UpdateMode.READ_ONLY or (
        key.name != name and not is_prefixed
    ):
        raise _read_only(name)
    if key.update_mode is UpdateMode.PER_BROKER and not is_prefixed:
        raise ApiError(
            ErrorCode.INVALID_REQUEST,
            "These security configs can be dynamically updated only per-listener using"
            f" the listener prefix: {name}; set listener.name.<listener>.{name}",
        )


def _read_only(name: str) -> ApiError:
    return ApiError(
        ErrorCode.INVALID_REQUEST,
        f"Cannot update these configs dynamically: {name}; set it where the broker is"
        " started, and restart it.",
    )
