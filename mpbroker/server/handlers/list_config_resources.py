"""ListConfigResources: topics, this broker, groups and subscriptions that have configs.

Source: KIP-1142; Kafka's KafkaApis.handleListConfigResources.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Protocol

from mpbroker.metadata.metadata_image import MetadataImage
from mpbroker.metadata.topics import Topic
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

_KNOWN: Final = (
    TOPIC_RESOURCE,
    BROKER_RESOURCE,
    BROKER_LOGGER_RESOURCE,
    CLIENT_METRICS_RESOURCE,
    GROUP_RESOURCE,
)


class Registry(Protocol):
    """The part of the TopicRegistry that is read here."""

    def topics(self) -> list[Topic]: ...

    def configured_groups(self) -> list[str]: ...

    @property
    def image(self) -> MetadataImage: ...


def handle_list_config_resources(
    request: ListConfigResourcesRequest, version: int, registry: Registry, node_id: int
) -> ListConfigResourcesResponse:
    """List what is asked for, each once; no types at all ask for everything.

    Everything is subscriptions to clients' metrics alone in version 0.
    """
    known = _KNOWN if version else (CLIENT_METRICS_RESOURCE,)
    wanted = dict.fromkeys(request.resource_types) or dict.fromkeys(known)
    if not wanted.keys() <= set(known):
        return ListConfigResourcesResponse(error_code=ErrorCode.UNSUPPORTED_VERSION)
    return ListConfigResourcesResponse(
        config_resources=[
            ConfigResource(resource_name=name, resource_type=kind)
            for kind in wanted
            for name in _names(kind, registry, node_id)
        ]
    )


def _names(kind: int, registry: Registry, node_id: int) -> Iterable[str]:
    if kind == TOPIC_RESOURCE:
        return [topic.name for topic in registry.topics()]
    if kind in (BROKER_RESOURCE, BROKER_LOGGER_RESOURCE):
        return [str(node_id)]
    if kind == GROUP_RESOURCE:
        return registry.configured_groups()
    return subscription_names(registry)
