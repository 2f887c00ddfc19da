"""How fast `mpbroker mirror` copies, beside a bare consumer and producer of librdkafka.

The pair does less than a mirror: one thread reads all records of a topic, and at the
same time another sends as many of the same size to the other broker, from memory.
Nothing is handed over, and no offset is kept.
"""

from __future__ import annotations

import re
import threading
import time
from typing import Final

from mpbroker.client.addresses import Address
from mpbroker.client.cluster import Cluster
from mpbroker.client.mirror.topic_mirror import Mirror, Progress
from tests.bench import wire
from tests.bench.brokers import Broker
from tests.bench.cases import Case, Context
from tests.bench.client_throughput import CONSUMER_SETTINGS, PRODUCER_SETTINGS
from tests.bench.rdkafka import BatchConsumer, BatchProducer

_VALUE_BYTES: Final = 1024
_DISTINCT: Final = 1000
_RECORDS_PER_S: Final = 100_000  # of a measurement's length: about as long with both
_TOPIC: Final = "bench-mirror"


class _Clock:
    """Notes when the copy ends and the comparison begins."""

    def __init__(self) -> None:
        self.copied_at = 0.0

    def say(self, line: str) -> None:
        """Ignore the line."""

    def show(self, progress: Progress) -> None:
        if progress.step == "verifying" and not self.copied_at:
            self.copied_at = time.monotonic()

    def stopped(self) -> bool:
        return False


def _values() -> list[bytes]:
    return [wire.filler(_VALUE_BYTES, number) for number in range(_DISTINCT)]


def _mirror(source: Broker, target: Broker) -> float:
    """Return how many seconds a mirror takes to copy the topic."""
    clock = _Clock()
    clusters = [
        Cluster([Address(*each.address)], timeout_s=30) for each in (source, target)
    ]
    began = time.monotonic()
    with clusters[0] as theirs, clusters[1] as ours:
        Mirror(
            theirs, ours, re.compile(_TOPIC), origin=source.bootstrap, watcher=clock
        ).run()
    return clock.copied_at - began


def _pair(source: Broker, target: Broker, records: int) -> float:
    """Return how many seconds a consumer and a producer of librdkafka take."""
    topic = target.topic(f"bench-pair-{target.next_number()}")
    values = _values()

    def send() -> None:
        with BatchProducer(
            target.bootstrap, topic, values, PRODUCER_SETTINGS
        ) as producer:
            producer.send(records // _DISTINCT)

    sender = threading.Thread(target=send)
    began = time.monotonic()
    sender.start()
    with BatchConsumer(source.bootstrap, _TOPIC, CONSUMER_SETTINGS) as consumer:
        consumer.read(records)
        sender.join()
        seconds = time.monotonic() - began
    with target.connect() as connection:
        connection.delete_topic(topic)
    return seconds


def _run(context: Context) -> dict[str, float]:
    rounds = max(1, round(context.seconds * _RECORDS_PER_S / _DISTINCT))
    records = rounds * _DISTINCT
    with context.source.broker() as source, context.source.broker() as target:
        source.topic(_TOPIC)
        with BatchProducer(
            source.bootstrap, _TOPIC, _values(), PRODUCER_SETTINGS
        ) as producer:
            producer.send(rounds)
        mirrored, paired = [], []
        for turn in range(4):
            # The other one begins in each second turn.
            for is_mirror in (True, False) if turn % 2 else (False, True):
                if not is_mirror:
                    paired.append(_pair(source, target, records))
                    continue
                mirrored.append(_mirror(source, target))
                with target.connect() as connection:
                    connection.delete_topic(_TOPIC)
        return {
            "mb_per_s": records * _VALUE_BYTES / min(mirrored) / 1e6,
            "bound_mb_per_s": records * _VALUE_BYTES / min(paired) / 1e6,
            "times_librdkafka": min(paired) / min(mirrored),
        }


CASES: Final = [Case("mirror", _run, starts_brokers=True)]
