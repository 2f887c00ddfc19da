"""A value of any shape becomes a column as it is, or a reason with the way to it."""

from __future__ import annotations

import datetime
import decimal

import orjson
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpbroker.spark.pipeline.decode import Decoder
from mpbroker.spark.pipeline.description import ValueFormat
from mpbroker.spark.pipeline.schemas import column_types
from mpbroker.spark.pipeline.schemas.column_types import SpellingError, parse
from tests.spark.test_decode import decode

LEGS = "array<struct<carrier: string not null, delay: int, tags: map<string, double>>>"
AT = datetime.datetime(2013, 1, 1, 5, tzinfo=datetime.UTC)
D = decimal.Decimal


def column(text, *documents):
    """Return a column of JSON values, and the reasons of those that do not fit."""
    values = [b'{"a":%s}' % each for each in documents]
    found = decode(values, ValueFormat("json", {"a": text}))
    return (
        found.rows.column("a").to_pylist(maps_as_pydicts="strict"),
        found.bad.column("_error").to_pylist(),
    )


def test_nested_values_keep_their_shape_and_nulls_their_place():
    rows, bad = column(
        LEGS,
        b'[{"carrier":"UA","delay":3,"tags":{"x":1,"y":0.5}},{"carrier":"B6"},null]',
        b"[]",
        b"null",
        b'[{"carrier":"DL","tags":{}}]',
    )
    assert bad == []
    assert rows == [
        [
            {"carrier": "UA", "delay": 3, "tags": {"x": 1.0, "y": 0.5}},
            {"carrier": "B6", "delay": None, "tags": None},
            None,
        ],
        [],
        None,
        [{"carrier": "DL", "delay": None, "tags": {}}],
    ]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b'[{"carrier":"UA"},{"carrier":5}]', "a[1].carrier=5 is no string"),
        (b'[{"delay":1}]', "a[0].carrier is missing"),
        (b'[{"carrier":"x","tags":{"k":"v"}}]', "a[0].tags['k']='v' is no double"),
        (b'[{"carrier":"x","delay":3000000000}]', "a[0].delay=3000000000 is no int"),
        (b'["x"]', "a[0]='x' is no struct<"),
        (b'{"carrier":"x"}', "a={'carrier': 'x'} is no array<"),
    ],
)
def test_a_misfit_is_named_with_the_way_to_it_and_its_neighbours_stay(value, reason):
    good = b'[{"carrier":"a"}]'
    rows, bad = column(LEGS, good, value, good)
    assert len(rows) == 2 and rows[0] == rows[1] and rows[0][0]["carrier"] == "a"
    [said] = bad
    assert said.startswith(reason)


@pytest.mark.parametrize(
    ("text", "value", "wanted"),
    [
        ("decimal(20, 2)", b"12345678901234567.89", D("12345678901234567.89")),
        ("decimal(4,2)", b'"1.5"', D("1.50")),
        ("decimal(4,2)", b"7", D("7.00")),
        ("double", b"0.1", 0.1),
        ("map<int, string>", b'{"-5":"x"}', {-5: "x"}),
        ("array<array<int>>", b"[[1],[],null,[2,3]]", [[1], [], None, [2, 3]]),
        ("json", b'{"x":[1.10,123456789012345678901]}', None),
        ("json", b"null", None),
        ("json<struct<x: decimal(3, 1)>>", b'"{\\"x\\":1.5}"', {"x": D("1.5")}),
        ("json<array<int>>", b'"[1,2]"', [1, 2]),
        ("struct<`a b`: int, `c:d` string>", b'{"a b":1}', {"a b": 1, "c:d": None}),
        ("date(days)", b"15706", AT.date()),
        ("date('%d.%m.%Y')", b'"01.01.2013"', AT.date()),
        ("date", b'"2013/01/01"', AT.date()),
    ],
)
def test_a_value_becomes_what_its_type_says(text, value, wanted):
    [found], bad = column(text, value)
    assert bad == []
    if text == "json" and value != b"null":
        assert found == value.decode()  # every digit
    else:
        assert found == wanted


SPELLINGS = {
    "timestamp": [
        b'"2013-01-01T05:00:00Z"',
        b'"2013-01-01 05:00:00"',
        b'"2013-01-01T06:00+01:00"',
        b'"2013-01-01 06:00:00.000 +0100"',
        b'"2013-01-01T05:00:00.000000000Z"',
        b'"2013-01-01t05:00:00z"',
        b'"2013-01-01 05:00:00 UTC"',
        b'"2013/01/01 05:00:00"',
        b'"20130101T050000Z"',
        b'"2013-01-01T06:00:00+01:00[Europe/Paris]"',
        b'"Tue, 01 Jan 2013 05:00:00 GMT"',
        b'"/Date(1357016400000)/"',
        b"1357016400000",
        b"[2013,1,1,5,0]",
        b"[2013,1,1,5,0,0,0]",
    ],
    "timestamp(s)": [b"1357016400", b"1357016400.0", b'"1357016400"'],
    "timestamp(ms)": [b"1357016400000", b'"1357016400000"'],
    "timestamp(us)": [b"1357016400000000"],
    "timestamp(ns)": [b"1357016400000000000"],
    "timestamp('%d/%m/%Y %H:%M')": [b'"01/01/2013 05:00"'],
    "timestamp('%d/%m/%Y %H:%M', 'Europe/Paris')": [b'"01/01/2013 06:00"'],
}


@pytest.mark.parametrize("text", SPELLINGS)
def test_a_moment_is_the_same_in_every_spelling(text):
    assert column(text, *SPELLINGS[text]) == ([AT] * len(SPELLINGS[text]), [])


@given(st.lists(st.datetimes() | st.dates(), min_size=1, max_size=3), st.booleans())
def test_arrow_and_python_read_the_same_moments(times, zoned):
    texts = [each.isoformat() for each in times]
    if zoned:
        texts = [f"{each}+02:30" if "T" in each else each for each in texts]
    kind = parse("timestamp")
    alone = {}
    fast = kind.column(texts, alone)
    slow = kind.column([*texts, 0], alone)  # a number: Python's way
    assert fast == slow[:-1]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        # Python's parser reads these milliseconds of 2011 as the year 1312.
        ("timestamp", b'"1312011400000"'),
        ("timestamp", b'"01/02/2013"'),  # January or February?
        ("timestamp", b'"2013-13-01T00:00:00Z"'),
        ("timestamp", b"[2013]"),
        ("timestamp", b"1e30"),
        ("timestamp_ntz", b'"2013-01-01T05:00:00Z"'),
        ("timestamp(s)", b'"2013-01-01"'),
        ("timestamp('%H:%M')", b'"25:00"'),
        ("date", b'"2013-01-01T05:00:00Z"'),
        ("decimal(4,2)", b"1.555"),
        ("decimal(4,2)", b"123.4"),
        ("decimal(4,2)", b'"NaN"'),
        ("decimal(4,2)", b"true"),
        ("float", b"1e39"),
        ("struct<a: decimal(2,1), x: double>", b'{"x":1e999}'),
        ("double", b"9007199254740993"),
        ("int not null", b"null"),
        ("json<int>", b'"x"'),
        ("json<int>", b"5"),
        ("map<int, string>", b'{"x":"y"}'),
        ("map<string, int>", b"[]"),
    ],
)
def test_nothing_is_rounded_guessed_or_null_in_silence(text, value):
    rows, bad = column(text, value)
    assert rows == [] and len(bad) == 1


def test_unknown_fields_are_found_at_every_level():
    strict = ValueFormat("json", {"a": LEGS}, unknown_fields="dead_letter")
    values = [b'{"a":[{"carrier":"x","new":1}]}', b'{"b":1}', b'{"a":[]}']
    found = decode(values, strict)
    assert found.bad.column("_error").to_pylist() == [
        "a[0]: unknown fields: new",
        "unknown fields: b",
    ]


def test_a_tombstone_is_a_row_even_where_fields_are_required():
    found = decode([None], ValueFormat("json", {"a": "int not null"}))
    assert found.rows.num_rows == 1 and not found.bad.num_rows


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("struct<a: itn>", "'itn' is none of .*did you mean 'int'"),
        ("array<int", "ends where '>' is expected"),
        ("array(int)", "'<' is expected"),
        ("map<double, int>", "a map's key is"),
        ("struct<a: int, a: int>", "'a' is there twice"),
        ("decimal(50, 2)", "1 to 38 digits"),
        ("decimal(2, 3)", "no more of them"),
        ("timestamp(min)", "neither a unit"),
        ("timestamp('%H', 'Nowhere/There')", "is no time zone"),
        ("int int", "not expected there"),
        ("int not", "'null' is expected"),
        ("array<int> ?", "not understood"),
        ("", "ends where a type"),
    ],
)
def test_a_type_that_is_spelled_wrong_is_explained(text, said):
    with pytest.raises(SpellingError, match=said):
        parse(text)


KINDS = st.recursive(
    st.sampled_from(
        ["string", "int", "double", "decimal(5, 2)", "timestamp", "json", "boolean"]
    ),
    lambda inner: (
        inner.map("array<{}>".format)
        | inner.map("map<string, {}>".format)
        | inner.map("json<{}>".format)
        | st.tuples(inner, inner).map(lambda pair: "struct<a: {}, b: {}>".format(*pair))
    ),
    max_leaves=5,
)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5)
    | st.just("2013-01-01T05:00:00Z"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(KINDS, st.lists(JSON, max_size=4))
def test_any_value_of_any_type_is_a_row_or_a_reason(text, values):
    kind = parse(text)
    assert parse(column_types.spelled(kind)).arrow == kind.arrow
    misfits: column_types.Misfits = {}
    found = kind.column(values, misfits)
    assert (len(found), found.type) == (len(values), kind.arrow)
    found.validate(full=True)
    # No value vanishes: what is null was null, or is among the misfits.
    for index, each in enumerate(found):
        nothing = values[index] is None or values[index] == "null"
        assert each.is_valid or nothing or index in misfits, (text, values[index])
    # Each alone is judged as it is among others.
    for index, value in enumerate(values):
        alone: column_types.Misfits = {}
        kind.column([value], alone)
        assert (0 in alone) == (index in misfits)


@given(KINDS, st.lists(JSON, max_size=4))
def test_a_replayed_value_is_read_as_the_same_row(text, values):
    encoded = [orjson.dumps({"a": each}) for each in values]
    value_format = ValueFormat("json", {"a": text})
    rows = decode(encoded, value_format).rows
    whole = column_types.struct({"a": text})
    again = [
        column_types.json_text(whole.plain(row)).encode() for row in rows.to_pylist()
    ]
    back = decode(again, value_format)
    assert not back.bad.num_rows
    assert back.rows.column("a").to_pylist() == rows.column("a").to_pylist()


def test_types_travel_to_executors_as_text():
    value_format = ValueFormat("json", {"a": LEGS})
    assert Decoder(value_format, with_headers=False).schema.field("a").type == pa.list_(
        parse(LEGS).element.arrow
    )
