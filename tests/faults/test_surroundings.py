"""The clock jumps, and /dev/shm is full while the broker runs: nobody notices."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer

from mpbroker.protocol.records.batch_header import parse_batch_header
from tests.bench import wire
from tests.bench.processes import title_of
from tests.faults.test_kill_one_process import wait_until
from tests.faults.test_kill_the_whole_tree import address_of
from tests.support.broker import Broker
from tests.support.patience import LONGEST_S

TOPIC = "surroundings"
STAMPED = "stamped"  # with the time of the broker
COMMITTED = "committed"
FAKETIME = [
    Path(folder) / "faketime/libfaketimeMT.so.1"
    for folder in (
        "/usr/lib/x86_64-linux-gnu",
        "/usr/lib/aarch64-linux-gnu",
        "/usr/lib",
    )
]
# What a loaded machine may do between two looks at the clock.
MAX_OFF_S = 600


def produce(connection: wire.Connection, value: bytes) -> wire.ProducedPartition:
    batch = wire.record_batch([wire.RecordSpec(value)])
    return wire.parse_produce(connection.ask(wire.produce(TOPIC, 0, batch, acks=-1)))


def test_jumps_of_the_wall_clock_are_not_noticed(tmp_path: Path) -> None:
    ahead = tmp_path / "ahead"
    ahead.write_text("0")
    command = [sys.executable, "-m", "tests.faults.jumping", str(ahead)]
    with (
        Broker(tmp_path / "data", {"num.io.threads": 2}, command=command) as broker,
        wire.Connection(address_of(broker)) as connection,
    ):
        pids = broker.processes().keys()
        connection.create_topic(TOPIC)
        for number, jump_s in enumerate((0, -1800, 3600, -1800, 0)):
            new = ahead.with_suffix(".new")
            new.write_text(str(jump_s))
            new.replace(ahead)
            assert produce(connection, b"%d" % number) == (wire.ERROR_NONE, number)
            # Deadlines are not the wall clock's: this waits its 50 ms and ends.
            waiting = wire.fetch(TOPIC, 0, number + 1, max_bytes=1024, max_wait_ms=50)
            assert wire.parse_fetch(connection.ask(waiting)).error_code == 0
        stored = connection.read_all(TOPIC, 0)
        assert [record.value for record in stored] == [b"%d" % n for n in range(5)]
        assert pids <= broker.processes().keys()  # the last may have come late


def libfaketime() -> Path:
    """Return the library that lies about the time to C and Python alike."""
    for path in FAKETIME:
        if path.exists():
            return path
    pytest.skip("no libfaketime")


def test_jumps_of_the_wall_clock_are_not_noticed_by_the_core(tmp_path: Path) -> None:
    """For all processes and their C code: the monotonic clock is left alone."""
    ahead = tmp_path / "ahead"
    ahead.write_text("+0")
    environ = {
        "LD_PRELOAD": str(libfaketime()),
        "FAKETIME_TIMESTAMP_FILE": str(ahead),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }
    config = {"num.io.threads": 2, "group.initial.rebalance.delay.ms": 50}
    with (
        Broker(tmp_path / "data", config, environ=environ) as broker,
        wire.Connection(address_of(broker)) as connection,
    ):
        pids = broker.processes().keys()
        for left in Path("/dev/shm").glob(f"*faketime_*_{broker.pid}"):
            left.unlink()  # the library's own
        connection.create_topic(TOPIC)
        appended_at = {"message.timestamp.type": "LogAppendTime"}
        connection.create_topic(STAMPED, config=appended_at)
        for number, jump in enumerate(("+0", "-1800", "+86400", "-3000", "+0")):
            new = ahead.with_suffix(".new")
            new.write_text(jump)
            new.replace(ahead)
            assert produce(connection, b"%d" % number) == (wire.ERROR_NONE, number)
            waiting = wire.fetch(TOPIC, 0, number + 1, max_bytes=1024, max_wait_ms=50)
            assert wire.parse_fetch(connection.ask(waiting)).error_code == 0
            # A transaction has its own deadlines, a group too.
            connection.init_producer_id()
            assert commit_one(broker, number)
            # It is believed: what the core writes has the false time.
            told_s = time.time() + int(jump)
            assert abs(stamp_s(connection) - told_s) < MAX_OFF_S
        stored = connection.read_all(TOPIC, 0)
        assert [record.value for record in stored] == [b"%d" % n for n in range(5)]
        assert pids <= broker.processes().keys()  # the last may have come late


def commit_one(broker: Broker, number: int) -> bool:
    """Commit a transaction, and read it as a group; return whether it was there."""
    producer = Producer(
        {"bootstrap.servers": broker.bootstrap, "transactional.id": "t"}
    )
    producer.init_transactions(LONGEST_S)
    producer.begin_transaction()
    producer.produce(COMMITTED, b"%d" % number)
    producer.commit_transaction(LONGEST_S)
    consumer = Consumer(
        {
            "bootstrap.servers": broker.bootstrap,
            "group.id": "g",
            "auto.offset.reset": "earliest",
            "isolation.level": "read_committed",
        }
    )
    try:
        consumer.subscribe([COMMITTED])
        message = consumer.poll(LONGEST_S)
        assert message is not None
        assert message.error() is None
        consumer.commit(message, asynchronous=False)
        return message.value() == b"%d" % number
    finally:
        consumer.close()


def stamp_s(connection: wire.Connection) -> float:
    """Append a record, and return the time that the broker has given to it."""
    batch = wire.record_batch([wire.RecordSpec(b"now")])
    asked = wire.produce(STAMPED, 0, batch)
    offset = wire.parse_produce(connection.ask(asked)).base_offset
    fetched = wire.fetch(STAMPED, 0, offset, max_bytes=1024)
    records = wire.parse_fetch(connection.ask(fetched)).records
    return parse_batch_header(records).max_timestamp / 1000


@pytest.fixture
def small_shm(tmp_path: Path) -> Broker:
    """A broker to be started with a /dev/shm of its own, of 256 KiB."""
    if os.geteuid() or shutil.which("unshare") is None:
        pytest.skip("only root can give a process a /dev/shm of its own")
    mount = "mount -t tmpfs -o size=256k none /dev/shm"
    command = ["unshare", "-m", "--propagation", "private"]
    if subprocess.run([*command, "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("cannot mount a /dev/shm of our own")
    script = f'{mount} && exec "$@"'
    return Broker(
        tmp_path / "data",
        {"num.io.threads": 2},
        command=[*command, "sh", "-c", script, "sh", sys.executable, "-m", "mpbroker"],
    )


def fill(path: Path) -> None:
    """Write a file until its file system is full."""
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError as error:
            assert error.errno == errno.ENOSPC


def data_plane(broker: Broker) -> set[int]:
    """Return the process ids of a broker's handlers and processors."""
    titles = {pid: title_of(pid) for pid in broker.processes()}
    return {
        pid
        for pid, title in titles.items()
        if "request-handler" in title or "network-thread" in title
    }


def test_a_full_dev_shm_is_not_noticed(small_shm: Broker) -> None:
    with small_shm as broker, wire.Connection(address_of(broker)) as connection:
        filler = Path(f"/proc/{broker.pid}/root/dev/shm/filler")
        fill(filler)
        connection.create_topic(TOPIC)
        killed = data_plane(broker)
        assert len(killed) >= 3
        for pid in killed:
            os.kill(pid, signal.SIGKILL)

        def replaced() -> bool:
            now = data_plane(broker)
            return len(now) == len(killed) and not now & killed

        wait_until("all are replaced", replaced)
        assert produce(connection, b"a") == (wire.ERROR_NONE, 0)
        filler.unlink()
