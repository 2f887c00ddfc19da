"""Values of Confluent's serializers in the console, by the schemas of a registry."""

from __future__ import annotations

import json
import math
import socket
import struct
import threading

import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroSerializer
from confluent_kafka.schema_registry.json_schema import JSONSerializer
from confluent_kafka.schema_registry.protobuf import ProtobufSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from hypothesis import given
from hypothesis import strategies as st

from mpbroker import AdminClient, Producer
from mpbroker.client.admin.config_admin import ConfigResource, ConfigResourceType
from mpbroker.client.errors import ApiError
from mpbroker.console.message_pages import shown
from mpbroker.console.schema_values import Misread, reader_of
from mpbroker.console.schemas import Schemas, Undecoded
from mpbroker.spark.pipeline.errors import PipelineError
from mpbroker.spark.pipeline.schemas.registry import Registered, Registry
from tests.console.serving import CONSOLE, browser, secured
from tests.exporter.asking import wait_until
from tests.spark.test_registry import AVRO, FLIGHT, JSON_SCHEMA, PLACE, PROTO, flight
from tests.support.broker import Broker, BrokerFailedError
from tests.support.schema_registry import SchemaRegistry

URL = "console.schema.registry.url"


@pytest.fixture(scope="module")
def registry():
    found = SchemaRegistry()
    yield found
    found.close()


@pytest.fixture(scope="module")
def broker(tmp_path_factory, registry):
    login = {"console.schema.registry.basic.auth.user.info": "alice:secret"}
    settings = {**CONSOLE, URL: registry.url, "node.id": 1, **login}
    with secured(tmp_path_factory.mktemp("schemas"), settings) as made:
        with AdminClient(bootstrap_servers=made.bootstrap) as client:
            for name in ("typed", "refused"):
                client.create_topic(name, partitions=1)
        yield made


@pytest.fixture
def admin(broker):
    return browser(broker, "admin")


def send(broker, *values, topic="typed", key=None):
    """Return the offset of the first."""
    with Producer(bootstrap_servers=broker.bootstrap) as producer:
        sent = [producer.send(topic, value, key=key, partition=0) for value in values]
    return sent[0].result(60).offset


def framed(schema_id, data=b""):
    return b"\0" + schema_id.to_bytes(4) + data


def context(field=MessageField.VALUE):
    return SerializationContext("typed", field)


def row_at(admin, offset, form="auto", topic="typed"):
    asked = {"topic": topic, "partition": 0, "offset": offset, "count": 1}
    (row,) = admin.get("messages", **asked, format=form).json["rows"]
    return row


def test_values_of_confluents_serializers_are_shown_decoded(broker, admin, registry):
    client = SchemaRegistryClient({"url": registry.url})
    avro = AvroSerializer(client, json.dumps(AVRO))(FLIGHT, context())
    message = flight()
    protobuf = ProtobufSerializer(type(message), client)(message, context())
    checked = JSONSerializer(json.dumps({"title": "F", "type": "object"}), client)
    key = checked({"key": 1}, context(MessageField.KEY))
    at = send(broker, avro, protobuf, key, key=key)

    row = row_at(admin, at)
    assert (row["key"]["format"], json.loads(row["key"]["text"])) == (
        "json",
        {"key": 1},
    )
    assert row["value"]["format"] == "avro" and row["value"]["schema"] > 0
    assert json.loads(row["value"]["text"]) == {
        "number": 5,
        "carrier": "UA",
        "price": "12.50",
        "tags": {"a": 1},
        "legs": [{"to": "IAH"}, {"to": None}],
        "at": "2013-01-01T05:00:00+00:00",
        "id": str(FLIGHT["id"]),
        "either": "x",
        "next": None,
    }
    found = row_at(admin, at + 1)["value"]
    assert found["format"] == "protobuf" and found["note"] == ""
    content = json.loads(found["text"])
    assert content["kind"] == "JET" and content["legs"] == [{"airport": "EWR"}]
    assert content["at"] == "2013-01-01T05:00:00Z" and content["more"] == {
        "x": [1, "y"]
    }

    # Each was asked for once, and what is not wished is not done.
    asked = len(registry.asked)
    assert row_at(admin, at)["value"] == row["value"]
    assert row_at(admin, at, "hex")["value"]["text"].startswith("00 00 00 00")
    assert len(registry.asked) == asked


def test_a_search_shows_what_it_finds_decoded(broker, admin, registry):
    schema = {
        "type": "record",
        "name": "S",
        "fields": [{"name": "s", "type": "string"}],
    }
    schema_id = registry.register("s-value", {"schema": json.dumps(schema)})
    send(broker, framed(schema_id, b"\x0cneedle"))
    found = admin.get("search", topic="typed", partition=0, text="needle").json["rows"]
    assert [json.loads(row["value"]["text"]) for row in found] == [{"s": "needle"}]


@pytest.mark.parametrize("has_descriptors", [True, False])
def test_protobuf_of_a_registry_with_text_alone_is_shown(registry, has_descriptors):
    registry.has_descriptors = has_descriptors
    registry.register("place", {"schemaType": "PROTOBUF", "schema": PLACE})
    reference = {"name": "place.proto", "subject": "place", "version": 1}
    schema = {"schemaType": "PROTOBUF", "schema": PROTO, "references": [reference]}
    schema_id = registry.register("text-value", schema)
    value = framed(schema_id, b"\2\2" + flight().SerializeToString())
    try:
        found = shown(value, "auto", patient(registry.url))
    finally:
        registry.has_descriptors = True
    assert json.loads(found["text"])["row"] == "3A"


def patient(url, **more):
    """Return a decoder that waits as long as it takes."""
    schemas = Schemas(Registry((url,), waits=False, **more), clock=lambda: 0.0)
    return schemas.decoder()


def test_what_breaks_its_json_schema_is_shown_with_the_place(registry):
    own = JSON_SCHEMA | {"properties": {"number": {"type": "integer", "minimum": 1}}}
    schema = {"schemaType": "JSON", "schema": json.dumps(own)}
    schema_id = registry.register("json-value", schema)
    found = shown(framed(schema_id, b'{"number":0}'), "auto", patient(registry.url))
    assert json.loads(found["text"]) == {"number": 0}
    assert "does not fit its schema: ['number'] 0 is less than" in found["note"]
    found = shown(framed(schema_id, b"{"), "auto", patient(registry.url))
    assert found["format"] == "hex" and "it is not JSON" in found["note"]


def test_an_id_that_the_registry_does_not_know_is_named(broker, admin, registry):
    at = send(broker, framed(4711, b"\1"), b"plain", framed(0, b"\1"), key=b"\0\0\0")
    row = row_at(admin, at)
    assert row["value"]["text"] == "00 00 00 12 67 01"
    assert row["value"]["note"] == "the schema registry has no schema 4711"
    assert "note" not in row["key"]
    # Only who wants the registry's form is told that bytes are not of it.
    for number, data in ((1, "plain"), (2, "00 00 00 00 00 01")):
        found = row_at(admin, at + number)["value"]
        assert (found["text"], found.get("note")) == (data, None)
        found = row_at(admin, at + number, "registry")["value"]
        assert found["text"] == data and "does not begin with a zero" in found["note"]


def test_a_registry_that_is_away_is_named_and_its_return_is_seen(
    broker, admin, registry
):
    schema_id = registry.register("later-value", {"schema": '"long"'})
    at = send(broker, framed(schema_id, b"\x54"))
    registry.broken = True
    try:
        found = row_at(admin, at)["value"]
        assert found["format"] == "hex"
        assert "the schema registry does not answer" in found["note"]
    finally:
        registry.broken = False
    wait_until(lambda: row_at(admin, at)["value"]["format"] == "avro")
    assert row_at(admin, at)["value"]["text"] == "42"


def test_a_slow_registry_holds_up_no_page_for_long():
    """It accepts, and says nothing: the page is shown with what is known."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        registry = Registry(
            (f"http://127.0.0.1:{silent.getsockname()[1]}",), waits=False
        )
        schemas = Schemas(registry)
        decode = schemas.decoder()
        for schema_id in (1, 2, 1):
            with pytest.raises(Undecoded, match=f"not given schema {schema_id} yet"):
                decode(framed(schema_id, b"\1"))
        # Others do not begin to wait anew: the request is older than their patience.
        with pytest.raises(Undecoded, match="not given schema 3 yet"):
            schemas.decoder()(framed(3, b"\1"))
        told = set()
        for number in range(100):
            with pytest.raises(Undecoded) as error:
                decode(framed(1000 + number, b"\1"))
            told.add(str(error.value).partition(" ")[0])
        assert told == {"the", "too"}  # a bounded number of ids wait


def test_one_thread_asks_for_all_who_wait(registry):
    schema_id = registry.register("many-value", {"schema": '"int"'})
    asked = registry.asked.count(f"/schemas/ids/{schema_id}")
    decode, found = patient(registry.url), []
    threads = [
        threading.Thread(target=lambda: found.append(decode(framed(schema_id, b"\2"))))
        for _ in range(8)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert [each.value.content for each in found] == [1] * 8
    assert registry.asked.count(f"/schemas/ids/{schema_id}") == asked + 1


def test_the_login_is_sent_and_a_refusal_names_the_setting(registry):
    schema_id = registry.register("secret-value", {"schema": '"int"'})
    registry.password = "Basic YWxpY2U6cHc="
    try:
        value = framed(schema_id, b"\2")
        assert (
            shown(value, "auto", patient(registry.url, login="alice:pw"))["text"] == "1"
        )
        refused = shown(value, "auto", patient(registry.url, login="alice:no"))
        assert "refuses" in refused["note"] and "401" in refused["note"]
    finally:
        registry.password = ""


def test_messages_by_schema_need_the_right_to_read(broker):
    one = browser(broker, "alice")
    answer = one.get("messages", topic="typed", partition=0, format="registry")
    assert answer.status == 403


def test_without_a_registry_who_asks_for_one_is_told_the_setting():
    schemas = Schemas(None)
    assert not schemas.has_registry
    found = shown(framed(1, b"\2"), "registry", schemas.decoder())
    assert found["format"] == "hex" and URL in found["note"]


# -- hostile values and schemas --------------------------------------------------------


def avro(schema):
    return reader_of(Registered("AVRO", json.dumps(schema)))


LIST = {
    "type": "record",
    "name": "N",
    "fields": [{"name": "next", "type": ["null", "N"]}],
}


def test_a_list_nested_a_hundred_thousand_times_is_refused():
    """fastavro's compiled reader overflows the stack, which ends the process."""
    read = avro(LIST)
    assert read(b"\2\2\0").content == {"next": {"next": {"next": None}}}
    with pytest.raises(Misread, match="RecursionError"):
        read(b"\2" * 100_000 + b"\0")


def test_a_tree_is_shown_as_a_whole():
    """An array of the type that has it is no array of nothing."""
    children = {"name": "children", "type": {"type": "array", "items": "Node"}}
    value = {"name": "v", "type": "int"}
    tree = {"type": "record", "name": "Node", "fields": [value, children]}
    found = avro(tree)(b"\2\2\4\0\0").content
    assert found == {"v": 1, "children": [{"v": 2, "children": []}]}
    bare = {"type": "record", "name": "Node", "fields": [children]}
    assert avro(bare)(b"\2\0\0").content == {"children": [{"children": []}]}
    index = {"name": "by", "type": {"type": "map", "values": "Index"}}
    read = avro({"type": "record", "name": "Index", "fields": [index]})
    assert read(b"\2\2a\0\0").content == {"by": {"a": {"by": {}}}}


def test_a_record_that_is_its_own_field_has_no_value():
    own = {"type": "record", "name": "R", "fields": [{"name": "r", "type": "R"}]}
    for schema in (own, {"type": "array", "items": own}):
        with pytest.raises(PipelineError, match="has no end"):
            avro(schema)


@pytest.mark.parametrize(
    "items",
    [
        "null",
        {"type": "fixed", "name": "F", "size": 0},
        {"type": "record", "name": "E", "fields": [{"name": "n", "type": "null"}]},
    ],
)
def test_an_array_of_nothing_is_refused(items):
    """A few bytes would be 2**40 items."""
    with pytest.raises(PipelineError, match="items that take no bytes"):
        avro({"type": "array", "items": items})
    inner = {"name": "a", "type": ["null", {"type": "array", "items": items}]}
    with pytest.raises(PipelineError, match="items that take no bytes"):
        avro({"type": "record", "name": "R", "fields": [inner]})


NULLS = ["null"] * 200


def record(name, *kinds):
    fields = [{"name": f"f{i}", "type": kind} for i, kind in enumerate(kinds)]
    return {"type": "record", "name": name, "fields": fields}


def zigzag(number):
    """Return a positive number as Avro writes it."""
    out, number = bytearray(), number * 2
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes((*out, number))


def doubled(depth, kind):
    """Return a record of 2**depth records."""
    for level in range(depth):
        kind = record(
            f"R{level}", kind, kind if isinstance(kind, str) else kind["name"]
        )
    return kind


@pytest.mark.parametrize(
    ("schema", "data"),
    [
        (doubled(24, record("E")), b""),
        (["null", doubled(24, record("E"))], b"\2"),
        # 200 fields for each byte or two.
        (
            {"type": "array", "items": record("I", "boolean", *NULLS)},
            zigzag(20_000) + bytes(20_001),
        ),
        (
            {"type": "array", "items": [record("I", *NULLS), "null"]},
            zigzag(20_000) + bytes(20_001),
        ),
        ({"type": "map", "values": record("I", *NULLS)}, zigzag(9_000) + bytes(9_001)),
    ],
)
def test_a_value_that_its_schema_makes_large_is_refused(schema, data):
    with pytest.raises(Misread, match="can be more than"):
        avro(schema)(data)


def test_a_chain_of_references_is_no_deeper_than_the_stack():
    texts = [json.dumps(record("R0", "int"))]
    texts += [json.dumps(record(f"R{i + 1}", f"R{i}")) for i in range(1500)]
    references = tuple((str(index), text) for index, text in enumerate(texts[:-1]))
    with pytest.raises(PipelineError, match="nested too deeply"):
        reader_of(Registered("AVRO", texts[-1], references))


@pytest.mark.parametrize("base", ["string", "int", "boolean", ["null", "string"]])
@pytest.mark.parametrize("depth", [0, 1, 3])
def test_usual_records_of_hundreds_of_fields_are_read_at_any_length(base, depth):
    kind = record("R", *[base] * 300)
    for level in range(depth):
        kind = record(f"R{level}", [kind, "null"], *[base] * 300)
    size = 300 + depth * 301  # of an item whose fields have a byte each
    count = 400_000 // size
    read = avro({"type": "array", "items": kind})
    found = read(zigzag(count) + bytes(size * count + 1)).content
    assert len(found) == count and len(found[-1]) == 300 + bool(depth)


def protobuf(text):
    return reader_of(Registered("PROTOBUF", f'syntax = "proto3"; {text}'))


def test_defaults_of_protobuf_are_left_out_where_they_are_too_many():
    fields = " ".join(f"int32 f{number} = {number + 1};" for number in range(200))
    read = protobuf(
        f"message M {{ repeated N n = 1; N o = 2; }} message N {{ {fields} }}"
    )
    few = read(b"\0" + b"\n\2\x10\7" * 200)
    assert few.note == "" and len(few.content["n"]) == 200
    assert few.content["n"][-1] == dict.fromkeys((f"f{n}" for n in range(200)), 0) | {
        "f1": 7
    }
    many = read(b"\0" + b"\n\2\x10\7" * 5000)
    assert many.content == {"n": [{"f1": 7}] * 5000}
    assert "default are left out" in many.note
    # A long value of few messages has room for all.
    long = read(b"\0" + b"\x12\x02\x10\7" * 20_000)
    assert long.note == "" and len(long.content["o"]) == 200


def test_defaults_behind_any_are_counted_too():
    fields = " ".join(f"int32 f{number} = {number + 1};" for number in range(200))
    read = protobuf(
        'import "google/protobuf/any.proto"; message M { google.protobuf.Any a = 1; }'
        f" message L {{ repeated N n = 1; }} message N {{ {fields} }}"
    )
    inner = b"\n\1L\x12\xa0\x9c\1" + b"\n\0" * 10_000
    found = read(b"\0\n\xa7\x9c\1" + inner)
    assert found.content == {"a": {"@type": "L", "n": [{}] * 10_000}}
    assert "default are left out" in found.note


@pytest.mark.parametrize(
    "text",
    [
        "message M {{ repeated bool {name} = 1; }}",
        "message M {{ repeated E e = 1; }} enum E {{ {name} = 0; }}",
        "message M {{ repeated N n = 1; message N {{ bool {name} = 1; }} }}",
    ],
)
def test_long_names_in_a_protobuf_schema_are_not_copied_for_each_byte(text):
    read = protobuf(text.format(name="N" * 5000))
    data = b"\0\n\xc0\x38" + bytes(7232)
    with pytest.raises(Misread, match="names of 5000 characters"):
        read(data)
    assert protobuf(text.format(name="N" * 250))(b"\0").content is not None


def test_protobuf_messages_of_many_fields_have_no_room_in_short_values():
    """Two bytes are a message, which takes 40 KB until it is shown."""
    fields = " ".join(f"int64 f{number} = {number + 1};" for number in range(5000))
    text = f"message M {{ repeated N n = 1; N o = 2; }} message N {{ {fields} }}"
    with pytest.raises(Misread, match="message of 5000 fields in another"):
        protobuf(text)(b"\0" + b"\n\0" * 20_000)
    assert len(protobuf(text)(b"\0\x12\0").content["o"]) == 5000
    alone = protobuf(f"message N {{ {fields} bytes long = 5001; }}")
    found = alone(b"\0\xca\xb8\2\xe0\xa7\x12" + bytes(300_000)).content
    assert len(found) == 5001 and len(found["long"]) == 400_000


@given(st.binary(max_size=60))
def test_any_bytes_are_decoded_or_refused(data):
    for read in READERS:
        try:
            json.dumps(read(data).content)
        except Misread as error:
            assert len(str(error)) <= 300


READERS = [
    avro(AVRO),
    avro(LIST),
    avro(["null", "double", {"type": "array", "items": "long"}]),
    reader_of(Registered("JSON", json.dumps({"type": "object"}))),
    reader_of(Registered("PROTOBUF", PROTO, (("place.proto", PLACE),))),
]


@pytest.mark.parametrize(
    "schema",
    [
        Registered("AVRO", '{"type": "record"}'),
        Registered("AVRO", "{"),
        Registered("THRIFT", ""),
        Registered("JSON", '{"type": 7}'),
    ],
)
def test_schemas_that_cannot_be_used_are_named(schema):
    with pytest.raises(PipelineError):
        reader_of(schema)


@pytest.mark.parametrize(
    ("field", "content"),
    [
        ("timestamp.Timestamp", b"\x08" + b"\xff" * 8 + b"\x7f"),
        ("duration.Duration", b"\x08" + b"\xff" * 8 + b"\x7f"),
        ("struct.Value", b"\x11" + struct.pack("<d", math.nan)),
        ("field_mask.FieldMask", b"\n\3a_B"),
        ("any.Any", b"\n\3foo"),
    ],
)
def test_a_protobuf_message_that_json_cannot_hold_is_refused(field, content):
    file, _, kind = field.partition(".")
    text = (
        f'syntax = "proto3"; import "google/protobuf/{file}.proto";'
        f" message M {{ google.protobuf.{kind} f = 1; int32 n = 2; }}"
    )
    read = reader_of(Registered("PROTOBUF", text))
    assert read(b"\0\x10\1").content == {"n": 1}
    with pytest.raises(Misread):
        read(b"\0\n" + bytes([len(content)]) + content)


def test_long_values_are_not_decoded(registry):
    schema_id = registry.register("long-value", {"schema": '"bytes"'})
    found = shown(framed(schema_id, bytes(200_000)), "auto", patient(registry.url))
    assert found["format"] == "hex" and "is not decoded" in found["note"]


def test_bytes_behind_the_last_field_are_refused():
    with pytest.raises(Misread, match="1 bytes follow"):
        avro("long")(b"\2\0")


# -- settings --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({URL: "registry:8081"}, "is not http://host:port"),
        ({URL: "file:///etc/passwd"}, "is not http://host:port"),
        ({URL: "http://h:port"}, "is not http://host:port"),
        ({URL: "http://alice:pw@h:1"}, "an address has no password"),
        (
            {"console.schema.registry.basic.auth.user.info": "alice"},
            "is not user:password",
        ),
        (
            {"console.schema.registry.ssl.truststore.location": "/no/such/file"},
            "'/no/such/file' is no file",
        ),
    ],
)
def test_a_wrong_setting_is_refused(tmp_path, settings, said):
    with pytest.raises(BrokerFailedError) as error:
        Broker(tmp_path / "data", {**CONSOLE, **settings}).start()
    assert said in str(error.value)


def test_no_client_changes_the_address_and_none_is_told_the_password(broker):
    login = "console.schema.registry.basic.auth.user.info"
    resource = ConfigResource(ConfigResourceType.BROKER, str(broker.config["node.id"]))
    with AdminClient(bootstrap_servers=broker.bootstrap) as client:
        for key in (URL, login):
            with pytest.raises(ApiError, match=key):
                client.alter_configs(resource, {key: "http://127.0.0.1:1"})
        found = {e.name: e for e in client.describe_configs(resource, [URL, login])}
    assert found[URL].is_read_only
    assert found[login].is_sensitive and found[login].value is None
