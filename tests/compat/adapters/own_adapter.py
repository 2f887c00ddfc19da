"""Our own client, held to what is asked of the others."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from mpbroker.client.addresses import parse_addresses
from mpbroker.client.admin import config_admin, topic_admin
from mpbroker.client.admin.config_admin import ConfigResource, ConfigResourceType
from mpbroker.client.cluster import Cluster, TopicPartition
from mpbroker.client.consumer.consumer import Consumer
from mpbroker.producer import Producer
from tests.compat.adapters.adapter import Adapter, Message, Outgoing
from tests.support.patience import LONGEST_S


class OwnAdapter(Adapter):
    name = "mpbroker"

    def __init__(self, bootstrap: str) -> None:
        super().__init__(bootstrap)
        self._cluster = Cluster(parse_addresses(bootstrap), LONGEST_S)

    def close(self) -> None:
        self._cluster.close()

    def topics(self) -> dict[str, int]:
        return {
            topic.name or "": len(topic.partitions)
            for topic in self._cluster.metadata(None).topics
        }

    def create_topic(
        self, topic: str, partitions: int, config: Mapping[str, str] | None = None
    ) -> None:
        topic_admin.create_topic(
            self._cluster,
            topic,
            partitions=partitions,
            replication_factor=1,
            configs=config,
        )
        self._cluster.topic(topic, auto_create=True)  # until it is known everywhere

    def create_partitions(self, topic: str, total: int) -> None:
        topic_admin.create_partitions(self._cluster, topic, total)

    def delete_topic(self, topic: str) -> None:
        topic_admin.delete_topic(self._cluster, topic)

    def delete_records(self, topic: str, partition: int, before_offset: int) -> int:
        where = TopicPartition(topic, partition)
        leaders = {where: self._leader(where)}
        return topic_admin.delete_records(
            self._cluster, {where: before_offset}, leaders
        )[where]

    def _leader(self, where: TopicPartition) -> int:
        topic = self._cluster.topic(where.topic)
        return {p.partition_index: p.leader_id for p in topic.partitions}[
            where.partition
        ]

    def topic_config(self, topic: str) -> dict[str, str]:
        resource = ConfigResource(ConfigResourceType.TOPIC, topic)
        entries = config_admin.describe_configs(self._cluster, resource)
        return {entry.name: entry.value or "" for entry in entries}

    def alter_topic_config(self, topic: str, changes: Mapping[str, str]) -> None:
        resource = ConfigResource(ConfigResourceType.TOPIC, topic)
        config_admin.alter_configs(self._cluster, resource, changes)

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
        with Producer(
            bootstrap_servers=self.bootstrap,
            acks=acks,
            compression_type=codec,
            enable_idempotence=idempotent,
            max_request_size=max_request_bytes,
        ) as producer:
            futures = [
                producer.send(
                    topic,
                    record.value,
                    record.key,
                    headers=record.headers,
                    partition=record.partition,
                    timestamp_ms=record.timestamp_ms,
                )
                for record in records
            ]
            return [future.result(LONGEST_S).offset for future in futures]

    def consume(
        self, topic: str, partition: int, from_offset: int, count: int
    ) -> list[Message]:
        with self._consumer() as consumer:
            consumer.assign([(topic, partition)])
            consumer.seek((topic, partition), from_offset)
            messages: list[Message] = []
            deadline = time.monotonic() + LONGEST_S
            while len(messages) < count and time.monotonic() < deadline:
                for records in consumer.poll(1000).values():
                    messages += [
                        Message(
                            record.offset,
                            record.key,
                            record.value,
                            tuple(record.headers),
                            record.timestamp,
                        )
                        for record in records
                    ]
            return messages[:count]

    def _consumer(self) -> Consumer:
        return Consumer(bootstrap_servers=self.bootstrap, auto_offset_reset="none")

    def offsets(self, topic: str, partition: int) -> tuple[int, int]:
        where = TopicPartition(topic, partition)
        with self._consumer() as consumer:
            first = consumer.offsets_for([where], topic_admin.EARLIEST)[where]
            return first, consumer.offsets_for([where], topic_admin.LATEST)[where]

    def offset_for_time(
        self, topic: str, partition: int, timestamp_ms: int
    ) -> int | None:
        where = TopicPartition(topic, partition)
        leaders = {where: self._leader(where)}
        answer = topic_admin.list_offsets(self._cluster, {where: timestamp_ms}, leaders)
        return None if answer[where].offset < 0 else answer[where].offset
