"""aiokafka: asyncio, compiled record code, old protocol versions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import (
    AIOKafkaAdminClient,
    NewPartitions,
    NewTopic,
    RecordsToDelete,
)
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

from tests.compat.adapters.adapter import Adapter, Message, Outgoing
from tests.support.patience import LONGEST_S

T = TypeVar("T")


class AiokafkaAdapter(Adapter):
    """Each call has an event loop and a connection of its own."""

    name = "aiokafka"

    def _with_admin(
        self, use: Callable[[AIOKafkaAdminClient], Coroutine[Any, Any, T]]
    ) -> T:
        async def run() -> T:
            admin = AIOKafkaAdminClient(bootstrap_servers=self.bootstrap)
            await admin.start()
            try:
                return await use(admin)
            finally:
                await admin.close()

        return asyncio.run(run())

    def _with_consumer(
        self,
        topic: str,
        partition: int,
        use: Callable[[AIOKafkaConsumer, TopicPartition], Coroutine[Any, Any, T]],
    ) -> T:
        async def run() -> T:
            consumer = AIOKafkaConsumer(
                bootstrap_servers=self.bootstrap,
                group_id=None,
                enable_auto_commit=False,
                auto_offset_reset="none",
            )
            await consumer.start()
            try:
                where = TopicPartition(topic, partition)
                consumer.assign([where])
                return await use(consumer, where)
            finally:
                await consumer.stop()

        return asyncio.run(run())

    def topics(self) -> dict[str, int]:
        found = self._with_admin(lambda admin: admin.describe_topics())
        return {topic["topic"]: len(topic["partitions"]) for topic in found}

    def create_topic(
        self, topic: str, partitions: int, config: Mapping[str, str] | None = None
    ) -> None:
        new = NewTopic(topic, partitions, 1, topic_configs=dict(config or {}))
        response = self._with_admin(lambda admin: admin.create_topics([new]))
        _check(response.topic_errors)

    def create_partitions(self, topic: str, total: int) -> None:
        wanted = {topic: NewPartitions(total)}
        response = self._with_admin(lambda admin: admin.create_partitions(wanted))
        _check(response.topic_errors)

    def delete_topic(self, topic: str) -> None:
        response = self._with_admin(lambda admin: admin.delete_topics([topic]))
        _check(response.topic_error_codes)

    def delete_records(self, topic: str, partition: int, before_offset: int) -> int:
        where = TopicPartition(topic, partition)
        wanted = {where: RecordsToDelete(before_offset)}
        return self._with_admin(lambda admin: admin.delete_records(wanted))[where]

    def topic_config(self, topic: str) -> dict[str, str]:
        resource = ConfigResource(ConfigResourceType.TOPIC, topic)
        [response] = self._with_admin(lambda admin: admin.describe_configs([resource]))
        [(code, message, _, _, entries)] = response.resources
        assert code == 0, message
        return {entry[0]: entry[1] for entry in entries}

    def alter_topic_config(self, topic: str, changes: Mapping[str, str]) -> None:
        # AlterConfigs replaces: what is not named goes back to its default.
        resource = ConfigResource(ConfigResourceType.TOPIC, topic, dict(changes))
        [response] = self._with_admin(lambda admin: admin.alter_configs([resource]))
        [(code, message, *_)] = response.resources
        assert code == 0, message

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
        async def run() -> list[int]:
            producer = AIOKafkaProducer(
                bootstrap_servers=self.bootstrap,
                acks=acks,
                compression_type=None if codec == "none" else codec,
                enable_idempotence=idempotent,
                max_request_size=max_request_bytes,
                linger_ms=5,
            )
            await producer.start()
            try:
                futures = [
                    await producer.send(
                        topic,
                        value=record.value,
                        key=record.key,
                        partition=record.partition,
                        headers=list(record.headers),
                        timestamp_ms=record.timestamp_ms,
                    )
                    for record in records
                ]
                done = await asyncio.wait_for(asyncio.gather(*futures), LONGEST_S)
            finally:
                await producer.stop()
            return [-1 if acks == 0 else metadata.offset for metadata in done]

        return asyncio.run(run())

    def consume(
        self, topic: str, partition: int, from_offset: int, count: int
    ) -> list[Message]:
        async def use(
            consumer: AIOKafkaConsumer, where: TopicPartition
        ) -> list[Message]:
            consumer.seek(where, from_offset)
            messages: list[Message] = []
            deadline = time.monotonic() + LONGEST_S
            while len(messages) < count and time.monotonic() < deadline:
                found = await consumer.getmany(where, timeout_ms=1000)
                for record in found.get(where, []):
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

        return self._with_consumer(topic, partition, use)

    def offsets(self, topic: str, partition: int) -> tuple[int, int]:
        async def use(
            consumer: AIOKafkaConsumer, where: TopicPartition
        ) -> tuple[int, int]:
            first = await consumer.beginning_offsets([where])
            end = await consumer.end_offsets([where])
            return first[where], end[where]

        return self._with_consumer(topic, partition, use)

    def offset_for_time(
        self, topic: str, partition: int, timestamp_ms: int
    ) -> int | None:
        async def use(consumer: AIOKafkaConsumer, where: TopicPartition) -> int | None:
            found = (await consumer.offsets_for_times({where: timestamp_ms}))[where]
            return None if found is None else found.offset

        return self._with_consumer(topic, partition, use)


def _check(errors: Sequence[tuple[Any, ...]]) -> None:
    """Refuse an answer with an error: the admin client gives answers as they came."""
    for topic, code, *message in errors:
        assert code == 0, f"{topic}: error code {code} {message}"
