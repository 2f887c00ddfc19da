"""Each value becomes a row or a reason, whatever bytes it has."""

from __future__ import annotations

import datetime
import io
import uuid

import fastavro
import msgpack
import orjson
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpbroker.spark.pipeline.decode import Decoder
from mpbroker.spark.pipeline.description import Table, ValueFormat, parse
from mpbroker.spark.pipeline.errors import PipelineError
from mpbroker.spark.pipeline.schemas.avro import fields_of as avro_fields
from mpbroker.spark.pipeline.schemas.columns import HEADERS, TYPES
from mpbroker.spark.pipeline.schemas.field_names import UNTAKEN_MAX
from mpbroker.spark.pipeline.staging import BAD, ROWS, SEEN, UNTAKEN, Stager

FIELDS = {
    "n": "bigint",
    "x": "double",
    "ok": "boolean",
    "name": "string",
    "at": "timestamp",
    "day": "date",
}
DOCUMENT = {
    "n": 5,
    "x": 0.5,
    "ok": True,
    "name": "é",
    "at": "2013-01-01T05:00:00Z",
    "day": "2013-01-01",
}
AT = datetime.datetime(2013, 1, 1, 5, tzinfo=datetime.UTC)
SCHEMA = {
    "type": "record",
    "name": "r",
    "fields": [
        {"name": "n", "type": "long"},
        {"name": "name", "type": ["null", "string"]},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
    ],
}
AVRO = ValueFormat(
    "avro",
    {"n": "bigint", "name": "string", "at": "timestamp"},
    orjson.dumps(SCHEMA).decode(),
)


def batch_of(values):
    count = len(values)
    return pa.RecordBatch.from_arrays(
        [
            pa.nulls(count, pa.binary()),
            pa.array(values, pa.binary()),
            pa.repeat("t", count),
            pa.repeat(pa.scalar(3, pa.int32()), count),
            pa.array(range(count), pa.int64()),
            pa.repeat(pa.scalar(0, TYPES["timestamp"]), count),
        ],
        names=["key", "value", "topic", "partition", "offset", "timestamp"],
    )


def decode(values, value_format):
    return Decoder(value_format, with_headers=False).decode(batch_of(values))


def avro(document):
    out = io.BytesIO()
    fastavro.schemaless_writer(out, SCHEMA, document)
    return out.getvalue()


def test_json_becomes_columns_and_absent_fields_are_null():
    found = decode([orjson.dumps(DOCUMENT), b"{}", None], ValueFormat("json", FIELDS))
    first, second, third = found.rows.to_pylist()
    assert {name: first[name] for name in FIELDS} == DOCUMENT | {
        "at": AT,
        "day": AT.date(),
    }
    assert all(row[name] is None for row in (second, third) for name in FIELDS)
    assert [row["_offset"] for row in (first, second, third)] == [0, 1, 2]
    assert not found.bad.num_rows


def test_msgpack_and_avro_become_the_same_columns():
    document = {"n": 5, "name": "é", "at": AT}
    packed = msgpack.packb(document, datetime=True)
    fields = {"n": "bigint", "name": "string", "at": "timestamp"}
    for values, kind in (
        ([packed], ValueFormat("msgpack", fields)),
        ([avro(document)], AVRO),
    ):
        [row] = decode(values, kind).rows.to_pylist()
        assert {name: row[name] for name in fields} == document


def test_a_task_tells_which_fields_have_values(tmp_path):
    fields = {"n": "bigint", "name": "string", "customer.name": "string", "x": "double"}
    table = Table(str(tmp_path / "lake"))
    value_format = ValueFormat("json", fields)
    stager = Stager(value_format, table, table, {ROWS: f"{tmp_path}/s"}, False, 0)

    def seen(*values):
        [report] = stager([batch_of(list(values))])
        found = [each for each in report.to_pylist() if each["kind"] == SEEN]
        return [orjson.loads(each["partition"]) for each in found]

    assert seen(b'{"n":1,"x":null}', b'{"name":"a","customer":{"name":"b"}}') == [
        ["n", "name"]
    ]
    assert seen(b"{}", None) == []


@pytest.mark.parametrize("fields", [{"n": "bigint"}, {"n": "bigint", "x": "json"}])
def test_a_task_tells_which_fields_no_column_takes(fields, tmp_path):
    # "json" is a type that Arrow's parser does not read: the other way is taken.
    table = Table(str(tmp_path / "lake"))

    def untaken(*values, form="json", **settings):
        value_format = ValueFormat(form, fields, **settings)
        places = {kind: f"{tmp_path}/{kind}" for kind in (ROWS, BAD)}
        stager = Stager(value_format, table, table, places, False, 0)
        [report] = stager([batch_of(list(values))])
        found = [each for each in report.to_pylist() if each["kind"] == UNTAKEN]
        return [orjson.loads(each["partition"]) for each in found]

    values = [b'{"n":1,"gate":{"deep":1}}', None, b'{"gate":2,"m":null}', b'{"n":1}']
    assert untaken(*values) == [["gate", "m"]]
    assert untaken(b'{"n":1}', b"{}", None) == []
    # Such a value is a dead letter, and its error names the field.
    assert untaken(b'{"n":1,"gate":1}', unknown_fields="dead_letter") == []
    packed = msgpack.packb({"n": 1, "gate": 2, b"raw": 3})
    assert untaken(packed, form="msgpack") == [["b'raw'", "gate"]]
    many = [b'{"n":1,"id-%d":1}' % number for number in range(1_000)]
    [names] = untaken(*many)
    assert names == sorted(f"id-{number}" for number in range(UNTAKEN_MAX))


NESTED = {
    "from": "struct<airport: string, gate: struct<wing: string, nmuber: int>>",
    "legs": "array<struct<to: string, tial: string>>",
    "crew": "map<string, struct<name: string, rank: int>>",
    "extra": "json<struct<seats: int, class: string>>",
    "plan": "struct<a: int>",
}


@pytest.mark.parametrize("more", [{}, {"_": "json"}])
def test_fields_inside_of_others_are_seen_and_missed_as_well(more):
    # "json" is a type that Arrow's parser does not read: the other way is taken.
    decoder = Decoder(ValueFormat("json", NESTED | more), with_headers=False)
    document = {
        "from": {"airport": "EWR", "gate": {"wing": "A", "number": 5}},
        "legs": [{"to": "IAH"}, {"to": None, "tail": "N1"}],
        "crew": {"7": {"name": "x", "sex": "f"}},
        "extra": '{"seats":1,"pitch":2}',  # JSON inside of text is not looked into
        "plan": None,
    }
    nothing = b'{"legs":[],"crew":{},"from":{"airport":null}}'
    values = [None, nothing, orjson.dumps(document), b'{"crew":"no map","plan":{}}']
    assert decoder.decode(batch_of(values)).rows.num_rows == 3
    assert decoder.untaken == {"from.gate.number", "legs[].tail", "crew[].sex"}
    assert decoder.seen == {
        *("from", "from.airport", "from.gate", "from.gate.wing"),
        *("legs", "legs[].to", "crew", "crew[].name", "extra", "extra.seats"),
    }


def test_what_does_not_fit_is_set_aside_with_the_field_and_the_value():
    values = [
        b'{"n":1}',
        b'{"n":"1"}',
        b'{"name":5}',
        b'{"at":"yesterday"}',
        b'{"n":1.5}',
        b"{",
        b'"text"',
        b'{"n":2}',
    ]
    found = decode(values, ValueFormat("json", FIELDS))
    assert found.rows.column("n").to_pylist() == [1, 2]
    reasons = found.bad.column("_error").to_pylist()
    assert found.bad.column("value").to_pylist() == values[1:7]
    assert found.bad.column("_offset").to_pylist() == list(range(1, 7))
    assert reasons[0] == "n='1' is no bigint"
    assert reasons[1] == "name=5 is no string"
    assert reasons[2] == "at='yesterday' is no timestamp"
    assert reasons[5].endswith("str where an object is expected")


@pytest.mark.parametrize("wanted", [False, True])
def test_dead_letters_have_headers_also_where_rows_have_none(wanted):
    headers = pa.array([[{"key": "k", "value": b"v"}], None], HEADERS.type)
    batch = batch_of([b"{", b"{}"]).append_column("headers", headers)
    decoder = Decoder(ValueFormat("json", FIELDS), with_headers=wanted)
    found = decoder.decode(batch)
    assert found.bad.column("_headers").to_pylist() == [[{"key": "k", "value": b"v"}]]
    assert ("_headers" in found.rows.column_names) == wanted


def test_a_field_that_the_description_does_not_know_may_be_an_error():
    value = b'{"n":1,"new":2}'
    assert decode([value], ValueFormat("json", {"n": "bigint"})).rows.num_rows == 1
    strict = ValueFormat("json", {"n": "bigint"}, unknown_fields="dead_letter")
    [bad] = decode([value], strict).bad.to_pylist()
    assert "unknown fields: new" in bad["_error"]


def test_avro_behind_a_registrys_header_is_read_if_the_id_is_that_of_its_schema():
    value = avro({"n": 1, "name": None, "at": AT})
    with_header = ValueFormat(
        "avro", AVRO.fields, AVRO.schema, confluent_header=True, schema_id=263
    )
    header = b"\0\0\0\1\7"
    found = decode([header + value, value, b"\0\0\0\1\x08" + value], with_header)
    assert found.rows.column("n").to_pylist() == [1]
    assert found.bad.column("_error").to_pylist() == [
        "ValueError: it does not begin with a schema id (confluent_header)",
        "ValueError: its schema id is 264, not 263 (value.schema_id); format='registry'"
        " reads several",
    ]


def field_of(kind):
    fields = [{"name": "a", "type": kind}]
    return orjson.dumps({"type": "record", "name": "r", "fields": fields}).decode()


def test_avro_uuids_are_text():
    schema = field_of(["null", {"type": "string", "logicalType": "uuid"}])
    value_format = ValueFormat("avro", avro_fields(schema), schema)
    out = [io.BytesIO(), io.BytesIO()]
    known = uuid.UUID(int=7)
    for stream, value in zip(out, (known, None), strict=True):
        fastavro.schemaless_writer(stream, orjson.loads(schema), {"a": value})
    found = decode([stream.getvalue() for stream in out], value_format)
    assert found.rows.column("a").to_pylist() == [str(known), None]


def test_an_avro_value_within_itself_ends_no_executor():
    """fastavro's compiled reader overflows the stack of the process."""
    fields = [{"name": "n", "type": "int"}, {"name": "next", "type": ["null", "r"]}]
    schema = orjson.dumps({"type": "record", "name": "r", "fields": fields}).decode()
    value_format = ValueFormat("avro", avro_fields(schema), schema)
    values = [b"\2\2" * depth + b"\2\0" for depth in (0, 100, 300, 100_000)]
    found = decode(values, value_format)
    good = found.rows.column("_offset").to_pylist()
    assert good[:2] == [0, 1] and 3 not in good
    assert len(good) + found.bad.num_rows == len(values)
    assert "RecursionError" in found.bad.column("_error").to_pylist()[-1]


def test_an_avro_value_that_its_schema_makes_large_is_set_aside():
    nulls = [{"name": f"n{index}", "type": "null"} for index in range(200)]
    one = {"type": "record", "name": "one", "fields": nulls}
    schema = field_of({"type": "array", "items": [one, "null"]})
    value_format = ValueFormat("avro", {"a": "json"}, schema)
    few, many = b"\4" + bytes(3), b"\xc0\xb8\2" + bytes(20_001)
    found = decode([few, many], value_format)
    assert found.rows.column("_offset").to_pylist() == [0]
    assert "20004 bytes can be more than" in found.bad.column("_error")[0].as_py()


def test_an_avro_array_of_nothing_is_refused():
    schema = field_of({"type": "array", "items": "null"})
    value_format = ValueFormat("avro", avro_fields(schema), schema)
    with pytest.raises(PipelineError, match="items that take no bytes"):
        decode([b"\2\0"], value_format)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ("{", "not JSON"),
        (field_of("nothing"), "no Avro schema"),
        ('{"type":"record","name":"r","fields":[{"type":"int"}]}', "no Avro schema"),
        ('{"type":"record","fields":[]}', "no Avro schema"),
        ('"long"', "must be an Avro record"),
    ],
)
def test_a_schema_without_columns_is_named(schema, message):
    with pytest.raises(PipelineError, match=message):
        parse(
            {
                "pipeline": {"job": "ingest", "checkpoint": "c"},
                "source": {},
                "table": {"path": "t"},
                "value": {"format": "avro", "schema": schema},
            }
        )


@pytest.mark.parametrize("kind", ["json", "msgpack", "avro"])
@given(values=st.lists(st.none() | st.binary(max_size=40), max_size=5))
def test_any_bytes_give_a_row_or_a_reason(kind, values):
    value_format = AVRO if kind == "avro" else ValueFormat(kind, FIELDS)
    found = decode(values, value_format)
    offsets = found.rows.column("_offset").to_pylist()
    offsets += found.bad.column("_offset").to_pylist()
    assert sorted(offsets) == list(range(len(values)))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(list(FIELDS)), inner, max_size=4)
    ),
    max_leaves=8,
)


@given(st.lists(JSON, max_size=4))
def test_any_document_gives_a_row_or_a_reason(documents):
    values = []
    for document in documents:
        try:
            values.append(orjson.dumps(document))
        except (TypeError, orjson.JSONEncodeError):
            values.append(b"1e999")
    found = decode(values, ValueFormat("json", FIELDS))
    assert found.rows.num_rows + found.bad.num_rows == len(values)
