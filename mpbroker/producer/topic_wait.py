"""TopicWait: wait until a topic's partitions and leaders are known."""

from __future__ import annotations

import threading
import time
from typing import Final

from mpbroker.base.config_def import utf8
from mpbroker.client.errors import AuthenticationError, error_code_of
from mpbroker.client.metadata import Metadata, Snapshot, TopicInfo
from mpbroker.client.network_client import NetworkClient
from mpbroker.client.selector import monotonic_ms
from mpbroker.producer.errors import (
    DeliveryTimeoutError,
    RefusedError,
    RetriableError,
    authentication_failed,
    error_of,
)
from mpbroker.producer.metrics import ProducerMetrics
from mpbroker.protocol.error_code import ErrorCode

_CAN_BE_SENT: Final = utf8()


class TopicWait:
    """Makes threads that call send() wait for the metadata of a topic.

    The sender's thread asks brokers for it.
    """

    def __init__(
        self,
        metadata: Metadata,
        client: NetworkClient,
        metrics: ProducerMetrics,
        max_block_ms: int,
        asking: threading.Thread,
    ) -> None:
        """Store the parts of a producer that a wait needs.

        Args:
            metadata: the producer's metadata.
            client: the client that is woken to ask brokers.
            metrics: counts the time that waits take.
            max_block_ms: the longest wait.
            asking: the sender's thread.
        """
        self._metadata = metadata
        self._client = client
        self._metrics = metrics
        self._max_block_ms = max_block_ms
        self._asking = asking

    def wait(self, topic: str, partition: int | None, began: float) -> TopicInfo:
        """Wait until a topic is known, and has a partition.

        Args:
            topic: the topic's name.
            partition: the partition's number; None: any will do.
            began: the time.monotonic() at which the caller began.

        Raises:
            DeliveryTimeoutError: the topic is not known within max.block.ms, or has no
                such partition.
            RefusedError: the topic's name cannot be sent.
            RetriableError: a login or a certificate was refused; or a callback calls
                this, and its thread would wait for itself.
            TypeError: the topic is not a string.
            ProducerError: the broker refused to describe the topic.
        """
        _check_name(topic)
        deadline = began + self._max_block_ms / 1000
        metadata = self._metadata
        try:
            while True:
                # Each time, so that the topic is not forgotten during a long wait.
                metadata.add_topic(topic, monotonic_ms())
                seen = metadata.request_update()
                snapshot = metadata.snapshot
                info = snapshot.topics.get(topic)
                if info is not None and (
                    partition is None or partition < len(info.leaders)
                ):
                    return info
                self._check_topic_error(topic, snapshot)
                if threading.current_thread() is self._asking:
                    raise _in_callback(topic, partition, info)
                self._client.wakeup()
                left_s = min(deadline - time.monotonic(), threading.TIMEOUT_MAX)
                if left_s <= 0 or not metadata.wait(seen, left_s):
                    raise self._error(topic, partition, info)
        except AuthenticationError as error:
            raise authentication_failed(error) from error
        finally:
            spent = time.monotonic() - began
            self._metrics.spend("metadata-wait-time-ns", spent)

    @staticmethod
    def _check_topic_error(topic: str, snapshot: Snapshot) -> None:
        code = snapshot.topic_errors.get(topic, 0)
        if code in (
            ErrorCode.TOPIC_AUTHORIZATION_FAILED,
            ErrorCode.INVALID_TOPIC_EXCEPTION,
        ):
            raise error_of(code, f"topic {topic!r}")

    def _error(
        self, topic: str, partition: int | None, info: TopicInfo | None
    ) -> DeliveryTimeoutError:
        wait = f"after {self._max_block_ms} ms (max.block.ms)"
        if info is not None:
            return DeliveryTimeoutError(
                f"topic {topic!r} has no partition {partition} {wait}, only"
                f" 0..{len(info.leaders) - 1}",
                ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
            )
        if not self._metadata.snapshot.nodes:
            why = self._client.last_error or "no broker has answered"
            return DeliveryTimeoutError(f"no metadata of topic {topic!r} {wait}: {why}")
        code = error_code_of(self._metadata.snapshot.topic_errors.get(topic, 3))
        return DeliveryTimeoutError(
            f"topic {topic!r} not present in metadata {wait}: {code.name}; create it",
            code,
        )


def _in_callback(
    topic: str, partition: int | None, info: TopicInfo | None
) -> RetriableError:
    what = f"topic {topic!r}" if info is None else f"partition {partition} of {topic!r}"
    return RetriableError(
        f"{what} is not known yet, and a callback cannot wait for it: its own thread"
        " asks the brokers, which it does now; call partitions_for() before the"
        " callbacks, or send from another thread",
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
    )


def _check_name(topic: object) -> None:
    """Refuse a name that would spoil the Metadata request for all topics."""
    if not topic:
        raise RefusedError("the record has no topic; name one")
    if not isinstance(topic, str):
        raise TypeError(f"the topic {topic!r} is {type(topic).__name__}, not str")
    if not _CAN_BE_SENT.accepts(topic):
        raise RefusedError(
            f"the topic {topic[:80]!r} cannot be sent: it must be {_CAN_BE_SENT.limit}"
        )
