"""Describe and alter configs of brokers, topics, groups and other resources."""

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
    """The kinds of resources that have configs, in the numbers of the protocol."""

    TOPIC = 2
    BROKER = 4
    BROKER_LOGGER = 8
    CLIENT_METRICS = 16
    GROUP = 32


class ConfigResource(NamedTuple):
    """A resource that has configs, by kind and name.

    The name of a BROKER is its id; a BROKER with the name "" stands for all brokers.
    """

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
    """Return a resource's configs: all of them, or those that ``keys`` names.

    Raises:
        ApiError: there is no such resource, or the client may not describe it.
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
    """Set and delete configs of a resource; the broker makes all changes or none.

    A config that is deleted inherits its value.

    Args:
        cluster: the brokers.
        resource: the resource that has the configs.
        put: new values, by the config's name.
        delete: the names of configs whose own value is removed.

    Raises:
        ApiError: the broker refused one of the changes; nothing is changed.
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
