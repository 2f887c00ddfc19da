"""Admin clients that we did not write: partitions, records, configs, the cluster."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin import NewPartitions as AioNewPartitions
from aiokafka.admin.config_resource import ConfigResource as AioConfigResource
from aiokafka.admin.config_resource import ConfigResourceType as AioConfigResourceType
from confluent_kafka import (
    KafkaError,
    KafkaException,
    Producer,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ConfigSource,
    NewPartitions,
    OffsetSpec,
    ResourceType,
    TopicDescription,
)
from kafka.admin import ConfigResource as PyConfigResource
from kafka.admin import ConfigResourceType as PyConfigResourceType
from kafka.admin import KafkaAdminClient
from kafka.admin import NewPartitions as PyNewPartitions
from kafka.structs import TopicPartition as PyTopicPartition

from tests.support.patience import LONGEST_S

MakeTopic = Callable[..., str]
T = TypeVar("T")

SET, DELETE = AlterConfigOpType.SET, AlterConfigOpType.DELETE
APPEND, SUBTRACT = AlterConfigOpType.APPEND, AlterConfigOpType.SUBTRACT


@pytest.fixture
def admin(bootstrap: str) -> AdminClient:
    return AdminClient({"bootstrap.servers": bootstrap})


def soon(ask: Callable[[], T], is_true: Callable[[T], bool]) -> T:
    """Ask until it is true: Apache Kafka answers a change before it shows it."""
    deadline = time.monotonic() + LONGEST_S
    while True:
        try:
            answer = ask()
            if is_true(answer) or time.monotonic() > deadline:
                return answer
        except KafkaException:
            if time.monotonic() > deadline:
                raise


def configs_of(
    admin: AdminClient, resource: ConfigResource, **values: str
) -> dict[str, ConfigEntry]:
    """Return what is described, as soon as these values are (dots as underscores)."""

    def ask() -> dict[str, ConfigEntry]:
        (answer,) = admin.describe_configs([resource]).values()
        found: dict[str, ConfigEntry] = answer.result()
        return found

    return soon(
        ask,
        lambda found: all(
            found[key.replace("_", ".")].value == value for key, value in values.items()
        ),
    )


def edit(
    admin: AdminClient,
    kind: ResourceType,
    name: str,
    operation: AlterConfigOpType,
    key: str,
    value: str | None = None,
) -> None:
    entry = ConfigEntry(key, value, incremental_operation=operation)
    resource = ConfigResource(kind, name, incremental_configs=[entry])
    admin.incremental_alter_configs([resource])[resource].result()


def test_librdkafka_edits_topic_configs(
    admin: AdminClient, make_topic: MakeTopic
) -> None:
    topic = make_topic()
    kind, resource = ResourceType.TOPIC, ConfigResource(ResourceType.TOPIC, topic)
    edit(admin, kind, topic, SET, "retention.ms", "86400000")
    edit(admin, kind, topic, APPEND, "cleanup.policy", "compact")
    found = configs_of(admin, resource, cleanup_policy="delete,compact")
    assert found["cleanup.policy"].value == "delete,compact"
    assert found["retention.ms"].value == "86400000"
    assert found["retention.ms"].source == ConfigSource.DYNAMIC_TOPIC_CONFIG.value
    assert "retention.ms" in found["retention.ms"].synonyms
    edit(admin, kind, topic, DELETE, "retention.ms")
    edit(admin, kind, topic, SUBTRACT, "cleanup.policy", "delete")
    found = configs_of(admin, resource, cleanup_policy="compact")
    assert found["cleanup.policy"].value == "compact"
    assert found["retention.ms"].source != ConfigSource.DYNAMIC_TOPIC_CONFIG.value


@pytest.mark.parametrize(
    ("kind", "name", "key", "code"),
    [
        (
            ResourceType.TOPIC,
            "none",
            "retention.ms",
            KafkaError.UNKNOWN_TOPIC_OR_PART,
        ),
        (ResourceType.TOPIC, None, "retention.m", KafkaError.INVALID_CONFIG),
        (ResourceType.BROKER, "1", "log.dirs", KafkaError.INVALID_REQUEST),
    ],
)
def test_librdkafka_is_told_what_cannot_be_edited(
    admin: AdminClient,
    make_topic: MakeTopic,
    kind: ResourceType,
    name: str | None,
    key: str,
    code: int,
) -> None:
    with pytest.raises(KafkaException) as refused:
        edit(admin, kind, name or make_topic(), SET, key, "5")
    assert refused.value.args[0].code() == code


def test_librdkafka_changes_what_topics_inherit_from_the_broker(
    admin: AdminClient, make_topic: MakeTopic
) -> None:
    topic = ConfigResource(ResourceType.TOPIC, make_topic())
    key = "log.message.timestamp.before.max.ms"
    edit(admin, ResourceType.BROKER, "1", SET, key, "86400001")
    try:
        broker = configs_of(
            admin,
            ConfigResource(ResourceType.BROKER, "1"),
            log_message_timestamp_before_max_ms="86400001",
        )
        assert broker[key].value == "86400001"
        assert broker[key].source == ConfigSource.DYNAMIC_BROKER_CONFIG.value
        assert broker["node.id"].is_read_only
        found = configs_of(admin, topic, message_timestamp_before_max_ms="86400001")
        assert found["message.timestamp.before.max.ms"].value == "86400001"
    finally:
        edit(admin, ResourceType.BROKER, "1", DELETE, key)


def test_librdkafka_adds_partitions_and_deletes_records(
    admin: AdminClient, bootstrap: str, make_topic: MakeTopic
) -> None:
    topic = make_topic()
    admin.create_partitions([NewPartitions(topic, 3)])[topic].result()
    producer = Producer({"bootstrap.servers": bootstrap})
    for _ in range(10):
        producer.produce(topic, b"value", partition=2)
    assert producer.flush(30) == 0
    partition = TopicPartition(topic, 2, 4)
    (deleted,) = admin.delete_records([partition]).values()
    assert deleted.result().low_watermark == 4
    (start,) = admin.list_offsets({partition: OffsetSpec.earliest()}).values()
    assert start.result().offset == 4
    (refused,) = admin.delete_records([TopicPartition(topic, 2, 11)]).values()
    with pytest.raises(KafkaException) as raised:
        refused.result()
    assert raised.value.args[0].code() == KafkaError.OFFSET_OUT_OF_RANGE


def test_librdkafka_describes_the_cluster_and_its_topics(
    admin: AdminClient, bootstrap: str, make_topic: MakeTopic
) -> None:
    topic = make_topic(3)
    cluster = admin.describe_cluster(include_authorized_operations=True).result()
    assert [f"{node.host}:{node.port}" for node in cluster.nodes] == [bootstrap]
    assert cluster.controller.id == cluster.nodes[0].id
    assert cluster.authorized_operations

    def describe() -> TopicDescription:
        (answer,) = admin.describe_topics(
            TopicCollection([topic]), include_authorized_operations=True
        ).values()
        return answer.result()

    described = soon(describe, lambda topic: len(topic.partitions) == 3)
    assert [len(partition.isr) for partition in described.partitions] == [1, 1, 1]
    assert described.authorized_operations


@pytest.fixture
def py_admin(bootstrap: str) -> Iterator[KafkaAdminClient]:
    client = KafkaAdminClient(bootstrap_servers=bootstrap)
    yield client
    client.close()


def test_kafka_python_administers(
    py_admin: KafkaAdminClient, make_topic: MakeTopic
) -> None:
    topic = make_topic()
    py_admin.create_partitions({topic: PyNewPartitions(2)})
    (described,) = soon(
        lambda: py_admin.describe_topics([topic]),
        lambda found: len(found[0]["partitions"]) == 2,
    )
    assert len(described["partitions"]) == 2
    resource = PyConfigResource(
        PyConfigResourceType.TOPIC, topic, configs={"retention.ms": "1234567"}
    )
    py_admin.alter_configs([resource])
    described = soon(
        lambda: str(py_admin.describe_configs([resource], include_synonyms=True)),
        lambda found: "1234567" in found,
    )
    assert "1234567" in described
    partition = PyTopicPartition(topic, 0)
    deleted = py_admin.delete_records({partition: 0})
    assert deleted[partition]["low_watermark"] == 0
    assert topic in str(py_admin.describe_log_dirs())
    assert len(py_admin.describe_cluster()["brokers"]) == 1


def test_aiokafka_administers(bootstrap: str, make_topic: MakeTopic) -> None:
    topic = make_topic()
    resource = AioConfigResource(
        AioConfigResourceType.TOPIC, topic, configs={"retention.ms": "1234567"}
    )

    # As in `soon`.
    deadline = time.monotonic() + LONGEST_S

    async def administer() -> str:
        client = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
        await client.start()
        try:
            await client.create_partitions({topic: AioNewPartitions(2)})
            while True:
                (described,) = await client.describe_topics([topic])
                if len(described["partitions"]) == 2 or time.monotonic() > deadline:
                    break
            assert len(described["partitions"]) == 2
            await client.alter_configs([resource])
            wanted = AioConfigResource(AioConfigResourceType.TOPIC, topic)
            while True:
                found = str(await client.describe_configs([wanted]))
                if "1234567" in found or time.monotonic() > deadline:
                    return found
        finally:
            await client.close()

    assert "1234567" in asyncio.run(administer())
