"""What a consumer reads next to what cannot be read, and after what went wrong."""

from __future__ import annotations

import os
import struct

import pytest

from mpbroker.client import cluster as cluster_module
from mpbroker.client.consumer import consumer_record
from mpbroker.client.consumer.consumer import Consumer
from mpbroker.client.consumer.fetcher import Fetcher
from mpbroker.client.errors import ClientError
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ProtocolError
from mpbroker.protocol.messages.metadata import MetadataRequest, MetadataResponse
from mpbroker.protocol.records.record_batch import compute_crc
from tests.client.fake_broker import FakeBroker
from tests.client.test_consumer import values
from tests.client.test_fetcher import answer_for, batch_of

T0, T1 = ("t", 0), ("t", 1)


@pytest.fixture
def consumer(fake_broker):
    with Consumer(
        bootstrap_servers=str(fake_broker.address), auto_offset_reset="earliest"
    ) as consumer:
        yield consumer


def unreadable(value: bytes) -> bytes:
    """Return a batch whose record is said to be longer than the batch; its CRC fits."""
    batch = bytearray(batch_of(value))
    batch[61] = 126
    batch[17:21] = struct.pack(">I", compute_crc(batch))
    return bytes(batch)


@pytest.mark.parametrize("at_once", [1, 500])
def test_what_cannot_be_decoded_is_never_passed_over(fake_broker, consumer, at_once):
    for batch in (batch_of(b"0", b"1"), unreadable(b"2"), batch_of(b"3")):
        fake_broker.append("t", 0, batch)
    consumer.assign([T0])
    found = []
    while len(found) < 2:
        for records in consumer.poll(100, max_records=at_once).values():
            found += [record.value for record in records]
    assert found == [b"0", b"1"]
    for _ in range(2):
        with pytest.raises(ProtocolError):
            values(consumer, 1)
        assert consumer.position(T0) == 2
    consumer.seek(T0, 3)
    assert values(consumer, 1) == [3]


def test_an_interrupt_while_records_are_decoded_loses_none(
    fake_broker, consumer, monkeypatch
):
    for number in range(4):
        fake_broker.append("t", 0, batch_of(b"%d" % number))
    consumer.assign([T0])
    decode, left = consumer_record.records_of, [1, 0]

    def interrupted(batch):
        if left and not left.pop():
            raise KeyboardInterrupt
        return decode(batch)

    monkeypatch.setattr(consumer_record, "records_of", interrupted)
    with pytest.raises(KeyboardInterrupt):
        consumer.poll(1000)
    assert values(consumer, 4) == [0, 1, 2, 3]


def test_an_interrupt_behind_an_answer_loses_none_of_it(
    fake_broker, consumer, monkeypatch
):
    fake_broker.append("t", 0, batch_of(b"0"))
    consumer.assign([T0])
    send, calls = Fetcher._send_all, []

    def interrupted(fetcher):
        calls.append(fetcher)
        if len(calls) == 2:  # the next request, sent before the answer is handed over
            raise KeyboardInterrupt
        send(fetcher)

    monkeypatch.setattr(Fetcher, "_send_all", interrupted)
    with pytest.raises(KeyboardInterrupt):
        consumer.poll(1000)
    assert values(consumer, 1) == [0]


def test_who_seeks_is_not_sent_elsewhere_by_an_older_answer(fake_broker):
    fake_broker.append("t", 0, batch_of(b"0"))
    fake_broker.append("t", 1, batch_of(b"1"))
    with Consumer(bootstrap_servers=str(fake_broker.address)) as consumer:
        consumer.assign([T0, T1])
        consumer.seek(T0, 0)
        consumer.seek(T1, 99)  # out of range, as its answer says behind T0's records
        assert values(consumer, 1) == [0]
        consumer.seek(T1, 0)
        assert values(consumer, 1) == [1]


def test_an_error_of_a_partition_does_not_cost_another_its_answer(
    fake_broker, consumer
):
    fake_broker.append("t", 1, batch_of(b"1"))
    refused = answer_for(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)

    def answer(request):
        usual = fake_broker._fetch(request)
        usual.responses[0].partitions[0] = refused(request).responses[0].partitions[0]
        return usual

    fake_broker.answer_with(ApiKey.FETCH, answer)
    consumer.assign([T0, T1])
    assert values(consumer, 1) == [1]
    (asked,) = fake_broker.seen(ApiKey.FETCH)
    assert [entry.partition for entry in asked.topics[0].partitions] == [0, 1]


@pytest.mark.parametrize("timeout_ms", [0, 1000])
def test_a_leader_that_is_none_for_a_while_is_no_error_of_a_poll(
    fake_broker, consumer, timeout_ms
):
    fake_broker.append("t", 0, batch_of(b"0"))
    consumer.assign([T0])
    fake_broker.answer_with(ApiKey.FETCH, answer_for(ErrorCode.NOT_LEADER_OR_FOLLOWER))
    assert bool(consumer.poll(timeout_ms)) == bool(timeout_ms)
    if not timeout_ms:
        assert values(consumer, 1) == [0]


def test_a_partition_without_a_leader_keeps_no_other_one_unread(fake_broker, consumer):
    for partition in range(3):
        fake_broker.append("t", partition, batch_of(b"%d" % partition))
    fake_broker.leaderless = {T1}
    consumer.assign([T0, T1, ("t", 2)])
    assert sorted(values(consumer, 2)) == [0, 2]
    fake_broker.leaderless = set()
    assert values(consumer, 1) == [1]


def test_a_request_may_be_sent_in_the_moment_in_which_a_session_is_to_be_renewed(
    monkeypatch,
):
    broker = FakeBroker({"t": 1}, passwords={"u": "p"}, session_lifetime_ms=10**9)
    consumer = Consumer(
        bootstrap_servers=str(broker.address),
        security_protocol="SASL_PLAINTEXT",
        sasl_mechanism="PLAIN",
        sasl_jaas_config=(
            "org.apache.kafka.common.security.plain.PlainLoginModule required"
            ' username="u" password="p";'
        ),
    )
    try:
        cluster = consumer._cluster
        asked = cluster.any_broker()
        now_ms = cluster_module.monotonic_ms()
        node = cluster.client._node(0)
        node.reauthenticate_at_ms = now_ms + 1.5

        def tick():
            nonlocal now_ms
            now_ms += 1.0
            return now_ms

        monkeypatch.setattr(cluster_module, "monotonic_ms", tick)
        response = asked.request(MetadataRequest(topics=[]), MetadataResponse)
        assert response.brokers
    finally:
        monkeypatch.undo()
        consumer.close()
        broker.close()


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_child_is_told_to_make_a_consumer_of_its_own(fake_broker, consumer):
    fake_broker.append("t", 0, batch_of(b"0"))
    consumer.assign([T0])
    assert values(consumer, 1) == [0]
    pid = os.fork()
    if not pid:
        code = 1
        try:
            consumer.poll(0)
        except ClientError as error:
            consumer.close()
            code = 42 if "after the fork" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 42
    fake_broker.append("t", 0, batch_of(b"1"))
    assert values(consumer, 1) == [1]  # over the same connection
