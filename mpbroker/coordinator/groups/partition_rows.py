"""Convert between sets of partitions and the rows that requests and records have.

A row has a topic and a list of partition numbers.
"""

from __future__ import annotations

from collections.abc import Iterable

from mpbroker.coordinator.groups.assignors import Partitions, TopicId
from mpbroker.coordinator.groups.group_records import RecordTopicPartitions


def partitions_of(rows: Iterable[tuple[TopicId, Iterable[int]]]) -> Partitions:
    """Return the sets of partitions, by topic, that (topic, partitions) rows name.

    A topic may be in several rows.
    """
    found: Partitions = {}
    for topic, numbers in rows:
        found.setdefault(topic, set()).update(numbers)
    return found


def read_rows(rows: Iterable[RecordTopicPartitions]) -> Partitions:
    """Return the partitions, by topic id, that the rows of a decoded record name."""
    return partitions_of((row.topic_id, row.partitions) for row in rows)


def rows_of(partitions: Partitions) -> list[RecordTopicPartitions]:
    """Return partitions as a record lists them: per topic id, in ascending order."""
    return [
        RecordTopicPartitions(topic_id=topic, partitions=sorted(numbers))
        for topic, numbers in sorted(partitions.items())
    ]
