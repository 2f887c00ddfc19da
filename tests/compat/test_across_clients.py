"""What one client published, every other reads byte for byte."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.compat.adapters import ADAPTERS, Outgoing
from tests.compat.adapters.adapter import CODECS
from tests.compat.records import T0, as_messages, some_records

MakeTopic = Callable[..., str]


@pytest.mark.parametrize("producer", sorted(ADAPTERS))
def test_all_clients_read_what_one_published_with_every_codec(
    bootstrap: str, make_topic: MakeTopic, producer: str
) -> None:
    topic = make_topic()
    records = []
    with ADAPTERS[producer](bootstrap) as client:
        for codec in CODECS:
            client.produce(topic, some_records(30), codec=codec)
            records += some_records(30)
    expected = as_messages(records)
    for adapter in ADAPTERS.values():
        with adapter(bootstrap) as client:
            assert client.consume(topic, 0, 0, len(expected)) == expected, client.name
            # The last codec's batches alone, and from inside one.
            assert client.consume(topic, 0, 133, 17) == expected[133:], client.name


@pytest.mark.parametrize("codec", CODECS)
def test_null_headers_and_records_of_nothing_are_kept(
    bootstrap: str, make_topic: MakeTopic, codec: str
) -> None:
    topic = make_topic()
    records = [
        Outgoing(None, None, (), T0),
        Outgoing(None, None, (("only a name", None), ("", b"")), T0),
        Outgoing(b"", b"", (("twice", None), ("twice", b"2")), T0),
    ]
    with ADAPTERS["confluent-kafka"](bootstrap) as client:
        client.produce(topic, records, codec=codec)
    for adapter in ADAPTERS.values():
        with adapter(bootstrap) as client:
            assert client.consume(topic, 0, 0, 3) == as_messages(records), client.name


@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_a_topic_with_a_codec_of_its_own_recompresses_and_changes_nothing_else(
    bootstrap: str, make_topic: MakeTopic, codec: str
) -> None:
    topic = make_topic(compression_type="uncompressed" if codec == "none" else codec)
    records = []
    with ADAPTERS["confluent-kafka"](bootstrap) as client:
        for sent_with in CODECS:
            client.produce(topic, some_records(20), codec=sent_with)
            records += some_records(20)
    for adapter in ADAPTERS.values():
        with adapter(bootstrap) as client:
            assert client.consume(topic, 0, 0, 100) == as_messages(records), client.name
