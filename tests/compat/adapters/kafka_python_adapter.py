"""kafka-python: pure Python, its own protocol code."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from kafka import KafkaConsumer, KafkaProducer, TopicPartition
from kafka.admin import ConfigResource, ConfigResourceType, KafkaAdminClient, NewTopic

from tests.compat.adapters.adapter import Adapter, Message, Outgoing
from tests.support.patience import LONGEST_S


class KafkaPythonAdapter(Adapter):
    name = "kafka-python"

    def __init__(self, bootstrap: str) -> None:
        super().__init__(bootstrap)
        self._admin = KafkaAdminClient(bootstrap_servers=bootstrap)

    def close(self) -> None:
        self._admin.close()

    def topics(self) -> dict[str, int]:
        return {
            topic["name"]: len(topic["partitions"])
            for topic in self._admin.describe_topics()
        }

    def create_topic(
        self, topic: str, partitions: int, config: Mapping[str, str] | None = None
    ) -> None:
        self._admin.create_topics(
            [NewTopic(topic, partitions, 1, topic_configs=dict(config or {}))]
        )

    def create_partitions(self, topic: str, total: int) -> None:
        self._admin.create_partitions({topic: total})

    def delete_topic(self, topic: str) -> None:
        self._admin.delete_topics([topic])

    def delete_records(self, topic: str, partition: int, before_offset: int) -> int:
        where = TopicPartition(topic, partition)
        result = self._admin.delete_records({where: before_offset})
        return result[where]["low_watermark"]

    def topic_config(self, topic: str) -> dict[str, str]:
        resource = ConfigResource(ConfigResourceType.TOPIC, topic)
        result = self._admin.describe_configs([resource], config_filter="all")
        entries = result["topic"][topic]
        return {name: entry["value"] for name, entry in entries.items()}

    def alter_topic_config(self, topic: str, changes: Mapping[str, str]) -> None:
        resource = ConfigResource(ConfigResourceType.TOPIC, topic, dict(changes))
        self._admin.alter_configs([resource])

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
        producer = KafkaProducer(
            bootstrap_servers=self.bootstrap,
            acks=acks,
            compression_type=None if codec == "none" else codec,
            enable_idempotence=idempotent,
            max_request_size=max_request_bytes,
            linger_ms=5,
        )
        try:
            futures = [
                producer.send(
                    topic,
                    value=record.value,
                    key=record.key,
                    partition=record.partition,
                    headers=list(record.headers),
                    timestamp_ms=record.timestamp_ms,
                )
                for record in records
            ]
            done = [future.get(timeout=LONGEST_S) for future in futures]
        finally:
            producer.close(LONGEST_S)
        return [-1 if acks == 0 else metadata.offset for metadata in done]

    def consume(
        self, topic: str, partition: int, from_offset: int, count: int
    ) -> list[Message]:
        where = TopicPartition(topic, partition)
        consumer = self._consumer()
        try:
            consumer.assign([where])
            consumer.seek(where, from_offset)
            messages: list[Message] = []
            deadline = time.monotonic() + LONGEST_S
            while len(messages) < count and time.monotonic() < deadline:
                for record in consumer.poll(timeout_ms=1000).get(where, []):
                    messages.append(
                        Message(
                            record.offset,
                            record.key,
                            record.value,
                            tuple(record.headers),
                            record.timestamp,
                        )
                    )
            return messages[:count]
        finally:
            consumer.close()

    def offsets(self, topic: str, partition: int) -> tuple[int, int]:
        where = TopicPartition(topic, partition)
        consumer = self._consumer()
        try:
            first = consumer.beginning_offsets([where])[where]
            return first, consumer.end_offsets([where])[where]
        finally:
            consumer.close()

    def offset_for_time(
        self, topic: str, partition: int, timestamp_ms: int
    ) -> int | None:
        where = TopicPartition(topic, partition)
        consumer = self._consumer()
        try:
            found = consumer.offsets_for_times({where: timestamp_ms})[where]
            return None if found is None else found.offset
        finally:
            consumer.close()

    def _consumer(self) -> KafkaConsumer:
        return KafkaConsumer(
            bootstrap_servers=self.bootstrap,
            group_id=None,
            enable_auto_commit=False,
            auto_offset_reset="none",
            max_partition_fetch_bytes=1 << 20,
        )
