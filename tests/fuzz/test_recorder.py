"""Requests of real clients are recorded; the corpus has those of all of them."""

from __future__ import annotations

import re
from pathlib import Path

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.messages.metadata import MetadataRequest, MetadataRequestTopic
from tests.bench import wire
from tests.conftest import OtherBroker
from tests.fuzz.recorder import Recorder, condense, load, save
from tests.support.broker import Broker
from tests.support.children import wait_until
from tests.support.ports import reusable_port


def test_the_corpus_has_each_client_and_what_it_does() -> None:
    corpus = load()
    clients = {each.client for each in corpus.conversations}
    for name in ("librdkafka|rdkafka", "kafka-python", "aiokafka", "java", "mpbroker"):
        assert any(re.search(name, each) for each in clients), name
    frames = [frame for each in corpus.conversations for frame in each.frames]
    keys = {int.from_bytes(frame[:2], "big") for frame in frames}
    assert {
        *(ApiKey.PRODUCE, ApiKey.FETCH, ApiKey.JOIN_GROUP, ApiKey.SYNC_GROUP),
        *(ApiKey.CONSUMER_GROUP_HEARTBEAT, ApiKey.OFFSET_COMMIT, ApiKey.END_TXN),
        *(ApiKey.TXN_OFFSET_COMMIT, ApiKey.CREATE_TOPICS, ApiKey.CREATE_ACLS),
        *(ApiKey.SASL_HANDSHAKE, ApiKey.SASL_AUTHENTICATE),
    } <= keys


def test_what_passes_is_recorded_once_and_under_lasting_names(
    broker: Broker | OtherBroker, topic_name: str, tmp_path: Path
) -> None:
    port = reusable_port()
    recorder = Recorder("PLAINTEXT", port, int(broker.bootstrap.rpartition(":")[2]))
    with wire.Connection(("127.0.0.1", port)) as connection:
        connection.create_topic(topic_name)
        for _ in range(3):
            connection.ask(_metadata(MetadataRequestTopic(name=topic_name)))
        [topic_id] = recorder.topic_ids
        connection.ask(_metadata(MetadataRequestTopic(topic_id=topic_id, name=None)))
    recorder.close()
    wait_until(lambda: len(recorder.conversations[0].frames) == 5)
    corpus = condense([recorder])
    save(corpus, tmp_path / "corpus")
    assert load(tmp_path / "corpus") == corpus
    [(name, stand_in)] = corpus.topics.items()
    assert re.fullmatch(r"test-0{11}\d", name)
    [conversation] = corpus.conversations
    created, asked, by_id = conversation.frames
    assert name.encode() in created
    assert name.encode() in asked
    assert stand_in in by_id
    assert topic_name.encode() not in b"".join(conversation.frames)


def _metadata(topic: MetadataRequestTopic) -> bytes:
    body = MetadataRequest(topics=[topic]).encode(12)
    return wire.request((ApiKey.METADATA, 12), body)
