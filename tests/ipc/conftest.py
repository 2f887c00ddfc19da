"""Shared memory for each test."""

from collections.abc import Iterator

import pytest

from mpbroker.supervisor.memory import BrokerMemory
from tests.support.memory import broker_memory


@pytest.fixture
def memory() -> Iterator[BrokerMemory]:
    with broker_memory() as made:
        yield made
