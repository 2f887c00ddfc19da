"""The request log knows the first topic of a Produce or a Fetch, in C and in Python."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpbroker.ipc.counters.request_metrics import first_topic, read_logged, topic_hash
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.headers import encode_request_header
from mpbroker.protocol.messages.fetch import FetchPartition, FetchRequest, FetchTopic
from mpbroker.protocol.messages.produce import (
    PartitionProduceData,
    ProduceRequest,
    TopicProduceData,
)
from tests.exporter.test_client_ids import rig
from tests.network.rig import frame

__all__ = ["rig"]
ID = bytes(range(16))


def produce(version: int, transactional_id: str | None = None) -> bytes:
    data = [PartitionProduceData(index=0, records=b"x" * 50)]
    topics = [
        TopicProduceData(name="flights", topic_id=ID, partition_data=data),
        TopicProduceData(name="other", topic_id=bytes(16), partition_data=data),
    ]
    message = ProduceRequest(
        transactional_id=transactional_id, acks=1, timeout_ms=9, topic_data=topics
    )
    header = encode_request_header(ApiKey.PRODUCE, version, 5, "größe")
    return header + message.encode(version)


def fetch(version: int, *, is_empty: bool = False) -> bytes:
    one = FetchPartition(partition=0, fetch_offset=5, partition_max_bytes=1)
    topics = [FetchTopic(topic="flights", topic_id=ID, partitions=[one])]
    message = FetchRequest(
        max_wait_ms=1,
        min_bytes=1,
        isolation_level=0,
        session_id=7,
        topics=[] if is_empty else topics,
        forgotten_topics_data=[],
        rack_id="",
    )
    header = encode_request_header(ApiKey.FETCH, version, 5, None)
    return header + message.encode(version)


REQUESTS = [
    *((produce(version), version) for version in range(3, 14)),
    (produce(3, "of a transaction"), 3),
    (produce(12, "of a transaction"), 12),
    *((fetch(version), version) for version in range(4, 19)),
]


def test_each_version_names_its_topic(rig):
    client = rig.connect()
    requests = [each for each, _ in REQUESTS]
    # Cut within the topic's name, without topics, and of another API.
    requests += [produce(9)[:30], fetch(12)[:20], fetch(7, is_empty=True), b"\0\3" * 20]
    for number, request in enumerate(requests):
        client.send(frame(request))
        rig.pump(lambda number=number: len(client.frames()) == number + 1)
    found, _, _ = read_logged(rig.memory.control.words, 0, 0)
    name, topic_id = topic_hash(b"flights"), topic_hash(ID)
    expected = [name if version < 13 else topic_id for _, version in REQUESTS]
    assert [each.topic for each in found] == [*expected, 0, 0, 0, 0]
    assert {each.error_code for each in found} == {None}
    assert {(each.principal, each.throttle_ms) for each in found} == {(0, 0)}


@given(st.binary(max_size=80), st.sampled_from([b"", b"\0\0\0\t", b"\0\1\0\r"]))
def test_any_bytes_have_a_topic_or_none(data, head):
    request = head + data
    assert 0 <= first_topic(request, len(request)) < 1 << 63


@pytest.mark.parametrize(("whole", "version"), REQUESTS)
def test_a_request_that_is_cut_off_has_its_topic_or_none(whole, version):
    name = topic_hash(b"flights" if version < 13 else ID)
    found = [first_topic(whole[:end], end) for end in range(len(whole) + 1)]
    assert set(found) == {0, name}
    assert found == sorted(found)
