"""Disk and descriptors run out while the broker serves: errors, and nothing lost."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mpbroker.cli.exit_codes import ExitCode
from tests.bench import wire
from tests.broker.load import children
from tests.exporter.asking import METRICS, get
from tests.faults.test_kill_one_process import wait_until
from tests.faults.test_kill_the_whole_tree import address_of
from tests.support.broker import Broker
from tests.support.own_disk import resize, small_disk

KAFKA_STORAGE_ERROR = 56
SMALL_DISK_BYTES = 48 << 20
VALUE = bytes(200_000)


@pytest.fixture(name="small_disk")
def small_disk_fixture(tmp_path: Path) -> Iterator[Path]:
    """A file system of SMALL_DISK_BYTES."""
    with small_disk(tmp_path / "small", SMALL_DISK_BYTES) as path:
        yield path


def produce_until_refused(
    connection: wire.Connection, topic: str, first_offset: int = 0
) -> tuple[int, int]:
    """Return how many records were acknowledged, and the error that ended it."""
    batch = wire.record_batch([wire.RecordSpec(VALUE)])
    request = wire.produce(topic, 0, batch, acks=-1)
    for count in range(2 * SMALL_DISK_BYTES // len(VALUE)):
        answer = wire.parse_produce(connection.ask(request))
        if answer.error_code:
            return count, answer.error_code
        assert answer.base_offset == first_offset + count
    pytest.fail("the disk never was full")


def test_a_full_disk_loses_nothing_and_stops_nobody(small_disk: Path) -> None:
    data = small_disk / "data"
    with Broker(data, {"log.segment.bytes": 16 << 20}) as broker:
        pids = broker.processes().keys()
        with wire.Connection(address_of(broker)) as connection:
            connection.create_topic("full")
            count, error = produce_until_refused(connection, "full")
            assert error == KAFKA_STORAGE_ERROR
            assert count > 0
            # Those who ask something else are served as before.
            connection.ask(wire.api_versions())
            connection.ask(wire.metadata(["full"]))
        assert pids <= broker.processes().keys()  # the last may have come late
    resize(small_disk, 4 * SMALL_DISK_BYTES)
    with (
        Broker(data, {"log.segment.bytes": 16 << 20}) as broker,
        wire.Connection(address_of(broker)) as connection,
    ):
        stored = connection.read_all("full", 0)
        # The refused one may be there: it was not acknowledged, and not denied either.
        assert len(stored) in (count, count + 1)
        assert {record.value for record in stored} == {VALUE}
        batch = wire.record_batch([wire.RecordSpec(b"again")])
        answer = wire.parse_produce(connection.ask(wire.produce("full", 0, batch)))
        assert answer == (wire.ERROR_NONE, len(stored))


def test_another_directory_goes_on_when_one_is_full(
    small_disk: Path, tmp_path: Path
) -> None:
    full, roomy = small_disk / "data", tmp_path / "roomy"
    config = {"log.dirs": f"{full},{roomy}", "log.segment.bytes": 16 << 20}
    with (
        Broker(tmp_path / "unused", config) as broker,
        wire.Connection(address_of(broker)) as connection,
    ):
        # Kafka's rule puts each new partition where there are fewest.
        first = wire.record_batch([wire.RecordSpec(b"first")])
        second = wire.record_batch([wire.RecordSpec(b"second")])
        names = [f"topic-{number}" for number in range(4)]
        for name in names:
            connection.create_topic(name)
            request = wire.produce(name, 0, first, acks=-1)
            assert wire.parse_produce(connection.ask(request)).error_code == 0
        doomed = [name for name in names if (full / f"{name}-0").exists()]
        spared = [name for name in names if (roomy / f"{name}-0").exists()]
        assert sorted(doomed + spared) == names
        assert doomed and spared
        _, error = produce_until_refused(connection, doomed[0], first_offset=1)
        assert error == KAFKA_STORAGE_ERROR
        for name in spared:
            request = wire.produce(name, 0, second, acks=-1)
            answer = wire.parse_produce(connection.ask(request))
            assert answer == (wire.ERROR_NONE, 1)
            stored = connection.read_all(name, 0)
            assert [record.value for record in stored] == [b"first", b"second"]


def test_a_full_disk_is_told_once_and_so_is_its_room(small_disk: Path) -> None:
    data = small_disk / "data"
    config = {"log.segment.bytes": 16 << 20, **METRICS}
    with Broker(data, config) as broker:
        with wire.Connection(address_of(broker)) as connection:
            connection.create_topic("full")
            produce_until_refused(connection, "full")
            wait_until(
                "the full disk is told", lambda: is_logged(broker, f"{data} is full")
            )
            batch = wire.record_batch([wire.RecordSpec(bytes(900_000))])
            request = wire.produce("full", 0, batch, acks=-1)
            for _ in range(100):
                answer = wire.parse_produce(connection.ask(request))
                assert answer.error_code == KAFKA_STORAGE_ERROR
            assert f"FULL         {data}" in status(broker)
            assert get(broker, "ready") == (
                200,
                f"ready\n{data} is full: appends are refused\n",
            )
            shown = f'mpbroker_log_directory_full{{log_dir="{data}"}}'
            assert f"{shown} 1" in get(broker, "metrics")[1]
            resize(small_disk, 4 * SMALL_DISK_BYTES)
            answer = wire.parse_produce(connection.ask(request))
            assert answer.error_code == wire.ERROR_NONE
        wait_until("the room is told", lambda: is_logged(broker, "has room again"))
        assert "FULL" not in status(broker)
        assert get(broker, "ready") == (200, "ready\n")
        log = broker.log_path.read_text()
        assert log.count("is full") == log.count("has room again") == 1
        assert "No space left" not in log


def test_the_produce_command_counts_what_a_full_disk_refuses(
    small_disk: Path, tmp_path: Path
) -> None:
    """Outsiders saw 30 records named where 1,430 were missing."""
    lines = [b"%06d" % number + b"." * 100_000 for number in range(1, 701)]
    assert len(lines) * len(lines[0]) > SMALL_DISK_BYTES
    (tmp_path / "lines").write_bytes(b"\n".join(lines) + b"\n")
    config = {"log.segment.bytes": 16 << 20}
    with Broker(small_disk / "data", config) as broker:
        with wire.Connection(address_of(broker)) as connection:
            connection.create_topic("full")
        command = [sys.executable, "-m", "mpbroker", "produce", "-b", broker.bootstrap]
        command += ["-t", "full", "-l", "--timeout", "3", str(tmp_path / "lines")]
        done = subprocess.run(command, capture_output=True, text=True)
        *told, last = done.stderr.splitlines()
        assert done.returncode in (ExitCode.ERROR, ExitCode.UNAVAILABLE), done.stderr
        found = re.fullmatch(
            r"mpbroker: full: (\d+) of (\d+) records not written(; what follows them in"
            r" the input was not sent)?",
            last,
        )
        assert found, done.stderr
        failed, sent = int(found[1]), int(found[2])
        assert sent == len(lines) or found[3]
        resize(small_disk, 4 * SMALL_DISK_BYTES)
        with wire.Connection(address_of(broker)) as connection:
            stored = connection.read_all("full", 0)
    # What timed out may be there all the same, as a last batch that is smaller than
    # those before it and found room. What is not there was told.
    assert 0 < sent - failed <= len(stored) < len(lines)
    values = [record.value for record in stored]
    assert values == sorted(set(values))
    assert set(values) <= set(lines)
    first = re.search(r"\(of numbers (\d+)-\d+ of the input\) not written", told[0])
    assert first and int(first[1]) <= sent - failed + 1


def test_an_idle_handler_gives_a_deleted_topics_space_back(tmp_path: Path) -> None:
    with Broker(tmp_path / "data", {"num.io.threads": 2}) as broker:
        with wire.Connection(address_of(broker)) as connection:
            connection.create_topic("gone")
            batch = wire.record_batch([wire.RecordSpec(VALUE)])
            for _ in range(20):
                connection.ask(wire.produce("gone", 0, batch, acks=-1))
            connection.read_all("gone", 0)
            assert holders(broker, "gone-0")
        run(broker, "topic", "delete", "gone")
        wait_until("its files are closed", lambda: not holders(broker, "gone-0"))


def holders(broker: Broker, name: str) -> set[int]:
    """Return the processes that have a file of a directory open."""
    found = set()
    for pid in broker.processes():
        with contextlib.suppress(OSError):  # the process or the file has gone
            for fd in os.listdir(f"/proc/{pid}/fd"):
                if f"/{name}" in os.readlink(f"/proc/{pid}/fd/{fd}"):
                    found.add(pid)
    return found


def is_logged(broker: Broker, text: str) -> bool:
    return text in broker.log_path.read_text()


def run(broker: Broker, *arguments: str) -> str:
    command = [sys.executable, "-m", "mpbroker", *arguments, "-b", broker.bootstrap]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def status(broker: Broker) -> str:
    command = [sys.executable, "-m", "mpbroker", "ctl", "status"]
    command += ["--data-dir", str(broker.data_dir)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_a_broker_out_of_descriptors_serves_those_it_has(tmp_path: Path) -> None:
    limit = 400  # the supervisor alone has some 300 open
    # Both processors together can hold fewer than this, whatever else they have open.
    too_many = 2 * limit + 50
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, too_many + 100), hard))
    command = ["sh", "-c", f'ulimit -n {limit}; exec "$@"', "sh"]
    broker = Broker(
        tmp_path / "data",
        {"num.network.threads": 2},
        command=[*command, sys.executable, "-m", "mpbroker"],
    )
    with broker:
        pids = broker.processes().keys()
        with wire.Connection(address_of(broker)) as first:
            first.ask(wire.api_versions())
            crowd = [wire.Connection(address_of(broker), 60.0) for _ in range(too_many)]
            first.ask(wire.api_versions())
            for connection in crowd:
                connection.close()

            def serves_new_ones() -> bool:
                try:
                    with wire.Connection(address_of(broker), 5.0) as late:
                        late.ask(wire.api_versions())
                        return True
                except OSError:
                    return False

            wait_until("new connections are served", serves_new_ones)
            first.ask(wire.api_versions())
        assert pids <= broker.processes().keys()  # the last may have come late


def test_ctl_clients_that_use_up_the_supervisors_descriptors_stop_nobody(
    make_broker: Callable[..., Broker],
) -> None:
    broker = make_broker({"num.io.threads": 2})
    path = str(broker.data_dir / "control.sock")
    handlers = children(broker, "handler")
    room = 8
    used = len(os.listdir(f"/proc/{broker.pid}/fd"))
    before = resource.prlimit(broker.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(broker.pid, resource.RLIMIT_NOFILE, (used + room, before[1]))
    with contextlib.ExitStack() as crowd:
        for _ in range(2 * room):  # no more than wait to be accepted
            sock = crowd.enter_context(socket.socket(socket.AF_UNIX))
            sock.connect(path)
        said = "control socket: cannot accept"
        wait_until("it is at its limit", lambda: said in broker.log_tail())
        # It still sees who dies, and forks.
        os.kill(handlers["handler", 0], signal.SIGKILL)
        died = f"handler 0 (pid {handlers['handler', 0]}) died"
        wait_until("a death is seen", lambda: died in broker.log_tail())
        with wire.Connection(address_of(broker)) as connection:
            connection.ask(wire.api_versions())
    resource.prlimit(broker.pid, resource.RLIMIT_NOFILE, before)

    def replaced() -> bool:
        now = children(broker, "handler")
        return len(now) == 2 and now["handler", 0] != handlers["handler", 0]

    wait_until("the dead one has a successor", replaced)
