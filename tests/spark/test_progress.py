"""What a pipeline says while it runs, and at its end."""

from __future__ import annotations

import io

import pytest

from mpbroker.spark.pipeline.progress import Progress


@pytest.mark.parametrize(
    ("batches", "said"),
    [(0, "0 rows,"), (1, "5 rows in 1 batch,"), (2, "10 rows in 2")],
)
def test_the_last_line_tells_of_batches_where_there_were_some(batches, said):
    out = io.StringIO()
    progress = Progress("flights", out)
    for number in range(batches):
        progress.batch(number, 5, 0.1)
    assert progress.report()["batches"] == batches
    assert out.getvalue().splitlines()[-1].startswith(f"flights: done: {said}")


def test_fields_that_were_null_in_all_rows_are_named():
    out = io.StringIO()
    progress = Progress("flights", out)
    progress.fields.update(["n", "name", "customer.name"])
    progress.seen.add("n")
    progress.report()
    assert "null" not in out.getvalue(), "there were no rows"
    progress.batch(0, 5_000, 0.1)
    progress.report()
    assert out.getvalue().splitlines()[-1] == (
        "flights: null in all 5,000 rows: customer.name, name (do the values have"
        " fields of these names?)"
    )


def test_of_a_field_that_was_always_null_those_inside_are_not_named():
    progress = Progress("flights", io.StringIO(), rows=5)
    progress.fields.update(["a", "a.b", "c", "c[].d", "c[].d.e", "f", "f.g", "ab"])
    progress.seen.update(["f", "c", "ab"])
    progress.say_nulls()
    said = progress.out.getvalue()
    assert said.startswith("flights: null in all 5 rows: a, c[].d, f.g (do")


def test_fields_that_no_column_takes_are_named_and_no_more_than_some():
    def said(*untaken):
        progress = Progress("flights", io.StringIO(), fields={"n"}, seen={"n"})
        progress.untaken.update(untaken)
        progress.batch(0, 5, 0.1)
        progress.report()
        return progress.out.getvalue().splitlines()[2:]

    assert said() == []
    assert said("gate") == ["flights: 1 field of the values is in no column: gate"]
    assert said("tail number", "gate", "n") == [
        "flights: 2 fields of the values are in no column: gate, tail number"
    ]
    assert said("a\nb", " ", "c" * 100) == [
        "flights: 3 fields of the values are in no column: ' ', 'a\\nb', "
        + "c" * 60
        + "..."
    ]
    many = [f"id-{number:03d}" for number in range(40)]
    assert said(*many) == [
        "flights: more than 20 fields of the values are in no column: "
        + ", ".join(many[:20])
        + " and others"
    ]
