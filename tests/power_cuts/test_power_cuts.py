"""What was acknowledged outlives a power cut; and a campaign of cuts finds defects."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mpbroker.cli.ctl.ctl_connection import ControlClient
from mpbroker.protocol.error_code import ErrorCode
from tests.bench import wire
from tests.faults.test_kill_the_whole_tree import address_of
from tests.power_cuts.broken import DEFECTS
from tests.power_cuts.disk import Disk, enter_private_mounts, why_not
from tests.power_cuts.plain_files import content, losses
from tests.support.broker import Broker
from tests.support.children import Child, wait_until

CUTS = 6
# A defect may stay unseen for some cuts: what it does not wait for may be on disk.
MOST_CUTS = 60
LIST_GROUPS = (16, 4)
STORAGE_ERROR = int(ErrorCode.KAFKA_STORAGE_ERROR)


@pytest.fixture(scope="module", autouse=True)
def _permitted() -> None:
    if reason := why_not():
        pytest.skip(f"no power can be cut here: {reason}")


def campaign(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a campaign in a process of its own, which has the mounts."""
    return subprocess.run(
        [sys.executable, "-m", "tests.power_cuts", *map(str, arguments)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )


@pytest.mark.timeout(600)
def test_what_was_acknowledged_outlives_power_cuts() -> None:
    done = campaign(CUTS, "--seed", random.randrange(1 << 30))
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.splitlines()[-1].split()[0]) >= CUTS


@pytest.mark.timeout(900)
@pytest.mark.parametrize("defect", DEFECTS)
def test_power_cuts_show_what_was_not_forced_to_disk(defect: str) -> None:
    done = campaign(MOST_CUTS, "--seed", 1, "--defect", defect)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "NOT KEPT" in done.stdout


def test_what_plain_files_lose_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "writer-0"
    folder.mkdir()
    counts = memoryview(bytearray(4 * 5)).cast("I")
    for file, records in enumerate((3, 3, 2, 3)):
        counts[file] = 3
        (folder / f"{file:08d}").write_bytes(content(file, records))
    (folder / f"{1:08d}").unlink()
    (folder / f"{3:08d}").write_bytes(content(0, 3))
    disk = SimpleNamespace(path=tmp_path)
    found = losses(disk, [counts])  # type: ignore[arg-type]
    assert [text.partition(" ")[0] for text in found] == [
        f"{file:08d}" for file in (1, 2, 3)
    ]
    assert losses(disk, [counts]) == []  # type: ignore[arg-type]


def test_plain_files_outlive_power_cuts() -> None:
    module = [sys.executable, "-m", "tests.power_cuts.plain_files", "0.02"]
    assert subprocess.run(module, cwd=Path(__file__).parents[2]).returncode == 0


def test_a_broker_whose_disk_fails_acknowledges_nothing_more(tmp_path: Path) -> None:
    def with_a_disk() -> None:
        enter_private_mounts()
        folder = tmp_path / "power"
        folder.mkdir()
        disk = Disk(folder)
        disk.make(random.Random(1))
        try:
            lose_it(disk, tmp_path / "broker.log")
        finally:
            disk.close()

    assert Child(with_a_disk).wait(200) == 0


def lose_it(disk: Disk, log_path: Path) -> None:
    """Let every call of a broker's disk fail, and power return later."""
    broker = Broker(
        disk.path / "data", {"num.io.threads": 1, "log.segment.delete.delay.ms": 0}
    )
    broker.log_path = log_path
    batch = batch_of_one(b"kept")
    lost = batch_of_one(b"not acknowledged")
    broker.start()
    try:
        with wire.Connection(address_of(broker)) as connection:
            for topic in ("used", "idle"):
                connection.create_topic(topic)
                answer = connection.ask(wire.produce(topic, 0, batch, acks=-1))
                assert wire.parse_produce(answer) == (wire.ERROR_NONE, 0)
            wait_until_all_have_read(broker, connection)
            processes = broker.processes()
            # News of the metadata log that the supervisor can never read.
            os.kill(broker.pid, signal.SIGSTOP)
            connection.create_topic("unread")
            # A coordinator or a housekeeper that cannot read them would end.
            wait_until_all_have_read(broker, connection)
            disk.cut()
            os.kill(broker.pid, signal.SIGCONT)
            for acks in (-1, 1, -1):
                answer = connection.ask(wire.produce("used", 0, lost, acks=acks))
                assert wire.parse_produce(answer).error_code == STORAGE_ERROR
            with pytest.raises(wire.AnswerError, match=f"error {STORAGE_ERROR}"):
                connection.create_topic("new")
            with pytest.raises(wire.AnswerError, match=f"error {STORAGE_ERROR}"):
                connection.delete_topic("idle")
            connection.ask(wire.api_versions())  # all else is answered
            assert broker.processes() == processes, broker.log_tail()
            said = broker.log_tail()
            assert "used-0" in said and "is now offline" in said
            # Its successors find no metadata log; the supervisor repairs each death.
            for pid in coordinators(broker):
                os.kill(pid, signal.SIGKILL)
            wait_until(lambda: broker.log_tail().count("died: exit status") > 1)
            connection.ask(wire.api_versions())
        broker.kill()
        disk.restore()
        broker.start()
        with wire.Connection(address_of(broker)) as connection:
            for topic in ("used", "idle"):
                values = [record.value for record in connection.read_all(topic, 0)]
                assert values == [b"kept"]
            assert connection.create_topic("new")
        broker.stop()
    finally:
        broker.kill()


def wait_until_all_have_read(broker: Broker, connection: wire.Connection) -> None:
    """Wait until the housekeeper and the coordinator run and know the newest topics."""
    connection.create_topic("gone")
    connection.ask(wire.produce("gone", 0, batch_of_one(b"gone"), acks=-1))
    connection.delete_topic("gone")
    wait_until(lambda: not list(broker.data_dir.glob("gone-0*")))
    connection.ask(wire.request(LIST_GROUPS, wire.array([]) + wire.NO_TAGS))


def batch_of_one(value: bytes) -> bytes:
    return wire.record_batch([wire.RecordSpec(value)])


def coordinators(broker: Broker) -> list[int]:
    return [
        child["pid"] for child in children(broker) if child["role"] == "coordinator"
    ]


def children(broker: Broker) -> list[dict[str, Any]]:
    with ControlClient(os.fspath(broker.data_dir / "control.sock"), 60.0) as client:
        found: list[dict[str, Any]] = client.request("status")["processes"]
        return found
