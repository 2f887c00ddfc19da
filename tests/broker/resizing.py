"""Resizes of a real broker, and how far they have got."""

from __future__ import annotations

import os
from collections.abc import Mapping

from mpbroker.cli.ctl.ctl_connection import ControlClient
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.messages.incremental_alter_configs import (
    AlterableConfig,
    AlterConfigsResource,
    AlterConfigsResourceResponse,
    IncrementalAlterConfigsRequest,
    IncrementalAlterConfigsResponse,
)
from tests.broker.load import ask, dial, states
from tests.support.broker import Broker
from tests.support.children import wait_until

HANDLERS, PROCESSORS = "num.io.threads", "num.network.threads"
BROKER, OF_ALL = "1", ""
BROKER_RESOURCE, LOGGER_RESOURCE = 4, 8
_VERSION, _SET, _DELETE = 1, 0, 1


def alter(
    broker: Broker,
    configs: Mapping[str, object],
    resource_name: str = BROKER,
    resource_type: int = BROKER_RESOURCE,
) -> AlterConfigsResourceResponse:
    """Set dynamic configs, delete those that are None; return the answer."""
    resource = AlterConfigsResource(
        resource_type=resource_type,
        resource_name=resource_name,
        configs=[
            AlterableConfig(
                name=name,
                config_operation=_DELETE if value is None else _SET,
                value=None if value is None else str(value),
            )
            for name, value in configs.items()
        ],
    )
    request = IncrementalAlterConfigsRequest(resources=[resource])
    with dial(broker) as sock:
        body = ask(
            sock,
            ApiKey.INCREMENTAL_ALTER_CONFIGS,
            _VERSION,
            request.encode(_VERSION),
        )
    return IncrementalAlterConfigsResponse.decode(_VERSION, body).responses[0]


def resize(broker: Broker, handlers: int | None = None, processors: int | None = None):
    """Ask for other sizes, by dynamic configs of the broker."""
    wanted = {HANDLERS: handlers, PROCESSORS: processors}
    given = {name: size for name, size in wanted.items() if size is not None}
    answer = alter(broker, given)
    assert answer.error_code == 0, answer


def sizes(broker: Broker) -> tuple[int, int]:
    """How many handlers and processors there are; (0, 0) while that changes."""
    children = states(broker)
    if any(child["state"] != "READY" for child in children):
        return 0, 0
    roles = [child["role"] for child in children]
    return roles.count("handler"), roles.count("processor")


def settle(broker: Broker) -> None:
    """Wait until all that was set counts in every process.

    Until the supervisor has looked, processes that will be replaced are READY: only it
    can tell that they will.
    """
    with ControlClient(os.fspath(broker.data_dir / "control.sock"), 60.0) as client:

        def is_settled() -> bool:
            figures = client.request("figures")
            states = {each["state"] for each in figures["processes"]}
            return not figures["resizing"] and states == {"READY"}

        wait_until(is_settled)


def wait_for_sizes(broker: Broker, handlers: int, processors: int) -> None:
    wait_until(lambda: sizes(broker) == (handlers, processors))
