"""Throughput through librdkafka, and broker CPU per million records in and out.

Beside what is not compressed the same bytes' way without a broker and without
librdkafka, in the same run and on the same file system (see byte_path.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from tests.bench import wire
from tests.bench.brokers import Broker, scratch_directory
from tests.bench.byte_path import Bound, fetch_bound, produce_bound
from tests.bench.cases import Case, Context
from tests.bench.rdkafka import BatchConsumer, BatchProducer

DISTINCT_VALUES: Final = 1000
PRODUCER_SETTINGS: Final = {
    "linger.ms": "5",
    "batch.size": "1000000",
    "batch.num.messages": "100000",
    "queue.buffering.max.messages": "200000",
    "queue.buffering.max.kbytes": "131072",
    "acks": "1",
}
CONSUMER_SETTINGS: Final = {
    "queued.min.messages": "200000",
    "queued.max.messages.kbytes": "131072",
    "fetch.max.bytes": "52428800",
    "max.partition.fetch.bytes": "8388608",
    "fetch.wait.max.ms": "10",
    "enable.auto.commit": "false",
    "group.id": "bench",
}


class Shape(NamedTuple):
    """Records of one size: how many make about a second of work."""

    label: str
    value_bytes: int
    records: int


SHAPES: Final = (
    Shape("100B", 100, 1_000_000),
    Shape("1KiB", 1024, 400_000),
    Shape("10KB", 10_000, 50_000),
)


def values_of(value_bytes: int) -> list[bytes]:
    """Return the values that are sent over and over."""
    return [wire.filler(value_bytes, i) for i in range(DISTINCT_VALUES)]


def _fill(broker: Broker, topic: str, shape: Shape, codec: str, acks: str) -> int:
    """Send the shape's records once; return how many."""
    values = values_of(shape.value_bytes)
    settings = PRODUCER_SETTINGS | {"compression.codec": codec, "acks": acks}
    with BatchProducer(broker.bootstrap, topic, values, settings) as producer:
        return int(producer.send(shape.records // DISTINCT_VALUES))


def _figures(
    records: int, value_bytes: int, seconds: float, cpu: float
) -> dict[str, float]:
    return {
        "records_per_s": records / seconds,
        "mb_per_s": records * value_bytes / seconds / 1e6,
        "cpu_s_per_million": cpu / records * 1e6,
    }


def _bound(
    measure: Callable[[Path, float], Bound], context: Context, shape: Shape, codec: str
) -> dict[str, float]:
    if codec != "none":
        return {}
    with scratch_directory() as directory:
        bound = measure(directory, context.seconds)
    mib_per_record = shape.value_bytes / (1 << 20)
    return {
        "bound_mb_per_s": bound.mb_per_s,
        "bound_cpu_s_per_million": bound.cpu_us * mib_per_record,
    }


def _produce(
    shape: Shape, codec: str, acks: str = "1"
) -> Callable[[Context], dict[str, float]]:
    def run(context: Context) -> dict[str, float]:
        broker = context.broker
        # A topic of its own for every run, so that its end offset proves the count.
        number = broker.next_number()
        topic = broker.topic(f"bench-in-{shape.label}-{codec}-{number}")
        cpu, began = broker.tree.cpu_seconds(), time.monotonic()
        sent = _fill(broker, topic, shape, codec, acks)
        seconds, cpu = time.monotonic() - began, broker.tree.cpu_seconds() - cpu
        with broker.connect() as connection:
            stored = connection.end_offset(topic, 0)
            connection.delete_topic(topic)
        if stored != sent:
            raise wire.AnswerError(f"{stored} records stored of {sent} acknowledged")
        return _figures(sent, shape.value_bytes, seconds, cpu) | _bound(
            produce_bound, context, shape, codec
        )

    return run


def _consume(shape: Shape, codec: str) -> Callable[[Context], dict[str, float]]:
    def run(context: Context) -> dict[str, float]:
        broker = context.broker
        topic = broker.topic(f"bench-out-{shape.label}-{codec}")
        count = broker.once(
            f"filled {topic}", lambda: _fill(broker, topic, shape, codec, "1")
        )
        cpu, began = broker.tree.cpu_seconds(), time.monotonic()
        with BatchConsumer(broker.bootstrap, topic, CONSUMER_SETTINGS) as consumer:
            consumer.read(count)
            seconds, cpu = time.monotonic() - began, broker.tree.cpu_seconds() - cpu
        return _figures(count, shape.value_bytes, seconds, cpu) | _bound(
            fetch_bound, context, shape, codec
        )

    return run


CASES: Final = [
    *(
        Case(f"librdkafka/{direction}/{shape.label}/{codec}", run(shape, codec))
        for shape in SHAPES
        for codec in ("none", "lz4")
        for direction, run in (("produce", _produce), ("consume", _consume))
    ),
    *(
        Case(
            f"librdkafka/produce-acks-all/{shape.label}/lz4",
            _produce(shape, "lz4", "all"),
        )
        for shape in SHAPES
    ),
]
