"""Our producer, kafka-python's and aiokafka's, in turn, to the same broker.

Every run sends records of one kind with the settings that all three have (acks=all,
batches of 16 KiB, linger of 5 ms) to a topic of four partitions of its own, and counts
afterwards what the broker has. "pure" is ours without its compiled part. "bare" is no
producer: it sends the same batches, encoded before the clock starts; so it says how
much faster than another client any could be, with this broker on this machine.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable
from typing import Final, NamedTuple
from unittest import mock

from mpbroker.client.addresses import parse_addresses
from mpbroker.client.admin.topic_admin import LATEST, delete_topic, list_offsets
from mpbroker.client.cluster import Cluster, TopicPartition
from mpbroker.producer import Producer, batch
from mpbroker.protocol.records.compression import Codec
from mpbroker.protocol.records.record_encode import encode_batch_in_python
from tests.bench.bare_sends import BareSends
from tests.bench.cases import Case, Context
from tests.bench.wire import AnswerError

PARTITIONS: Final = 4
BATCH_SIZE: Final = 16_384
LINGER_MS: Final = 5


class Work(NamedTuple):
    """What is sent: so many values, and how they are compressed."""

    bootstrap: str
    topic: str
    value: bytes
    count: int
    codec: str


def _ours(work: Work) -> float:
    with Producer(
        bootstrap_servers=work.bootstrap,
        batch_size=BATCH_SIZE,
        linger_ms=LINGER_MS,
        compression_type=work.codec,
    ) as producer:
        producer.partitions_for(work.topic)
        began = time.perf_counter()
        for _ in range(work.count):
            producer.send(work.topic, work.value)
        producer.flush()
        return time.perf_counter() - began


def _ours_pure(work: Work) -> float:
    with mock.patch.object(batch, "encode_batch", encode_batch_in_python):
        return _ours(work)


def _kafka_python(work: Work) -> float:
    from kafka import KafkaProducer

    producer = KafkaProducer(
        bootstrap_servers=work.bootstrap,
        acks="all",
        batch_size=BATCH_SIZE,
        linger_ms=LINGER_MS,
        compression_type=None if work.codec == "none" else work.codec,
    )
    try:
        producer.partitions_for(work.topic)
        began = time.perf_counter()
        for _ in range(work.count):
            producer.send(work.topic, work.value)
        producer.flush()
        return time.perf_counter() - began
    finally:
        producer.close()


def _aiokafka(work: Work) -> float:
    from aiokafka import AIOKafkaProducer

    async def run() -> float:
        producer = AIOKafkaProducer(
            bootstrap_servers=work.bootstrap,
            acks="all",
            enable_idempotence=True,
            max_batch_size=BATCH_SIZE,
            linger_ms=LINGER_MS,
            compression_type=None if work.codec == "none" else work.codec,
        )
        await producer.start()
        try:
            await producer.partitions_for(work.topic)
            began = time.perf_counter()
            for _ in range(work.count):
                await producer.send(work.topic, work.value)
            await producer.flush()
            return time.perf_counter() - began
        finally:
            await producer.stop()

    return asyncio.run(run())


def _bare(work: Work) -> float:
    codec = Codec.from_name(work.codec)
    return BareSends(
        work.topic, PARTITIONS, work.value, work.count, codec, BATCH_SIZE
    ).run(work.bootstrap)


CLIENTS: Final[dict[str, Callable[[Work], float]]] = {
    "ours": _ours,
    "pure": _ours_pure,
    "kafka_python": _kafka_python,
    "aiokafka": _aiokafka,
    "bare": _bare,
}


def _written(bootstrap: str, topic: str) -> int:
    """Return how many records a topic has, and delete it."""
    with Cluster(parse_addresses(bootstrap), 30) as cluster:
        leaders = {
            TopicPartition(topic, entry.partition_index): entry.leader_id
            for entry in cluster.topic(topic).partitions
        }
        ends = list_offsets(cluster, dict.fromkeys(leaders, LATEST), leaders)
        delete_topic(cluster, topic)
    return sum(answer.offset for answer in ends.values())


class Speed(NamedTuple):
    """What a client did, of wall time and of its process's CPU time."""

    records_per_s: float
    records_per_cpu_s: float


def _run(context: Context, name: str, value: bytes, count: int, codec: str) -> Speed:
    """Run one client; all of its records are found at the broker afterwards."""
    broker = context.broker
    bootstrap = broker.bootstrap
    topic = broker.topic(f"bench-py-{broker.next_number()}", PARTITIONS)
    cpu_s = time.process_time()
    seconds = CLIENTS[name](Work(bootstrap, topic, value, count, codec))
    cpu_s = time.process_time() - cpu_s
    written = _written(bootstrap, topic)
    if written != count:
        raise AnswerError(f"{name}: {written} records stored of {count} acknowledged")
    return Speed(count / seconds, count / cpu_s)


def _throughput(size: int, codec: str) -> Callable[[Context], dict[str, float]]:
    # Text that compresses as log lines do, not a run of one letter.
    line = b"".join(b'{"id":%d,"user":"u%d","ok":true}' % (i, i * 7) for i in range(99))
    value = line[:size]

    def run(context: Context) -> dict[str, float]:
        rates: dict[str, list[Speed]] = {name: [] for name in CLIENTS}
        counts = dict.fromkeys(CLIENTS, 5000)
        for turn in range(4):
            for name in CLIENTS:
                rate = _run(context, name, value, counts[name], codec)
                counts[name] = max(5000, int(rate.records_per_s * context.seconds))
                if turn:  # the first is a warm-up, and finds out how much is enough
                    rates[name].append(rate)
        median, cpu = (
            {
                name: statistics.median(speed[which] for speed in found)
                for name, found in rates.items()
            }
            for which in (0, 1)
        )
        return {
            "records_per_s": median["ours"],
            "pure_records_per_s": median["pure"],
            "times_kafka_python": median["ours"] / median["kafka_python"],
            "pure_times_kafka_python": median["pure"] / median["kafka_python"],
            "bare_times_kafka_python": median["bare"] / median["kafka_python"],
            "times_aiokafka": median["ours"] / median["aiokafka"],
            "pure_times_aiokafka": median["pure"] / median["aiokafka"],
            # What others do on the machine meanwhile changes these little.
            "cpu_times_kafka_python": cpu["ours"] / cpu["kafka_python"],
            "pure_cpu_times_kafka_python": cpu["pure"] / cpu["kafka_python"],
            "cpu_times_aiokafka": cpu["ours"] / cpu["aiokafka"],
            "pure_cpu_times_aiokafka": cpu["pure"] / cpu["aiokafka"],
        }

    return run


LATENCY_RATE: Final = 1000  # records a second, one at a time
LATENCY_RUNS: Final = 7


def _paced(seconds: float, send: Callable[[], None]) -> None:
    """Call so often as LATENCY_RATE says, and catch up after being late."""
    began = time.perf_counter()
    for number in range(int(seconds * LATENCY_RATE)):
        due = began + number / LATENCY_RATE
        while (left := due - time.perf_counter()) > 0:
            time.sleep(left)
        send()


def _ours_latency(bootstrap: str, topic: str, seconds: float) -> list[float]:
    taken: list[float] = []
    with Producer(bootstrap_servers=bootstrap, linger_ms=0) as producer:
        for partition in range(PARTITIONS):
            producer.send(topic, b"first", partition=partition)
        producer.flush()

        def send() -> None:
            began = time.perf_counter()
            producer.send(
                topic,
                b"x" * 100,
                callback=lambda _m, _e: taken.append(time.perf_counter() - began),
            )

        _paced(seconds, send)
        producer.flush()
    return taken


def _kafka_python_latency(bootstrap: str, topic: str, seconds: float) -> list[float]:
    from kafka import KafkaProducer

    taken: list[float] = []
    producer = KafkaProducer(bootstrap_servers=bootstrap, acks="all", linger_ms=0)
    try:
        for partition in range(PARTITIONS):
            producer.send(topic, b"first", partition=partition)
        producer.flush()

        def send() -> None:
            began = time.perf_counter()
            producer.send(topic, b"x" * 100).add_callback(
                lambda _: taken.append(time.perf_counter() - began)
            )

        _paced(seconds, send)
        producer.flush()
    finally:
        producer.close()
    return taken


def _aiokafka_latency(bootstrap: str, topic: str, seconds: float) -> list[float]:
    from aiokafka import AIOKafkaProducer

    taken: list[float] = []

    async def run() -> None:
        producer = AIOKafkaProducer(
            bootstrap_servers=bootstrap,
            acks="all",
            enable_idempotence=True,
            linger_ms=0,
        )
        await producer.start()
        try:
            for partition in range(PARTITIONS):
                await producer.send(topic, b"first", partition=partition)
            await producer.flush()
            began = time.perf_counter()
            for number in range(int(seconds * LATENCY_RATE)):
                due = began + number / LATENCY_RATE
                while (left := due - time.perf_counter()) > 0:
                    await asyncio.sleep(left)
                sent = time.perf_counter()
                future = await producer.send(topic, b"x" * 100)
                future.add_done_callback(
                    lambda _, sent=sent: taken.append(time.perf_counter() - sent)
                )
            await producer.flush()
        finally:
            await producer.stop()

    asyncio.run(run())
    return taken


def _latency(context: Context) -> dict[str, float]:
    """Time from send() to the acknowledgement, with each client in turn.

    Before the clock starts each partition has a record: else the first dozen of 1,500
    wait for connections, a producer id and a log that is made, whosever they are, and
    where the p99 lies depends on whether these are fewer than 15.
    """
    broker = context.broker
    clients = {
        "ours": _ours_latency,
        "kafka_python": _kafka_python_latency,
        "aiokafka": _aiokafka_latency,
    }
    # By run: where a core stands still for 10 ms, as it does on machines that others
    # share, it is a hundredth of all records of that run, whosever it is.
    taken: dict[str, list[list[float]]] = {name: [] for name in clients}
    for _ in range(LATENCY_RUNS):
        for name, run in clients.items():
            topic = broker.topic(f"bench-py-{broker.next_number()}", PARTITIONS)
            taken[name].append(run(broker.bootstrap, topic, context.seconds))
    p50, p99 = (
        {
            name: statistics.median(_percentile(run, share) for run in runs)
            for name, runs in taken.items()
        }
        for share in (0.5, 0.99)
    )
    return {
        "p50_ms": p50["ours"] * 1000,
        "p99_ms": p99["ours"] * 1000,
        "p99_times_kafka_python": p99["ours"] / p99["kafka_python"],
        "p99_times_aiokafka": p99["ours"] / p99["aiokafka"],
    }


def _percentile(values: list[float], share: float) -> float:
    return sorted(values)[int(len(values) * share)]


CASES: Final = [
    Case("python-producers/latency", _latency),
    *(
        Case(f"python-producers/{label}/{codec}", _throughput(size, codec))
        for label, size in (("100B", 100), ("1KiB", 1024))
        for codec in ("none", "lz4")
    ),
]
