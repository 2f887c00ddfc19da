"""AlterConfigs: replace all overrides of a resource; what is not named is reset.

Source: Kafka protocol guide, "AlterConfigs"; KIP-133.
"""

from __future__ import annotations

from collections.abc import Mapping

from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.messages.alter_configs import (
    AlterConfigsRequest,
    AlterConfigsResource,
    AlterConfigsResourceResponse,
    AlterConfigsResponse,
)
from mpbroker.server.configs.config_resources import NamedOnce, alter_resource
from mpbroker.server.handler_context import HandlerContext


def handle_alter_configs(
    request: AlterConfigsRequest, context: HandlerContext
) -> AlterConfigsResponse:
    """Change what can be changed; answer each resource for itself."""
    named_once = NamedOnce(request.resources)
    responses = []
    for resource in request.resources:
        response = AlterConfigsResourceResponse(
            resource_type=resource.resource_type,
            resource_name=resource.resource_name,
            error_message=None,
        )
        responses.append(response)
        try:
            named_once.check(resource)
            wanted = _wanted(resource)
            alter_resource(
                resource.resource_type,
                resource.resource_name,
                lambda _, wanted=wanted: wanted,  # type: ignore[misc]
                context.broker,
                validate_only=request.validate_only,
            )
        except ApiError as error:
            response.error_code = error.error_code
            response.error_message = str(error)
    return AlterConfigsResponse(responses=responses)


def _wanted(resource: AlterConfigsResource) -> Mapping[str, str]:
    wanted: dict[str, str] = {}
    for config in resource.configs:
        if config.name in wanted:
            raise ApiError(
                ErrorCode.INVALID_REQUEST,
                f"Error due to duplicate config keys: {config.name}",
            )
        if config.value is None:
            raise ApiError(
                ErrorCode.INVALID_REQUEST,
                f"Null value not supported for: {config.name}",
            )
        wanted[config.name] = config.value
    return wanted
