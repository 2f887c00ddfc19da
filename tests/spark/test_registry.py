"""Values that Confluent's serializers wrote are read by the schemas of a registry.

The serializers are those of confluent-kafka. The registry is a stand-in of ours, as no
real one can be had from a package index; MPBROKER_SCHEMA_REGISTRY=http://... names one,
whose compatibility must be NONE. They pass with Karapace, which keeps its schemas in a
broker of ours. It has no references in JSON Schema.
"""

from __future__ import annotations

import base64
import datetime
import decimal
import json
import os
import threading
import uuid

import pytest
from confluent_kafka.schema_registry import (
    Schema,
    SchemaReference,
    SchemaRegistryClient,
)
from confluent_kafka.schema_registry.avro import AvroSerializer
from confluent_kafka.schema_registry.error import SchemaRegistryError
from confluent_kafka.schema_registry.json_schema import JSONSerializer
from confluent_kafka.schema_registry.protobuf import ProtobufSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from google.protobuf import descriptor_pb2, message_factory
from google.protobuf.descriptor import FileDescriptor
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mpbroker.spark.pipeline.description import ValueFormat, parse
from mpbroker.spark.pipeline.errors import PipelineError
from mpbroker.spark.pipeline.registered import Reader, resolved, subjects_of
from mpbroker.spark.pipeline.schemas import protobuf
from mpbroker.spark.pipeline.schemas.registry import Registry, RegistryAwayError
from tests.spark.test_decode import decode
from tests.support.schema_registry import SchemaRegistry

AT = datetime.datetime(2013, 1, 1, 5, tzinfo=datetime.UTC)
D = decimal.Decimal
AVRO = {
    "type": "record",
    "name": "Flight",
    "namespace": "demo",
    "fields": [
        {"name": "number", "type": "int"},
        {"name": "carrier", "type": {"type": "enum", "name": "C", "symbols": ["UA"]}},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
        {
            "name": "price",
            "type": {
                "type": "bytes",
                "logicalType": "decimal",
                "precision": 9,
                "scale": 2,
            },
        },
        {"name": "tags", "type": {"type": "map", "values": "long"}},
        {
            "name": "legs",
            "type": {
                "type": "array",
                "items": {
                    "type": "record",
                    "name": "Leg",
                    "fields": [{"name": "to", "type": ["null", "string"]}],
                },
            },
        },
        {"name": "id", "type": {"type": "string", "logicalType": "uuid"}},
        {"name": "either", "type": ["null", "string", "Leg"]},
        {"name": "next", "type": ["null", "Flight"], "default": None},
    ],
}
FLIGHT = {
    "number": 5,
    "carrier": "UA",
    "at": AT,
    "price": D("12.50"),
    "tags": {"a": 1},
    "legs": [{"to": "IAH"}, {"to": None}],
    "id": uuid.UUID(int=7),
    "either": "x",
    "next": None,
}
PROTO = """
syntax = "proto3";
package demo;
import "google/protobuf/timestamp.proto";
import "google/protobuf/wrappers.proto";
import "google/protobuf/struct.proto";
import "place.proto";
message Unused { message Inner { int32 n = 1; } }
message Flight {
  enum Kind { NONE = 0; JET = 1; }
  int32 number = 1;
  optional int64 delay = 2;
  Kind kind = 3;
  google.protobuf.Timestamp at = 4;
  google.protobuf.StringValue note = 5;
  repeated Place legs = 6;
  map<string, double> tags = 7;
  oneof seat { string row = 8; uint64 place = 9; }
  google.protobuf.Struct more = 10;
  Flight next = 11;
  bytes raw = 12;
  map<int32, Place> gates = 13;
}
"""
PLACE = 'syntax = "proto3"; package demo; message Place { string airport = 1; }'
JSON_SCHEMA = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "title": "Flight",
    "type": "object",
    "required": ["number"],
    "properties": {
        "number": {"type": "integer", "minimum": 1},
        "at": {"type": "string", "format": "date-time"},
        "day": {"type": ["null", "string"], "format": "date"},
        "delay": {"oneOf": [{"type": "null"}, {"type": "number"}]},
        "from": {"$ref": "#/definitions/place"},
        "legs": {"type": "array", "items": {"$ref": "place.json"}},
        "tags": {"type": "object", "additionalProperties": {"type": "integer"}},
        "any": {},
    },
    "definitions": {
        "place": {"type": "object", "properties": {"airport": {"type": "string"}}}
    },
}
PLACE_JSON = {"type": "object", "properties": {"gate": {"type": "integer"}}}


# The serializers' client leaves the connections open that a real one keeps alive.
UNCLOSED = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning"
)


@pytest.fixture(params=["stand-in", pytest.param("real", marks=UNCLOSED)])
def registry(request):
    """The address of a registry."""
    if request.param == "real":
        url = os.environ.get("MPBROKER_SCHEMA_REGISTRY")
        if not url:
            pytest.skip("no real schema registry: MPBROKER_SCHEMA_REGISTRY names none")
        yield url
        return
    found = SchemaRegistry()
    yield found.url
    found.close()


@pytest.fixture
def standin():
    found = SchemaRegistry()
    yield found
    found.close()


@pytest.fixture
def topic():
    return f"t-{uuid.uuid4().hex[:8]}"


def context(topic):
    return SerializationContext(topic, MessageField.VALUE)


def value_format(url, **more):
    return ValueFormat("registry", registry=url, **more)


def columns(url, topic, **more):
    description = parse(
        {
            "pipeline": {"job": "ingest", "checkpoint": "/c"},
            "source": {"bootstrap": "h:1", "subscribe": topic},
            "table": {"path": "/t"},
            "value": {"format": "registry", "registry": url, **more},
        }
    )
    return resolved(description, print, waits=False).value


def decoded(url, topic, values, **more):
    found = decode(values, columns(url, topic, **more))
    rows = found.rows.drop_columns([n for n in found.rows.column_names if n[0] == "_"])
    return (
        rows.to_pylist(maps_as_pydicts="strict"),
        found.bad.column("_error").to_pylist(),
    )


def test_avro_of_confluents_serializer_becomes_columns(registry, topic):
    client = SchemaRegistryClient({"url": registry})
    write = AvroSerializer(client, json.dumps(AVRO))
    value = write(FLIGHT, context(topic))
    nested = write(FLIGHT | {"next": FLIGHT, "either": {"to": "b"}}, context(topic))
    rows, bad = decoded(registry, topic, [value, nested, value[:-1], value[5:]])
    plain = FLIGHT | {"id": str(FLIGHT["id"]), "either": '"x"'}
    assert rows[0] == plain
    assert json.loads(rows[1]["either"]) == {"to": "b"}
    # A record within itself has no column of its own, but is there.
    assert json.loads(rows[1]["next"])["legs"] == FLIGHT["legs"]
    assert len(bad) == 2


def test_avro_schemas_may_name_others_of_the_registry(registry, topic):
    client = SchemaRegistryClient({"url": registry})
    leg = {
        "type": "record",
        "name": "Leg",
        "fields": [{"name": "to", "type": "string"}],
    }
    client.register_schema(f"{topic}-leg", Schema(json.dumps(leg), "AVRO"))
    outer = {
        "type": "record",
        "name": "F",
        "fields": [{"name": "legs", "type": {"type": "array", "items": "Leg"}}],
    }
    schema = Schema(
        json.dumps(outer), "AVRO", [SchemaReference("Leg", f"{topic}-leg", 1)]
    )
    write = AvroSerializer(client, schema)
    value = write({"legs": [{"to": "IAH"}]}, context(topic))
    assert decoded(registry, topic, [value]) == ([{"legs": [{"to": "IAH"}]}], [])


def flight_file() -> FileDescriptor:
    return protobuf.file_of(PROTO, [("place.proto", PLACE)])


def flight():
    kind = message_factory.GetMessageClass(
        flight_file().message_types_by_name["Flight"]
    )
    found = kind(number=5, kind=1, row="3A", raw=b"\xff", tags={"a": 0.5})
    found.at.seconds = int(AT.timestamp())
    found.legs.add(airport="EWR")
    found.more["x"] = [1, "y"]
    found.gates[7].airport = "IAH"
    return found


ROW = {
    "number": 5,
    "delay": None,
    "kind": "JET",
    "at": AT,
    "note": None,
    "legs": [{"airport": "EWR"}],
    "tags": {"a": 0.5},
    "row": "3A",
    "place": None,
    "more": '{"x":[1.0,"y"]}',
    "next": None,
    "raw": b"\xff",
    "gates": {7: {"airport": "IAH"}},
}


def test_protobuf_of_confluents_serializer_becomes_columns(registry, topic):
    """It registers descriptors, and the file that this one imports as a reference."""
    client = SchemaRegistryClient({"url": registry})
    message = flight()
    write = ProtobufSerializer(type(message), client)
    value = write(message, context(topic))
    assert value[5] != 0  # Flight is the second message of its file
    with pytest.raises(PipelineError, match=r"message='Fly' is none of .*Unused, Fl"):
        columns(registry, topic, message="Fly")
    rows, bad = decoded(registry, topic, [value, value[:8]], message="Flight")
    for name in ("tags", "gates"):
        if isinstance(rows[0][name], list):  # Karapace makes entries of maps
            rows[0][name] = {each["key"]: each["value"] for each in rows[0][name]}
    assert rows == [ROW]
    assert len(bad) == 1
    # Without a name it is the first of the file.
    assert columns(registry, topic).fields == {}
    _, bad = decoded(registry, topic, [value], fields={"number": "int"})
    assert bad == ["ValueError: it is a demo.Flight, no demo.Unused"]


@pytest.mark.parametrize("has_descriptors", [True, False])
def test_protobuf_as_text_is_compiled(standin, topic, has_descriptors):
    standin.has_descriptors = has_descriptors
    standin.register(f"{topic}-place", {"schemaType": "PROTOBUF", "schema": PLACE})
    reference = {"name": "place.proto", "subject": f"{topic}-place", "version": 1}
    schema_id = standin.register(
        f"{topic}-value",
        {"schemaType": "PROTOBUF", "schema": PROTO, "references": [reference]},
    )
    framed = b"\0" + schema_id.to_bytes(4) + b"\2\2" + flight().SerializeToString()
    fields = protobuf.fields_of(flight_file().message_types_by_name["Flight"])
    value = value_format(standin.url, fields=fields, message="demo.Flight")
    found = decode([framed], value)
    [row] = found.rows.to_pylist(maps_as_pydicts="strict")
    assert {name: row[name] for name in ROW} == ROW


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (b"\2\6", "no message [3]"),
        (b"\4\0\0", None),  # Unused.Inner
        (b"\4\0\2", "no message [0, 1]"),
        (b"\1", "-1 message indexes"),
        (b"\xff" * 5, "do not end"),
        (b"", "do not end"),
    ],
)
def test_the_place_of_a_message_in_its_file_is_checked(header, said):
    try:
        indexes, place = protobuf.read_indexes(b"....." + header, 5)
        found = protobuf.message_at(flight_file(), indexes)
    except ValueError as error:
        assert said is not None and said in str(error)
    else:
        assert (said, found.full_name) == (None, "demo.Unused.Inner")
        assert place == 5 + len(header)


def test_json_of_confluents_serializer_is_checked_and_becomes_columns(registry, topic):
    client = SchemaRegistryClient({"url": registry})
    place = Schema(json.dumps(PLACE_JSON), "JSON")
    client.register_schema(f"{topic}-place", place)
    schema = Schema(
        json.dumps(JSON_SCHEMA),
        "JSON",
        [SchemaReference("place.json", f"{topic}-place", 1)],
    )
    write = JSONSerializer(schema, client, conf={"validate": False})
    flight = {
        "number": 5,
        "at": "2013-01-01T05:00:00Z",
        "day": None,
        "delay": 1.5,
        "from": {"airport": "EWR"},
        "legs": [{"gate": 3}],
        "tags": {"a": 1},
        "any": [1, {"b": None}],
    }
    bad = [
        {"number": 0},
        {"at": "2013-01-01T05:00:00Z"},
        {"number": 1, "legs": [{"gate": "x"}]},
        {"number": 1, "at": "noon"},
    ]
    try:
        values = [write(each, context(topic)) for each in (flight, *bad)]
    except SchemaRegistryError as error:
        pytest.skip(error.error_message)
    rows, reasons = decoded(registry, topic, values)
    assert rows == [flight | {"at": AT, "any": '[1,{"b":null}]'}]
    assert len(reasons) == len(bad)
    assert "['legs'][0]['gate'] \"x\" is not of type" in reasons[2]


def test_columns_are_those_of_all_versions_and_the_first_type_stays(registry, topic):
    def record(*fields):
        named = [{"name": name, "type": kind} for name, kind in fields]
        return json.dumps({"type": "record", "name": "R", "fields": named})

    client = SchemaRegistryClient({"url": registry})
    first = AvroSerializer(client, record(("a", "int"), ("b", "long")))
    values = [first({"a": 1, "b": 2}, context(topic))]
    assert dict(columns(registry, topic).fields) == {"a": "int", "b": "bigint"}
    second = AvroSerializer(
        client, record(("a", "long"), ("b", "string"), ("c", "string"))
    )
    # Not judged compatible by everybody, and so not by a registry of ours.
    values.append(second({"a": 3, "b": "x", "c": "new"}, context(topic)))
    values.append(second({"a": 2**40, "b": "x", "c": "new"}, context(topic)))
    third = AvroSerializer(client, record(("a", "long"), ("c", "string")))
    values.append(third({"a": 5, "c": "later"}, context(topic)))
    rows, reasons = decoded(registry, topic, values)
    assert rows == [
        {"a": 1, "b": 2, "c": None},
        {"a": 5, "b": None, "c": "later"},
    ]
    assert reasons[0] == "b='x' is no bigint"
    assert reasons[1].startswith("a=1099511627776 is no int")
    # What the description says of a field goes before what the registry says.
    rows, reasons = decoded(registry, topic, values, fields={"a": "bigint"})
    assert [row["a"] for row in rows] == [1, 5]


def test_an_unknown_id_is_a_dead_letter_and_is_asked_for_once(standin):
    fields = {"a": "int"}
    found = decode([b"\0\0\0\0\x09x"] * 50, value_format(standin.url, fields=fields))
    assert found.bad.num_rows == 50
    assert "the registry has no schema 9" in found.bad.column("_error")[0].as_py()
    assert standin.asked == ["/schemas/ids/9"]


def test_a_schema_is_asked_for_once(standin, topic):
    client = SchemaRegistryClient({"url": standin.url})
    write = AvroSerializer(client, json.dumps(AVRO))
    values = [write(FLIGHT, context(topic))] * 50
    value = columns(standin.url, topic)
    standin.asked.clear()
    for _ in range(3):
        assert decode(values, value).rows.num_rows == 50
    assert standin.asked == ["/schemas/ids/1"]


def test_a_registry_that_is_away_is_waited_for_with_one_sentence(standin, topic):
    schema = json.dumps({"type": "record", "name": "R", "fields": []})
    standin.register(f"{topic}-value", {"schema": schema})
    standin.broken = True
    said, pauses = [], []

    def sleep(seconds):
        pauses.append(seconds)
        standin.broken = len(pauses) < 8

    # The first address is of nobody.
    urls = ("http://127.0.0.1:9", standin.url)
    found = Registry(urls, say=said.append, sleep=sleep)
    assert found.versions(f"{topic}-value") == [1]
    assert len(pauses) == 8 and max(pauses) <= 5 and pauses == sorted(pauses)
    assert len(said) == 2
    assert said[0].startswith("the schema registry does not answer (http://127")
    assert said[0].endswith("waiting for it, nothing is lost")
    assert said[1] == "the schema registry answers again"
    standin.broken = True
    with pytest.raises(RegistryAwayError, match="does not answer"):
        Registry((standin.url,), waits=False).versions("x")


def test_a_batch_goes_on_when_the_registry_is_back(standin, topic):
    client = SchemaRegistryClient({"url": standin.url})
    write = AvroSerializer(client, json.dumps(AVRO))
    value, format_ = write(FLIGHT, context(topic)), columns(standin.url, topic)
    standin.broken = True
    asked = len(standin.asked)
    found = []
    task = threading.Thread(target=lambda: found.append(decode([value] * 3, format_)))
    task.start()
    while len(standin.asked) < asked + 2:  # it has been refused, and tried again
        task.join(0.01)
    standin.broken = False
    task.join()
    assert found[0].rows.num_rows == 3


def test_what_must_be_said_and_what_is_refused_is_said(standin, topic, monkeypatch):
    with pytest.raises(PipelineError, match=f"no subject '{topic}-value'.*value.subje"):
        columns(standin.url, topic)
    standin.password = base64.b64encode(b"me:secret").decode()
    with pytest.raises(PipelineError, match=r"refuses .* 401 .*registry_auth_env"):
        columns(standin.url, topic)
    with pytest.raises(PipelineError, match="no variable 'REGISTRY'"):
        columns(standin.url, topic, registry_auth_env="REGISTRY")
    monkeypatch.setenv("REGISTRY", "me:secret")
    standin.register("s", {"schema": json.dumps(AVRO)})
    given = {"registry_auth_env": "REGISTRY", "subject": ["s"]}
    assert "number" in columns(standin.url, topic, **given).fields
    standin.register("bad", {"schema": '"long"'})
    with pytest.raises(
        PipelineError, match=r"bad, version 1: .*must be an Avro record"
    ):
        columns(standin.url, topic, **given | {"subject": ["bad"]})
    standin.register("odd", {"schemaType": "XML", "schema": "<a/>"})
    with pytest.raises(PipelineError, match="XML, which is none of AVRO, PROTOBUF"):
        columns(standin.url, topic, **given | {"subject": ["odd"]})


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"format": "registry"}, "need each other"),
        ({"format": "json", "registry": "http://h:1"}, "need each other"),
        ({"format": "registry", "registry": "h:1"}, "addresses such as"),
    ],
)
def test_a_description_needs_the_registrys_address(value, said):
    with pytest.raises(PipelineError, match=said):
        parse(
            {
                "pipeline": {"job": "ingest", "checkpoint": "/c"},
                "source": {"bootstrap": "h:1", "subscribe": "t"},
                "table": {"path": "/t"},
                "value": value,
            }
        )


def test_subjects_are_those_of_the_topics(standin):
    def subjects(source, **value):
        description = parse(
            {
                "pipeline": {"job": "ingest", "checkpoint": "/c"},
                "source": {"bootstrap": "h:1", **source},
                "table": {"path": "/t"},
                "value": {"format": "registry", "registry": standin.url, **value},
            }
        )
        return subjects_of(description)

    assert subjects({"subscribe": "a, b"}) == ("a-value", "b-value")
    assert subjects({"assign": '{"t":[0]}'}) == ("t-value",)
    assert subjects({"subscribePattern": "x.*"}, subject=["s"]) == ("s",)
    with pytest.raises(PipelineError, match=r"value\.subject is not set"):
        subjects({"subscribePattern": "x.*"})


@pytest.mark.parametrize("known", protobuf._KNOWN)
def test_a_protobuf_text_may_import_each_file_of_google(known):
    name = known.DESCRIPTOR.name
    kind = next(iter(known.DESCRIPTOR.message_types_by_name.values())).full_name
    text = f'syntax = "proto3"; import "{name}"; message M {{ {kind} f = 1; }}'
    file = protobuf.file_of(text)
    assert file.message_types_by_name["M"].fields[0].message_type.full_name == kind
    # A registry may name the file among the references, too.
    given = [(name, as_base64(known.DESCRIPTOR))]
    assert protobuf.file_of(as_base64(file), given).message_types_by_name["M"]


def as_base64(file):
    found = descriptor_pb2.FileDescriptorProto()
    file.CopyToProto(found)
    return base64.b64encode(found.SerializeToString()).decode()


def test_a_protobuf_message_that_json_cannot_hold_has_a_reason():
    text = 'syntax = "proto3"; import "google/protobuf/duration.proto";'
    fields = "Inner inner = 1; google.protobuf.Duration took = 2;"
    file = protobuf.file_of(f"{text} message Inner {{ {fields} }}")
    message = protobuf.message_named(file, "")
    read, made = protobuf.reader(message), message_factory.GetMessageClass(message)()
    made.inner.took.seconds = 2
    assert read(made.SerializeToString())["inner"] == {"took": "2s"}
    made.inner.took.seconds = 2**62
    with pytest.raises(ValueError, match="cannot be JSON"):
        read(made.SerializeToString())


@pytest.fixture(scope="module")
def all_kinds():
    """A registry with a schema of each kind."""
    found = SchemaRegistry()
    file = descriptor_pb2.FileDescriptorProto()
    protobuf.file_of(PLACE).CopyToProto(file)
    for schema in (
        {"schema": json.dumps(AVRO)},
        {"schemaType": "JSON", "schema": json.dumps(PLACE_JSON)},
        {
            "schemaType": "PROTOBUF",
            "schema": base64.b64encode(file.SerializeToString()).decode(),
        },
    ):
        found.register("s", schema)
    yield found
    found.close()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from([b"\0\0\0\0\1", b"\0\0\0\0\2", b"\0\0\0\0\3", b""]),
    st.binary(max_size=40),
)
def test_any_bytes_give_a_row_or_a_reason(all_kinds, header, content):
    fields = {"number": "int", "airport": "string", "gate": "bigint"}
    found = decode([header + content], value_format(all_kinds.url, fields=fields))
    assert found.rows.num_rows + found.bad.num_rows == 1


def test_a_reader_travels_as_text():
    """An executor makes its own from the description, which has no secret."""
    reader = Reader(value_format("http://127.0.0.1:9"), exact=False)
    with pytest.raises(ValueError, match="zero byte and a schema id"):
        reader(b"x")
