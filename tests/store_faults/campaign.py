"""A broker with tiered storage under load, kills, and a store that fails in every way.

The store is SeaweedFS behind a proxy (tests/support/store_proxy.py). Meanwhile records
are written, segments are copied and leave the disk, and are read back from the store
through a cache that is too small; records and topics are deleted. In the end the store
works, and everything is read and compared, at last from a restored machine.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from threading import Event, Thread
from typing import Final

import psutil
from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic, OffsetSpec

from mpbroker.storage.remote.object_store import ObjectStore
from mpbroker.storage.remote.remote_manifest import RemoteManifest
from tests.store_faults.ledger import Ledger, value
from tests.support.broker import Broker
from tests.support.object_store import object_store
from tests.support.store_proxy import FAULTS, Fault, StoreProxy, always, none, sometimes

TOPIC: Final = "load"
PARTITIONS: Final = 3
SETTINGS: Final = {
    "remote.log.storage.system.enable": "true",
    "remote.log.manager.task.interval.ms": "300",
    "remote.metadata.interval.ms": "1000",
    "remote.log.manager.task.retry.backoff.ms": "100",
    "remote.log.manager.task.retry.backoff.max.ms": "2000",
    "remote.storage.cache.bytes": "200000",
    "log.retention.check.interval.ms": "300",
    "log.initial.task.delay.ms": "0",
    "num.io.threads": "2",
    "num.network.threads": "2",
}
TIERED: Final = {
    "remote.storage.enable": "true",
    "local.retention.bytes": "1",
    "segment.bytes": "32768",
    "retention.ms": "-1",
}
# Short names of what is killed, by the words in the titles of the processes.
_KILLED: Final = (
    "remote-log-manager",
    "housekeeper",
    "request-handler",
    "network-thread",
)
_PATIENCE_S: Final = 300
_QUIET_S: Final = 20  # of a consumer that has nothing more to read
# At the start of a broker the store may be away; other failures are its operator's.
_AT_START: Final = ("refused", "503", "SlowDown")


class Campaign:
    """One run.

    Args:
        folder: for all files; it must exist.
        seed: of all that is random.
        rate: records a second.
        defect: let the last object be damaged at the end, to see that it is found.

    Attributes:
        ledger: what was written, and complaints.
        kills: how often each kind of process was killed.
    """

    def __init__(
        self, folder: Path, seed: int, rate: int = 300, *, defect: bool = False
    ) -> None:
        self._folder = folder
        self._draw = random.Random(seed)
        self._rate = rate
        self._defect = defect
        self._over = Event()
        self.ledger = Ledger(PARTITIONS)
        self.kills: Counter[str] = Counter()
        self.harmed: Counter[str] = Counter()
        self.requests = self.segments = self.topics = 0

    def run(self, seconds: float) -> None:
        """Do harm for some seconds, then look whether all is there."""
        folder = self._folder
        (folder / "seaweedfs").mkdir()
        with (
            object_store(folder / "seaweedfs") as store,
            StoreProxy(store.endpoint) as proxy,
        ):
            os.environ.update(store.environ)
            os.environ["AWS_ENDPOINT_URL"] = proxy.endpoint
            self._proxy = proxy
            self._url = "s3://lake/campaign"
            self._broker = Broker(
                folder / "data", {**SETTINGS, "remote.storage.url": self._url}
            )
            # A port of its own, which every start takes again.
            with self._broker:
                address = self._broker.bootstrap
                self._broker.config["listeners"] = f"PLAINTEXT://{address}"
                self._bootstrap = address
                self._harm(seconds)
                self._settle()
                self._restore()
            self.harmed, self.requests = proxy.done, proxy.requests

    # -- the load ----------------------------------------------------------------------

    def _admin(self) -> AdminClient:
        return AdminClient({"bootstrap.servers": self._bootstrap, "log_level": 0})

    def _write(self) -> None:
        """Write the records of each partition in their order, until it is over."""
        producer = Producer(
            {
                "bootstrap.servers": self._bootstrap,
                "enable.idempotence": True,
                "linger.ms": 20,
                "batch.size": 16_000,
                "message.timeout.ms": 0,  # try for ever
                "log_level": 0,
            }
        )

        def note(error: KafkaError | None, message: object) -> None:
            if error is not None:
                self.ledger.complain(f"a record was refused: {error}")
                return
            self.ledger.acknowledge(
                message.partition(), message.offset(), message.value()
            )

        sent = [0] * PARTITIONS
        while not self._over.wait(0.05):
            for partition in range(PARTITIONS):
                for _ in range(max(1, self._rate // (20 * PARTITIONS))):
                    producer.produce(
                        TOPIC,
                        value(partition, sent[partition]),
                        partition=partition,
                        on_delivery=note,
                    )
                    sent[partition] += 1
            producer.poll(0)
        if producer.flush(_PATIENCE_S):
            self.ledger.complain("records are without an answer")

    def _read(self, seed: int) -> None:
        """Read from places drawn by chance on, until it is over."""
        draw = random.Random(seed)
        consumer = self._consumer()
        while not self._over.is_set():
            partition = draw.randrange(PARTITIONS)
            first, end = self.ledger.start(partition), self.ledger.end(partition)
            if first == end:
                time.sleep(0.1)
                continue
            self._read_some(
                consumer, partition, draw.randint(first, end - 1), draw.randint(1, 2000)
            )
        consumer.close()

    def _consumer(self) -> Consumer:
        return Consumer(
            {
                "bootstrap.servers": self._bootstrap,
                "group.id": "readers",
                "enable.auto.commit": False,
                "auto.offset.reset": "error",
                "fetch.wait.max.ms": 100,
                "fetch.error.backoff.ms": 50,
                "log_level": 0,
            }
        )

    def _read_some(
        self, consumer: Consumer, partition: int, first: int, count: int
    ) -> None:
        end = min(first + count, self.ledger.end(partition))
        consumer.assign([TopicPartition(TOPIC, partition, first)])
        expected = first
        while expected < end and not self._over.is_set():
            message = consumer.poll(0.2)
            if message is None:
                continue
            if message.error() is not None:
                if expected < self.ledger.start(partition):
                    return  # they were deleted meanwhile
                code = message.error().code()
                if code == KafkaError._AUTO_OFFSET_RESET:
                    self.ledger.complain(
                        f"partition {partition}: {expected}: {message.error()}"
                    )
                    return
                continue  # it tries again
            self.ledger.read(partition, message.offset(), message.value(), expected)
            expected = message.offset() + 1

    def _delete(self, seed: int) -> None:
        """Delete records, and topics, until it is over."""
        draw = random.Random(seed)
        while not self._over.wait(draw.uniform(1, 4)):
            # The broker may be dead at this moment: then another time.
            with contextlib.suppress(Exception):
                if draw.random() < 0.5:
                    self._delete_records(draw)
                else:
                    self._make_and_delete_a_topic(draw)

    def _delete_records(self, draw: random.Random) -> None:
        partition = draw.randrange(PARTITIONS)
        start, end = self.ledger.start(partition), self.ledger.end(partition)
        before = start + (end - start) // draw.randint(5, 20)
        self.ledger.delete(partition, before)
        wanted = TopicPartition(TOPIC, partition, before)
        self._admin().delete_records([wanted])[wanted].result(10)

    def _make_and_delete_a_topic(self, draw: random.Random) -> None:
        self.topics += 1
        name = f"gone-{self.topics}"
        admin = self._admin()
        admin.create_topics([NewTopic(name, 1, config=TIERED)])[name].result(10)
        producer = Producer(
            {"bootstrap.servers": self._bootstrap, "log_level": 0, "batch.size": 10_000}
        )
        for _ in range(draw.randint(100, 500)):
            producer.produce(name, b"x" * 400)
        producer.flush(5)
        time.sleep(draw.uniform(0, 2))
        admin.delete_topics([name])[name].result(10)

    # -- the harm ----------------------------------------------------------------------

    def _harm(self, seconds: float) -> None:
        admin = self._admin()
        made = admin.create_topics([NewTopic(TOPIC, PARTITIONS, config=TIERED)])
        made[TOPIC].result(60)
        threads = [Thread(target=self._write)]
        threads += [
            Thread(target=self._read, args=(self._draw.random(),)) for _ in range(2)
        ]
        threads.append(Thread(target=self._delete, args=(self._draw.random(),)))
        for thread in threads:
            thread.start()
        until = time.monotonic() + seconds
        try:
            while time.monotonic() < until and not self.ledger.complaints:
                self._proxy.choose = self._choice()
                time.sleep(self._draw.uniform(0.5, 4))
                self._kill_something()
        finally:
            self._proxy.choose = none
            self._ensure_running()
            self._over.set()
            for thread in threads:
                thread.join(_PATIENCE_S)
                if thread.is_alive():
                    self.ledger.complain("a client waits for ever")

    def _choice(self):
        """Return what the proxy is to do for a while."""
        draw = self._draw.random()
        seed = self._draw.randrange(1 << 30)
        if draw < 0.25:
            return none
        if draw < 0.5:
            return sometimes(self._draw.choice((0.02, 0.1, 0.5)), seed)
        if draw < 0.7:
            return always(self._draw.choice(sorted(FAULTS)))
        return self._kill_at_requests(seed)

    def _kill_at_requests(self, seed: int):
        """Return a choice that kills the process of the store as it asks for something.

        Before the store does it, or after: so it dies at every step of what it does.
        """
        draw = random.Random(seed)
        left = [draw.randint(0, 30)]

        def choose(method: str, path: str) -> Fault | None:
            left[0] -= 1
            if left[0] > 0:
                return None
            left[0] = draw.randint(1, 30)
            self._kill("remote-log-manager", f"manager at {method}")
            return FAULTS[draw.choice(("refused", "no answer"))]

        return choose

    def _kill_something(self) -> None:
        draw = self._draw.random()
        if draw < 0.1:
            self.kills["broker"] += 1
            self._broker.kill()
            if self._draw.random() < 0.5:
                self._proxy.choose = always(self._draw.choice(_AT_START))
            else:
                self._proxy.choose = none
            self._broker.start()
        elif draw < 0.15:
            self._kill("remote-log-manager", "manager stopped", signal.SIGSTOP)
        elif draw < 0.7:
            self._kill(self._draw.choice(_KILLED))

    def _kill(self, title: str, name: str = "", how: int = signal.SIGKILL) -> None:
        with contextlib.suppress(psutil.NoSuchProcess, AssertionError):
            found = [
                each
                for each in psutil.Process(self._broker.pid).children(recursive=True)
                if title in " ".join(each.cmdline())
            ]
            if found:
                self._draw.choice(found).send_signal(how)
                self.kills[name or title] += 1

    def _ensure_running(self) -> None:
        if not self._broker.is_running:
            self._broker.start()

    # -- the end -----------------------------------------------------------------------

    def _settle(self) -> None:
        """Wait until all closed segments are in the store only, and look at all."""
        self._wait(self._is_tiered, "segments are not copied")
        self._wait(self._has_no_orphan, "objects of deleted topics stay")
        self._read_all()
        self._check_store()
        if "Traceback" in self._broker.log_path.read_text():
            self.ledger.complain("a traceback in the log")

    def _wait(self, reached, complaint: str) -> None:
        until = time.monotonic() + _PATIENCE_S
        while not reached():
            if time.monotonic() > until:
                self.ledger.complain(complaint)
                return
            time.sleep(0.2)

    def _directories(self) -> list[Path]:
        data = Path(self._broker.data_dir)
        return [data / f"{TOPIC}-{each}" for each in range(PARTITIONS)]

    def _is_tiered(self) -> bool:
        return all(len(list(each.glob("*.log"))) == 1 for each in self._directories())

    def _manifests(self) -> list[RemoteManifest]:
        return [RemoteManifest.of_directory(str(each)) for each in self._directories()]

    def _has_no_orphan(self) -> bool:
        """Return whether the store has what the manifests name, and nothing else."""
        manifests = self._manifests()
        self.segments = sum(len(each.copied()) for each in manifests)
        named, needed = {"owner"}, {"owner"}
        for manifest in manifests:
            named.add(f"{manifest.prefix}/manifest")
            for segment in manifest.segments:
                stem = f"{segment.base_offset:020d}-{segment.segment_id}"
                both = {f"{manifest.prefix}/{stem}.{end}" for end in ("log", "indexes")}
                named |= both
                needed |= both if segment in manifest.copied() else set()
        there = {
            key
            for key in ObjectStore(self._url).list("")
            if not key.startswith("metadata/")
        }
        return needed <= there <= named

    def _read_all(self) -> None:
        consumer = self._consumer()
        self._over.clear()
        admin = self._admin()
        for partition in range(PARTITIONS):
            where = TopicPartition(TOPIC, partition)
            start = admin.list_offsets({where: OffsetSpec.earliest()})[where]
            first = start.result(60).offset
            if first > self.ledger.start(partition):
                self.ledger.complain(f"partition {partition} begins at {first}")
            self._read_to_end(consumer, partition, first, self.ledger.end(partition))
        consumer.close()

    def _read_to_end(
        self, consumer: Consumer, partition: int, first: int, end: int
    ) -> None:
        consumer.assign([TopicPartition(TOPIC, partition, first)])
        expected, quiet_since = first, time.monotonic()
        while expected < end:
            message = consumer.poll(1)
            if message is not None and message.error() is None:
                self.ledger.read(partition, message.offset(), message.value(), expected)
                expected, quiet_since = message.offset() + 1, time.monotonic()
            elif time.monotonic() > quiet_since + _QUIET_S:
                self.ledger.complain(
                    f"partition {partition}: nothing from {expected} on, of {end}"
                )
                return

    def _check_store(self) -> None:
        if self._defect:
            store = ObjectStore(self._url)
            keys = [key for key in store.list("") if key.endswith(".log")]
            store.put(keys[-1], store.get(keys[-1])[:-1])
        self._command("store", "check", "--from", self._url)

    def _restore(self) -> None:
        """Lose the machine, and read what its store has."""
        ends = [each.copied_to() for each in self._manifests()]
        data = Path(self._broker.data_dir)
        self._broker.kill()
        shutil.move(data, self._folder / "lost")
        self._command(
            *("restore", "--from", self._url, "--data-dir", str(data), "--take-over")
        )
        self._broker.start()
        consumer = self._consumer()
        for partition, end in enumerate(ends):
            first = self.ledger.start(partition)
            self._read_to_end(consumer, partition, first, max(end, first))
        consumer.close()

    def _command(self, *arguments: str) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "mpbroker", *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=_PATIENCE_S,
        )
        if done.returncode:
            self.ledger.complain(
                f"{' '.join(arguments[:2])}: {done.stdout[-500:]}{done.stderr[-500:]}"
            )
