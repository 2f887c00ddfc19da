"""kcat, as Debian packages it: librdkafka of an older day."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from tests.compat.adapters import ADAPTERS
from tests.compat.adapters.adapter import CODECS, Message
from tests.compat.records import T0, as_messages, some_records
from tests.support.patience import LONGEST_S

MakeTopic = Callable[..., str]

pytestmark = pytest.mark.skipif(
    shutil.which("kcat") is None,
    reason="no kcat on PATH (Debian: apt-get install kcat)",
)


def kcat(bootstrap: str, *arguments: str, stdin: bytes = b"") -> bytes:
    """Run kcat; return what it printed. Fails the test if it did not exit with 0."""
    done = subprocess.run(
        ["kcat", "-q", "-b", bootstrap, *arguments],
        input=stdin,
        capture_output=True,
        timeout=LONGEST_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


def kcat_json(bootstrap: str, *arguments: str) -> list[dict[str, Any]]:
    lines = kcat(bootstrap, "-J", *arguments).splitlines()
    return [json.loads(line) for line in lines]


def test_metadata_is_listed(bootstrap: str, make_topic: MakeTopic) -> None:
    topic = make_topic(3)
    [listing] = kcat_json(bootstrap, "-L", "-t", topic)
    [broker] = listing["brokers"]
    assert broker["name"] == bootstrap
    assert listing["controllerid"] == broker["id"]
    leaders = {
        row["partition"]: row["leader"] for row in listing["topics"][0]["partitions"]
    }
    assert leaders == dict.fromkeys(range(3), broker["id"])


@pytest.mark.parametrize("codec", CODECS)
def test_records_are_published_and_read_back(
    bootstrap: str, make_topic: MakeTopic, codec: str
) -> None:
    topic = make_topic()
    lines = [f"key{i}:value {i}" for i in range(100)]
    produce = ("-P", "-t", topic, "-p", "0", "-K:", "-H", "origin=kcat", "-z", codec)
    kcat(bootstrap, *produce, stdin="\n".join(lines).encode() + b"\n")
    records = kcat_json(bootstrap, "-C", "-t", topic, "-e", "-o", "beginning")
    assert [(r["offset"], r["key"], r["payload"]) for r in records] == [
        (i, f"key{i}", f"value {i}") for i in range(100)
    ]
    assert all(r["headers"] == ["origin", "kcat"] for r in records)
    assert all(r["tstype"] == "create" for r in records)


def test_an_idempotent_kcat_publishes(bootstrap: str, make_topic: MakeTopic) -> None:
    topic = make_topic()
    options = ("-X", "enable.idempotence=true", "-X", "acks=all")
    kcat(bootstrap, "-P", "-t", topic, "-p", "0", *options, stdin=b"a\nb\n")
    assert kcat(bootstrap, "-C", "-t", topic, "-e") == b"a\nb\n"


def test_reading_starts_at_an_offset_before_the_end_or_at_a_time(
    bootstrap: str, make_topic: MakeTopic
) -> None:
    topic = make_topic()
    with ADAPTERS["confluent-kafka"](bootstrap) as client:
        client.produce(topic, some_records(20))

    def first_read(start: str) -> int:
        read = ("-C", "-t", topic, "-p", "0", "-c", "1", "-e", "-f", "%o")
        return int(kcat(bootstrap, *read, "-o", start))

    assert first_read("7") == 7
    assert first_read("-3") == 17
    assert first_read(f"s@{T0 + 12}") == 12


def test_offsets_are_queried_by_time(bootstrap: str, make_topic: MakeTopic) -> None:
    topic = make_topic()
    with ADAPTERS["confluent-kafka"](bootstrap) as client:
        client.produce(topic, some_records(20))
    for timestamp, offset in ((T0 + 5, 5), (-2, 0), (-1, 20)):
        answer = kcat(bootstrap, "-Q", "-t", f"{topic}:0:{timestamp}").decode()
        assert answer.strip() == f"{topic} [0] offset {offset}"


def test_the_other_clients_read_what_kcat_published(
    bootstrap: str, make_topic: MakeTopic
) -> None:
    topic = make_topic()
    produce = ("-P", "-t", topic, "-p", "0", "-K:", "-Z", "-H", "h=1", "-z", "snappy")
    kcat(bootstrap, *produce, stdin="ключ:значение\n:\n".encode())
    for adapter in ADAPTERS.values():
        with adapter(bootstrap) as client:
            messages = [
                message._replace(timestamp_ms=0)
                for message in client.consume(topic, 0, 0, 2)
            ]
            assert messages == [
                Message(0, "ключ".encode(), "значение".encode(), (("h", b"1"),), 0),
                Message(1, None, None, (("h", b"1"),), 0),  # -Z: nothing is null
            ]


def test_kcat_reads_what_another_client_published(
    bootstrap: str, make_topic: MakeTopic
) -> None:
    topic = make_topic()
    records = some_records(40)
    with ADAPTERS["kafka-python"](bootstrap) as client:
        client.produce(topic, records, codec="lz4")
    # Lengths first, -1 for null: keys and values may hold any separator.
    read = ("-C", "-t", topic, "-e", "-f", r"%o|%T|%K|%k|%S|%s\n")
    lines = kcat(bootstrap, *read).decode().splitlines()
    for line, message in zip(lines, as_messages(records), strict=True):
        offset, timestamp, key_length, key, length, value = line.split("|")
        assert (int(offset), int(timestamp)) == (message.offset, message.timestamp_ms)
        assert int(key_length) == (-1 if message.key is None else len(message.key))
        assert int(length) == (-1 if message.value is None else len(message.value))
        # Without -Z kcat writes nothing for null; the lengths tell it from empty.
        assert key == (message.key or b"").decode()
        assert value == (message.value or b"").decode()
