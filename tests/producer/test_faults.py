"""Every record once and in order, or a future that says why not, whatever breaks."""

from __future__ import annotations

import threading
import time

import pytest

from mpbroker.producer import NetworkError, Producer
from tests.producer.conftest import read_all
from tests.producer.cutting_proxy import CuttingProxy
from tests.support.children import wait_until
from tests.support.ports import reusable_port


@pytest.fixture
def proxied(make_broker):
    """A broker that tells clients to come through a proxy, and that proxy."""
    port = reusable_port()
    proxy = CuttingProxy(port)
    broker = make_broker(
        {
            "listeners": f"PLAINTEXT://127.0.0.1:{port}",
            "advertised.listeners": f"PLAINTEXT://127.0.0.1:{proxy.port}",
            "num.partitions": "2",
        }
    )
    yield broker, proxy
    proxy.close()


def settings_of(proxy, **more):
    return {
        "bootstrap_servers": f"127.0.0.1:{proxy.port}",
        "reconnect_backoff_ms": 1,
        "reconnect_backoff_max_ms": 5,
        "retry_backoff_ms": 1,
        "retry_backoff_max_ms": 5,
        **more,
    }


def numbers(records):
    return [int(record.value) for record in records]


def test_a_connection_cut_at_any_byte_of_an_answer_loses_and_doubles_nothing(proxied):
    broker, proxy = proxied
    settings = settings_of(proxy, linger_ms=0, max_block_ms=30_000)
    count = 0
    # Of a connection's answers: versions (some 500 bytes), metadata, id, Produce.
    for cut in range(1, 600, 8):
        proxy.limits = [None, cut]  # the bootstrap connection, then the node's
        with Producer(settings) as producer:
            assert producer.send("t", b"%d" % count, partition=0).result(30)
        count += 1
    assert proxy.cuts > 20
    assert numbers(read_all(broker.bootstrap, "t")[0]) == list(range(count))


@pytest.mark.parametrize("codec", ["none", "lz4"])
def test_connections_that_keep_breaking_lose_and_double_nothing(proxied, codec):
    broker, proxy = proxied
    options = settings_of(proxy, linger_ms=0, batch_size=200, compression_type=codec)
    proxy.average = 800  # an answer about versions alone has some 500 bytes
    with Producer(options) as producer:
        futures = [producer.send("t", b"%d" % i, partition=i % 2) for i in range(1500)]
        producer.flush(50)
        offsets = [[f.result(0).offset for f in futures[p::2]] for p in (0, 1)]
    assert proxy.cuts > 2
    proxy.average = 0
    records = read_all(broker.bootstrap, "t")
    for partition in (0, 1):
        assert numbers(records[partition]) == list(range(partition, 1500, 2))
        # A batch whose answer was lost is found by its sequence; where it is may then
        # be forgotten, never told wrongly.
        for number, offset in enumerate(offsets[partition]):
            assert offset in (number, -1)


def test_without_idempotence_a_lost_answer_without_retries_is_told(proxied):
    _, proxy = proxied
    options = settings_of(proxy, enable_idempotence=False, retries=0, linger_ms=0)
    proxy.average = 800
    with Producer(options) as producer:
        errors = [producer.send("t", b"x").exception(30) for _ in range(200)]
        proxy.average = 0
    told = [error for error in errors if error is not None]
    assert told
    assert all(isinstance(error, NetworkError) for error in told)
    assert all("may be written" in str(error) for error in told)


def test_a_broker_killed_and_started_again_mid_stream_has_every_record_once(
    make_broker,
):
    port = reusable_port()
    broker = make_broker(
        {"listeners": f"PLAINTEXT://127.0.0.1:{port}", "num.partitions": "2"}
    )
    producer = Producer(bootstrap_servers=broker.bootstrap, linger_ms=0, batch_size=500)
    futures = []
    stop = threading.Event()

    def send():
        number = 0
        while not stop.is_set():
            futures.append(producer.send("t", b"%d" % number, partition=number % 2))
            number += 1
            time.sleep(0.0002)

    sending = threading.Thread(target=send)
    try:
        producer.partitions_for("t")
        sending.start()
        for _ in range(2):
            seen = len(futures)
            wait_until(lambda seen=seen: len(futures) > seen + 200)
            broker.kill()
            broker.start()
        seen = len(futures)
        wait_until(lambda: len(futures) > seen + 200 and futures[seen + 100].done())
    finally:
        stop.set()
        sending.join()
        producer.close(40)
    assert [error for f in futures if (error := f.exception(0))] == []
    records = read_all(broker.bootstrap, "t")
    for partition in (0, 1):
        expected = list(range(partition, len(futures), 2))
        assert numbers(records[partition]) == expected
