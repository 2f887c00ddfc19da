"""IncrementalAlterConfigs: set, delete, append to or subtract from single configs.

Source: Kafka protocol guide, "IncrementalAlterConfigs"; KIP-339.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

from mpbroker.base.config_def import ConfigType
from mpbroker.metadata.log_config_def import LOG_CONFIG_DEF
from mpbroker.metadata.topics import ConfigChange
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.messages.incremental_alter_configs import (
    AlterableConfig,
    AlterConfigsResource,
    IncrementalAlterConfigsRequest,
    IncrementalAlterConfigsResponse,
)
from mpbroker.server.configs.broker_loggers import broker_loggers
from mpbroker.server.configs.client_metrics_config import CLIENT_METRICS_CONFIG_DEF
from mpbroker.server.configs.config_entries import (
    BROKER_LOGGER_RESOURCE,
    CLIENT_METRICS_RESOURCE,
    GROUP_RESOURCE,
    TOPIC_RESOURCE,
)
from mpbroker.server.configs.config_resources import (
    alter_each,
    broker_configs,
    each_once,
    null_value,
)
from mpbroker.server.configs.group_config_def import GROUP_CONFIG_DEF
from mpbroker.server.errors import invalid_request
from mpbroker.server.handler_context import Broker, HandlerContext


class OpType(IntEnum):
    """Names the operations on a config: set, delete, append, subtract."""

    SET = 0
    DELETE = 1
    APPEND = 2
    SUBTRACT = 3


def handle_incremental_alter_configs(
    request: IncrementalAlterConfigsRequest, context: HandlerContext
) -> IncrementalAlterConfigsResponse:
    """Change each resource whose operations are valid; answer each resource."""
    broker, validate_only = context.broker, request.validate_only
    loggers = broker_loggers(broker.node_id, broker.levels)

    def change_of(resource: AlterConfigsResource) -> ConfigChange | None:
        _check_operations(resource)
        if resource.resource_type == BROKER_LOGGER_RESOURCE and loggers:
            loggers.alter(
                resource.resource_name, resource.configs, validate_only=validate_only
            )
            return None
        return _Edit(resource, broker).apply

    return IncrementalAlterConfigsResponse(
        responses=alter_each(
            request.resources, change_of, broker, validate_only=validate_only
        )
    )


def _check_operations(resource: AlterConfigsResource) -> None:
    for config in each_once(resource.configs):
        if not 0 <= config.config_operation <= OpType.SUBTRACT:
            raise invalid_request(
                f"Unknown operation {config.config_operation} for {config.name}; it is"
                " 0 (set), 1 (delete), 2 (append) or 3 (subtract).",
            )
        if config.value is None and config.config_operation != OpType.DELETE:
            raise null_value(config.name)


class _Edit:
    """Applies the operations of a request to the configs of one resource."""

    def __init__(self, resource: AlterConfigsResource, broker: Broker) -> None:
        self._resource = resource
        self._broker = broker
        self._is_topic = resource.resource_type == TOPIC_RESOURCE
        self._definition = {
            TOPIC_RESOURCE: LOG_CONFIG_DEF,
            GROUP_RESOURCE: GROUP_CONFIG_DEF,
            CLIENT_METRICS_RESOURCE: CLIENT_METRICS_CONFIG_DEF,
        }.get(resource.resource_type, broker.definition)

    def apply(self, overrides: dict[str, str]) -> Mapping[str, str]:
        """Change and return a resource's overrides.

        The registry calls this under its lock.

        Raises:
            ApiError: INVALID_CONFIG: a config to append to or subtract from is not a
                list.
        """
        for config in self._resource.configs:
            value = config.value or ""
            if config.config_operation == OpType.DELETE:
                overrides.pop(config.name, None)
            elif config.config_operation == OpType.SET:
                overrides[config.name] = value
            else:
                overrides[config.name] = self._edit_list(config, overrides)
        return overrides

    def _edit_list(self, config: AlterableConfig, overrides: dict[str, str]) -> str:
        """Return a config's list with members added or removed, each member once.

        The operation starts from the list in effect. This is the override, or the
        inherited value if there is no override.

        Raises:
            ApiError: INVALID_CONFIG: the config is not a list.
        """
        operation, name = OpType(config.config_operation), config.name
        key = self._definition.get(name)
        prefixed = self._definition.of_listener(name)
        if prefixed is not None:
            key = prefixed[1]
        if key is not None and key.type is not ConfigType.LIST:
            raise ApiError(
                ErrorCode.INVALID_CONFIG,
                f"Can't {operation.name} to key {name} because its type is not LIST.",
            )
        text = overrides.get(name)
        members = _members(self._inherited(name) if text is None else text)
        given = _members(config.value or "")
        if operation is OpType.APPEND:
            members += [member for member in given if member not in members]
        else:
            members = [member for member in members if member not in given]
        return ",".join(members)

    def _inherited(self, name: str) -> str:
        broker = broker_configs(self._broker)
        if self._is_topic:
            synonyms = broker.synonyms_of_topic_key(name)
            key = LOG_CONFIG_DEF.get(name)
            default = None if key is None else key.format(key.default)
            return synonyms[0].text if synonyms else default or ""
        prefixed = self._broker.definition.of_listener(name)
        synonyms = (
            broker.synonyms_of_listener(name, prefixed[1])
            if prefixed is not None
            else broker.synonyms(name)
        )
        return synonyms[0].text if synonyms else ""


def _members(text: str) -> list[str]:
    members = (member.strip() for member in text.split(","))
    return list(dict.fromkeys(member for member in members if member))
