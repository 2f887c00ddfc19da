"""Messages in the console: what was produced, as it was, whatever it contains."""

from __future__ import annotations

import json

import msgpack
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpbroker import AdminClient, Consumer, Producer
from mpbroker.console import message_pages
from mpbroker.console.message_pages import (
    FORMATS,
    Batch,
    Look,
    records_from,
    row_of,
    shown,
)
from mpbroker.console.schema_values import Value
from mpbroker.console.schemas import Decoded
from mpbroker.protocol.records.batch_header import parse_batch_header, set_base_offset
from mpbroker.protocol.records.compression import Codec
from mpbroker.protocol.records.record_batch import RecordBatchBuilder
from tests.console.serving import browser, secured


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    with secured(tmp_path_factory.mktemp("messages")) as made:
        with AdminClient(bootstrap_servers=made.bootstrap) as client:
            client.create_topic("flights", partitions=4)
            client.create_topic("moved", partitions=1)
        yield made


@pytest.fixture
def admin(broker):
    return browser(broker, "admin")


@pytest.fixture
def producer(broker):
    with Producer(bootstrap_servers=broker.bootstrap) as made:
        yield made


def all_found(admin, topic, **asked):
    """Search as the page does, until the end; return rows and bytes."""
    rows, scanned, at = [], 0, 0
    while True:
        page = admin.get("search", topic=topic, offset=at, **asked).json
        rows += page["rows"]
        scanned += page["scanned_bytes"]
        assert page["next"] > at or page["next"] >= page["end"]
        at = page["next"]
        if at >= page["end"]:
            return rows, scanned


def test_messages_are_those_that_a_consumer_reads(broker, admin, producer):
    for number in range(120):
        producer.send(
            "flights",
            json.dumps({"number": number}).encode(),
            key=f"k{number}".encode(),
            headers=[("trace", b"t%d" % number), ("none", None)],
            partition=3,
        )
    producer.flush()
    with Consumer(bootstrap_servers=broker.bootstrap) as consumer:
        consumer.assign([("flights", 3)])
        consumer.seek(("flights", 3), 0)
        wanted = []
        while len(wanted) < 120:
            for records in consumer.poll(5000).values():
                wanted += records
    rows, at = [], 0
    while at < 120:
        page = admin.get(
            "messages", topic="flights", partition=3, offset=at, count=50
        ).json
        rows += page["rows"]
        at = page["next"]
    assert [
        (r["offset"], r["timestamp"], r["key"]["text"], json.loads(r["value"]["text"]))
        for r in rows
    ] == [(w.offset, w.timestamp, w.key.decode(), json.loads(w.value)) for w in wanted]
    assert rows[7]["value"]["format"] == "json"
    assert rows[7]["headers"][0][0] == "trace"
    assert rows[7]["headers"][0][1]["text"] == "t7"
    assert rows[7]["headers"][1][1]["format"] == "null"

    last = admin.get("messages", topic="flights", partition=3, count=5).json
    assert [row["offset"] for row in last["rows"]] == list(range(115, 120))
    asked = {"topic": "flights", "partition": 3, "time": wanted[60].timestamp}
    (first, *_) = admin.get("messages", **asked).json["rows"]
    assert first["timestamp"] == wanted[60].timestamp
    late = admin.get("messages", topic="flights", partition=3, time=2**50).json
    assert late["rows"] == [] and late["next"] == late["end"] == 120
    beyond = admin.get("messages", topic="flights", partition=3, offset=999)
    assert beyond.status == 400 and "OFFSET_OUT_OF_RANGE" in beyond.text
    nowhere = admin.get("messages", topic="flights", partition=99)
    assert "there is no such partition" in nowhere.text


def test_transactions_and_markers_are_shown_as_what_they_are(broker, admin):
    settings = {"bootstrap.servers": broker.bootstrap, "transactional.id": "t"}
    with Producer(settings) as producer:
        producer.init_transactions()
        for number, ends in enumerate((True, False, None)):
            producer.begin_transaction()
            producer.send("moved", b"%d" % number, partition=0)
            producer.flush()
            if ends is None:
                rows = admin.get("messages", topic="moved", offset=0).json["rows"]
                rows += admin.get("messages", topic="moved", offset=4).json["rows"]
                producer.abort_transaction()
            elif ends:
                producer.commit_transaction()
            else:
                producer.abort_transaction()
    told = {row["offset"]: row.get("control") or row["transaction"] for row in rows}
    assert told == {
        0: "committed",
        1: "commit marker",
        2: "aborted",
        3: "abort marker",
        4: "undecided",
    }
    assert all(row["producer_id"] >= 0 for row in rows)


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_a_search_finds_all_and_only_what_matches(broker, admin, codec):
    topic = f"searched-{codec}"
    with Producer(
        bootstrap_servers=broker.bootstrap, compression_type=codec
    ) as producer:
        for number in range(3000):
            value = b"needle" if number % 500 == 1 else b"x" * 1000
            producer.send(topic, value, key=b"key-%d" % (number % 7), partition=0)
        producer.send(topic, b"last", key=b"the needle", partition=0)
    found, scanned = all_found(
        admin, topic, partition=0, text="needle", **{"in": "any"}
    )
    assert [row["offset"] for row in found] == [*range(1, 3000, 500), 3000]
    assert scanned > (3_000_000 if codec == "none" else 0)
    found, _ = all_found(admin, topic, partition=0, text="needle", **{"in": "value"})
    assert len(found) == 6
    found, _ = all_found(admin, topic, partition=0, text="key-3", **{"in": "key"})
    assert [row["offset"] for row in found] == list(range(3, 3000, 7))
    found, _ = all_found(admin, topic, partition=0, text="key-", **{"in": "key"})
    assert found == []


def test_a_key_is_looked_for_where_clients_put_it(broker, admin, producer):
    producer.send("flights", b"v", key="schlüssel".encode())
    producer.flush()
    asked = {"partition": -1, "text": "schlüssel", "in": "key"}
    found, _ = all_found(admin, "flights", **asked)
    assert [row["value"]["text"] for row in found] == ["v"]


def test_messages_need_the_right_to_read(broker):
    one = browser(broker, "alice")
    for path in ("messages", "search"):
        answer = one.get(path, topic="flights", text="x", partition=0, offset=0)
        assert answer.status == 403 and "AUTHORIZATION_FAILED" in answer.text


def test_values_are_shown_as_what_they_look_like():
    packed = msgpack.packb({"a": [1, b"\xff"], 2: None})
    for data, form, text in (
        (b'{"a":1}', "json", '{\n  "a": 1\n}'),
        (b'{"a":', "text", '{"a":'),
        ("grüße\n".encode(), "text", "grüße\n"),
        (b"", "text", ""),
        (b"\x00\x01", "hex", "00 01"),
        (b"\xff\xfe", "hex", "ff fe"),
    ):
        assert (shown(data, "auto")["format"], shown(data, "auto")["text"]) == (
            form,
            text,
        )
    assert json.loads(shown(packed, "auto")["text"]) == {"a": [1, "0xff"], "2": None}
    assert shown(None, "hex")["format"] == "null"
    assert shown(b"<b>", "hex")["text"] == "3c 62 3e"
    assert shown(b"[" * 100_000, "json")["format"] == "hex"
    long = shown("ü".encode() * 100_000, "text")
    assert long["is_cut"] and long["bytes"] == 200_000 and set(long["text"]) == {"ü"}


@given(st.binary(max_size=300), st.sampled_from(FORMATS))
def test_any_bytes_can_be_shown_in_any_format(data, form):
    found = shown(data, form)
    assert found["format"] in FORMATS and found["bytes"] == len(data)
    orjson.dumps(found)


@pytest.mark.parametrize("depth", [1, 99, 300])
def test_no_more_of_a_deep_value_becomes_text_than_is_shown(depth, monkeypatch):
    """Indented by its depth, each item of a list is some hundred characters."""
    taken = []
    monkeypatch.setattr(
        message_pages, "_cut", lambda *args: taken.append(args[2]) or {}
    )
    items = [1] * 60_000
    ones = b",".join([b"1"] * len(items))
    shown(b"[" * depth + ones + b"]" * depth, "auto")
    shown(b"\x91" * (depth - 1) + msgpack.packb(items), "auto")
    shown(b"", "registry", lambda _: Decoded(1, Value("avro", {"x" * 1000: items})))
    for text in taken:
        assert 8 * 1024 < len(text) < 12 * 1024
    assert len(taken) == 3


@pytest.mark.parametrize("step", [1, 3], ids=["whole", "compacted"])
def test_few_of_the_records_before_an_offset_are_decoded(step):
    """A batch may have 9 million records, and a page shows 200."""
    builder = RecordBatchBuilder(codec=Codec.ZSTD)
    for number in range(5000):
        builder.append(0, None, b"%d" % number, offset_delta=number * step)
    data = memoryview(bytearray(builder.build()))
    set_base_offset(data, 7)
    batch = Batch(parse_batch_header(data), data, "", 0)
    for delta in (-7, 0, 1, 1023, 1024, 3333, 4999, 14_997, 15_000):
        offset = 7 + delta
        found = list(records_from(batch, offset))
        wanted = [b"%d" % n for n in range(5000) if n * step >= delta]
        assert [r.value for r in found if r.offset >= offset] == wanted
        assert len(found) - len(wanted) <= 1024


def with_headers(headers):
    """Return a batch of one record, and the record."""
    builder = RecordBatchBuilder(codec=Codec.ZSTD)
    builder.append(0, b"v", b"k", headers)
    data = memoryview(bytes(builder.build()))
    batch = Batch(parse_batch_header(data), data, "", 0)
    return batch, next(records_from(batch, 0))


def test_the_headers_of_a_row_have_a_bounded_size():
    """A header's name may have 16 million characters, in 600 bytes of a batch."""
    long, full = ("n" * 2**20, b"x"), ("\u00fc", b"y" * 100_000)
    row = row_of(*with_headers([("short", b"z"), long, *[full] * 60]), Look("auto"))
    names = [name for name, _ in row["headers"]]
    assert names[:3] == ["short", "n" * 200 + "\u2026 (1048576 characters)", "\u00fc"]
    assert row["headers"][2][1]["is_cut"]
    assert len(names) + row["more_headers"] == 62
    assert len(orjson.dumps(row)) < 50_000
    row = row_of(*with_headers([("n" * 200, b"x")] * 60), Look("auto"))
    assert row["headers"][49][0] == "n" * 200 and row["more_headers"] == 10


def test_half_a_character_in_json_can_be_shown():
    assert "?" in shown(b'["\\ud800"]', "auto")["text"]
