"""A description is inferred from a sample, runs as it stands, and is shown."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib

import msgpack
import orjson
import pytest
from confluent_kafka import Producer
from hypothesis import given
from hypothesis import strategies as st

from mpbroker.cli.options import open_cluster
from mpbroker.spark.pipeline.description import parse
from mpbroker.spark.pipeline.infer import infer, infer_registered, picture, toml
from mpbroker.spark.pipeline.schemas.sample import Sample, read_sample
from tests.support.schema_registry import SchemaRegistry


def inferred(*documents, name="t"):
    values = [
        each if isinstance(each, bytes) or each is None else json.dumps(each).encode()
        for each in documents
    ]
    return infer(Sample(name, values, len(values)))


def type_of(*values, name="a"):
    found = inferred(*({name: each} for each in values))
    assert found.bad == 0
    return found.value.fields[name]


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ([1, 2], "bigint"),
        ([1, 2.5], "double"),
        ([2**70], "decimal(38, 0)"),
        ([True, None], "boolean"),
        (["x", None], "string"),
        (["2013-01-01", "2013/01/02"], "date"),
        (["2013-01-01T05:00:00Z", "2013-01-01 05:00:00"], "timestamp"),
        (["Tue, 01 Jan 2013 05:00:00 GMT"], "timestamp"),
        (["31/12/2013", "01/02/2013"], "date('%d/%m/%Y')"),
        (["12/31/2013 05:00"], "timestamp('%m/%d/%Y %H:%M')"),
        (["01/02/2013"], "string"),  # the day or the month first?
        (["1357016400000"], "string"),
        (["2013-01-01", "never"], "string"),
        (['{"x":1}', '{"x":2}'], "json<struct<x: bigint>>"),
        (["[1,2]"], "json<array<bigint>>"),
        ([{"b": 1}, {"c": "x"}], "struct<b: bigint, c: string>"),
        ([[{"b": [1]}], []], "array<struct<b: array<bigint>>>"),
        ([[]], "array<json>"),
        ([None], "json"),
        ([1, "x"], "json"),
        ([{}], "json"),
        ([{f"k{n}": n for n in range(80)}], "map<string, bigint>"),
    ],
)
def test_a_type_is_chosen_that_all_values_fit(values, wanted):
    assert type_of(*values) == wanted


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("created_at", 1357016400, "timestamp(s)"),
        ("updatedAt", 1357016400000, "timestamp(ms)"),
        ("ts", 1357016400000000, "timestamp(us)"),
        ("event_time", 1357016400000000000, "timestamp(ns)"),
        ("id", 1357016400, "bigint"),
        ("format", 1357016400, "bigint"),
        ("created_at", 7, "bigint"),
    ],
)
def test_numbers_are_times_only_under_a_name_of_times(name, value, wanted):
    assert type_of(value, name=name) == wanted


def test_digits_that_a_double_would_lose_make_a_decimal():
    found = inferred(b'{"price":12345678901234567.89}', b'{"price":1.5}')
    assert found.value.fields == {"price": "decimal(38, 2)"}


def test_a_few_values_of_another_type_become_dead_letters():
    found = inferred(*({"a": n} for n in range(99)), {"a": "n/a"}, b"{", None)
    assert found.value.fields == {"a": "bigint"}
    assert found.bad == 2


def test_fields_that_cannot_be_columns_are_left_out_and_named():
    found = inferred({"_id": 1, "A": 2, "a": 3, "a b": 4})
    assert list(found.value.fields) == ["A", "a b"]
    text = toml(found, {"bootstrap": "h:1"}, "lake")
    assert "# '_id' is left out: " in text and "# 'a' is left out: " in text
    assert parse(tomllib.loads(text)).value.fields == found.value.fields


def test_msgpack_and_raw_values_are_told_apart():
    packed = [msgpack.packb({"n": n}) for n in range(5)]
    assert inferred(*packed).value.format == "msgpack"
    found = inferred(b"\xff\xfe", b"text")
    assert found.value.format == "raw"
    parse(tomllib.loads(toml(found, {"bootstrap": "h:1"}, "lake")))
    assert list(picture(found)) == ["t: 2 of 2 records, raw"]


def test_the_picture_shows_types_shares_nulls_and_examples():
    flight = {"carrier": "UA", "legs": [{"to": "IAH"}], "delay": None}
    documents = [flight, flight, flight | {"carrier": "B6", "delay": 5}, {}, None]
    title, heading, *rows = picture(inferred(*documents, b"?", name="flights"))
    assert (
        title == "flights: 6 of 6 records, json, 1 tombstones, 1 would be dead letters"
    )
    assert heading.split() == ["field", "type", "in", "records", "null", "values"]
    cells = {row.split()[0]: row for row in rows}
    assert list(cells) == ["carrier", "legs", "legs[].to", "delay"]
    assert "string" in cells["carrier"] and "UA, B6" in cells["carrier"]
    assert "\u2588" * 8 + "\u2591" * 2 + "  75%  25%" in cells["carrier"]
    assert "  25%  75%" in cells["delay"]
    assert "100%" in cells["legs[].to"]


def test_the_event_time_is_the_only_field_with_a_time_in_each_record():
    at = "2013-01-01T05:00:00Z"
    one = inferred({"at": at, "seen": None}, {"at": at, "seen": at})
    assert 'event_time = "at"' in toml(one, {"bootstrap": "h:1"}, "lake").splitlines()
    two = inferred({"at": at, "seen": at})
    text = toml(two, {"bootstrap": "h:1"}, "lake")
    assert '# event_time = "at"  # or seen' in text.splitlines()


NAMES = st.text(max_size=4) | st.sampled_from(["a", "at", "A", "_x", 'q"\\`', "a.b"])
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**80), 2**80)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5)
    | st.sampled_from(["2013-01-01", "01/02/2013", "[1]", "{}", "[", "1e5"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.lists(st.dictionaries(NAMES, JSON, max_size=4), max_size=4))
def test_whatever_is_inferred_is_a_description_that_takes_the_sample(documents):
    found = infer(Sample("t", [json.dumps(each).encode() for each in documents], 9))
    description = parse(tomllib.loads(toml(found, {"bootstrap": "h:1"}, "lake")))
    assert description.value.fields == found.value.fields
    assert list(picture(found))
    # With so few values all of them count, unless the types are mixed.
    assert found.bad <= len(documents)


def test_a_registry_says_what_the_values_are():
    registry = SchemaRegistry()
    try:
        fields = [{"name": "n", "type": "long"}]
        schema = json.dumps({"type": "record", "name": "R", "fields": fields})
        registry.register("t-value", {"schema": schema})
        sample = Sample("t", [b"\0\0\0\0\1\2", b"\0\0\0\0\2\2"], 2)
        found = infer_registered(sample, registry.url)
    finally:
        registry.close()
    assert (found.value.fields, found.bad) == ({"n": "bigint"}, 1)
    description = parse(tomllib.loads(toml(found, {"bootstrap": "h:1"}, "lake")))
    assert description.value.registry == registry.url
    assert any("bigint" in line for line in picture(found))


def test_the_command_prints_a_file_and_shows_what_it_saw(bootstrap, make_topic):
    topic = make_topic(partitions=2)
    producer = Producer({"bootstrap.servers": bootstrap})
    for n in range(1_000):
        value = {"n": n} if n < 500 else {"n": n, "new": "x"}
        producer.produce(topic, orjson.dumps(value), partition=n % 2)
    assert producer.flush(90) == 0
    command = [sys.executable, "-m", "mpbroker", "pipeline", "infer", topic]
    command += ["-b", bootstrap, "--rows", "100", "--lake", "/lake"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = parse(tomllib.loads(done.stdout))
    # The newest records are in the sample, too.
    assert found.value.fields == {"n": "bigint", "new": "string"}
    assert found.source["subscribe"] == topic
    assert f"{topic}: 100 of 1,000 records, json" in done.stderr
    command[5] = make_topic()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (10, "")
    assert "has no records" in done.stderr


@pytest.mark.parametrize("rows", [2, 3, 9, 10, 25])
def test_a_sample_is_not_larger_than_was_asked_for(bootstrap, make_topic, rows):
    """Also if the topic has more partitions, some of them empty."""
    topic = make_topic(partitions=12)
    producer = Producer({"bootstrap.servers": bootstrap})
    for n in range(40):
        producer.produce(topic, b"old" if n < 20 else b"new", partition=n % 10)
    assert producer.flush(90) == 0
    settings = {"bootstrap.servers": bootstrap}
    with open_cluster(bootstrap, 90) as cluster:
        found = read_sample(cluster, settings, topic, rows)
    assert found.offsets == 40
    assert (len(found.values), found.values.count(b"new")) == (rows, rows // 2)
