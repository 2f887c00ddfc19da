"""Producers that are closed after the test, and readers of what they wrote."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from mpbroker.client.addresses import parse_addresses
from mpbroker.client.admin.topic_admin import (
    EARLIEST,
    LATEST,
    create_topic,
    list_offsets,
)
from mpbroker.client.cluster import Cluster, TopicPartition
from mpbroker.client.consumer.fetcher import Fetcher, FetchSettings
from mpbroker.producer import DeliveryTimeoutError, Producer
from mpbroker.protocol.records.record_batch import Record, iter_records
from tests.support.patience import LONGEST_S


@pytest.fixture
def make_producer(bootstrap: str) -> Iterator[Callable[..., Producer]]:
    """Make producers for the broker under test: make_producer(linger_ms=0, ...)."""
    made: list[Producer] = []

    def make(**settings: object) -> Producer:
        producer = Producer(**{"bootstrap_servers": bootstrap, **settings})
        made.append(producer)
        return producer

    yield make
    for producer in made:
        producer.close(5)


@pytest.fixture
def new_topic(bootstrap: str, topic_name: str) -> Callable[..., str]:
    """Create a topic: new_topic(partitions=1, **config)."""
    made: list[str] = []

    def create(partitions: int = 1, **config: str) -> str:
        name = f"{topic_name}-{len(made)}"
        made.append(name)
        with Cluster(parse_addresses(bootstrap), LONGEST_S) as cluster:
            create_topic(
                cluster,
                name,
                partitions=partitions,
                replication_factor=1,
                configs={key.replace("_", "."): value for key, value in config.items()},
            )
            cluster.topic(name, auto_create=True)  # it may not be everywhere yet
        return name

    return create


def read_all(bootstrap: str, topic: str) -> dict[int, list[Record]]:
    """Return every committed record of a topic, by partition."""
    with Cluster(parse_addresses(bootstrap), LONGEST_S) as cluster:
        leaders = {
            TopicPartition(topic, p.partition_index): p.leader_id
            for p in cluster.topic(topic).partitions
        }
        starts = list_offsets(cluster, dict.fromkeys(leaders, EARLIEST), leaders)
        # Who commits is told when that is decided; the markers follow.
        ends = whole = list_offsets(cluster, dict.fromkeys(leaders, LATEST), leaders)
        deadline = time.monotonic() + LONGEST_S
        while time.monotonic() < deadline:
            ends = list_offsets(
                cluster, dict.fromkeys(leaders, LATEST), leaders, read_committed=True
            )
            if all(ends[each].offset >= whole[each].offset for each in leaders):
                break
            time.sleep(0.02)
        fetcher = Fetcher(
            cluster,
            {partition: answer.offset for partition, answer in starts.items()},
            leaders,
            FetchSettings(fetch_max_wait_ms=100),
        )
        found: dict[int, list[Record]] = {p.partition: [] for p in leaders}
        while any(
            fetcher.positions[partition] < ends[partition].offset
            for partition in leaders
        ):
            for batch in fetcher.fetch():
                found[batch.partition.partition] += iter_records(batch.data)
        return found


def until_known(producer: Producer, topic: str) -> None:
    """Wait for a topic's metadata, however short max.block.ms is."""
    deadline = time.monotonic() + LONGEST_S
    while True:
        try:
            producer.partitions_for(topic)
            return
        except DeliveryTimeoutError:
            if time.monotonic() > deadline:
                raise


@pytest.fixture
def read(bootstrap: str) -> Callable[[str], dict[int, list[Record]]]:
    return lambda topic: read_all(bootstrap, topic)
