"""Our consumer, aiokafka's and confluent-kafka's, in turn, from the same broker.

Every run reads the same records of 100 B, which librdkafka has sent, from the start of
a topic by assignment. A figure is the CPU time of the client's own process with all its
threads: what others do on the machine meanwhile changes it little. "batches" is ours by
`poll_batches`, with the records made into columns of Arrow.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Final, NamedTuple

from mpbroker.client.cluster import TopicPartition
from mpbroker.client.consumer.consumer import Consumer
from mpbroker.protocol.records.record_columns import encoded_records
from tests.bench import wire
from tests.bench.brokers import Broker
from tests.bench.cases import Case, Context
from tests.bench.client_throughput import (
    DISTINCT_VALUES,
    PRODUCER_SETTINGS,
    values_of,
)
from tests.bench.rdkafka import BatchProducer

RECORDS: Final = 300_000
POLL_RECORDS: Final = 500
TURNS: Final = 3


class Work(NamedTuple):
    """What is read: all records of partition 0 of a topic."""

    bootstrap: str
    topic: str
    count: int


def _poll(work: Work) -> int:
    read = 0
    with Consumer(
        bootstrap_servers=work.bootstrap,
        auto_offset_reset="earliest",
        max_poll_records=POLL_RECORDS,
    ) as consumer:
        consumer.assign([(work.topic, 0)])
        while read < work.count:
            for records in consumer.poll(timeout_ms=1000).values():
                read += len(records)
    return read


def _batches(work: Work) -> int:
    from mpbroker.spark.arrow import record_batches

    read = 0
    with Consumer(
        bootstrap_servers=work.bootstrap, auto_offset_reset="earliest"
    ) as consumer:
        consumer.assign([(work.topic, 0)])
        while read < work.count:
            encoded = (
                encoded_records(each.header, each.data, each.first_offset)
                for each in consumer.poll_batches(timeout_ms=1000)
            )
            place = TopicPartition(work.topic, 0)
            for rows in record_batches(encoded, place, with_headers=False):
                read += rows.num_rows
    return read


def _aiokafka(work: Work) -> int:
    from aiokafka import AIOKafkaConsumer, TopicPartition

    async def run() -> int:
        consumer = AIOKafkaConsumer(
            bootstrap_servers=work.bootstrap,
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            group_id=None,
        )
        await consumer.start()
        try:
            consumer.assign([TopicPartition(work.topic, 0)])
            read = 0
            while read < work.count:
                found = await consumer.getmany(
                    timeout_ms=1000, max_records=POLL_RECORDS
                )
                read += sum(map(len, found.values()))
            return read
        finally:
            await consumer.stop()

    return asyncio.run(run())


def _confluent(work: Work) -> int:
    import confluent_kafka

    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": work.bootstrap,
            "group.id": "bench",
            "enable.auto.commit": False,
        }
    )
    try:
        begin = confluent_kafka.OFFSET_BEGINNING
        consumer.assign([confluent_kafka.TopicPartition(work.topic, 0, begin)])
        read = 0
        while read < work.count:
            for message in consumer.consume(POLL_RECORDS, 1.0):
                if message.error():
                    raise wire.AnswerError(str(message.error()))
                message.value()
                read += 1
        return read
    finally:
        consumer.close()


# By the metric's prefix; what is not installed is left out.
CLIENTS: Final[dict[str, tuple[str, Callable[[Work], int]]]] = {
    "": ("mpbroker", _poll),
    "batches_": ("pyarrow", _batches),
    "aiokafka_": ("aiokafka", _aiokafka),
    "confluent_": ("confluent_kafka", _confluent),
}


def _filled(broker: Broker) -> str:
    topic = broker.topic("bench-python-consumers")
    values = values_of(100)
    with BatchProducer(broker.bootstrap, topic, values, PRODUCER_SETTINGS) as producer:
        producer.send(RECORDS // DISTINCT_VALUES)
    return topic


def _run(context: Context) -> dict[str, float]:
    broker = context.broker
    topic = broker.once("python-consumers", lambda: _filled(broker))
    work = Work(broker.bootstrap, topic, RECORDS)
    cpu: dict[str, list[float]] = {}
    for turn in range(TURNS + 1):
        for prefix, (module, read) in CLIENTS.items():
            if find_spec(module) is None:
                continue
            began = time.process_time()
            count = read(work)
            taken = (time.process_time() - began) / count * 1e6
            if count != RECORDS:
                raise wire.AnswerError(f"{module}: {count} records of {RECORDS}")
            if turn:  # the first imports
                cpu.setdefault(f"{prefix}cpu_s_per_million", []).append(taken)
    return {metric: statistics.median(found) for metric, found in cpu.items()}


CASES: Final = [Case("python-consumers/100B", _run)]
