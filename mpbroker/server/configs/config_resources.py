"""Change the configs of one resource: a topic, a group, a broker or a subscription.

AlterConfigs and IncrementalAlterConfigs share this module. Each of the two handlers
gives a function that makes the new overrides of a resource from the old ones. The new
overrides are checked and written to the metadata log.

Source: KIP-133, KIP-339; Kafka's ConfigAdminManager and ConfigurationControlManager.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Final, Protocol, TypeVar

from mpbroker.base.config_def import (
    ConfigDef,
    ConfigError,
    ConfigKey,
    UnusableConfigError,
    UpdateMode,
)
from mpbroker.metadata.topics import Alteration, ConfigChange, TopicRegistry
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.messages.alter_configs import AlterConfigsResourceResponse
from mpbroker.server.configs.client_metrics_config import (
    check_client_metrics_configs,
    check_subscription_name,
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
    GroupLimits,
    check_group_name,
)
from mpbroker.server.errors import invalid_request

MIN_ISR_KEY: Final = "min.insync.replicas"


class Broker(Protocol):
    """The parts of a broker that a change of configs needs: registry, keys, id."""

    @property
    def node_id(self) -> int: ...

    @property
    def definition(self) -> ConfigDef: ...

    @property
    def static_configs(self) -> Mapping[str, str]: ...

    @property
    def registry(self) -> TopicRegistry: ...


def unsupported_resource(resource_type: int) -> ApiError:
    """Return the error for a resource whose type has no configs that can be changed."""
    text = "there is no such resource"
    if resource_type == BROKER_LOGGER_RESOURCE:
        text = "levels of loggers are changed by IncrementalAlterConfigs"
    return invalid_request(
        f"Unsupported resource type {resource_type}: {text}; TOPIC (2), BROKER (4),"
        " CLIENT_METRICS (16) and GROUP (32) are.",
    )


def check_broker_name(name: str, node_id: int) -> None:
    """Raise ApiError INVALID_REQUEST if a resource's name is not this broker's id."""
    if name != str(node_id):
        raise invalid_request(
            f"Unexpected broker id, expected {node_id} or empty string, but received"
            f" {name}",
        )


class Resource(Protocol):
    """Names a resource in a request that describes or changes configs."""

    resource_type: int
    resource_name: str


class Config(Protocol):
    """Names a config of a resource in a request that changes configs."""

    name: str


ResourceT = TypeVar("ResourceT", bound=Resource)
ConfigT = TypeVar("ConfigT", bound=Config)


class NamedOnce:
    """Counts the resources of one request, to refuse those that it names twice."""

    def __init__(self, resources: Iterable[Resource]) -> None:
        self._counts = Counter(
            (each.resource_type, each.resource_name) for each in resources
        )

    def check(self, resource: Resource) -> None:
        """Raise ApiError INVALID_REQUEST if the request names a resource twice."""
        if self._counts[resource.resource_type, resource.resource_name] > 1:
            raise invalid_request("Each resource must appear at most once.")


def alter_each(
    resources: Sequence[ResourceT],
    change_of: Callable[[ResourceT], ConfigChange | None],
    broker: Broker,
    *,
    validate_only: bool,
) -> list[AlterConfigsResourceResponse]:
    """Change the configs of a request's resources; return a response for each.

    All of them are written to disk at once, except for those of brokers: they depend on
    each other, so each is decided upon what the one before has left.

    Args:
        resources: the resources. One that is named twice is refused.
        change_of: returns the function that makes a resource's new overrides from the
            old ones; None: it has changed the resource itself. It may raise ApiError.
        broker: has the topic registry, which writes the changes, and the broker's keys.
        validate_only: check the changes, and do not make them.
    """
    named_once = NamedOnce(resources)
    basis = _Basis(broker)
    responses = []
    together: list[tuple[AlterConfigsResourceResponse, Alteration]] = []
    singly: list[tuple[AlterConfigsResourceResponse, Alteration]] = []
    for resource in resources:
        response = AlterConfigsResourceResponse(
            resource_type=resource.resource_type,
            resource_name=resource.resource_name,
            error_message=None,
        )
        responses.append(response)
        try:
            named_once.check(resource)
            change = change_of(resource)
            if change is not None:
                wanted = _alteration(resource, change, basis)
                of_broker = resource.resource_type == BROKER_RESOURCE
                (singly if of_broker else together).append((response, wanted))
        except ApiError as error:
            _refuse(response, error)
    for group in (together, *([each] for each in singly)):
        _alter(group, broker.registry, validate_only=validate_only)
    return responses


def _alter(
    wanted: Sequence[tuple[AlterConfigsResourceResponse, Alteration]],
    registry: TopicRegistry,
    *,
    validate_only: bool,
) -> None:
    """Make changes with one write to disk; put errors into the responses."""
    if not wanted:
        return
    alterations = [alteration for _, alteration in wanted]
    errors: list[ApiError | None]
    try:
        errors = registry.alter_configs(alterations, validate_only=validate_only)
    except ApiError as error:  # nothing was changed
        errors = [error] * len(wanted)
    for (response, _), refusal in zip(wanted, errors, strict=True):
        if refusal is not None:
            _refuse(response, refusal)


def _refuse(response: AlterConfigsResourceResponse, error: ApiError) -> None:
    response.error_code, response.error_message = error.error_code, str(error)


def each_once(configs: Iterable[ConfigT]) -> Iterator[ConfigT]:
    """Yield the configs of one resource in a request.

    Raises:
        ApiError: INVALID_REQUEST: a config is named twice.
    """
    seen = set()
    for config in configs:
        if config.name in seen:
            raise invalid_request(
                f"Error due to duplicate config keys: {config.name}",
            )
        seen.add(config.name)
        yield config


def null_value(name: str) -> ApiError:
    """Return the error for a request that sets a config to null."""
    return invalid_request(f"Null value not supported for: {name}")


class _Basis:
    """The values against which the changes of one request are checked.

    Attributes:
        broker: the broker.
    """

    def __init__(self, broker: Broker) -> None:
        self.broker: Final = broker
        self._limits: tuple[int, GroupLimits] | None = None

    def group_limits(self) -> GroupLimits:
        """Return the limits of groups' configs that the present metadata gives."""
        version = self.broker.registry.version
        if self._limits is None or self._limits[0] != version:
            self._limits = version, GroupLimits(broker_configs(self.broker))
        return self._limits[1]


def _alteration(resource: Resource, change: ConfigChange, basis: _Basis) -> Alteration:
    """Return a change of one resource's configs that also checks the new ones.

    Raises:
        ApiError: INVALID_REQUEST: the resource has no configs that can be changed.
    """
    kind, name = resource.resource_type, resource.resource_name
    checked = _CHECKED.get(kind)
    if checked is None:
        raise unsupported_resource(kind)
    return Alteration(kind, name, checked(name, change, basis))


def _of_topic(name: str, change: ConfigChange, _: _Basis) -> ConfigChange:
    if not name:
        raise invalid_request("Default topic resources are not allowed.")
    return change  # the registry checks the configs of topics


def _of_group(name: str, change: ConfigChange, basis: _Basis) -> ConfigChange:
    check_group_name(name)

    def checked(before: dict[str, str]) -> Mapping[str, str]:
        after = change(before)
        basis.group_limits().check(after)
        return after

    return checked


def _of_subscription(name: str, change: ConfigChange, _: _Basis) -> ConfigChange:
    check_subscription_name(name)

    def checked(before: dict[str, str]) -> Mapping[str, str]:
        after = change(before)
        check_client_metrics_configs(after)
        return after

    return checked


def _of_broker(name: str, change: ConfigChange, basis: _Basis) -> ConfigChange:
    """Check changes of this broker's configs; if the name is empty, of all brokers'."""
    broker = basis.broker
    if name:
        check_broker_name(name, broker.node_id)

    def checked(before: dict[str, str]) -> Mapping[str, str]:
        after = change(dict(before))
        changed = {key: text for key, text in after.items() if before.get(key) != text}
        if name and MIN_ISR_KEY in changed:
            raise ApiError(
                ErrorCode.INVALID_CONFIG,
                f"Broker-level {MIN_ISR_KEY} cannot be altered while ELR is enabled.",
            )
        _check_broker_configs(changed, broker.definition, is_default=not name)
        touched = changed.keys() | before.keys() - after.keys()
        if touched:
            _check_together(name, after, touched, broker)
        return after

    return checked


_CHECKED: Final[Mapping[int, Callable[[str, ConfigChange, _Basis], ConfigChange]]] = {
    TOPIC_RESOURCE: _of_topic,
    GROUP_RESOURCE: _of_group,
    CLIENT_METRICS_RESOURCE: _of_subscription,
    BROKER_RESOURCE: _of_broker,
}


def broker_configs(broker: Broker) -> BrokerConfigs:
    """Return the broker's configs in their layers, as they are now."""
    static = broker.static_configs
    return BrokerConfigs(
        broker.definition,
        broker.registry.broker_overrides(str(broker.node_id)),
        # Kafka's controller sets this one when a cluster begins (KIP-966).
        {
            MIN_ISR_KEY: static.get(MIN_ISR_KEY, "1"),
            **broker.registry.broker_overrides(""),
        },
        static,
    )


def _check_together(
    name: str, after: Mapping[str, str], touched: Collection[str], broker: Broker
) -> None:
    """Check configs that depend on each other.

    Args:
        name: the resource's name: this broker's id, or "" for all brokers.
        after: the new overrides of the resource.
        touched: the keys that are set, changed or removed.

    Raises:
        ApiError: INVALID_CONFIG or INVALID_REQUEST.
    """
    other = broker.registry.broker_overrides("" if name else str(broker.node_id))
    own, of_all = (after, other) if name else (other, after)
    try:
        broker.definition.check_together(own, of_all, touched)
    except UnusableConfigError as error:
        raise ApiError(ErrorCode.INVALID_CONFIG, str(error)) from None
    except ConfigError as error:
        raise invalid_request(str(error)) from None


def _check_broker_configs(
    changed: Mapping[str, str], definition: ConfigDef, *, is_default: bool
) -> None:
    for name, text in changed.items():
        prefixed = definition.of_listener(name)
        if prefixed is not None:
            key = prefixed[1]
            _check_may_change(key, name, is_prefixed=True)
        else:
            try:
                key = definition.key(name)
            except ConfigError as error:
                raise ApiError(ErrorCode.INVALID_CONFIG, str(error)) from None
            _check_may_change(key, name, is_prefixed=False)
        if is_default and key.update_mode is UpdateMode.PER_BROKER:
            raise invalid_request(
                "Cannot update these configs at default cluster level, broker id must"
                f" be specified: {name}",
            )
        try:
            key.parse(text)
        except ConfigError as error:
            prefix = name.removesuffix(key.name) if prefixed else ""
            raise invalid_request(f"{prefix}{error}") from None


def _check_may_change(key: ConfigKey, name: str, *, is_prefixed: bool) -> None:
    """Raise ApiError INVALID_REQUEST if a running broker cannot change a key.

    Args:
        key: the key's definition.
        name: the key's name in the request, with its listener prefix if it has one.
        is_prefixed: whether the name has a listener prefix.
    """
    if key.update_mode is UpdateMode.READ_ONLY or (
        key.name != name and not is_prefixed
    ):
        raise _read_only(name)
    if key.only_per_listener and not is_prefixed:
        raise invalid_request(
            "These security configs can be dynamically updated only per-listener using"
            f" the listener prefix: {name}; set listener.name.<listener>.{name}",
        )


def _read_only(name: str) -> ApiError:
    return invalid_request(
        f"Cannot update these configs dynamically: {name}; set it where the broker is"
        " started, and restart it.",
    )
