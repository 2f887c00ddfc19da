"""How far a stream is behind, and what a pipeline says of it."""

from __future__ import annotations

import io
import json
from types import SimpleNamespace

import pytest

from mpbroker.spark.lag import lag_metrics
from mpbroker.spark.pipeline.progress import LagWatch, Progress


def source(reached, latest):
    return {
        "endOffset": {"t": reached} if reached is not None else None,
        "latestOffset": {"t": latest} if latest is not None else None,
    }


@pytest.mark.parametrize("form", [lambda offsets: offsets, json.dumps])
def test_metrics_have_the_names_and_the_form_of_the_connector(form):
    # A third partition is new, and not read yet.
    found = source({"0": 5, "1": 20}, {"0": 10, "1": 20, "2": 9})
    assert lag_metrics({name: form(each) for name, each in found.items()}) == {
        "minOffsetsBehindLatest": "0",
        "maxOffsetsBehindLatest": "5",
        "avgOffsetsBehindLatest": "2.5",
    }


def test_bytes_behind_are_estimated_from_what_an_offset_takes():
    found = source({"0": 5, "1": 20}, {"0": 10, "1": 27})
    assert lag_metrics(found, 100.5)["estimatedTotalBytesBehindLatest"] == "1206"


@pytest.mark.parametrize(
    "other",
    [
        {},
        source(None, {"0": 1}),
        source({"0": 1}, None),
        {"endOffset": 7, "latestOffset": 8},
        {"endOffset": "log", "latestOffset": "log"},
        {"endOffset": {"logOffset": 1}, "latestOffset": {"logOffset": 1}},
    ],
)
def test_other_sources_have_no_metrics(other):
    assert lag_metrics(other) == {}


@pytest.fixture
def said():
    """Look at a query with this many offsets behind at these seconds; return lines."""

    def look(*seen):
        out = io.StringIO()
        clock = SimpleNamespace(now=0.0)
        watch = LagWatch(Progress("p", out), lambda: clock.now)
        for clock.now, behind in seen:
            done = {"sources": [source({"0": 0}, {"0": behind})]}
            watch.look(SimpleNamespace(lastProgress=None if behind < 0 else done))
        return out.getvalue().splitlines()

    return look


def test_a_line_says_when_a_query_will_have_caught_up(said):
    assert said((0, -1), (1, 4_000), (2, 3_900), (11, 3_000), (21, 2_900)) == [
        "p: 4,000 offsets behind",
        "p: 3,000 offsets behind, caught up in 30 s at this pace",
        "p: 2,900 offsets behind, caught up in 5 min at this pace",
    ]


def test_a_line_says_that_a_query_falls_behind(said):
    assert said((0, 100), (10, 100), (20, 200))[1:] == [
        "p: 100 offsets behind, and not catching up",
        "p: 200 offsets behind, and not catching up",
    ]


def test_nothing_is_said_where_nothing_is_left(said):
    assert said((0, 0), (10, 0), (20, 5)) == ["p: 5 offsets behind"]
