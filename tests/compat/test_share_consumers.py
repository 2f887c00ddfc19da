"""librdkafka's share consumer: accept, release, reject, and the end of a lock."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import confluent_kafka
import pytest
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourceType,
)

from tests.compat.adapters import ADAPTERS
from tests.compat.adapters.adapter import TIMEOUT_S
from tests.compat.records import some_records

MakeTopic = Callable[..., str]

pytestmark = [
    pytest.mark.skipif(
        not hasattr(confluent_kafka, "ShareConsumer"),
        reason="this confluent-kafka has no share consumer",
    ),
    pytest.mark.timeout(180),
]


def begin_at_the_start(bootstrap: str, group: str, **config: str) -> None:
    """Let a group begin with the first record of each partition."""
    admin = AdminClient({"bootstrap.servers": bootstrap})
    config["share_auto_offset_reset"] = "earliest"
    entries = [
        ConfigEntry(
            name.replace("_", "."), value, incremental_operation=AlterConfigOpType.SET
        )
        for name, value in config.items()
    ]
    resource = ConfigResource(ResourceType.GROUP, group, incremental_configs=entries)
    for future in admin.incremental_alter_configs([resource]).values():
        future.result(TIMEOUT_S)


def share_consumer(bootstrap: str, group: str, **settings: str) -> Any:
    return confluent_kafka.ShareConsumer(
        {"bootstrap.servers": bootstrap, "group.id": group, **settings}
    )


def test_records_are_accepted_released_and_rejected(
    bootstrap: str, make_topic: MakeTopic
) -> None:
    topic = make_topic()
    group = f"queue-of-{topic}"
    begin_at_the_start(bootstrap, group)
    with ADAPTERS["confluent-kafka"](bootstrap) as client:
        client.produce(topic, some_records(9))
    kinds = confluent_kafka.AcknowledgeType
    seen: Counter[int] = Counter()
    explicit = {"share.acknowledgement.mode": "explicit"}
    with share_consumer(bootstrap, group, **explicit) as consumer:
        consumer.subscribe([topic])
        until = time.monotonic() + TIMEOUT_S
        # Three are released once, and come a second time.
        while sum(seen.values()) < 12 and time.monotonic() < until:
            for message in consumer.poll(timeout=1.0):
                assert message.error() is None
                offset = message.offset()
                seen[offset] += 1
                kind = (kinds.ACCEPT, kinds.RELEASE, kinds.REJECT)[offset % 3]
                if seen[offset] > 1:
                    kind = kinds.ACCEPT
                consumer.acknowledge(message, kind)
            failed = consumer.commit_sync(timeout=float(TIMEOUT_S))
            assert not [error for error in failed.values() if error is not None]
        assert seen == {offset: 1 + (offset % 3 == 1) for offset in range(9)}
    # Nothing is left for another member.
    with share_consumer(bootstrap, group) as consumer:
        consumer.subscribe([topic])
        with ADAPTERS["confluent-kafka"](bootstrap) as client:
            client.produce(topic, some_records(1))
        offsets: list[int] = []
        until = time.monotonic() + TIMEOUT_S
        while not offsets and time.monotonic() < until:
            offsets += [message.offset() for message in consumer.poll(timeout=1.0)]
        assert offsets == [9]


@pytest.mark.parametrize("level", ["read_committed", "read_uncommitted"])
def test_records_of_aborted_transactions_are_delivered_only_where_asked(
    bootstrap: str, make_topic: MakeTopic, level: str
) -> None:
    topic = make_topic()
    group = f"queue-of-{topic}"
    begin_at_the_start(bootstrap, group, share_isolation_level=level)
    producer = confluent_kafka.Producer(
        {"bootstrap.servers": bootstrap, "transactional.id": f"of-{topic}"}
    )
    producer.init_transactions(TIMEOUT_S)
    for number, commits in enumerate((True, False, True, False, True)):
        producer.begin_transaction()
        for record in range(3):
            producer.produce(topic, f"{number}.{record} {commits}".encode())
        producer.flush(TIMEOUT_S)
        if commits:
            producer.commit_transaction(TIMEOUT_S)
        else:
            producer.abort_transaction(TIMEOUT_S)
    values: list[str] = []
    with share_consumer(bootstrap, group) as consumer:
        consumer.subscribe([topic])
        until = time.monotonic() + TIMEOUT_S
        while "4.2 True" not in values and time.monotonic() < until:
            for message in consumer.poll(timeout=1.0):
                assert message.error() is None
                values.append(message.value().decode())
    wanted = [0, 2, 4] if level == "read_committed" else [0, 1, 2, 3, 4]
    assert sorted(value[:3] for value in values) == [
        f"{number}.{record}" for number in wanted for record in range(3)
    ]
