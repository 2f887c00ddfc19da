"""A broker's disk fails under it, and power returns later.

python -m tests.power_cuts.failing_disk FOLDER    in mounts of its own; as root
"""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from mpbroker.cli.ctl.ctl_connection import ControlClient
from mpbroker.protocol.error_code import ErrorCode
from tests.bench import wire
from tests.faults.test_kill_the_whole_tree import address_of
from tests.power_cuts.disk import Disk, enter_private_mounts
from tests.support.broker import Broker
from tests.support.children import wait_until

LIST_GROUPS = (16, 4)
STORAGE_ERROR = int(ErrorCode.KAFKA_STORAGE_ERROR)


def main(folder: Path) -> None:
    enter_private_mounts()
    (folder / "power").mkdir()
    disk = Disk(folder / "power")
    disk.make(random.Random(1))
    try:
        lose_it(disk, folder / "broker.log")
    finally:
        disk.close()


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


if __name__ == "__main__":
    main(Path(sys.argv[1]))
