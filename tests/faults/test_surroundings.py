"""The clock jumps, and /dev/shm is full while the broker runs: nobody notices."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench import wire
from tests.bench.processes import title_of
from tests.faults.test_kill_one_process import wait_until
from tests.faults.test_kill_the_whole_tree import address_of
from tests.support.broker import Broker

TOPIC = "surroundings"
WITHIN_S = 90.0


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
        assert broker.processes().keys() == pids


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


def test_a_full_dev_shm_is_not_noticed(small_shm: Broker) -> None:
    with small_shm as broker, wire.Connection(address_of(broker)) as connection:
        filler = Path(f"/proc/{broker.pid}/root/dev/shm/filler")
        fill(filler)
        connection.create_topic(TOPIC)
        before = broker.processes().keys()
        for pid in before:
            if "request-handler" in title_of(pid) or "network-thread" in title_of(pid):
                os.kill(pid, signal.SIGKILL)

        def replaced() -> bool:
            now = broker.processes().keys()
            return len(now) == len(before) and len(now - before) >= 3

        wait_until("all are replaced", replaced, WITHIN_S)
        assert produce(connection, b"a") == (wire.ERROR_NONE, 0)
        filler.unlink()
