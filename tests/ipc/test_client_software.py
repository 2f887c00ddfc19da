"""Client software and error counts: words that outlive who wrote them."""

from __future__ import annotations

import pytest

from mpbroker.ipc.counters.error_counts import ErrorCounts, read_errors
from mpbroker.ipc.layout import (
    CONNECTION_COOKIE,
    SOFTWARE_ENTRIES,
    connection_row,
)
from mpbroker.ipc.tables.client_software import (
    OTHER,
    UNKNOWN,
    ClientSoftware,
    software_of,
)
from tests.support.memory import broker_memory


@pytest.fixture
def words():
    with broker_memory() as memory:
        for connection in range(100):
            row = connection_row(connection)
            memory.control.words[row + CONNECTION_COOKIE] = 1000 + connection
        yield memory.control.words


def test_what_a_client_says_it_is_can_be_read_by_anyone(words):
    ClientSoftware(3, words).note(7, "librdkafka", "2.6.0")
    assert software_of(words, 7) == ("librdkafka", "2.6.0")
    assert software_of(words, 8) == UNKNOWN


def test_whoever_gets_the_row_next_is_somebody_else(words):
    ClientSoftware(3, words).note(7, "librdkafka", "2.6.0")
    words[connection_row(7) + CONNECTION_COOKIE] += 50
    assert software_of(words, 7) == UNKNOWN


def test_a_successor_goes_on_with_the_table(words):
    ClientSoftware(3, words).note(7, "a", "1")
    ClientSoftware(3, words).note(8, "b", "2")
    ClientSoftware(3, words).note(9, "a", "1")
    found = [software_of(words, connection) for connection in (7, 8, 9)]
    assert found == [("a", "1"), ("b", "2"), ("a", "1")]


def test_whoever_invents_names_is_counted_as_other(words):
    table = ClientSoftware(0, words)
    for number in range(SOFTWARE_ENTRIES + 5):
        table.note(number, f"client{number}", "1")
    table.note(99, "x" * 500, "1")
    assert software_of(words, 0) == ("client0", "1")
    assert software_of(words, SOFTWARE_ENTRIES + 4) == OTHER == software_of(words, 99)


def test_errors_are_added_up_over_handlers_and_their_successors(words):
    ErrorCounts(0, words).count(0, 3)
    ErrorCounts(0, words).count(0, 3)
    ErrorCounts(5, words).count(0, 3)
    ErrorCounts(5, words).count(1, -1)
    assert read_errors(words, [0, 5]) == {(0, 3): 3, (1, -1): 1}


def test_codes_and_keys_that_no_table_has_hurt_nobody(words):
    ErrorCounts(0, words).count(30_000, 30_000)
    assert sum(read_errors(words, [0]).values()) == 1
    assert read_errors(words, [1]) == {}
