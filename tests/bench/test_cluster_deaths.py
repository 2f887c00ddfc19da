"""A gap is the time between two answers, of which the second comes behind a death."""

from __future__ import annotations

import pytest

from tests.bench.cluster_deaths import longest_gap
from tests.bench.wire import AnswerError


def test_the_gap_in_which_a_node_dies_counts_as_a_whole():
    assert longest_gap([0.0, 5.0, 5.5, 8.5, 9.0], since=6.0) == 3.0
    assert longest_gap([0.0, 5.0, 5.5, 8.5, 9.0], since=8.5) == 3.0


def test_gaps_that_ended_before_a_death_do_not_count():
    assert longest_gap([0.0, 5.0, 5.5, 6.0], since=5.1) == 0.5


def test_a_client_that_gets_no_answer_behind_a_death_is_no_short_gap():
    with pytest.raises(AnswerError):
        longest_gap([0.0, 1.0], since=2.0)
