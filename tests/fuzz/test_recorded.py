"""Recorded requests are bent and sent; what breaks is found, and made small."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.headers import encode_request_header
from mpbroker.protocol.message import Message
from mpbroker.protocol.messages.alter_client_quotas import AlterClientQuotasRequest
from mpbroker.protocol.messages.delete_topics import (
    DeleteTopicsRequest,
    DeleteTopicState,
)
from mpbroker.protocol.messages.list_offsets import (
    ListOffsetsPartition,
    ListOffsetsRequest,
    ListOffsetsTopic,
)
from mpbroker.protocol.messages.metadata import MetadataRequest
from tests.fuzz.assault import Assault
from tests.fuzz.attack import BrokenPromiseError
from tests.fuzz.bent import Shot, Stream, framed, volley
from tests.fuzz.campaign import FuzzFailureError
from tests.fuzz.minimise import minimise
from tests.fuzz.recorded import CONFIG, RecordedCampaign, Target
from tests.fuzz.recorder import Conversation, Corpus, load
from tests.support.broker import Broker

MakeBroker = Callable[[dict[str, object]], Broker]

TOPIC: Final = "test-0123456789ab"


def recorded(message: Message, version: int) -> bytes:
    return encode_request_header(message.api_key, version, 1, "c") + message.encode(
        version
    )


def list_offsets(partition: int = 0) -> bytes:
    asked = ListOffsetsPartition(partition_index=partition, timestamp=-1)
    topic = ListOffsetsTopic(name=TOPIC, partitions=[asked])
    return recorded(ListOffsetsRequest(replica_id=-1, topics=[topic]), 7)


def corpus_of(*frames: bytes) -> Corpus:
    return Corpus(
        {TOPIC: b"id of this topic"}, [Conversation("c", "PLAINTEXT", [*frames])]
    )


@pytest.fixture
def make_brokers(tmp_path: Path) -> Iterator[Callable[..., MakeBroker]]:
    """Return what makes brokers, which run a module."""
    made: list[Broker] = []

    def make_brokers(module: str) -> MakeBroker:
        def make(config: dict[str, object]) -> Broker:
            command = [sys.executable, "-m", module]
            path = tmp_path / f"data-{len(made)}"
            made.append(Broker(path, config, command=command))
            return made[-1]

        return make

    yield make_brokers
    for broker in made:
        broker.close()


def test_bent_requests_of_real_clients_hurt_nothing(
    make_brokers: Callable[..., MakeBroker], tmp_path: Path
) -> None:
    campaign = RecordedCampaign(make_brokers("mpbroker"), load(), 3, tmp_path)
    assert campaign.run(60.0, count=100) == 100
    assert campaign.requests > 100


def test_recorded_requests_get_as_far_as_they_did(
    make_brokers: Callable[..., MakeBroker],
) -> None:
    """They name topics, members, producers and epochs that this broker has made up."""
    corpus = load()
    target = Target(make_brokers("mpbroker")(CONFIG), corpus, glance_s=0.5)
    for _, listener, frames in corpus.conversations:
        shots = [Shot(each, None) for each in frames]
        target.assault.play([Stream(listener, shots, waits=True)], reset=False)
    target.check()
    target.close()
    assert {
        *(ApiKey.PRODUCE, ApiKey.FETCH, ApiKey.JOIN_GROUP, ApiKey.SYNC_GROUP),
        *(ApiKey.HEARTBEAT, ApiKey.OFFSET_COMMIT, ApiKey.CONSUMER_GROUP_HEARTBEAT),
        *(ApiKey.ADD_PARTITIONS_TO_TXN, ApiKey.TXN_OFFSET_COMMIT, ApiKey.END_TXN),
        *(ApiKey.CREATE_ACLS, ApiKey.INCREMENTAL_ALTER_CONFIGS),
        *(ApiKey.GET_TELEMETRY_SUBSCRIPTIONS, ApiKey.PUSH_TELEMETRY),
    } <= target.assault.served


def test_a_request_that_ends_a_process_is_found_and_made_small(
    make_brokers: Callable[..., MakeBroker], tmp_path: Path
) -> None:
    corpus = corpus_of(list_offsets(), recorded(MetadataRequest(topics=None), 12))
    make = make_brokers("tests.fuzz.broken")
    with pytest.raises(
        FuzzFailureError,
        match=r"data-plane-kafka-request-handler.* has died\W+volley \d+ of seed 21",
    ):
        RecordedCampaign(make, corpus, 21, tmp_path).run(300.0)
    [path] = tmp_path.glob("bent-21-*.json")
    [smallest] = json.loads(path.read_text())["smallest"]
    assert bytes.fromhex(smallest)[4:6] == struct.pack(">h", ApiKey.LIST_OFFSETS)


def test_a_volley_depends_on_seed_and_number_alone() -> None:
    corpus = corpus_of(list_offsets(), list_offsets(1), list_offsets(2))
    first = [volley(corpus, 1, n) for n in range(50)]
    assert first == [volley(corpus, 1, n) for n in range(50)]
    assert first != [volley(corpus, 2, n) for n in range(50)]


def test_requests_are_bent_in_all_ways_and_some_are_not() -> None:
    plain = list_offsets()
    corpus = corpus_of(plain)
    made = [framed(corpus, Shot(plain, seed)) for seed in range(2000)]
    bodies = [each[4:] for each in made]
    keys = {each[:2] for each in bodies}
    assert len(keys) > 20  # of other APIs
    assert any(struct.unpack(">i", each[:4])[0] != len(each) - 4 for each in made)
    assert any(plain.startswith(each) and each != plain for each in bodies)
    assert any(each == list_offsets(-1) for each in bodies)
    assert framed(corpus, Shot(plain, None))[4:] == plain


def test_what_an_administrator_may_do_to_all_clients_is_not_sent() -> None:
    quotas = recorded(AlterClientQuotasRequest(entries=[], validate_only=False), 1)
    tried = recorded(AlterClientQuotasRequest(entries=[], validate_only=True), 1)
    topic = DeleteTopicState(name="__consumer_offsets")
    offsets = recorded(DeleteTopicsRequest(topics=[topic], timeout_ms=0), 6)
    corpus = corpus_of(quotas)
    assert framed(corpus, Shot(quotas, None)) == b""
    assert framed(corpus, Shot(offsets, None)) == b""
    assert framed(corpus, Shot(tried, None))[4:] == tried


def test_an_answer_to_another_request_is_found_out(liar: tuple[str, int]) -> None:
    host, port = liar
    corpus = corpus_of(list_offsets())
    stream = Stream("PLAINTEXT", [Shot(list_offsets(), None)], waits=True)
    assault = Assault({"PLAINTEXT": f"{host}:{port}"}, corpus)
    with pytest.raises(BrokenPromiseError, match="an answer to 2"):
        assault.play([stream], reset=False)
    assert [sent[4:] for sent in assault.sent] == [list_offsets()]


def test_a_failure_needs_few_of_the_requests_before_it() -> None:
    def stream(*payloads: bytes) -> Stream:
        return Stream("PLAINTEXT", [Shot(each, None) for each in payloads], waits=True)

    volleys = [[stream(b"%d" % n, b"x"), stream(b"y")] for n in range(40)]

    def fails(some: list[list[Stream]]) -> bool:
        sent = [shot.payload for each in some for s in each for shot in s.shots]
        return {b"17", b"33"} <= set(sent)

    assert minimise(volleys, fails) == [[stream(b"17")], [stream(b"33")]]
    assert minimise(volleys, lambda some: False) == []
