"""What is used of each limit, as the metrics say it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mpbroker.exporter.limits import LIMIT, NO_SESSION, USED, limit_families
from mpbroker.ipc.layout import (
    CONNECTION_STATE,
    GENERATION_SHIFT,
    HANDLER_COUNTERS,
    PROCESSOR_ROWS_USED,
    PROCESSOR_SLOTS_USED,
    SLOT_STATE,
    SLOTS_PER_PROCESSOR,
    HandlerCounter,
    SlotState,
    connection_row,
    handler_row,
    processor_row,
    slot_row,
)
from mpbroker.ipc.tables.transaction_table import TransactionTable
from tests.support.memory import broker_memory


@pytest.fixture
def memory():
    with broker_memory() as made:
        yield made


def read(memory):
    registry = SimpleNamespace(capacity=500, partition_count=7, metadata_bytes=9)
    families = {each.name: each for each in limit_families(memory, registry, [0, 1])}
    found = {
        name: {dict(labels).get("limit"): value for _, labels, value in family.samples}
        for name, family in families.items()
    }
    return found[LIMIT], found[USED], found[NO_SESSION]


def test_each_limit_is_told_with_what_is_used_of_it(memory):
    limits, used, _ = read(memory)
    assert limits == {
        "partitions": 500,
        "metadata_bytes": 134_217_728,
        "principals": 65_536,
        "partitions_in_transactions": 98_304,
        "connections_of_a_processor": 16_384,
        "requests_of_a_processor": 8_192,
    }
    assert used == {**dict.fromkeys(limits, 0), "partitions": 7, "metadata_bytes": 9}
    words = memory.control.words
    words[processor_row(2) + PROCESSOR_ROWS_USED] = 3
    words[processor_row(2) + PROCESSOR_SLOTS_USED] = 4
    words[connection_row(2 * 16_384 + 1) + CONNECTION_STATE] = 1
    freed = connection_row(2 * 16_384 + 2) + CONNECTION_STATE
    words[freed] = 5 << GENERATION_SHIFT  # free, and not for the first time
    for slot in (0, 3):
        words[slot_row(2 * SLOTS_PER_PROCESSOR + slot) + SLOT_STATE] = SlotState.PARKED
    memory.principals.number_of("User:alice")
    TransactionTable(memory.transactions).open(1, 0, 5)
    for handler in range(2):
        counters = handler_row(handler) + HANDLER_COUNTERS
        words[counters + HandlerCounter.SESSIONS_REFUSED] = 2
    _, used, refused = read(memory)
    assert used == {
        "partitions": 7,
        "metadata_bytes": 9,
        "principals": 1,
        "partitions_in_transactions": 1,
        "connections_of_a_processor": 1,
        "requests_of_a_processor": 2,
    }
    assert refused == {None: 4}
