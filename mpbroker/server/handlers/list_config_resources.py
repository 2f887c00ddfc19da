"""ListConfigResources: topics, this broker, and groups that have configs of their own.

Source: KIP-1142; Kafka's KafkaApis.handleListConfigResources.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Protocol

from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages.list_config_resources import (
    ConfigResource,
    ListConfigResourcesRequest,
    ListConfigResourcesResponse,
)
from mpbroker.server.handlers.config_entries import (
    BROKER_LOGGER_RESOURCE,
    BROKER_RESOURCE,
    GROUP_RESOURCE,
    TOPIC_RESOURCE,
)
from mpbroker.storage.topics import Topic

_CLIENT_METRICS: Final = 16
_KNOWN: Final = (
    TOPIC_RESOURCE,
    BROKER_RESOURCE,
    BROKER_LOGGER_RESOURCE,
    _CLIENT_METRICS,
    GROUP_RESOURCE,
)


class Registry(Protocol):
    """The part of the TopicRegistry that is read here."""

    def topics(self) -> list[Topic]: ...

    def configured_groups(self) -> list[str]: ...


def handle_list_config_resources(
    request: ListConfigResourcesRequest, version: int, registry: Registry, node_id: int
) -> ListConfigResourcesResponse:
    """List what is asked for, each once; no types at all ask for everything.

    Nobody subscribes to clients' metrics here, so of these there are none, which is all
    that version 0 asks for.
    """
    known = _KNOWN if version else (_CLIENT_METRICS,)
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
    return ()
