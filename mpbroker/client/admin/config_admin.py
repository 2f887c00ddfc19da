"""Configs of brokers, topics and groups: read them, set them, take them away."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Final, NamedTuple

from mpbroker.client.cluster import Cluster, only
from mpbroker.client.errors import check_error
from mpbroker.protocol.messages.describe_configs import (
    DescribeConfigsRequest,
    DescribeConfigsResource,
    DescribeConfigsResourceResult,
    DescribeConfigsResponse,
)
from mpbroker.protocol.messages.incremental_alter_configs import (
    AlterableConfig,
    AlterConfigsResource,
    IncrementalAlterConfigsRequest,
    IncrementalAlterConfigsResponse,
)

_SET: Final = 0
_DELETE: Final = 1


class ConfigResourceType(IntEnum):
    """What has configs, in the numbers of the protocol."""

    TOPIC = 2
    BROKER = 4
    BROKER_LOGGER = 8
    CLIENT_METRICS = 16
    GROUP = 32


class ConfigResource(NamedTuple):
    """One that has configs; a BROKER called "" is all brokers."""

    type: ConfigResourceType
    name: str

    def __str__(self) -> str:
        if self.type is ConfigResourceType.BROKER and not self.name:
            return "all brokers"
        if self.type is ConfigResourceType.BROKER_LOGGER:
            return f"loggers of broker {self.name!r}"
        return f"{self.type.name.lower().replace('_', ' ')} {self.name!r}"


def describe_configs(
    cluster: Cluster, resource: ConfigResource, keys: Sequence[str] = ()
) -> list[DescribeConfigsResourceResult]:
    """Return a resource's configs; all of them unless ``keys`` names some.

    Raises:
        ApiError: there is no such resource, or it may not be seen.
    """
    wanted = DescribeConfigsResource(
        resource_type=resource.type,
        resource_name=resource.name,
        configuration_keys=list(keys) or None,
    )
    request = DescribeConfigsRequest(resources=[wanted])
    broker = cluster.controller()
    answer = broker.request(request, DescribeConfigsResponse)
    result = only(answer.results, broker.address)
    check_error(result.error_code, str(resource), result.error_message)
    return result.configs


def alter_configs(
    cluster: Cluster,
    resource: ConfigResource,
    put: Mapping[str, str],
    delete: Iterable[str] = (),
) -> None:
    """Set some configs, and put others back to what they inherit; all or none.

    Raises:
        ApiError: one of them is refused.
    """
    changes = [
        AlterableConfig(name=key, config_operation=_SET, value=value)
        for key, value in put.items()
    ]
    changes += [
        AlterableConfig(name=key, config_operation=_DELETE, value=None)
        for key in delete
    ]
    wanted = AlterConfigsResource(
        resource_type=resource.type, resource_name=resource.name, configs=changes
    )
    request = IncrementalAlterConfigsRequest(resources=[wanted])
    broker = cluster.controller()
    answer = broker.request(request, IncrementalAlterConfigsResponse)
    result = only(answer.responses, broker.address)
    check_error(result.error_code, str(resource), result.error_message)
