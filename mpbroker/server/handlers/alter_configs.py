"""AlterConfigs: replace all overrides of a resource.

A config that the request does not name gets its default again.

Source: Kafka protocol guide, "AlterConfigs"; KIP-133.
"""

from __future__ import annotations

from collections.abc import Mapping

from mpbroker.metadata.topics import ConfigChange
from mpbroker.protocol.messages.alter_configs import (
    AlterConfigsRequest,
    AlterConfigsResource,
    AlterConfigsResponse,
)
from mpbroker.server.configs.config_resources import (
    alter_each,
    each_once,
    null_value,
)
from mpbroker.server.handler_context import HandlerContext


def handle_alter_configs(
    request: AlterConfigsRequest, context: HandlerContext
) -> AlterConfigsResponse:
    """Change each resource whose new configs are valid; answer each resource."""

    def change_of(resource: AlterConfigsResource) -> ConfigChange:
        wanted = _wanted(resource)
        return lambda _: wanted

    return AlterConfigsResponse(
        responses=alter_each(
            request.resources,
            change_of,
            context.broker,
            validate_only=request.validate_only,
        )
    )


def _wanted(resource: AlterConfigsResource) -> Mapping[str, str]:
    """Return the configs (overrides) that a request sets for a resource.

    Raises:
        ApiError: INVALID_REQUEST: a config is null, or is named twice.
    """
    wanted: dict[str, str] = {}
    for config in each_once(resource.configs):
        if config.value is None:
            raise null_value(config.name)
        wanted[config.name] = config.value
    return wanted
