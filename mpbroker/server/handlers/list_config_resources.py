"""ListConfigResources: list the resources that have configs.

These are all topics, this broker and its loggers, and the groups and subscriptions to
clients' metrics for which configs are set.

Source: KIP-1142; Kafka's KafkaApis.handleListConfigResources.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages.list_config_resources import (
    ConfigResource,
    ListConfigResourcesRequest,
    ListConfigResourcesResponse,
)
from mpbroker.server.configs.client_metrics_config import subscription_names
from mpbroker.server.configs.config_entries import (
    BROKER_LOGGER_RESOURCE,
    BROKER_RESOURCE,
    CLIENT_METRICS_RESOURCE,
    GROUP_RESOURCE,
    TOPIC_RESOURCE,
)
from mpbroker.server.handler_context import Broker, HandlerContext

_KNOWN: Final = (
    TOPIC_RESOURCE,
    BROKER_RESOURCE,
    BROKER_LOGGER_RESOURCE,
    CLIENT_METRICS_RESOURCE,
    GROUP_RESOURCE,
)


def handle_list_config_resources(
    request: ListConfigResourcesRequest, context: HandlerContext
) -> ListConfigResourcesResponse:
    """List the resources of the wanted types, or of all types if none is named.

    Version 0 knows only one type: subscriptions to clients' metrics. Refuse types that
    the version does not know.
    """
    known = _KNOWN if context.version else (CLIENT_METRICS_RESOURCE,)
    wanted = dict.fromkeys(request.resource_types) or dict.fromkeys(known)
    if not wanted.keys() <= set(known):
        return ListConfigResourcesResponse(error_code=ErrorCode.UNSUPPORTED_VERSION)
    return ListConfigResourcesResponse(
        config_resources=[
            ConfigResource(resource_name=name, resource_type=kind)
            for kind in wanted
            for name in _names(kind, context.broker)
        ]
    )


def _names(kind: int, broker: Broker) -> Iterable[str]:
    if kind == TOPIC_RESOURCE:
        return [topic.name for topic in broker.registry.topics()]
    if kind in (BROKER_RESOURCE, BROKER_LOGGER_RESOURCE):
        return [str(broker.node_id)]
    if kind == GROUP_RESOURCE:
        return broker.registry.configured_groups()
    return subscription_names(broker.registry)
