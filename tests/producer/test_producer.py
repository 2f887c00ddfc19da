"""`Producer` with a real broker: ours, or the one at $MPBROKER_TEST_BOOTSTRAP."""

from __future__ import annotations

import gc
import json
import os
import re
import socket
import threading
import time
from itertools import pairwise
from typing import ClassVar

import pytest

from mpbroker.base.config_def import ConfigError
from mpbroker.client.partitioner import partition_for_key
from mpbroker.producer import (
    BufferExhaustedError,
    DeliveryTimeoutError,
    Producer,
    ProducerClosedError,
    ProducerForkedError,
    ProducerInterceptor,
    RecordTooLargeError,
    RefusedError,
    RoundRobinPartitioner,
    SerializationError,
)
from tests.producer.conftest import until_known
from tests.support.patience import LONGEST_S
from tests.support.ports import reusable_port

KAFKAS = "org.apache.kafka.clients"
CODECS = ["none", "gzip", "snappy", "lz4", "zstd"]


@pytest.fixture
def silent_port():
    """A port where connections are taken and nothing is ever said."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("codec", CODECS)
def test_records_arrive_as_they_were_sent(make_producer, new_topic, read, codec):
    topic = new_topic()
    now_ms = time.time_ns() // 1_000_000  # what is old goes, by the broker's retention
    producer = make_producer(compression_type=codec)
    headers = [("h", b"1"), ("h", None), ("\u00e9", b"")]
    futures = [
        producer.send(
            topic,
            b"v%d" % i * 20,
            b"k",
            headers=headers,
            timestamp_ms=now_ms + i,
        )
        for i in range(300)
    ]
    futures.append(producer.send(topic))
    assert [f.result(30).offset for f in futures] == list(range(301))
    records = read(topic)[0]
    assert [r.value for r in records] == [b"v%d" % i * 20 for i in range(300)] + [None]
    assert all(r.key == b"k" and list(r.headers) == headers for r in records[:300])
    assert [r.timestamp for r in records[:300]] == [now_ms + i for i in range(300)]


@pytest.mark.parametrize("acks", [0, 1, "all"])
@pytest.mark.parametrize("in_flight", [1, 5])
def test_every_level_of_acks_keeps_the_order(
    make_producer, new_topic, read, acks, in_flight
):
    topic = new_topic()
    producer = make_producer(
        acks=acks,
        max_in_flight_requests_per_connection=in_flight,
        batch_size=200,
        linger_ms=0,
    )
    for i in range(200):
        producer.send(topic, b"%d" % i)
    producer.flush(30)
    deadline = time.monotonic() + 90
    while len(read(topic)[0]) < 200 and time.monotonic() < deadline:
        time.sleep(0.01)  # acks=0: nobody says when it is there
    assert [r.value for r in read(topic)[0]] == [b"%d" % i for i in range(200)]


def test_keys_go_where_javas_murmur2_puts_them(make_producer, new_topic, read):
    topic = new_topic(7)
    producer = make_producer()
    keys = [b"", b"a", b"key-1", b"\xff" * 13, "\u00e9t\u00e9".encode()]
    futures = {key: producer.send(topic, b"x", key) for key in keys}
    for key, future in futures.items():
        assert future.result(30).partition == partition_for_key(key, 7)


def test_records_without_keys_fill_one_batch_after_another(make_producer, new_topic):
    topic = new_topic(4)
    producer = make_producer(batch_size=1000, linger_ms=100)
    futures = [producer.send(topic, b"x" * 80) for _ in range(400)]
    partitions = [f.result(30).partition for f in futures]
    changes = sum(a != b for a, b in pairwise(partitions))
    assert changes < 60  # ten to a batch
    assert set(partitions) == {0, 1, 2, 3}


def test_round_robin_gives_every_partition_its_share(make_producer, new_topic):
    topic = new_topic(3)
    producer = make_producer(partitioner=RoundRobinPartitioner())
    futures = [producer.send(topic, b"x", b"same key") for _ in range(9)]
    partitions = [f.result(30).partition for f in futures]
    assert sorted(partitions) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_a_partitioner_of_ones_own_chooses_or_leaves_it(make_producer, new_topic):
    topic = new_topic(3)

    class Mine:
        def partition(self, topic, key, value, partition_count, available):
            return {b"last": partition_count - 1, b"bad": 9}.get(key)

    producer = make_producer(partitioner=Mine())
    assert producer.send(topic, b"x", b"last").result(30).partition == 2
    assert producer.send(topic, b"x").result(30).partition in (0, 1, 2)
    assert "chose 9" in str(producer.send(topic, b"x", b"bad").exception(30))


def test_serializers_make_the_bytes(make_producer, new_topic, read):
    topic = new_topic()
    producer = make_producer(
        key_serializer=lambda topic, key: key.encode(),
        value_serializer=lambda topic, value: json.dumps(value).encode(),
    )
    producer.send(topic, {"a": 1}, "k").result(30)
    assert [(r.key, r.value) for r in read(topic)[0]] == [(b"k", b'{"a": 1}')]
    with pytest.raises(SerializationError, match="value of a record"):
        producer.send(topic, object(), "k")
    # As kafka-python's users have it.
    producer = make_producer(key_serializer=str.encode)
    with pytest.raises(SerializationError, match="called with the topic and the value"):
        producer.send(topic, b"", "k")


@pytest.mark.parametrize("name", [b"events", 5, "\ud800", "e" * 40_000])
def test_a_topic_no_message_can_name_spoils_no_other(make_producer, new_topic, name):
    producer = make_producer(max_block_ms=20_000)
    with pytest.raises((TypeError, RefusedError)):
        producer.send(name, b"value").result(LONGEST_S)
    with pytest.raises((TypeError, RefusedError)):
        producer.partitions_for(name)
    assert producer.send(new_topic(), b"value").result(LONGEST_S).offset == 0


def test_what_is_not_bytes_needs_a_serializer(make_producer, new_topic):
    producer, topic = make_producer(), new_topic()
    with pytest.raises(SerializationError, match="value_serializer"):
        producer.send(topic, "text")
    with pytest.raises(SerializationError, match="key_serializer"):
        producer.send(topic, b"", 7)
    with pytest.raises(SerializationError, match="headers"):
        producer.send(topic, b"", headers=[("a",)])
    with pytest.raises(SerializationError, match=r"header .* encode it$"):
        producer.send(topic, b"", headers=[("a", "text")])
    for timestamp in (-1, 1 << 63, 1.5, "now"):
        with pytest.raises(SerializationError, match="timestamp_ms"):
            producer.send(topic, b"", timestamp_ms=timestamp)
    value = bytearray(b"abc")
    future = producer.send(topic, value)
    value[:] = b"xyz"  # sent as it was
    assert future.result(30).offset == 0


def test_interceptors_see_every_record_and_may_change_or_break(
    make_producer, new_topic, read, caplog
):
    topic = new_topic()

    class Shouting(ProducerInterceptor):
        def __init__(self):
            self.acknowledged = []

        def on_send(self, record):
            return record._replace(value=record.value.upper())

        def on_acknowledgement(self, metadata, error):
            self.acknowledged.append((metadata, error))

        def close(self):
            self.acknowledged.append("closed")

    class Broken(ProducerInterceptor):
        def on_send(self, record):
            raise RuntimeError("broken")

        def on_acknowledgement(self, metadata, error):
            raise RuntimeError("broken")

        def close(self):
            raise RuntimeError("broken")

    shouting = Shouting()
    producer = make_producer(interceptors=[Broken(), shouting])
    assert producer.send(topic, b"hello").result(30).offset == 0
    assert [r.value for r in read(topic)[0]] == [b"HELLO"]
    assert shouting.acknowledged[0][0].offset == 0
    assert "Broken.on_send" in caplog.text
    refused = producer.send(topic, b"x" * 2_000_000, partition=0)
    assert shouting.acknowledged[1] == ((topic, 0, -1, -1), refused.exception())
    late = producer.send(topic, b"late")
    for _ in range(2):
        producer.close()
    assert shouting.acknowledged[2:] == [(late.result(), None), "closed"]
    assert "Broken.close" in caplog.text


def test_interceptors_are_told_the_partition_of_a_record_that_the_broker_refuses(
    make_producer, new_topic
):
    topic = new_topic(max_message_bytes="2000")
    acknowledged, told = [], []

    class Interceptor(ProducerInterceptor):
        def on_acknowledgement(self, metadata, error):
            acknowledged.append((metadata, error))

    producer = make_producer(interceptors=[Interceptor()])
    future = producer.send(
        topic, os.urandom(5000), callback=lambda m, e: told.append((m, e))
    )
    error = future.exception(30)
    assert acknowledged == [((topic, 0, -1, -1), error)]
    assert told == [(None, error)]  # as without interceptors


def test_a_producer_without_client_id_makes_up_kafkas_name(bootstrap):
    with Producer(bootstrap_servers=bootstrap) as producer:
        first = thread_of(producer)
    with Producer(bootstrap_servers=bootstrap) as producer:
        second = thread_of(producer)
    number = int(first.removeprefix("kafka-producer-network-thread | producer-"))
    assert second == f"kafka-producer-network-thread | producer-{number + 1}"
    given = {"bootstrap.servers": bootstrap, "transactional.id": "mover"}
    with Producer(given) as producer:
        assert thread_of(producer).endswith("| producer-mover")
    with Producer(given, client_id="mine") as producer:
        assert thread_of(producer).endswith("| mine")


def thread_of(producer):
    return producer._thread.name


def test_callbacks_tell_success_and_failure(make_producer, new_topic):
    topic = new_topic(max_message_bytes="2000")
    producer = make_producer()
    told = []
    producer.send(topic, b"x", callback=lambda m, e: told.append((m, e))).result(30)
    future = producer.send(
        topic, os.urandom(5000), callback=lambda m, e: told.append((m, e))
    )
    assert isinstance(future.exception(30), RecordTooLargeError)
    assert told[0][0].offset == 0 and told[0][1] is None
    assert told[1] == (None, future.exception())


def test_done_callbacks_are_called_even_when_added_late(make_producer, new_topic):
    producer = make_producer()
    future = producer.send(new_topic(), b"x")
    called = []
    future.add_done_callback(called.append)
    future.result(30)
    future.add_done_callback(called.append)
    assert called == [future, future]


def test_a_callback_may_ask_its_record_and_wait_for_no_other(make_producer, new_topic):
    producer, topic = make_producer(linger_ms=50), new_topic()
    told = []

    def ask(future):
        told.append(future.result().offset)
        other = producer.send(topic, b"y")
        with pytest.raises(ProducerClosedError, match="wait for itself"):
            other.result()
        told.append(other)

    future = producer.send(topic, b"x")
    future.add_done_callback(ask)
    assert future.result(LONGEST_S).offset == told[0] == 0
    assert told[1].result(LONGEST_S).offset == 1


def test_a_record_above_a_limit_fails_its_future_and_names_the_limit(
    make_producer, new_topic
):
    topic = new_topic()
    producer = make_producer(max_request_size=1000)
    error = producer.send(topic, b"x" * 1001).exception(30)
    assert isinstance(error, RecordTooLargeError)
    assert "max.request.size=1000" in str(error)
    small = make_producer(buffer_memory=500, batch_size=100)
    assert "buffer.memory=500" in str(small.send(topic, b"x" * 501).exception(30))


def test_a_batch_above_the_topics_limit_is_split_and_arrives(
    make_producer, new_topic, read
):
    topic = new_topic(max_message_bytes="3000")
    producer = make_producer(linger_ms=200, batch_size=16_000)
    futures = [producer.send(topic, b"%04d" % i * 25) for i in range(100)]
    assert [f.result(30).offset for f in futures] == list(range(100))
    assert [r.value for r in read(topic)[0]] == [b"%04d" % i * 25 for i in range(100)]
    metrics = producer.metrics()["producer-metrics"]
    assert metrics["batch-split-total"] >= 1


def test_a_partition_that_is_not_there_is_waited_for_and_then_refused(
    make_producer, new_topic
):
    topic = new_topic(2)
    producer = make_producer(max_block_ms=300)
    until_known(producer, topic)
    error = producer.send(topic, b"x", partition=5).exception(30)
    assert isinstance(error, DeliveryTimeoutError)
    assert "no partition 5" in str(error)
    assert isinstance(
        producer.send(topic, b"x", partition=-1).exception(30), RefusedError
    )


def test_a_broker_that_says_nothing_is_named_when_metadata_does_not_come(silent_port):
    with Producer(
        bootstrap_servers=silent_port,
        max_block_ms=2000,
        socket_connection_setup_timeout_ms=100,
        socket_connection_setup_timeout_max_ms=100,
    ) as producer:
        error = producer.send("t", b"x").exception(30)
    assert isinstance(error, DeliveryTimeoutError)
    assert silent_port in str(error)


def test_a_broker_that_is_not_there_is_named_too():
    port = reusable_port()
    with Producer(bootstrap_servers=f"127.0.0.1:{port}", max_block_ms=2000) as producer:
        error = producer.send("t", b"x").exception(30)
    assert "connection refused" in str(error)


def test_memory_that_does_not_come_free_fails_the_record_after_max_block_ms(
    make_producer, new_topic
):
    topic = new_topic()
    producer = make_producer(buffer_memory=1000, batch_size=1000, max_block_ms=400)
    until_known(producer, topic)
    producer._pool.grant(1000).take(0)
    error = producer.send(topic, b"x").exception(30)
    assert isinstance(error, BufferExhaustedError)
    assert "buffer.memory=1000" in str(error)
    producer._pool.free(1000)
    assert producer.send(topic, b"x").result(30).offset == 0
    assert producer.metrics()["producer-metrics"]["buffer-exhausted-total"] == 1


def test_little_memory_only_makes_senders_wait(make_producer, new_topic, read):
    topic = new_topic()
    producer = make_producer(buffer_memory=3000, batch_size=1000, linger_ms=60_000)
    futures = [producer.send(topic, b"%d" % i * 50) for i in range(300)]
    producer.flush(30)
    assert [f.result(0).offset for f in futures] == list(range(300))
    assert producer._pool.available_bytes == 3000


def test_flush_waits_for_all_sent_before_whatever_lingers(make_producer, new_topic):
    topic = new_topic(3)
    producer = make_producer(linger_ms=60_000)
    futures = [producer.send(topic, b"x", partition=i % 3) for i in range(9)]
    assert not any(f.done() for f in futures)
    with pytest.raises(TimeoutError):
        futures[0].result(0)
    producer.flush(30)
    assert all(f.done() for f in futures)


def test_closing_sends_everything_and_may_be_repeated(make_producer, new_topic, read):
    topic = new_topic()
    producer = make_producer(linger_ms=60_000)
    futures = [producer.send(topic, b"x") for _ in range(50)]
    producer.close()
    producer.close()
    assert [f.result(0).offset for f in futures] == list(range(50))
    with pytest.raises(ProducerClosedError):
        producer.send(topic, b"late")
    with pytest.raises(ProducerClosedError):
        producer.partitions_for(topic + "-unknown")


def test_closing_with_a_timeout_fails_what_cannot_be_sent(silent_port, bootstrap):
    producer = Producer(bootstrap_servers=silent_port, max_block_ms=60_000)
    failed = []
    waiting = threading.Thread(
        target=lambda: failed.append(_error_of(producer, "t")), daemon=True
    )
    waiting.start()
    producer.close(0.05)
    waiting.join(30)
    assert isinstance(failed[0], ProducerClosedError)


def _error_of(producer, topic):
    try:
        return producer.send(topic, b"x").exception(30)
    except ProducerClosedError as error:
        return error


def test_closing_in_a_callback_does_not_wait_for_itself(make_producer, new_topic):
    topic = new_topic()
    producer = make_producer()
    refused = []

    def close(metadata, error):
        try:
            producer.flush()
        except ProducerClosedError as caught:
            refused.append(caught)
        producer.close()

    producer.send(topic, b"x", callback=close).result(30)
    producer._thread.join(30)
    assert not producer._thread.is_alive()
    assert "wait for itself" in str(refused[0])


def test_an_error_in_the_with_block_does_not_wait_for_records(silent_port):
    with pytest.raises(KeyError), Producer(bootstrap_servers=silent_port):
        raise KeyError("the user's own")


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_child_is_told_to_make_its_own(make_producer, new_topic, read):
    topic = new_topic()
    producer = make_producer()
    producer.send(topic, b"parent").result(30)
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        text = b"nothing"
        try:
            try:
                producer.send(topic, b"child")
            except ProducerForkedError as error:
                text = str(error).encode()
            producer.close()  # returns at once, and leaves the parent's socket alone
            os.write(writer, text)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    os.close(writer)
    with open(reader, "rb") as answer:
        assert b"make a producer here after the fork" in answer.read()
    producer.send(topic, b"parent again").result(30)
    assert [r.value for r in read(topic)[0]] == [b"parent", b"parent again"]


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_what_was_not_acknowledged_before_a_fork_is_not_waited_for_in_the_child(
    make_producer, new_topic
):
    topic = new_topic()
    producer = make_producer(linger_ms=60_000)
    producer.partitions_for(topic)
    future = producer.send(topic, b"parent's")
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.write(writer, repr(future.exception(60)).encode())
            producer.flush()
        except ProducerForkedError:
            os.write(writer, b" and flush() too")
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    os.close(writer)
    with open(reader, "rb") as answer:
        told = answer.read()
    assert b"ProducerForkedError" in told
    assert told.endswith(b" and flush() too")
    producer.flush(90)
    assert future.exception(0) is None


def test_many_threads_may_send(make_producer, new_topic, read):
    topic = new_topic(3)
    producer = make_producer(batch_size=500)

    def run(name):
        for i in range(300):
            producer.send(topic, b"%d:%d" % (name, i), b"%d" % name)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    producer.flush(30)
    by_thread: dict[bytes, list[int]] = {}
    for records in read(topic).values():
        for record in records:
            name, number = record.value.split(b":")
            by_thread.setdefault(name, []).append(int(number))
    assert by_thread == {b"%d" % n: list(range(300)) for n in range(5)}


# Of the documentation of Apache Kafka.
METRICS = (
    "batch-size-avg batch-size-max batch-split-rate batch-split-total"
    " buffer-available-bytes buffer-exhausted-rate buffer-exhausted-total"
    " buffer-total-bytes bufferpool-wait-ratio bufferpool-wait-time-ns-total byte-rate"
    " byte-total compression-rate-avg connection-close-rate connection-close-total"
    " connection-count connection-creation-rate connection-creation-total"
    " failed-authentication-total flush-time-ns-total incoming-byte-rate"
    " incoming-byte-total io-ratio io-time-ns-total io-wait-ratio io-wait-time-ns-total"
    " metadata-age metadata-wait-time-ns-total network-io-rate network-io-total"
    " outgoing-byte-rate outgoing-byte-total produce-throttle-time-avg"
    " produce-throttle-time-max record-error-rate record-error-total"
    " record-queue-time-avg record-queue-time-max record-retry-rate record-retry-total"
    " record-send-rate record-send-total record-size-avg record-size-max"
    " records-per-request-avg request-latency-avg request-latency-max request-rate"
    " request-total requests-in-flight response-rate response-total select-rate"
    " select-total txn-abort-time-ns-total txn-begin-time-ns-total"
    " txn-commit-time-ns-total txn-init-time-ns-total txn-send-offsets-time-ns-total"
    " waiting-threads"
)


def test_kafkas_metrics_are_there(make_producer, new_topic):
    topic = new_topic()
    producer = make_producer()
    for _ in range(10):
        producer.send(topic, b"x" * 100).result(30)
    groups = producer.metrics()
    own = groups["producer-metrics"]
    assert set(METRICS.split()) <= own.keys()
    assert own["io-wait-time-ns-total"] > 0
    assert own["select-total"] > 0 < own["network-io-total"]
    assert own["record-send-total"] == 10
    assert own["record-size-avg"] > 100
    assert own["request-latency-avg"] > 0
    assert own["buffer-total-bytes"] == own["buffer-available-bytes"] == 33_554_432
    assert own["flush-time-ns-total"] == 0
    assert own["connection-creation-total"] >= 1
    assert own["request-total"] >= own["response-total"] >= 10
    assert own["outgoing-byte-total"] > 10 * 100
    assert own["incoming-byte-total"] > 10
    assert own["bufferpool-wait-ratio"] == own["failed-authentication-total"] == 0
    assert groups[f"producer-topic-metrics.{topic}"]["record-send-total"] == 10
    assert any(name.startswith("producer-node-metrics.node-") for name in groups)


def test_a_producer_leaves_nothing_open(bootstrap, new_topic):
    topic = new_topic()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with Producer(bootstrap_servers=bootstrap) as producer:
            producer.send(topic, b"x").result(30)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before
    assert not [t for t in threading.enumerate() if "producer" in t.name]


# -- settings --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "bootstrap.servers is not set"),
        ({"bootstrap_server": "b:1"}, "did you mean bootstrap.servers"),
        ({"bootstrap.servers": "b:1", "linger_sm": 5}, "linger"),
        ({"bootstrap.servers": "b:1", "linger.ms": "soon"}, "linger.ms=soon"),
        ({"bootstrap.servers": "b:1", "linger.ms": 1, "linger_ms": 1}, "given twice"),
        ({"bootstrap.servers": "b:1", "acks": 2}, "acks=2"),
        ({"bootstrap.servers": "b:1", "compression.type": "lzo"}, "lzo"),
        (
            {"bootstrap.servers": "b:1", "delivery.timeout.ms": 10},
            "linger.ms + request.timeout.ms = 30005",
        ),
        (
            {"bootstrap.servers": "b:1", "acks": 1, "enable.idempotence": True},
            "acks=1",
        ),
        (
            {
                "bootstrap.servers": "b:1",
                "max.in.flight.requests.per.connection": 6,
            },
            "may have 5",
        ),
        (
            {
                "bootstrap.servers": "b:1",
                "transactional.id": "x",
                "enable.idempotence": False,
            },
            "transactional.id needs",
        ),
        ({"ssl.truststore.password": "x"}, "ssl.truststore.location"),
        ({"ssl.truststore.type": "JKS"}, "ssl.truststore.location"),
        ({"ssl_keystore_type": "PKCS12"}, "ssl.key.password"),
        ({"ssl.keystore.password": "x"}, "ssl.key.password"),
        ({"sasl.login.callback.handler.class": "x"}, "sasl.username"),
        ({"metric.reporters": "x"}, "metrics()"),
        ({"key.serializer": "com.example.Serializer"}, "StringSerializer"),
        ({"value.serializer": "json:no_such"}, "MODULE:FUNCTION"),
        ({"partitioner.class": "com.example.Mine"}, "MODULE:CLASS"),
        ({"partitioner.class": "json:JSONDecoder"}, "no method partition()"),
        (
            {"partitioner.class": f"{KAFKAS}.producer.UniformStickyPartitioner"},
            "leave it out",
        ),
        ({"interceptor.classes": "com.example.Mine"}, "MODULE:CLASS"),
        ({"interceptor.classes": "json:JSONDecoder"}, "no ProducerInterceptor"),
    ],
)
def test_settings_that_cannot_be_used_are_refused_with_the_fix(settings, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        Producer(settings)


class ToPartitionTwo:
    def partition(self, topic, key, value, partition_count, available):
        return 2


class Counting(ProducerInterceptor):
    seen: ClassVar[list[str]] = []

    def on_send(self, record):
        self.seen.append(record.topic)
        return record


def test_code_may_be_named_by_kafkas_settings(make_producer, new_topic, read):
    topic = new_topic(3)
    producer = make_producer(
        config={
            "key.serializer": f"{KAFKAS.replace('.clients', '.common')}"
            ".serialization.IntegerSerializer",
            "value.serializer": "StringSerializer",
            "partitioner.class": f"{__name__}:ToPartitionTwo",
            "interceptor.classes": f"{__name__}:Counting",
        }
    )
    producer.send(topic, "a", 258).result(30)
    producer.send(topic, None, None).result(30)
    records = read(topic)[2]
    assert [(r.key, r.value) for r in records] == [
        (b"\0\0\1\2", b"a"),
        (None, None),
    ]
    assert Counting.seen.count(topic) == 2


def test_kafkas_round_robin_partitioner_is_ours(make_producer, new_topic, read):
    topic = new_topic(2)
    producer = make_producer(
        partitioner_class=f"{KAFKAS}.producer.RoundRobinPartitioner"
    )
    for _ in range(4):
        producer.send(topic, b"x", b"same").result(30)
    assert [len(records) for records in read(topic).values()] == [2, 2]


def test_code_given_twice_is_refused(bootstrap):
    with pytest.raises(ConfigError, match=r"value\.serializer is given twice"):
        Producer(
            {"bootstrap.servers": bootstrap, "value.serializer": "StringSerializer"},
            value_serializer=lambda topic, value: value,
        )
