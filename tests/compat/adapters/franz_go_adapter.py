"""franz-go: every API in its newest version, written in Go."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from tests.compat.adapters.adapter import Adapter, Message, Outgoing
from tests.compat.adapters.line_client import LineClient, to_json, to_message
from tests.support.fetch_clients import FRANZ_GO


class FranzGoAdapter(Adapter):
    """Each call has a client of its own, in one child."""

    name = "franz-go"

    def __init__(self, bootstrap: str) -> None:
        super().__init__(bootstrap)
        self._child = LineClient([str(FRANZ_GO)], os.environ)

    def close(self) -> None:
        self._child.close()

    def ask(self, command: str, **arguments: Any) -> Any:
        return self._child.ask(command, bootstrap=self.bootstrap, **arguments)

    def topics(self) -> dict[str, int]:
        found: dict[str, int] = self.ask("topics")
        return found

    def create_topic(
        self, topic: str, partitions: int, config: Mapping[str, str] | None = None
    ) -> None:
        self.ask(
            "create_topic",
            topic=topic,
            partitions=partitions,
            config=dict(config or {}),
        )

    def create_partitions(self, topic: str, total: int) -> None:
        self.ask("create_partitions", topic=topic, partitions=total)

    def delete_topic(self, topic: str) -> None:
        self.ask("delete_topic", topic=topic)

    def delete_records(self, topic: str, partition: int, before_offset: int) -> int:
        first: int = self.ask(
            "delete_records", topic=topic, partition=partition, offset=before_offset
        )
        return first

    def topic_config(self, topic: str) -> dict[str, str]:
        found: dict[str, str] = self.ask("topic_config", topic=topic)
        return found

    def alter_topic_config(self, topic: str, changes: Mapping[str, str]) -> None:
        self.ask("alter_topic_config", topic=topic, config=dict(changes))

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
        offsets: list[int] = self.ask(
            "produce",
            topic=topic,
            records=[to_json(record) for record in records],
            codec=codec,
            acks=str(acks),
            idempotent=idempotent,
            max_request_bytes=max_request_bytes,
        )
        return offsets

    def consume(
        self, topic: str, partition: int, from_offset: int, count: int
    ) -> list[Message]:
        found = self.ask(
            "consume", topic=topic, partition=partition, offset=from_offset, count=count
        )
        return [to_message(each) for each in found]

    def offsets(self, topic: str, partition: int) -> tuple[int, int]:
        first, end = self.ask("offsets", topic=topic, partition=partition)
        return first, end

    def offset_for_time(
        self, topic: str, partition: int, timestamp_ms: int
    ) -> int | None:
        found: int | None = self.ask(
            "offset_for_time",
            topic=topic,
            partition=partition,
            timestamp_ms=timestamp_ms,
        )
        return found
