"""A client that sets configs on thousands of names keeps no other from its changes."""

from __future__ import annotations

import itertools
import threading
import uuid
from collections.abc import Callable
from typing import Final

import pytest

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages.incremental_alter_configs import (
    AlterableConfig,
    AlterConfigsResource,
    IncrementalAlterConfigsRequest,
    IncrementalAlterConfigsResponse,
)
from tests.bench import wire
from tests.broker.load import frame
from tests.faults.test_kill_the_whole_tree import address_of
from tests.neighbours.clients import LONGEST_WAIT_S, Attack, Client, hostile
from tests.support.broker import Broker

TOPIC: Final = "kept"
# With a write to disk for each of them, a request keeps a handler for longer than any
# client waits.
NAMES: Final = 4000
GROUP: Final = 32
VERSION: Final = 1
KEY: Final = "consumer.session.timeout.ms"


@pytest.fixture
def address(make_broker: Callable[..., Broker]) -> tuple[str, int]:
    broker = make_broker({"num.io.threads": 3})
    with wire.Connection(address_of(broker)) as connection:
        connection.create_topic(TOPIC)
    return address_of(broker)


def alter(names: list[str]) -> bytes:
    request = IncrementalAlterConfigsRequest(
        resources=[
            AlterConfigsResource(
                resource_type=GROUP,
                resource_name=name,
                configs=[AlterableConfig(name=KEY, config_operation=0, value="45000")],
            )
            for name in names
        ]
    )
    api_key = ApiKey.INCREMENTAL_ALTER_CONFIGS
    return frame(api_key, VERSION, request.encode(VERSION))


def altering(address: tuple[str, int], begun: list[int]) -> Attack:
    """Return an attack: set a config on groups that do not exist, always new ones.

    Each request that it begins is appended to ``begun``.
    """

    def attack(end: threading.Event) -> None:
        with wire.Connection(address) as connection:
            while not end.is_set():
                names = [f"{uuid.uuid4()}-{other}" for other in range(NAMES)]
                begun.append(NAMES)
                connection.ask(alter(names))

    return attack


def test_configs_of_names_that_are_made_up_keep_no_other_change_waiting(
    address: tuple[str, int],
) -> None:
    begun: list[int] = []
    produce = wire.produce(TOPIC, 0, wire.batch_of_size(1000))
    with hostile(altering(address, begun), altering(address, begun)):
        client = Client(address)
        for number in itertools.count():
            with client.waiting() as connection:
                assert connection.create_topic(f"wanted-{number}", 1)
            answer = wire.parse_produce(client.ask(produce))
            assert answer.error_code == 0
            # Until more than the first request of each attack has come to its end.
            if number >= 10 and len(begun) > 2:
                break
    assert client.longest_s < LONGEST_WAIT_S


def test_more_changes_than_one_request_may_make_are_refused(
    address: tuple[str, int],
) -> None:
    with wire.Connection(address) as connection:
        body = connection.ask(alter([str(number) for number in range(10_001)]))
    # Behind the correlation id are no tagged fields.
    response = IncrementalAlterConfigsResponse.decode(VERSION, body[5:])
    codes = {each.error_code for each in response.responses}
    assert codes == {ErrorCode.POLICY_VIOLATION}
