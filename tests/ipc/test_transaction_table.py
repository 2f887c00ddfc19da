"""The table of open transactions: found while open, by everybody, and never after."""

from __future__ import annotations

import os
import signal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpbroker.ipc.segment import Segment
from mpbroker.ipc.tables.transaction_table import (
    CAPACITY,
    MAX_ENTRIES,
    TransactionTable,
)

SEGMENT = TransactionTable.create_segment()

producers = st.integers(0, 5)
rows = st.integers(0, 5)
steps = st.lists(
    st.tuples(st.booleans(), producers, st.integers(0, 3), rows), max_size=60
)


@given(steps)
@settings(max_examples=100, deadline=None)
def test_it_is_a_map_from_producer_and_partition_to_epoch(steps):
    table = TransactionTable(SEGMENT)
    table.keep_only([])
    expected: dict[tuple[int, int], int] = {}
    for opens, producer, epoch, row in steps:
        if opens:
            assert table.open(producer, epoch, row)
            expected[producer, row] = epoch
        else:
            table.close(producer, row)
            expected.pop((producer, row), None)
    assert len(table) == len(expected)
    for producer in range(6):
        for row in range(6):
            epoch = expected.get((producer, row))
            for asked in range(4):
                assert table.contains(producer, asked, row) == (asked == epoch)


def test_neighbours_that_collide_are_found_when_those_before_them_are_gone(monkeypatch):
    module = "mpbroker.ipc.tables.transaction_table._start"
    monkeypatch.setattr(module, lambda producer_id, row: CAPACITY - 2)
    table = TransactionTable(TransactionTable.create_segment())
    for producer in range(5):  # round the end of the table, too
        table.open(producer, 1, 7)
    for gone in (0, 3):
        table.close(gone, 7)
    assert [table.contains(producer, 1, 7) for producer in range(5)] == [
        producer not in (0, 3) for producer in range(5)
    ]
    table.open(9, 1, 7)
    assert table.contains(9, 1, 7)
    for producer in (1, 2, 4, 9):
        table.close(producer, 7)
    words = TransactionTable(SEGMENT)  # nothing to probe by is left
    assert len(table) == 0
    assert not words.contains(9, 1, 7)


def test_a_successor_leaves_nothing_to_probe_by_behind_what_it_keeps(monkeypatch):
    module = "mpbroker.ipc.tables.transaction_table._start"
    monkeypatch.setattr(module, lambda producer_id, row: CAPACITY - 2)
    segment = TransactionTable.create_segment()
    table = TransactionTable(segment)
    for producer in range(5):  # round the end of the table, too
        table.open(producer, 1, 7)
    _, first, capacity, _ = table.place

    def keys():
        found = segment.words[first : first + 2 * capacity : 2].tolist()
        return {at: key for at, key in enumerate(found) if key}

    table.keep_only([(1, 1, 7)])
    assert keys() == {CAPACITY - 2: -1, CAPACITY - 1: 2}
    assert (len(table), table.contains(1, 1, 7)) == (1, True)
    table.keep_only([])
    assert (len(table), keys()) == (0, {})


def test_a_full_table_says_so_and_goes_on_when_there_is_room():
    table = TransactionTable(TransactionTable.create_segment())
    for number in range(MAX_ENTRIES):
        assert table.open(number, 0, 1)
    assert not table.open(MAX_ENTRIES, 0, 1)
    assert table.open(5, 3, 1), "what is there may get another epoch"
    table.close(7, 1)
    assert table.open(MAX_ENTRIES, 0, 1)


class DyingTable(TransactionTable):
    """Killed at the n-th store into the segment."""

    def __init__(self, segment: Segment, stores: int) -> None:
        super().__init__(segment)
        words = self._words

        class Words:
            left = stores

            def __getitem__(self, index: int) -> int:
                return words[index]

            def __setitem__(self, index: int, value: int) -> None:
                if not self.left:
                    os.kill(os.getpid(), signal.SIGKILL)
                self.left -= 1
                words[index] = value

        self._words = Words()  # type: ignore[assignment]


def test_an_owner_killed_at_any_store_leaves_a_table_its_successor_can_mend():
    for stores in range(8):
        segment = TransactionTable.create_segment()
        kept = TransactionTable(segment)
        kept.open(1, 0, 10)
        kept.open(2, 0, 20)
        pid = os.fork()
        if not pid:
            dying = DyingTable(segment, stores)
            dying.open(3, 4, 30)
            dying.close(2, 20)
            dying.open(4, 1, 40)
            os._exit(0)
        os.waitpid(pid, 0)
        # The one that nothing happened to is there at every moment.
        assert kept.contains(1, 0, 10), stores
        assert not kept.contains(3, 0, 30)
        successor = TransactionTable(segment)
        successor.keep_only([(1, 0, 10), (3, 4, 30)])
        assert [
            successor.contains(1, 0, 10),
            successor.contains(2, 0, 20),
            successor.contains(3, 4, 30),
            successor.contains(4, 1, 40),
            len(successor),
        ] == [True, False, True, False, 2], stores
        os.close(segment.fd)


def test_the_entries_of_deleted_partitions_go_and_the_others_stay():
    table = TransactionTable(TransactionTable.create_segment())
    for producer in range(50):
        for row in range(4):
            assert table.open(producer, 0, row)
    table.close_rows(lambda row: row in (1, 3))
    assert len(table) == 100
    for producer in range(50):
        held = [row for row in range(4) if table.contains(producer, 0, row)]
        assert held == [0, 2]


def test_it_says_to_everybody_whether_logs_have_all_their_ends_of_transactions():
    segment = TransactionTable.create_segment()
    table, other = TransactionTable(segment), TransactionTable(segment)
    assert other.is_restored()
    assert table.begin_restoring()  # nobody waits for it: it is as good as done
    table.await_restoring()
    assert not other.is_restored()
    table.begin_restoring()
    assert not other.is_restored()
    table.restored()
    assert other.is_restored()


@pytest.mark.parametrize("awaits", [True, False])
def test_another_generation_keeps_closed_what_the_one_before_had_closed(awaits):
    before = TransactionTable.create_segment()
    if awaits:
        TransactionTable(before).await_restoring()
        before.words[3] -= 5_000_000_000
    table = TransactionTable(TransactionTable.create_segment())
    table.inherit(before.fd)
    assert table.is_restored() is not awaits
    found = table.closed()
    assert (found is not None) is awaits
    if found is not None:  # and for as long
        assert found.for_s >= 5


def test_who_is_replaced_on_purpose_has_not_died_of_restoring():
    segment = TransactionTable.create_segment()
    table = TransactionTable(segment)
    table.await_restoring()
    table.forget_try()  # it was ended before it had begun
    for _ in range(10):
        assert TransactionTable(segment).begin_restoring()
        table.forget_try()
    assert [TransactionTable(segment).begin_restoring() for _ in range(3)] == [True] * 3
    assert not TransactionTable(segment).begin_restoring()


def test_partitions_stay_closed_while_three_coordinators_die_of_restoring_no_longer():
    segment = TransactionTable.create_segment()
    table = TransactionTable(segment)
    table.await_restoring()
    assert [TransactionTable(segment).begin_restoring() for _ in range(3)] == [True] * 3
    assert not table.is_restored()
    assert not TransactionTable(segment).begin_restoring()
    assert table.is_restored()
