"""Transactions while processes are killed or stopped, and the disk is full or fails.

Pools are resized meanwhile, the program is upgraded in place, and one of the producers
is a process that is killed, too. Every fault comes once, and then at random.

MPBROKER_TRANSACTION_FAULTS_S sets how long; an hour is 3600. Every fault comes when the
last one has been got over, so that there is something to be broken.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from mpbroker.cli.ctl.ctl_connection import ControlClient
from mpbroker.protocol.error_code import ErrorCode
from tests.bench import wire
from tests.bench.processes import title_of
from tests.chaos.events import control_socket
from tests.faults.transaction_checker import (
    Reader,
    complaints_about,
    complaints_about_early,
    complaints_about_markers,
    count_records,
    read_all,
)
from tests.faults.transaction_writers import (
    PARTITIONS,
    ConfluentWriter,
    FranzGoWriter,
    JavaWriter,
    KilledWriter,
    Outcome,
    OwnWriter,
    Writer,
)
from tests.support.broker import Broker
from tests.support.fetch_clients import FRANZ_GO, have_java_clients
from tests.support.ports import reusable_port
from tests.support.promises import promised

DURATION_S: Final = float(os.environ.get("MPBROKER_TRANSACTION_FAULTS_S", "10"))
TOPICS: Final = ("debits", "credits")
PROBE: Final = "probe"
FAILS: Final = "fails"  # as long as there is a file of this name
DISK_MIB: Final = 96
PLACES: Final = [(topic, number) for topic in TOPICS for number in range(PARTITIONS)]
# A client that lost an answer may wait for a call of 20 s and then for the 40 s after
# which its transaction is aborted, before it begins another.
PROGRESS_WITHIN_S: Final = 150.0
CONFIG: Final = {
    "num.io.threads": 2,
    "transaction.state.log.num.partitions": 3,
    "offsets.topic.num.partitions": 3,
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": 500,
    "log.segment.bytes": 65_536,  # markers and records in different segments
}


def wait_for_commits(writers: list[Writer], *, each: bool = False) -> None:
    """Wait for some commits, by each of the writers or by any."""
    before = [writer.commits for writer in writers]

    def are_enough() -> bool:
        more = [w.commits - n for w, n in zip(writers, before, strict=True)]
        return min(more) > 1 if each else sum(more) > 2 * len(more)

    deadline = time.monotonic() + PROGRESS_WITHIN_S
    while not are_enough():
        for writer in writers:
            assert writer.trouble is None, writer.trouble
        assert time.monotonic() < deadline, [
            f"{writer.name}: {writer.commits} commits after {commits},"
            f" {[str(each.outcome) for each in writer.history[-5:]]}"
            for writer, commits in zip(writers, before, strict=True)
        ]
        time.sleep(0.01)


def has_aborted(writers: list[Writer]) -> bool:
    return any(each.outcome is Outcome.ABORTED for w in writers for each in w.history)


def kill_one(broker: Broker, role: str) -> None:
    pids = [pid for pid in broker.processes() if role in title_of(pid)]
    if pids:
        os.kill(random.choice(pids), signal.SIGKILL)


def kill_all(broker: Broker) -> None:
    broker.kill()
    broker.start()


def stop_one(broker: Broker) -> None:
    """Stop a process that clients need; the supervisor kills and replaces it."""
    role = random.choice(["group-coordinator", "request-handler", "network-thread"])
    pids = [pid for pid in broker.processes() if role in title_of(pid)]
    if pids:
        os.kill(random.choice(pids), signal.SIGSTOP)


def resize(broker: Broker) -> None:
    with ControlClient(control_socket(broker), PROGRESS_WITHIN_S) as client:
        client.request(
            "resize", handlers=random.randint(1, 4), processors=random.randint(1, 4)
        )


def upgrade(broker: Broker) -> None:
    command = [sys.executable, "-m", "mpbroker", "ctl", "upgrade"]
    done = subprocess.run(
        [*command, "--socket", control_socket(broker)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def produce_until_refused(broker: Broker) -> None:
    """Append to a partition of its own until the broker says that its disk fails."""
    host, _, port = broker.bootstrap.rpartition(":")
    batch = wire.record_batch([wire.RecordSpec(bytes(50_000))])
    request = wire.produce(PROBE, 0, batch, acks=-1)
    deadline = time.monotonic() + PROGRESS_WITHIN_S
    with wire.Connection((host, int(port)), PROGRESS_WITHIN_S) as connection:
        while (
            wire.parse_produce(connection.ask(request)).error_code
            != ErrorCode.KAFKA_STORAGE_ERROR
        ):
            assert time.monotonic() < deadline, "the disk never failed"


def fill_disk(broker: Broker) -> None:
    """Take all room for a while: what cannot be written is not acknowledged."""
    ballast = broker.data_dir.parent / "ballast"
    try:
        with ballast.open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(1 << 16))
        produce_until_refused(broker)
    finally:
        ballast.unlink()


def fail_syncs(broker: Broker) -> None:
    """Let the disk fail: partitions are offline until the broker starts again."""
    fails = broker.data_dir.parent / FAILS
    fails.touch()
    try:
        produce_until_refused(broker)
    finally:
        fails.unlink()
    kill_all(broker)


FAULTS: Final[dict[str, tuple[int, Callable[[Broker], None]]]] = {
    "coordinator": (4, lambda broker: kill_one(broker, "group-coordinator")),
    "handler": (4, lambda broker: kill_one(broker, "request-handler")),
    "processor": (1, lambda broker: kill_one(broker, "network-thread")),
    "whole broker": (2, kill_all),
    "stopped": (1, stop_one),
    "resize": (1, resize),
    "upgrade": (1, upgrade),
    "disk full": (1, fill_disk),
    "disk fails": (1, fail_syncs),
}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system to fill, where one can be mounted."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "none", str(path)]
    is_small = not os.geteuid() and not subprocess.run(mount).returncode
    yield path
    if is_small:
        subprocess.run(["umount", "-l", path], check=True)


@pytest.mark.timeout(int(3 * DURATION_S) + 600)
def test_nothing_aborted_torn_lost_or_twice_is_ever_seen(disk: Path) -> None:
    bootstrap = f"127.0.0.1:{reusable_port()}"  # each time it is started
    config = {**CONFIG, "listeners": f"PLAINTEXT://{bootstrap}"}
    module = "tests.faults.failing_syncs"
    command = [sys.executable, "-m", module, str(disk / FAILS)]
    faults_left = list(FAULTS)
    if not disk.is_mount():
        faults_left.remove("disk full")
        print("\nwithout a full disk: no file system can be mounted")
    random.shuffle(faults_left)
    with Broker(disk / "data", config, command=command) as broker:
        admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})
        for made in admin.create_topics(
            [NewTopic(topic, PARTITIONS, 1) for topic in (*TOPICS, PROBE)]
        ).values():
            made.result(30)
        writers: list[Writer] = [
            ConfluentWriter("rdkafka", bootstrap, TOPICS),
            OwnWriter("own", bootstrap, TOPICS),
            KilledWriter("killed", bootstrap, TOPICS),
        ]
        if FRANZ_GO.exists():
            writers.append(FranzGoWriter("franz", bootstrap, TOPICS))
        else:
            print("\nwithout franz-go: no client in .downloads/franz-go")
        if have_java_clients():
            writers.append(JavaWriter("java", bootstrap, TOPICS))
        else:
            print("\nwithout Java: no client of Kafka's own in .downloads/java")
        reader = Reader(bootstrap, PLACES)
        for thread in (reader, *writers):
            thread.start()
        end = time.monotonic() + DURATION_S
        faults: Counter[str] = Counter()
        at_random = faults_left.copy()
        weights = [FAULTS[what][0] for what in at_random]
        while faults_left or time.monotonic() < end or not has_aborted(writers):
            wait_for_commits(writers)
            if faults_left:
                what = faults_left.pop()
            else:
                [what] = random.choices(at_random, weights)
            FAULTS[what][1](broker)
            faults[what] += 1
        wait_for_commits(writers, each=True)
        for writer in writers:
            writer.stop()
        for writer in writers:
            writer.join(PROGRESS_WITHIN_S)
            assert not writer.is_alive(), writer.name
        for writer in writers:  # end what they left open
            ConfluentWriter(writer.name, bootstrap, TOPICS).end_what_is_open()
        final, stable_ends = read_all(bootstrap, PLACES)
        _, ends = read_all(bootstrap, PLACES, "read_uncommitted")
        reader.stop()
    history = [each for writer in writers for each in writer.history]
    assert stable_ends == ends
    with promised("each transaction is seen whole or not at all, once, in its order"):
        assert reader.complaints == []
        assert complaints_about(history, final) == []
        assert complaints_about_early(reader.seen, final) == []
        assert complaints_about_markers(broker.data_dir, PLACES) == []
    kinds = Counter(each.outcome for each in history)
    counts = count_records(history, final)
    assert counts["acknowledged"] <= counts["read"]
    assert counts["read"] <= counts["acknowledged"] + counts["in doubt"]
    print(f"\n{faults.total()} faults: {dict(faults)}")
    print(f"records: {dict(counts)}")
    for writer in writers:
        ends = Counter(each.outcome.value for each in writer.history)
        print(f"{writer.name}: {dict(ends)}")
    assert faults
    assert kinds[Outcome.COMMITTED]
    assert kinds[Outcome.ABORTED]
