"""Which broker leads a partition now, and which offsets it has."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from typing import Final

from mpbroker.client.admin import LATEST, list_offsets
from mpbroker.client.cluster import Cluster, TopicPartition
from mpbroker.client.consumer_config import ConsumerSettings
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError

_RETRY_INTERVAL_S: Final = 0.1  # Kafka's retry.backoff.ms


class OffsetLookup:
    """Asks for a `Consumer`; see its `offsets_for`."""

    def __init__(self, cluster: Cluster, settings: ConsumerSettings) -> None:
        self._cluster = cluster
        self._read_committed = settings.read_committed
        self._auto_create = settings.auto_create_topics

    def offsets_for(
        self, partitions: Iterable[tuple[str, int]], timestamp: int
    ) -> dict[TopicPartition, int]:
        """See `Consumer.offsets_for`."""
        deadline = time.monotonic() + self._cluster.timeout_s
        wanted = [TopicPartition(*partition) for partition in partitions]
        while True:
            try:
                return self.ask(wanted, timestamp)
            except ApiError as error:
                if not error.error_code.retriable or time.monotonic() >= deadline:
                    raise
            time.sleep(_RETRY_INTERVAL_S)

    def ask(
        self, wanted: list[TopicPartition], timestamp: int
    ) -> dict[TopicPartition, int]:
        """Do so once. Raises ApiError: retriable, if asking again may help."""
        leaders = self.leaders(wanted)
        answers = list_offsets(
            self._cluster,
            dict.fromkeys(wanted, timestamp),
            leaders,
            read_committed=self._read_committed,
        )
        missing = [where for where, answer in answers.items() if answer.offset < 0]
        ends = list_offsets(self._cluster, dict.fromkeys(missing, LATEST), leaders)
        return {
            where: ends[where].offset if where in ends else answer.offset
            for where, answer in answers.items()
        }

    def leaders(
        self, partitions: Collection[TopicPartition]
    ) -> dict[TopicPartition, int]:
        """Return the node id of each partition's leader.

        Raises:
            ApiError: one has none now, or does not exist; see `led`.
        """
        leaders: dict[tuple[str, int], int] = {}
        for name in dict.fromkeys(partition.topic for partition in partitions):
            topic = self._cluster.topic(name, auto_create=self._auto_create, wait=False)
            for entry in topic.partitions:
                leaders[name, entry.partition_index] = entry.leader_id
        for where in partitions:
            if where not in leaders:
                raise ApiError(
                    ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
                    f"{where}: the topic has no such partition",
                )
            if leaders[where] < 0:
                raise ApiError(ErrorCode.LEADER_NOT_AVAILABLE, f"{where}: no leader")
        return {where: leaders[where] for where in partitions}

    def led(self, partitions: Collection[TopicPartition]) -> list[TopicPartition]:
        """Return those that are there and have a leader, whatever of the others."""
        names = list(dict.fromkeys(partition.topic for partition in partitions))
        answer = self._cluster.metadata(names, auto_create=self._auto_create)
        found = {
            (topic.name, entry.partition_index)
            for topic in answer.topics
            for entry in topic.partitions
            if not topic.error_code and entry.leader_id >= 0
        }
        return [where for where in partitions if where in found]
