"""Columns by Arrow's parser are those of the values one by one, or there are none."""

from __future__ import annotations

import gc
import json

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mpbroker.spark.pipeline.decode import Decoder
from mpbroker.spark.pipeline.description import ValueFormat
from mpbroker.spark.pipeline.schemas import column_types
from mpbroker.spark.pipeline.schemas.json_columns import reader_of
from tests.spark.test_decode import batch_of

FIELDS = {
    "s": "string",
    "i": "int",
    "n": "bigint",
    "d": "double",
    "b": "boolean",
    "t": "timestamp",
    "o": "struct<s: string, t: date, in: struct<n: bigint>>",
    "l": "array<double>",
    "a": "array<struct<t: timestamp, l: array<bigint>>>",
}
KIND = column_types.struct(FIELDS)


def both_ways(texts):
    """Return the columns by Arrow, and those of the values one by one."""
    reader = reader_of(KIND)
    misfits = {}
    slow = KIND.children([orjson.loads(each) for each in texts], misfits)
    return reader.columns(texts), slow, misfits


TIMES = ("2013-01-01T05:00:00Z", "2013-01-01T05:00:00.123456", "2013-01-01", "x", "")
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.sampled_from([0, 1, 2**31, 2**53, 2**53 + 1, -(2**63), 2**63]),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(TIMES),
    st.text(max_size=5),
)
fitting = st.fixed_dictionaries(
    {},
    optional={
        "s": st.one_of(st.none(), st.text(max_size=5)),
        "i": st.one_of(st.none(), st.integers(-(2**31), 2**31 - 1)),
        "n": st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1)),
        "d": st.one_of(st.none(), st.floats(-1e9, 1e9), st.integers(-9, 9)),
        "b": st.one_of(st.none(), st.booleans()),
        "t": st.sampled_from([None, *TIMES[:3]]),
        "o": st.one_of(
            st.none(),
            st.fixed_dictionaries(
                {},
                optional={
                    "s": st.text(max_size=3),
                    "t": st.sampled_from([None, "2013-01-01"]),
                    "in": st.one_of(
                        st.none(),
                        st.fixed_dictionaries({}, optional={"n": st.integers(0, 9)}),
                    ),
                },
            ),
        ),
        "l": st.one_of(st.none(), st.lists(st.one_of(st.none(), st.integers(0, 9)))),
        "a": st.lists(
            st.one_of(
                st.none(),
                st.fixed_dictionaries(
                    {},
                    optional={
                        "t": st.sampled_from([None, *TIMES[:3]]),
                        "l": st.lists(st.integers(0, 9), max_size=3),
                    },
                ),
            ),
            max_size=3,
        ),
        "else": leaves,
    },
)


@given(st.lists(fitting, min_size=1, max_size=8), st.sampled_from([None, 1]))
def test_values_that_fit_are_read_alike(documents, indent):
    texts = [json.dumps(each, indent=indent).encode() for each in documents]
    fast, slow, misfits = both_ways(texts)
    assert not misfits
    # Times of several spellings in one column are for the slower way.
    if fast is not None:
        for ours, theirs in zip(fast, slow, strict=True):
            ours.validate(full=True)
            assert ours.type == theirs.type
            assert ours.to_pylist() == theirs.to_pylist()


def test_what_fits_is_read_by_arrow():
    values = {"s": "ä\0", "i": 1, "n": 2**63 - 1, "d": 5, "t": TIMES[0], "x": [{}]}
    nested = {"o": {"in": {}}, "l": [1, None, 2.5], "a": [None, {"t": TIMES[0]}, {}]}
    texts = [json.dumps(each).encode() for each in (values, nested, {}, {"o": None})]
    fast, slow, _ = both_ways(texts)
    assert [each.to_pylist() for each in fast] == [each.to_pylist() for each in slow]


@given(st.lists(st.dictionaries(st.sampled_from([*FIELDS, "x"]), leaves), min_size=1))
@example([{"d": 2**53 + 1}])
@example([{"d": "1"}])
@example([{"n": 1.0}])
@example([{"s": 5}])
@example([{"i": 2**31}])
def test_what_does_not_fit_gives_no_columns(documents):
    texts = [json.dumps(each).encode() for each in documents]
    try:
        fast, slow, misfits = both_ways(texts)
    except orjson.JSONDecodeError:
        return  # the caller has sorted these out
    if fast is not None:
        assert not misfits
        assert [each.to_pylist() for each in fast] == [
            each.to_pylist() for each in slow
        ]


@pytest.mark.parametrize(
    "texts",
    [
        [b'{"n":', b"1}"],
        [b'{"n":1}\n{"n":2}', b'{"n":3}'],
        [b'{"n":1,"n":2}'],  # Python's parsers take the last one
        [b'{"n":1', b'{"n":2}'],
    ],
)
def test_lines_that_are_no_object_each_give_no_columns(texts):
    assert reader_of(KIND).columns(texts) is None


@pytest.mark.parametrize(
    "kind",
    [
        "int not null",
        "decimal(9, 2)",
        "map<string, int>",
        "json",
        "float",
        "binary",
        "array<struct<a: int not null>>",
        "timestamp(ms)",
    ],
)
def test_types_that_arrow_reads_otherwise_are_left_to_the_slower_way(kind):
    assert reader_of(column_types.struct({"a": kind})) is None
    assert reader_of(column_types.struct({"a": "int"}, closed=True)) is None


def test_bad_values_and_tombstones_leave_the_others_to_arrow(monkeypatch):
    decoder = Decoder(ValueFormat("json", {"n": "bigint"}), with_headers=False)
    monkeypatch.setattr(column_types.Struct, "children", None)  # not called
    values = [b'{"n":1}', b"{", None, b"[1]", b'{"n":1}{"n":2}', b"", b'{"n":\n6}']
    with pytest.raises(TypeError):
        decoder.decode(batch_of(values))  # a line more
    found = decoder.decode(batch_of(values[:-1]))
    assert found.rows["n"].to_pylist() == [1, None]
    assert found.rows["_offset"].to_pylist() == [0, 2]
    assert found.deleted.to_pylist() == [False, True]
    assert found.bad["_offset"].to_pylist() == [1, 3, 4, 5]


def test_the_collector_of_cycles_is_as_before_after_a_batch(monkeypatch):
    decoder = Decoder(ValueFormat("json", {"n": "json"}), with_headers=False)
    seen = []
    children = column_types.Struct.children

    def look(*arguments):
        seen.append(gc.isenabled())
        return children(*arguments)

    monkeypatch.setattr(column_types.Struct, "children", look)
    assert gc.isenabled()
    decoder.decode(batch_of([b'{"n":1}']))
    assert gc.isenabled()
    gc.disable()
    try:
        decoder.decode(batch_of([b'{"n":1}']))
        assert not gc.isenabled()
    finally:
        gc.enable()
    assert seen == [False, False]
