"""Read a sample of a topic: records from the start and the end of each partition."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from mpbroker.client.admin.topic_admin import EARLIEST, LATEST
from mpbroker.client.cluster import Cluster, TopicPartition
from mpbroker.client.consumer.consumer import Consumer
from mpbroker.spark.pipeline.errors import PipelineError

# The longest wait for one more record: a broker that is up answers in milliseconds.
_PATIENCE_S: Final = 30.0


@dataclass
class Sample:
    """The values of some records of a topic.

    Attributes:
        values: the values; None stands for a tombstone.
        offsets: the number of offsets in the whole topic.
    """

    topic: str
    values: list[bytes | None] = field(default_factory=list)
    offsets: int = 0


def read_sample(
    cluster: Cluster, settings: Mapping[str, object], topic: str, rows: int
) -> Sample:
    """Return up to ``rows`` records: half the oldest ones, half the newest.

    They are spread evenly over the partitions that have records.

    Args:
        settings: the settings of a consumer.
        rows: the number of records to aim at. There are fewer if a partition has fewer
            than its share, or where markers of transactions take offsets.

    Raises:
        ApiError: the topic does not exist, or may not be read.
        BrokerUnavailableError: no broker answers.
        PipelineError: a partition has records, but none arrives within 30 s.
    """
    count = len(cluster.topic(topic).partitions)
    partitions = [TopicPartition(topic, index) for index in range(count)]
    found = Sample(topic)
    with Consumer(settings) as consumer:
        start = consumer.offsets_for(partitions, EARLIEST)
        end = consumer.offsets_for(partitions, LATEST)
        found.offsets = sum(end[each] - start[each] for each in partitions)
        filled = [each for each in partitions if start[each] < end[each]]
        for index, each in enumerate(filled):
            # The share of this partition: all the shares together are ``rows``.
            before = rows * index // len(filled)
            after = rows * (index + 1) // len(filled)
            newest = after // 2 - before // 2
            oldest = after - before - newest
            middle = min(start[each] + oldest, end[each])
            for low, high in (
                (start[each], middle),
                (max(middle, end[each] - newest), end[each]),
            ):
                found.values += _read(consumer, each, low, high)
    return found


def _read(
    consumer: Consumer, partition: TopicPartition, low: int, high: int
) -> Iterator[bytes | None]:
    """Yield the values of the records with offsets from ``low`` to ``high`` - 1."""
    if low >= high:
        return
    consumer.assign([partition])
    consumer.seek(partition, low)
    deadline = time.monotonic() + _PATIENCE_S
    while consumer.position(partition) < high:
        records = consumer.poll(200).get(partition, [])
        for record in records:
            if record.offset >= high:
                return
            yield record.value
        if records:
            deadline = time.monotonic() + _PATIENCE_S
        elif time.monotonic() > deadline:
            raise PipelineError(
                f"{partition}: no record comes from offset"
                f" {consumer.position(partition)} on, before {high}"
            )
