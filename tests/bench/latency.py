"""End to end at 200 messages a second, and how soon a waiting fetch is answered."""

from __future__ import annotations

import select
import struct
import threading
import time
from collections.abc import Sequence
from typing import Final

from tests.bench import wire
from tests.bench.cases import Case, Context

RATE_PER_S: Final = 200
VALUE_BYTES: Final = 100
WARMUP_MESSAGES: Final = 100
LEAST_SECONDS: Final = 5.0  # 1,000 messages: ten of them above the p99


def percentiles_ms(seconds: Sequence[float]) -> tuple[float, float]:
    """Return the 50th and 99th percentile in milliseconds."""
    ordered = sorted(seconds)
    return (
        ordered[len(ordered) // 2] * 1e3,
        ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))] * 1e3,
    )


def _raw(context: Context) -> dict[str, float]:
    """Produce on one connection while a fetch waits on another; one thread for both.

    From the produce's send to the fetch's answer is the message's whole way through the
    broker; from the produce's answer to the fetch's is the price of waiting.
    """
    topic = context.broker.topic("bench-latency")
    batch = wire.record_batch([wire.RecordSpec(wire.filler(VALUE_BYTES))])
    produce = wire.produce(topic, 0, batch)
    count = WARMUP_MESSAGES + int(max(context.seconds, LEAST_SECONDS) * RATE_PER_S)
    whole: list[float] = []
    after_ack: list[float] = []
    with context.broker.connect() as producer, context.broker.connect() as consumer:
        offset = producer.end_offset(topic, 0)
        poll = select.poll()
        poll.register(producer.fileno(), select.POLLIN)
        poll.register(consumer.fileno(), select.POLLIN)
        due = time.perf_counter()
        cpu = 0.0
        for number in range(count):
            if number == WARMUP_MESSAGES:
                cpu = context.broker.tree.cpu_seconds()
            consumer.send(
                wire.fetch(topic, 0, offset, max_bytes=4096, max_wait_ms=10_000)
            )
            due = max(due + 1 / RATE_PER_S, time.perf_counter() + 0.001)
            time.sleep(max(0.0, due - time.perf_counter()))
            sent = time.perf_counter()
            producer.send(produce)
            arrived: dict[int, float] = {}
            while len(arrived) < 2:
                for fd, _event in poll.poll(10_000):
                    if fd not in arrived:
                        arrived[fd] = time.perf_counter()
                        _check(fd, producer, consumer, offset)
            if number >= WARMUP_MESSAGES:
                fetched, acked = arrived[consumer.fileno()], arrived[producer.fileno()]
                whole.append(fetched - sent)
                after_ack.append(max(0.0, fetched - acked))
            offset += 1
        cpu = context.broker.tree.cpu_seconds() - cpu
    p50, p99 = percentiles_ms(whole)
    ack_p50, ack_p99 = percentiles_ms(after_ack)
    return {
        "p50_ms": p50,
        "p99_ms": p99,
        "after_ack_p50_ms": ack_p50,
        "after_ack_p99_ms": ack_p99,
        "cpu_us": cpu / len(whole) * 1e6,
    }


def _check(
    fd: int, producer: wire.Connection, consumer: wire.Connection, offset: int
) -> None:
    if fd == producer.fileno():
        produced = wire.parse_produce(producer.receive())
        if produced != (0, offset):
            raise wire.AnswerError(f"{produced} where offset {offset} was due")
    else:
        records = wire.iter_records(wire.parse_fetch(consumer.receive()).records)
        if [record.offset for record in records] != [offset]:
            raise wire.AnswerError(f"{len(records)} records where {offset} was due")


def _librdkafka(context: Context) -> dict[str, float]:
    """Do the same through confluent-kafka: what a user of a common client sees."""
    import confluent_kafka

    topic = context.broker.topic("bench-latency-rdkafka")
    count = WARMUP_MESSAGES + int(max(context.seconds, LEAST_SECONDS) * RATE_PER_S)
    with context.broker.connect() as connection:
        start = connection.end_offset(topic, 0)
    taken: list[float] = []
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": context.broker.bootstrap,
            "group.id": "bench",
            "enable.auto.commit": False,
            "fetch.wait.max.ms": 500,
        }
    )
    consumer.assign([confluent_kafka.TopicPartition(topic, 0, start)])

    def consume() -> None:
        while len(taken) < count:
            message = consumer.poll(10.0)
            now = time.perf_counter()
            value = None if message is None or message.error() else message.value()
            if value is None:
                return
            taken.append(now - struct.unpack_from("<d", value)[0])

    thread = threading.Thread(target=consume)
    thread.start()
    producer = confluent_kafka.Producer(
        {"bootstrap.servers": context.broker.bootstrap, "linger.ms": 0, "acks": 1}
    )
    padding = wire.filler(VALUE_BYTES - 8)
    due = time.perf_counter() + 0.5
    for _ in range(count):
        time.sleep(max(0.0, due - time.perf_counter()))
        now = time.perf_counter()
        producer.produce(topic, struct.pack("<d", now) + padding, partition=0)
        producer.poll(0)
        due = max(due + 1 / RATE_PER_S, now)
    producer.flush(10)
    thread.join()
    consumer.close()
    if len(taken) < count:
        raise wire.AnswerError(f"{len(taken)} of {count} messages came back")
    p50, p99 = percentiles_ms(taken[WARMUP_MESSAGES:])
    return {"p50_ms": p50, "p99_ms": p99}


CASES: Final = [
    Case("latency/raw", _raw),
    Case("latency/librdkafka", _librdkafka),
]
