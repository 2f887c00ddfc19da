"""Cut the power again and again, and ask afterwards for all that was acknowledged."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Final

from mpbroker.inspect.process_state import process_state
from tests.bench import wire
from tests.power_cuts.disk import Disk
from tests.power_cuts.load import Client, Offsets, Records, Topics, Transactions
from tests.support.broker import Broker, BrokerFailedError
from tests.support.footprint import session_processes
from tests.support.ports import reusable_port

# So many cuts of one file system: logs stay short enough to be read after each.
CUTS_A_DISK: Final = 12
# What no broker says that can read its disk.
_ALARM: Final = re.compile(
    r"Traceback|CRITICAL|cannot be (?:loaded|read)|is now offline|is offline|-stray"
)
_SMALL: Final = {"segment.bytes": "16384", "index.interval.bytes": "512"}


def stop_all(broker: Broker) -> None:
    """Stop all processes of a broker, each behind the system call that it was in."""
    stopped: set[int] = set()
    os.kill(broker.pid, signal.SIGSTOP)  # first: it kills children that are stopped
    while left := session_processes(broker.pid).keys() - stopped:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        stopped |= {pid for pid in left if process_state(pid) in ("T", "Z", "")}


class Cuts:
    """A campaign.

    Attributes:
        cuts: how often the power was cut.
        acknowledged: how many answers were held against the disk.
        complaints: what was acknowledged and not kept.

    Args:
        folder: an empty directory, where the disk is mounted.
        seed: of all that is random.
        defect: a name of broken.DEFECTS; "": mpbroker as it is.
        keep: a directory that must not exist, for what is on the disk and what the
            broker has said if there is a complaint; None: nothing is kept.
        fast_commit: as ``Disk.make``.
    """

    def __init__(
        self,
        folder: Path,
        seed: int,
        *,
        defect: str = "",
        keep: Path | None = None,
        fast_commit: bool = False,
    ) -> None:
        self.cuts = 0
        self.acknowledged = 0
        self.complaints: list[str] = []
        self._chance = random.Random(seed)
        self._keep, self._fast_commit = keep, fast_commit
        disk_folder = folder / "power"
        disk_folder.mkdir()
        self._disk = Disk(disk_folder)
        module = ["tests.power_cuts.broken", defect] if defect else ["mpbroker"]
        self._command = [sys.executable, "-m", *module]
        self._log_path = folder / "broker.log"
        self._broker = self._new_broker()
        self._clients: list[Client] = []
        self._read_to = 0

    def run(self, cuts: int, until: float = float("inf")) -> None:
        """Cut the power so often, or until a time (monotonic, s), or a complaint."""
        try:
            while self.cuts < cuts and not self._is_over(until):
                self._one_disk(min(cuts, self.cuts + CUTS_A_DISK), until)
                kind = f"the last of them on ext4 with {self._disk.kind}"
                print(f"{self.cuts} cuts, {kind}", flush=True)
        finally:
            self._broker.kill()
            for client in self._clients:
                client.end()
            self._disk.close()

    def _is_over(self, until: float) -> bool:
        return bool(self.complaints) or time.monotonic() > until

    def _new_broker(self) -> Broker:
        config = {
            "listeners": f"PLAINTEXT://127.0.0.1:{reusable_port()}",
            "num.io.threads": self._chance.choice([1, 2, 3]),
            "num.network.threads": 1,
            "group.initial.rebalance.delay.ms": 0,
            "offsets.topic.num.partitions": 2,
            "transaction.state.log.num.partitions": 2,
            "offsets.topic.segment.bytes": 32768,
            "transaction.state.log.segment.bytes": 32768,
            # As often as may be: their files are replaced while the power is cut.
            "log.flush.offset.checkpoint.interval.ms": 100,
            "log.flush.start.offset.checkpoint.interval.ms": 100,
            "log.segment.delete.delay.ms": 200,
            "log.retention.check.interval.ms": 300,
        }
        data = self._disk.path / "data"
        broker = Broker(data, config, command=self._command)
        broker.log_path = self._log_path
        return broker

    @property
    def _address(self) -> tuple[str, int]:
        host, _, port = self._broker.bootstrap.rpartition(":")
        return host, int(port)

    def _one_disk(self, cuts: int, until: float) -> None:
        self._disk.make(self._chance, fast_commit=self._fast_commit)
        self._broker = self._new_broker()
        records = Records("cut", 2, _SMALL)
        flushed = Records("flushed", 1, {"flush.messages": "1", **_SMALL}, acks=1)
        written = Records("written", Transactions.PARTITIONS, _SMALL)
        seed = self._chance.getrandbits(32)
        self._clients = [
            records,
            flushed,
            Topics(seed),
            Offsets("cut", seed),
            *(Transactions(f"t-{number}", "written", seed) for number in range(2)),
        ]
        self._broker.start()
        for topic in (records, flushed, written):
            topic.set_up(self._address)
        counted = 0
        while self.cuts < cuts and not self._is_over(until):
            kind = self._cut_once()
            self.cuts += 1
            self._check(f"after a cut in a {kind}")
            total = sum(client.acknowledged for client in self._clients)
            self.acknowledged += total - counted
            counted = total
        self._broker.stop()
        self._broker.start()
        self._check("after a clean stop")
        self._broker.stop()  # it takes the names along that killed ones have left

    def _cut_once(self) -> str:
        """Cut the power under load, in a stop or in a start; start again.

        Returns:
            In which of them.
        """
        for client in self._clients:
            client.begin(self._address)
        time.sleep(self._chance.uniform(0.02, 0.8))
        kind = self._chance.choices(("load", "stop", "start"), (7, 2, 2))[0]
        self._cut_at = time.monotonic()
        if kind == "stop":
            os.kill(self._broker.pid, signal.SIGTERM)
            time.sleep(self._chance.uniform(0.0, 0.5))
        self._cut()
        self._end_load()
        self._disk.restore()
        if kind == "start":
            # The load before this was cut off, too, and what is left is recovered.
            starting = threading.Thread(target=self._start_in_vain)
            starting.start()
            while not self._broker.is_running:
                time.sleep(0.001)
            time.sleep(self._chance.uniform(0.0, 1.5))
            self._cut()
            starting.join()
            self._broker.kill()
            self._skip_log()
            self._disk.restore()
            self.cuts += 1
        self._broker.start()
        return kind

    def _start_in_vain(self) -> None:
        with contextlib.suppress(BrokerFailedError):
            self._broker.start()

    def _cut(self) -> None:
        """Stop the broker's processes, cut the power, and kill them.

        All are stopped first. Linux (6.18) lets an fdatasync that is under way succeed
        though the cut has taken what it was to force to disk: in a loop of pwrite and
        fdatasync the last record was missing after 10 cuts of 24, and after none of 100
        with this.
        """
        stop_all(self._broker)
        self._disk.cut()
        for pid in session_processes(self._broker.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _end_load(self) -> None:
        """Wait for the end of the broker, and end the clients."""
        self._broker.kill()  # the rest of it
        for client in self._clients:
            client.end()
            early = [text for at, text in client.troubles if at < self._cut_at]
            self.complaints += [f"before the cut: {text}" for text in early]
        self._skip_log()

    def _skip_log(self) -> None:
        """Look no more at what the broker has said until now: its disk had failed."""
        self._read_to = self._log_path.stat().st_size

    def _check(self, when: str) -> None:
        before = len(self.complaints)
        try:
            for client in self._clients:
                client.resume(self._address)
            for client in self._clients:
                self.complaints += client.check(self._address)
        except (OSError, wire.AnswerError) as error:
            self.complaints.append(f"no check: {error!r}")
        with self._log_path.open("rb") as log:
            log.seek(self._read_to)
            said = log.read().decode(errors="replace")
        self.complaints += [line for line in said.splitlines() if _ALARM.search(line)]
        if len(self.complaints) > before:
            self.complaints.append(f"({when}, on ext4 with {self._disk.kind})")
        if self.complaints and self._keep is not None and not self._keep.exists():
            sockets = shutil.ignore_patterns("*.sock")
            shutil.copytree(self._broker.data_dir, self._keep, ignore=sockets)
            shutil.copy(self._log_path, self._keep)

    def log_tail(self) -> str:
        """Return the end of what the broker said."""
        return self._broker.log_tail()
