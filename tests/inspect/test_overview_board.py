"""The board of the overview, and the percentiles on it."""

from __future__ import annotations

import os

import pytest

from mpbroker.inspect.overview_board import (
    COLUMNS,
    KEPT,
    MAX_BYTES,
    STEP_S,
    OverviewBoard,
)
from mpbroker.inspect.percentiles import percentile
from mpbroker.ipc.counters.request_metrics import bounds_s, bucket_of
from mpbroker.ipc.layout import HISTOGRAM_BUCKETS


def counts_of(*times_s: float) -> list[int]:
    counts = [0] * HISTOGRAM_BUCKETS
    for each in times_s:
        counts[bucket_of(int(each * 1e9))] += 1
    return counts


def test_nothing_counted_has_no_percentile():
    assert percentile(counts_of(), 0.99) is None


@pytest.mark.parametrize("share", [0.01, 0.5, 0.99, 1.0])
def test_a_percentile_lies_in_the_bucket_of_its_time(share):
    times = [0.00001 * 1.02**n for n in range(700)]
    true = times[max(0, int(share * len(times)) - 1)]
    found = percentile(counts_of(*times), share)
    assert found is not None
    assert true / 2 <= found <= true * 2


def test_a_time_beyond_all_bounds_is_told_by_its_lower_bound():
    assert percentile(counts_of(1e5), 0.5) == bounds_s()[-1]


def test_a_document_is_read_by_another_process():
    board = OverviewBoard()
    assert board.document() is None
    pid = os.fork()
    if not pid:
        os._exit(0 if board.publish(b'{"a": 1}', 7) else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert board.document() == (b'{"a": 1}', 7)
    assert not board.publish(b" " * (MAX_BYTES + 1), 8)
    assert board.document() == (b'{"a": 1}', 7)


class DyingBoard(OverviewBoard):
    """Its process ends when half of a document is written."""

    def _replace(self, document: bytes) -> None:
        super()._replace(document[: len(document) // 2])
        os._exit(9)


def test_a_half_written_document_is_not_read_and_is_replaced():
    board = DyingBoard()
    pid = os.fork()
    if not pid:
        board.publish(b'{"a": 12345}', 2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    assert board.document() is None
    board.__class__ = OverviewBoard
    assert board.publish(b'{"a": 2}', 3)
    assert board.document() == (b'{"a": 2}', 3)


def test_the_history_keeps_an_hour_and_gaps_in_it():
    board = OverviewBoard()
    for number in range(KEPT + 100):
        known = {"requests": float(number)} if number % 2 else {}
        board.add_row({"at": 1e9 + STEP_S * number, **known})
    found = board.history()
    assert set(found) == set(COLUMNS)
    assert len(found["at"]) == KEPT - 1
    assert found["at"][-1] == 1e9 + STEP_S * (KEPT + 99)
    assert found["requests"][-2:] == [None, float(KEPT + 99)]
    assert found["queue"] == [None] * (KEPT - 1)
    assert len(board.history(after=found["at"][-3])["at"]) == 2


def test_rows_older_than_an_hour_are_not_history():
    board = OverviewBoard()
    board.add_row({"at": 1e9})
    board.add_row({"at": 1e9 + STEP_S * KEPT + 1})
    assert board.history()["at"] == [1e9 + STEP_S * KEPT + 1]
