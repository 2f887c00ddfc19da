"""Tiered storage in a broker: clients read old segments from the store as any other."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
    OffsetSpec,
)
from kafka import KafkaConsumer
from kafka import TopicPartition as PurePartition

from mpbroker.broker.remote_storage import RemoteStorage
from mpbroker.broker.roles import Roles
from mpbroker.ipc.layout import MAX_PARTITIONS
from mpbroker.storage.remote.remote_cache import CACHE_DIRECTORY
from tests.exporter.asking import METRICS, get, samples
from tests.support.broker import Broker, BrokerFailedError
from tests.support.children import wait_until
from tests.support.dead_disk import kill_disk, revive_disk

TOPIC = "tiered"
RECORDS = 3000
QUICK = {
    **METRICS,
    "metrics.kafka.names.enable": "true",
    "remote.log.storage.system.enable": "true",
    "remote.log.manager.task.interval.ms": "100",
    "log.retention.check.interval.ms": "100",
    "log.initial.task.delay.ms": "0",
    "remote.fetch.max.wait.ms": "5000",
    "num.io.threads": "2",
}
TIERED = {
    "remote.storage.enable": "true",
    "local.retention.bytes": "1",
    "segment.bytes": "8000",
    "retention.ms": "-1",
}


@pytest.fixture
def store(tmp_path):
    """The directory that stands for the store."""
    path = tmp_path / "store"
    path.mkdir()
    return path


@pytest.fixture
def settings(store):
    return {**QUICK, "remote.storage.url": f"file://{store}"}


@pytest.fixture
def broker(tmp_path, settings):
    with Broker(tmp_path / "data", settings) as running:
        yield running


def make_topic(broker, **config):
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    made = admin.create_topics([NewTopic(TOPIC, 1, config={**TIERED, **config})])
    made[TOPIC].result(60)
    return admin


def fill(broker, count=RECORDS, first=0):
    producer = Producer({"bootstrap.servers": broker.bootstrap, "batch.size": 2000})
    for number in range(first, first + count):
        producer.produce(TOPIC, b"%05d" % number * 5, timestamp=1_000_000 + number)
    assert producer.flush(60) == 0


def offset(admin, spec):
    asked = admin.list_offsets({TopicPartition(TOPIC, 0): spec})
    return asked[TopicPartition(TOPIC, 0)].result(60).offset


def leader(broker):
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    return admin.list_topics(TOPIC, timeout=60).topics[TOPIC].partitions[0].leader


def local_segments(broker):
    directory = Path(broker.data_dir) / f"{TOPIC}-0"
    return sorted(directory.glob("*.log"))


def wait_until_tiered(broker):
    """Wait until the active segment alone is local."""
    wait_until(lambda: len(local_segments(broker)) == 1)


def numbers(broker, first=0, end=RECORDS, **options):
    consumer = Consumer(
        {
            "bootstrap.servers": broker.bootstrap,
            "group.id": "g",
            "enable.auto.commit": False,
            "auto.offset.reset": "error",
            **options,
        }
    )
    consumer.assign([TopicPartition(TOPIC, 0, first)])
    found = []
    while len(found) < end - first:
        message = consumer.poll(60)
        assert message is not None, f"nothing behind {found[-1:]}"
        assert message.error() is None, message.error()
        found.append((message.offset(), int(message.value()[:5])))
    consumer.close()
    return found


def numbered(first=0, end=RECORDS):
    return [(each, each) for each in range(first, end)]


def test_clients_read_across_the_border_and_after_a_restart(broker, store):
    admin = make_topic(broker)
    fill(broker)
    wait_until_tiered(broker)
    assert len(list(store.rglob("*.log"))) >= 10
    assert offset(admin, OffsetSpec.earliest()) == 0
    assert numbers(broker) == numbered()
    assert numbers(broker, 1234) == numbered(1234)
    assert offset(admin, OffsetSpec.for_timestamp(1_000_777)) == 777
    assert offset(admin, OffsetSpec.max_timestamp()) == RECORDS - 1
    sizes = sum(each.stat().st_size for each in store.rglob("*.log"))
    copied = "kafka_server_brokertopicmetrics_remotecopybytes_total"
    wait_until(lambda: samples(get(broker)[1]).get(copied) == sizes)
    fetched = "mpbroker_remote_fetched_bytes_total"
    now = wait_until(
        lambda: (found := samples(get(broker)[1])).get(fetched, 0) >= sizes and found
    )
    assert now["mpbroker_remote_cache_bytes"] > sizes
    assert now["kafka_server_brokertopicmetrics_remotecopylagsegments"] == 0
    by_ctl(broker, store, sizes)
    for died in (False, True):
        if died:
            broker.kill()
        else:
            broker.stop()
        broker.start()
        assert numbers(broker) == numbered()
    pure = KafkaConsumer(
        bootstrap_servers=broker.bootstrap, auto_offset_reset="earliest"
    )
    partition = PurePartition(TOPIC, 0)
    pure.assign([partition])
    assert pure.beginning_offsets([partition]) == {partition: 0}
    seen = []
    while len(seen) < RECORDS:
        for each in pure.poll(timeout_ms=1000).values():
            seen += [(one.offset, int(one.value[:5])) for one in each]
    pure.close()
    assert seen == numbered()


def by_ctl(broker, store, sizes):
    """Look at what status and doctor tell of the store."""

    def ask(name):
        command = [sys.executable, "-m", "mpbroker", "ctl", name, "--json"]
        place = ["--data-dir", str(broker.data_dir)]
        done = subprocess.run([*command, *place], capture_output=True, check=False)
        return json.loads(done.stdout)

    told = ask("status")["remote"]
    assert told["url"] == f"file://{store}"
    assert (told["copied_bytes"], told["lag_segments"]) == (sizes, 0)
    assert (told["stored_bytes"], told["fetched_bytes"]) == (sizes, sizes)
    assert told["stored_segments"] == told["copied_segments"]
    assert told["cache_hits"] > 0 and told["cache_misses"] > 0
    assert told["copy_success_time_seconds"] > time.time() - 3_600
    page = json.loads(get(broker, "api/status")[1])["remote"]
    assert page["stored_bytes"] == sizes and page["fetched_chunks"] > 0
    found = {each["check"]: each for each in ask("doctor")}
    assert found["remote store"]["level"] == "ok", found["remote store"]
    assert found["copies to the remote store"]["level"] == "ok"


def processes(broker, title):
    """Return the live processes of a broker with these words in their title."""
    found = []
    for each in psutil.Process(broker.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # a zombie is one, too
            if title in " ".join(each.cmdline()):
                found.append(each)
    return found


def manager_of(broker):
    """Return the process that talks to the store, once it is there."""
    return wait_until(lambda: processes(broker, "remote-log-manager"))[0]


def test_the_death_of_the_process_that_talks_to_the_store_loses_nothing(broker, store):
    make_topic(broker)
    for round_number in range(3):
        fill(broker, 1000, first=round_number * 1000)
        os.kill(manager_of(broker).pid, signal.SIGKILL)
    wait_until_tiered(broker)
    os.kill(manager_of(broker).pid, signal.SIGKILL)
    assert numbers(broker) == numbered()
    old = manager_of(broker)
    processes(broker, "housekeeper")[0].kill()
    psutil.wait_procs([old])
    fill(broker, 1000, first=RECORDS)
    wait_until_tiered(broker)
    assert numbers(broker, end=RECORDS + 1000) == numbered(end=RECORDS + 1000)


def test_a_store_that_is_slow_keeps_no_other_client_waiting(tmp_path, settings, store):
    quick = {**settings, "remote.fetch.max.wait.ms": "200", "num.io.threads": "1"}
    with Broker(tmp_path / "data", quick) as broker:
        make_topic(broker)
        fill(broker)
        wait_until_tiered(broker)
        active = int(local_segments(broker)[0].name[:20])
        # To open this object takes until another process opens it.
        first = min(store.rglob("*.log"))
        content = first.read_bytes()
        first.unlink()
        os.mkfifo(first)
        slow = KafkaConsumer(bootstrap_servers=broker.bootstrap)
        partition = PurePartition(TOPIC, 0)
        slow.assign([partition])
        slow.seek(partition, 0)
        for _ in range(3):
            assert not slow.poll(timeout_ms=500)
            # The one handler answers those who read what is local, and producers.
            assert numbers(broker, active) == numbered(active)
            fill(broker, 1, first=RECORDS)
            assert slow.position(partition) == 0
        with open(first, "wb"):
            first.unlink()
            first.write_bytes(content)
        found = wait_until(lambda: slow.poll(timeout_ms=500))
        assert found[partition][0].offset == 0
        slow.close()


def test_the_process_that_readers_wait_for_comes_before_all_partitions_are_opened():
    config = SimpleNamespace(remote_log_manager_task_interval_ms=100)
    roles = SimpleNamespace(parts=SimpleNamespace(config=config))
    done = []
    upkeep = SimpleNamespace(plan_remote_storage=lambda _: done.append("plan"))
    tasks = Roles._remote_tasks(roles, RemoteStorage(roles.parts), upkeep)
    first = [getattr(task, "__self__", None) for _, task in tasks]
    # The housekeeper does what is due at the same time in this order.
    assert isinstance(first[0], RemoteStorage)
    assert len(tasks) == 2
    tasks[1][1](0)
    assert done == ["plan"]


def test_the_process_that_talks_to_the_store_ends_before_the_housekeeper(broker):
    make_topic(broker)
    manager, housekeeper = manager_of(broker), processes(broker, "housekeeper")[0]
    ended = os.pidfd_open(housekeeper.pid)
    try:
        os.kill(broker.pid, signal.SIGTERM)
        select.select([ended], [], [])
        # Its parent has reaped it. Nobody else would wait for it.
        assert not psutil.pid_exists(manager.pid)
    finally:
        os.close(ended)


def test_a_stopped_process_of_the_store_is_replaced(broker, store):
    make_topic(broker)
    fill(broker)
    wait_until_tiered(broker)
    old = manager_of(broker)
    old.suspend()
    psutil.wait_procs([old])
    assert manager_of(broker).pid != old.pid
    assert numbers(broker) == numbered()


def test_a_topic_that_is_deleted_leaves_no_object(broker, store):
    admin = make_topic(broker)
    fill(broker)
    wait_until_tiered(broker)
    admin.delete_topics([TOPIC])[TOPIC].result(60)

    def left():
        files = (each for each in store.rglob("*") if each.is_file())
        return [each.name for each in files if each.parent.name != "metadata"]

    wait_until(lambda: left() == ["owner"])


def alter(admin, **config):
    """Set some of a topic's settings, whose names have _ for a point; None: reset."""
    changes = [
        ConfigEntry(
            name.replace("_", "."),
            value,
            incremental_operation=AlterConfigOpType.DELETE
            if value is None
            else AlterConfigOpType.SET,
        )
        for name, value in config.items()
    ]
    resource = ConfigResource(
        ConfigResource.Type.TOPIC, TOPIC, incremental_configs=changes
    )
    admin.incremental_alter_configs([resource])[resource].result(60)


def objects(store):
    return sorted(each.name for each in store.rglob("*.log"))


def test_a_topic_without_remote_storage_any_more_has_no_object_and_what_is_local(
    broker, store
):
    admin = make_topic(broker)
    fill(broker)
    wait_until_tiered(broker)
    active = int(local_segments(broker)[0].name[:20])
    with pytest.raises(KafkaException, match=r"remote.log.delete.on.disable=true"):
        alter(admin, remote_storage_enable="false")
    with pytest.raises(KafkaException, match=r"remote.log.delete.on.disable=true"):
        alter(admin, remote_storage_enable=None)
    assert offset(admin, OffsetSpec.earliest()) == 0
    alter(admin, remote_storage_enable="false", remote_log_delete_on_disable="true")

    def left():
        files = (each for each in store.rglob("*") if each.is_file())
        return [each.name for each in files if each.parent.name != "metadata"]

    wait_until(lambda: left() == ["owner"])
    assert offset(admin, OffsetSpec.earliest()) == active
    fill(broker, 1000, first=RECORDS)
    broker.kill()
    broker.start()
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    assert offset(admin, OffsetSpec.earliest()) == active
    assert numbers(broker, active, RECORDS + 1000) == numbered(active, RECORDS + 1000)
    assert left() == ["owner"]
    # Switched on again, what is local is copied.
    alter(admin, remote_storage_enable="true")
    wait_until_tiered(broker)
    assert int(objects(store)[0][:20]) == active
    assert numbers(broker, active, RECORDS + 1000) == numbered(active, RECORDS + 1000)


def test_nothing_more_is_copied_of_a_topic_that_is_to_be_read_only(broker, store):
    admin = make_topic(broker)
    fill(broker)
    wait_until_tiered(broker)
    copied = objects(store)
    with pytest.raises(KafkaException, match=r"local.retention.bytes=1 has to be -2"):
        alter(admin, remote_log_copy_disable="true")
    alter(admin, remote_log_copy_disable="true", local_retention_bytes="-2")
    fill(broker, 1000, first=RECORDS)
    assert len(local_segments(broker)) > 2
    lag = "kafka_server_brokertopicmetrics_remotecopylagsegments"
    wait_until(lambda: samples(get(broker)[1]).get(lag) == 0)
    assert numbers(broker, end=RECORDS + 1000) == numbered(end=RECORDS + 1000)
    assert objects(store) == copied
    # Retention counts, and deletes, what is in the store.
    alter(admin, retention_bytes="60000")
    wait_until(lambda: set(objects(store)) < set(copied))
    first = offset(admin, OffsetSpec.earliest())
    assert first > 0
    assert numbers(broker, first, RECORDS + 1000) == numbered(first, RECORDS + 1000)
    alter(admin, retention_bytes=None, remote_log_copy_disable="false")
    wait_until(lambda: objects(store)[-1] > copied[-1])


def test_retention_moves_the_start_and_removes_objects(broker, store):
    admin = make_topic(broker, **{"retention.bytes": "30000"})
    fill(broker)
    wait_until_tiered(broker)
    wait_until(lambda: 0 < len(list(store.rglob("*.log"))) <= 4)
    first = offset(admin, OffsetSpec.earliest())
    assert 0 < first < RECORDS
    assert numbers(broker, first) == numbered(first)


def test_records_that_the_store_lost_are_an_error_and_the_rest_is_served(
    broker, store, tmp_path
):
    make_topic(broker)
    fill(broker)
    wait_until_tiered(broker)
    shutil.move(store, tmp_path / "away")
    store.mkdir()
    pure = KafkaConsumer(bootstrap_servers=broker.bootstrap, max_poll_records=10)
    pure.assign([PurePartition(TOPIC, 0)])
    pure.seek(PurePartition(TOPIC, 0), 0)
    active = int(local_segments(broker)[0].name[:20])
    cache = Path(broker.data_dir) / CACHE_DIRECTORY
    while not list(cache.rglob("failed-*")):
        assert not pure.poll(timeout_ms=200)
    assert numbers(broker, active) == numbered(active)
    store.rename(tmp_path / "other")  # it may have a copy of the metadata by now
    shutil.move(tmp_path / "away", store)
    assert numbers(broker) == numbered()
    pure.close()


def test_a_directory_that_was_lost_comes_back_with_all_closed_segments(broker, store):
    admin = make_topic(broker)
    fill(broker)
    wait_until_tiered(broker)
    active = int(local_segments(broker)[0].name[:20])
    assert active > RECORDS / 2
    broker.stop()
    shutil.rmtree(local_segments(broker)[0].parent)
    broker.start()
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    assert offset(admin, OffsetSpec.earliest()) == 0
    assert offset(admin, OffsetSpec.latest()) == active
    fill(broker, 1000, first=active)
    assert numbers(broker, end=active + 1000) == numbered(end=active + 1000)
    wait_until_tiered(broker)
    assert numbers(broker, end=active + 1000) == numbered(end=active + 1000)


def test_a_directory_that_is_not_there_is_waited_for_and_not_restored(
    tmp_path, settings
):
    """It has records that the store lacks; the store has the rest if it is given up."""
    home, other = tmp_path / "data", tmp_path / "other"
    both = {**settings, "log.dirs": f"{home},{other}"}
    with Broker(home, settings) as broker:
        admin = AdminClient({"bootstrap.servers": broker.bootstrap})
        full = NewTopic("full", 5)  # so that the next partition is in the other
        admin.create_topics([full])["full"].result(60)
        producer = Producer({"bootstrap.servers": broker.bootstrap})
        for number in range(5):
            producer.produce("full", b"x", partition=number)
        assert producer.flush(60) == 0
    broker = Broker(home, both)
    with broker:
        make_topic(broker)
        fill(broker)
        wait_until(lambda: len([*other.glob(f"{TOPIC}-0/*.log")]) == 1)
        active = int(next(other.glob(f"{TOPIC}-0/*.log")).name[:20])
    for is_known in (True, False):  # by its place in log.dirs
        kill_disk(other)
        with Broker(home, both if is_known else settings) as without:
            assert leader(without) == -1
            assert not [*home.glob(f"{TOPIC}-0")]
        revive_disk(other)
    with broker:
        assert numbers(broker) == numbered()
    other.rename(tmp_path / "gone")
    with Broker(home, settings) as without:
        command = [sys.executable, "-m", "mpbroker", "log-dirs", "forget", "--yes"]
        command += ["--data-dir", str(home), str(other)]
        subprocess.run(command, check=True)
        assert leader(without) == -1  # it would begin at 0
    with Broker(home, settings) as restored:
        admin = AdminClient({"bootstrap.servers": restored.bootstrap})
        assert offset(admin, OffsetSpec.latest()) == active
        assert numbers(restored, end=active) == numbered(end=active)


def test_a_store_that_is_away_keeps_only_a_broker_from_starting_that_lost_something(
    tmp_path, settings, monkeypatch
):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
        monkeypatch.setenv(name, "x")
    away = {**settings, "remote.storage.url": "s3://bucket/prefix"}
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    broker = Broker(tmp_path / "data", settings)
    with broker:
        make_topic(broker)
        fill(broker)
        wait_until_tiered(broker)
        active = int(local_segments(broker)[0].name[:20])
    with Broker(tmp_path / "data", away) as without:
        assert numbers(without, active) == numbered(active)
    shutil.rmtree(local_segments(broker)[0].parent)
    with pytest.raises(BrokerFailedError, match="directories are missing"):
        Broker(tmp_path / "data", away).start()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"remote.storage.url": "file:///nowhere/at/all"}, "cannot be used"),
        ({"remote.storage.url": ""}, "remote.storage.url is not set"),
        ({"remote.storage.url": "ftp://x/y"}, "not a URL of a store"),
    ],
)
def test_a_store_that_cannot_be_used_is_told_at_the_start(
    tmp_path, settings, wrong, says
):
    with pytest.raises(BrokerFailedError, match=says):
        Broker(tmp_path / "data", {**settings, **wrong}).start()


def test_a_second_broker_at_one_place_does_not_start(broker, tmp_path, settings):
    with pytest.raises(BrokerFailedError, match="belongs to another broker"):
        Broker(tmp_path / "other", settings).start()


def test_a_broker_without_a_store_refuses_such_topics(tmp_path):
    with Broker(tmp_path / "data") as plain:
        admin = AdminClient({"bootstrap.servers": plain.bootstrap})
        made = admin.create_topics([NewTopic(TOPIC, 1, config=TIERED)])
        with pytest.raises(Exception, match=r"remote.log.storage.system.enable=false"):
            made[TOPIC].result(60)


def test_the_library_is_named_where_it_is_missing(tmp_path):
    hidden = tmp_path / "obstore.py"
    hidden.write_text("raise ModuleNotFoundError('x', name='obstore')\n")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "mpbroker.storage.remote.store_owner",
            "file:///x",
            *("c", "1", str(tmp_path)),
        ],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr == "obstore is missing: pip install 'mpbroker-server[tiered]'\n"


def test_partitions_above_max_partitions_are_told_of_what_was_read():
    """A node of a cluster may have such rows; a Fetch of one waited for ever."""
    put: list[int] = []
    row = SimpleNamespace(take_waiters=lambda: 1)
    memory = SimpleNamespace(
        table=SimpleNamespace(row=lambda index: row),
        notices=[SimpleNamespace(put=put.append)],
    )
    config = SimpleNamespace(max_partitions=4)
    storage = RemoteStorage(SimpleNamespace(memory=memory, config=config))
    for index in (3, 4, MAX_PARTITIONS - 1, MAX_PARTITIONS, -1):
        storage._tell(index)
    assert put == [3, 4, MAX_PARTITIONS - 1]
