"""Shared memory for each test, and partitions in it."""

from collections.abc import Iterator

import pytest

from mpbroker.supervisor.memory import BrokerMemory
from tests.support.memory import broker_memory


@pytest.fixture
def memory() -> Iterator[BrokerMemory]:
    with broker_memory() as made:
        for index in range(8):
            made.table.initialise_row(index)
        yield made
