"""Behind an unclean stop partitions are closed until transactions are loaded.

And whoever runs the broker can tell that they are, and what for.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mpbroker.cli.ctl.ctl_connection import ControlClient
from mpbroker.ipc.named_segment import read_telemetry, start_time
from mpbroker.protocol.error_code import ErrorCode
from tests.bench import wire
from tests.bench.transactions import RECORDS
from tests.broker.resizing import alter
from tests.exporter.asking import METRICS, get, pids_of
from tests.faults.test_kill_the_whole_tree import address_of
from tests.faults.test_lost_markers import (
    LAST,
    TOPIC,
    Client,
    S,
    cut_behind,
    cut_off_marker,
    kinds,
    log_of,
    wait_for_marker,
)
from tests.support.broker import Broker
from tests.support.children import wait_until


class Held:
    """A broker whose coordinators load nothing while ``is_held``."""

    def __init__(self, directory: Path) -> None:
        self.lock = directory / "lock"
        self._fd = os.open(self.lock, os.O_RDONLY | os.O_CREAT)
        self.broker = Broker(
            directory / "data",
            {"transaction.state.log.num.partitions": 1, "num.io.threads": 1} | METRICS,
            command=[*self.program(), "none"],
        )

    def program(self) -> list[str]:
        return [sys.executable, "-m", "tests.faults.held_loads", str(self.lock)]

    def start_without_a_marker(self) -> None:
        """Commit a transaction, and lose its marker to a power cut."""
        broker = self.broker
        broker.start()
        with wire.Connection(address_of(broker)) as connection:
            connection.create_topic(TOPIC, len(RECORDS))
        client = Client(broker, 1)
        client.transact()
        client.close()
        wait_for_marker(broker, LAST + 1)
        broker.kill()
        cut_off_marker(log_of(broker, f"{TOPIC}-0"))
        cut_behind(log_of(broker, "__transaction_state-0"), S.PREPARE_COMMIT)
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        broker.start()

    def let_go(self) -> None:
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        self.broker.kill()
        os.close(self._fd)

    @contextmanager
    def ctl(self) -> Iterator[ControlClient]:
        path = os.fspath(self.broker.data_dir / "control.sock")
        with ControlClient(path, 60.0) as client:
            yield client

    def status(self) -> dict[str, Any]:
        with self.ctl() as client:
            found: dict[str, Any] = client.request("status")
            return found

    def coordinators(self) -> int:
        """How many have begun to open partitions."""
        closed = self.status()["closed"]
        return 0 if closed is None else int(closed["coordinators"])

    def upgrade(self) -> str:
        """How far it is; not by the control socket, which is made anew amid it."""
        pid = self.broker.pid
        found = read_telemetry(f"/mpbroker-{pid}-{start_time(pid)}") or {}
        return str(found.get("upgrade", ""))

    def told(self) -> int:
        """What a fetch from behind the marker is told."""
        with wire.Connection(address_of(self.broker)) as connection:
            answer = connection.ask(wire.fetch(TOPIC, 0, LAST + 2, max_bytes=1000))
            return wire.parse_fetch(answer).error_code


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Held]:
    made = Held(tmp_path)
    try:
        yield made
    finally:
        made.close()


def test_an_operator_is_told_that_partitions_are_closed_and_what_for(held):
    held.start_without_a_marker()
    wait_until(lambda: held.coordinators() == 1)
    assert held.told() == ErrorCode.NOT_LEADER_OR_FOLLOWER
    assert "transactions are loaded first" in held.status()["why_closed"]
    wait_until(lambda: get(held.broker, "ready")[0] == 503)
    assert "all partitions are closed" in get(held.broker, "ready")[1]

    def seconds() -> float:
        _, page = get(held.broker)
        name = "mpbroker_partitions_closed_seconds"
        (line,) = [each for each in page.splitlines() if each.startswith(name)]
        return float(line.split()[1])

    assert seconds() > 0
    held.let_go()
    wait_until(lambda: held.told() == ErrorCode.NONE)
    assert held.status()["closed"] is None
    assert get(held.broker, "ready")[0] == 200
    wait_until(lambda: seconds() == 0)
    log = held.broker.log_path.read_text()
    assert "an unclean stop: all partitions are closed" in log
    assert "all partitions are open, after" in log
    assert kinds(held.broker) == [(0, None), (LAST + 1, 1)]
    held.broker.stop()


def test_a_coordinator_that_hangs_may_be_killed_and_the_third_lets_everybody_in(held):
    held.start_without_a_marker()
    for number in (1, 2, 3):
        wait_until(lambda number=number: held.coordinators() == number)
        assert held.told() == ErrorCode.NOT_LEADER_OR_FOLLOWER
        (pid,) = pids_of(held.broker, "coordinator")
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: held.status()["closed"] is None)
    assert held.told() == ErrorCode.OFFSET_OUT_OF_RANGE
    assert "transactions could not be loaded" in held.broker.log_path.read_text()
    held.let_go()
    wait_for_marker(held.broker, LAST + 1)
    assert kinds(held.broker) == [(0, None), (LAST + 1, 1)]
    held.broker.stop()


def test_a_coordinator_that_is_replaced_on_purpose_has_not_failed(held):
    held.start_without_a_marker()
    for size in range(100, 105):
        wait_until(lambda: held.coordinators() or held.status()["closed"] is None)
        assert held.coordinators() == 1
        (pid,) = pids_of(held.broker, "coordinator")
        assert alter(held.broker, {"group.max.size": size}).error_code == 0
        wait_until(
            lambda pid=pid: pids_of(held.broker, "coordinator") not in ([], [pid])
        )
    assert held.told() == ErrorCode.NOT_LEADER_OR_FOLLOWER
    held.let_go()
    wait_until(lambda: held.told() == ErrorCode.NONE)
    assert kinds(held.broker) == [(0, None), (LAST + 1, 1)]
    held.broker.stop()


@pytest.mark.parametrize("layout", ["none", "layout"])
def test_an_upgrade_while_they_are_closed_opens_them_no_sooner_and_no_later(
    held, layout
):
    held.start_without_a_marker()
    wait_until(lambda: held.coordinators() == 1)
    settings = [f"{key}={value}" for key, value in held.broker.config.items()]
    with held.ctl() as client:
        client.request("resize", handlers=2)
        client.request("upgrade", argv=[*held.program(), layout, "serve", *settings])
    wait_until(lambda: held.upgrade().startswith("done"))
    assert held.told() == ErrorCode.NOT_LEADER_OR_FOLLOWER
    wait_until(lambda: held.coordinators() >= 1)  # the newcomer's may not be there yet
    held.let_go()
    wait_until(lambda: held.told() == ErrorCode.NONE)
    assert kinds(held.broker) == [(0, None), (LAST + 1, 1)]
    held.broker.stop()
