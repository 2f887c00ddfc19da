"""confluent-kafka: librdkafka."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from confluent_kafka import (
    Consumer,
    KafkaError,
    KafkaException,
    Producer,
    TopicPartition,
)
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    ResourceType,
)

from tests.compat.adapters.adapter import TIMEOUT_S, Adapter, Message, Outgoing


class ConfluentAdapter(Adapter):
    name = "confluent-kafka"

    def __init__(self, bootstrap: str) -> None:
        super().__init__(bootstrap)
        self._common = {"bootstrap.servers": bootstrap, "log_level": 2}
        self._admin = AdminClient(self._common)

    def topics(self) -> dict[str, int]:
        topics = self._admin.list_topics(timeout=TIMEOUT_S).topics
        return {name: len(topic.partitions) for name, topic in topics.items()}

    def create_topic(
        self, topic: str, partitions: int, config: Mapping[str, str] | None = None
    ) -> None:
        new = NewTopic(topic, partitions, 1, config=dict(config or {}))
        _result(self._admin.create_topics([new]))

    def create_partitions(self, topic: str, total: int) -> None:
        _result(self._admin.create_partitions([NewPartitions(topic, total)]))

    def delete_topic(self, topic: str) -> None:
        _result(self._admin.delete_topics([topic]))

    def delete_records(self, topic: str, partition: int, before_offset: int) -> int:
        before = TopicPartition(topic, partition, before_offset)
        return _result(self._admin.delete_records([before])).low_watermark

    def topic_config(self, topic: str) -> dict[str, str]:
        resource = ConfigResource(ResourceType.TOPIC, topic)
        entries = _result(self._admin.describe_configs([resource]))
        return {name: entry.value for name, entry in entries.items()}

    def alter_topic_config(self, topic: str, changes: Mapping[str, str]) -> None:
        entries = [
            ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
            for name, value in changes.items()
        ]
        resource = ConfigResource(
            ResourceType.TOPIC, topic, incremental_configs=entries
        )
        _result(self._admin.incremental_alter_configs([resource]))

    def produce(
        self,
        topic: str,
        records: Sequence[Outgoing],
        *,
        codec: str = "none",
        acks: int | str = "all",
        idempotent: bool = False,
        max_request_bytes: int = 1_000_000,
    ) -> list[int]:
        producer = Producer(
            {
                **self._common,
                "acks": acks,
                "compression.type": codec,
                "enable.idempotence": idempotent,
                "message.max.bytes": max_request_bytes,
                "linger.ms": 5,
            }
        )
        offsets = [-1] * len(records)
        errors: list[KafkaError] = []

        def delivered(index: int) -> Any:
            def callback(error: KafkaError | None, message: Any) -> None:
                if error is not None:
                    errors.append(error)
                elif message.offset() is not None and message.offset() >= 0:
                    offsets[index] = message.offset()

            return callback

        for index, record in enumerate(records):
            producer.produce(
                topic,
                value=record.value,
                key=record.key,
                partition=record.partition,
                headers=list(record.headers),
                timestamp=record.timestamp_ms or 0,
                on_delivery=delivered(index),
            )
        assert producer.flush(TIMEOUT_S) == 0, "records were not answered in time"
        if errors:
            raise RuntimeError(f"{len(errors)} records refused, first: {errors[0]}")
        return [-1] * len(records) if acks == 0 else offsets

    def consume(
        self, topic: str, partition: int, from_offset: int, count: int
    ) -> list[Message]:
        consumer = self._consumer()
        try:
            consumer.assign([TopicPartition(topic, partition, from_offset)])
            messages: list[Message] = []
            deadline = time.monotonic() + TIMEOUT_S
            while len(messages) < count and time.monotonic() < deadline:
                message = consumer.poll(1.0)
                if message is None:
                    continue
                if message.error():
                    raise RuntimeError(str(message.error()))
                messages.append(
                    Message(
                        message.offset(),
                        message.key(),
                        message.value(),
                        tuple(message.headers() or ()),
                        message.timestamp()[1],
                    )
                )
            return messages
        finally:
            consumer.close()

    def offsets(self, topic: str, partition: int) -> tuple[int, int]:
        consumer = self._consumer()
        try:
            where = TopicPartition(topic, partition)
            deadline = time.monotonic() + TIMEOUT_S
            while True:
                try:
                    return consumer.get_watermark_offsets(where, timeout=TIMEOUT_S)
                except KafkaException as error:
                    # librdkafka drops what it asks a node that metadata names no more.
                    # A node that has just started may be such a one, until all nodes
                    # know it.
                    is_gone = error.args[0].code() == KafkaError._DESTROY_BROKER
                    if not is_gone or time.monotonic() > deadline:
                        raise
        finally:
            consumer.close()

    def offset_for_time(
        self, topic: str, partition: int, timestamp_ms: int
    ) -> int | None:
        consumer = self._consumer()
        try:
            where = TopicPartition(topic, partition, timestamp_ms)
            [found] = consumer.offsets_for_times([where], timeout=TIMEOUT_S)
            return found.offset if found.offset >= 0 else None
        finally:
            consumer.close()

    def _consumer(self) -> Consumer:
        return Consumer(
            {
                **self._common,
                # Demanded by the library; nothing is committed.
                "group.id": "compat",
                "enable.auto.commit": False,
                "auto.offset.reset": "error",
            }
        )


def _result(futures: Mapping[Any, Any]) -> Any:
    [future] = futures.values()
    return future.result(timeout=TIMEOUT_S)
