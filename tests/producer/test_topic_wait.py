"""Waiting for a topic, answered by a script."""

from __future__ import annotations

import threading
import time

import pytest

from mpbroker.client.metadata import Metadata
from mpbroker.client.selector import monotonic_ms
from mpbroker.producer import DeliveryTimeoutError
from mpbroker.producer.metrics import ProducerMetrics
from mpbroker.producer.topic_wait import TopicWait
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages.metadata import (
    MetadataResponse,
    MetadataResponseBroker,
    MetadataResponsePartition,
    MetadataResponseTopic,
)

IDLE_MS = 5000


class Cluster:
    """In place of the client: a wake-up has metadata asked and answered at once."""

    last_error = ""

    def __init__(self, error_code: int = 0) -> None:
        """Answer so; the first time after the broker was away for long."""
        self.metadata = Metadata(topic_max_idle_ms=IDLE_MS)
        self.error_code = error_code
        self.asked: list[list[str]] = []

    def wakeup(self) -> None:
        now_ms = monotonic_ms() + (0 if self.asked else IDLE_MS + 1)
        names = [topic.name for topic in self.metadata.next_request(now_ms).topics]
        self.asked.append(names)
        partition = MetadataResponsePartition(partition_index=0, leader_id=0)
        topics = [
            MetadataResponseTopic(
                name=name, error_code=self.error_code, partitions=[partition]
            )
            for name in names
        ]
        brokers = [MetadataResponseBroker(node_id=0, host="b", port=1)]
        self.metadata.update(MetadataResponse(brokers=brokers, topics=topics), now_ms)

    def wait(self, max_block_ms: int) -> int:
        metrics, asking = ProducerMetrics(), threading.Thread()
        wait = TopicWait(self.metadata, self, metrics, max_block_ms, asking)
        return len(wait.wait("t", None, time.monotonic()).leaders)


def test_a_topic_that_is_waited_for_is_not_forgotten_as_idle():
    cluster = Cluster()
    assert cluster.wait(2000) == 1
    assert cluster.asked == [[], ["t"]]


def test_an_error_of_a_newer_broker_is_told_as_any_other():
    cluster = Cluster(error_code=9999)
    with pytest.raises(DeliveryTimeoutError) as told:
        cluster.wait(50)
    assert told.value.error_code == ErrorCode.UNKNOWN_SERVER_ERROR
