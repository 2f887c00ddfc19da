"""Topics of all kinds on a source, by librdkafka; and what a cluster has of them."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from confluent_kafka import (
    Consumer,
    ConsumerGroupTopicPartitions,
    KafkaException,
    Producer,
    TopicPartition,
)
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
)

from tests.support.children import wait_until

# Name: partitions, configs.
TOPICS: Final[dict[str, tuple[int, dict[str, str]]]] = {
    "m-plain": (3, {"retention.ms": "-1"}),  # its timestamps are old
    "m-compacted": (1, {"cleanup.policy": "compact", "segment.bytes": "1048576"}),
    "m-appended": (1, {"message.timestamp.type": "LogAppendTime"}),
    "m-transactions": (2, {"retention.ms": "86400000000"}),
    "m-empty": (2, {}),
    "m-short": (1, {}),
}
CODECS: Final = ("none", "gzip", "snappy", "lz4", "zstd")
GROUP: Final = "readers"
_NOT_YET: Final = (
    "COORDINATOR_LOAD_IN_PROGRESS",
    "COORDINATOR_NOT_AVAILABLE",
    "NOT_COORDINATOR",
)
_QUIET: Final = {"log_level": 0}


class Seen(NamedTuple):
    """A record as a consumer gets it."""

    offset: int
    timestamp: tuple[int, int]
    key: bytes | None
    value: bytes | None
    headers: Any


def admin_of(bootstrap: str) -> AdminClient:
    return AdminClient({"bootstrap.servers": bootstrap, **_QUIET})


def create(bootstrap: str, topics: dict[str, tuple[int, dict[str, str]]]) -> None:
    wanted = [
        NewTopic(name, count, 1, config=configs)
        for name, (count, configs) in topics.items()
    ]
    admin = admin_of(bootstrap)  # kept: its answers are lost with it
    for future in admin.create_topics(wanted).values():
        future.result(60)


def alter(bootstrap: str, topic: str, config: dict[str, str]) -> None:
    entries = [
        ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
        for name, value in config.items()
    ]
    resource = ConfigResource(
        ConfigResource.Type.TOPIC, topic, incremental_configs=entries
    )
    admin = admin_of(bootstrap)  # it must outlive its futures
    for future in admin.incremental_alter_configs([resource]).values():
        future.result(60)


def fill(bootstrap: str, records: int = 400) -> None:
    """Create TOPICS with records of all kinds, and a group with offsets."""
    create(bootstrap, TOPICS)
    for number, codec in enumerate(CODECS):
        producer = Producer(
            {
                "bootstrap.servers": bootstrap,
                "compression.type": codec,
                "enable.idempotence": number % 2 == 0,
                "linger.ms": 5,
                **_QUIET,
            }
        )
        for n in range(records):
            producer.produce(
                "m-plain",
                key=None if n % 5 == 0 else f"k{n % 17}".encode(),
                value=None if n % 7 == 0 else b"v%d" % n * 9,
                headers=[("h", b"%d" % n), ("empty", None)] if n % 3 == 0 else None,
                partition=n % 3,
                timestamp=1_700_000_000_000 + n * 1_000,
            )
            producer.produce("m-appended", b"a%d" % n, timestamp=1_600_000_000_000)
            producer.produce(
                "m-compacted",
                key=b"k%d" % (n % 13),
                value=None if n % 11 == 0 else b"%d" % n,
            )
            producer.produce("m-short", b"s%d" % n)
        assert producer.flush(60) == 0
    transactions(bootstrap, "t-1", 6)
    delete_records(bootstrap, "m-short", 137)
    commit(bootstrap, GROUP, {("m-plain", 0): 3, ("m-plain", 2): 77})
    # Behind the marker that ends the last transaction.
    commit(bootstrap, GROUP, {("m-transactions", 0): end(bootstrap, "m-transactions")})


def transactions(bootstrap: str, name: str, count: int) -> None:
    """Make transactions; those with odd numbers are aborted."""
    producer = Producer(
        {"bootstrap.servers": bootstrap, "transactional.id": name, **_QUIET}
    )
    producer.init_transactions(60)
    for number in range(count):
        producer.begin_transaction()
        for n in range(10):
            producer.produce("m-transactions", b"%d-%d" % (number, n), partition=n % 2)
        producer.flush(60)
        if number % 2:
            producer.abort_transaction(60)
        else:
            producer.commit_transaction(60)


def delete_records(bootstrap: str, topic: str, before: int) -> None:
    wanted = [TopicPartition(topic, 0, before)]
    admin = admin_of(bootstrap)
    for future in admin.delete_records(wanted).values():
        future.result(60)


def commit(bootstrap: str, group: str, offsets: dict[tuple[str, int], int]) -> None:
    wanted = [
        TopicPartition(topic, partition, offset, metadata=f"at {offset}")
        for (topic, partition), offset in offsets.items()
    ]
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": group, **_QUIET})

    def is_committed() -> bool:
        try:
            consumer.commit(offsets=wanted, asynchronous=False)
        except KafkaException as error:
            # Apache Kafka's coordinator loads its log when it is first asked.
            assert error.args[0].name() in _NOT_YET, error
            return False
        return True

    wait_until(is_committed)
    consumer.close()


def commits(bootstrap: str, group: str) -> dict[tuple[str, int], tuple[int, str]]:
    """Return offsets and metadata that a group has committed."""
    asked = [ConsumerGroupTopicPartitions(group)]
    admin = admin_of(bootstrap)
    (future,) = admin.list_consumer_group_offsets(asked).values()
    return {
        (each.topic, each.partition): (each.offset, each.metadata or "")
        for each in future.result(60).topic_partitions
    }


def end(bootstrap: str, topic: str, partition: int = 0) -> int:
    return watermarks(bootstrap, topic, partition)[1]


def watermarks(bootstrap: str, topic: str, partition: int = 0) -> tuple[int, int]:
    """Return the first offset and the end offset of a partition."""
    consumer = Consumer(
        {"bootstrap.servers": bootstrap, "group.id": "watermarks", **_QUIET}
    )
    try:
        found = consumer.get_watermark_offsets(TopicPartition(topic, partition), 60)
        return int(found[0]), int(found[1])
    finally:
        consumer.close()


def partitions(bootstrap: str) -> dict[str, int]:
    found = admin_of(bootstrap).list_topics(timeout=60).topics
    return {name: len(each.partitions) for name, each in found.items()}


def read(bootstrap: str, topic: str, partition: int = 0) -> list[Seen]:
    """Return all committed records of a partition."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "unused",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "error",
            "check.crcs": True,
            **_QUIET,
        }
    )
    start, _ = watermarks(bootstrap, topic, partition)
    consumer.assign([TopicPartition(topic, partition, start)])
    found: list[Seen] = []
    try:
        while True:
            message = consumer.poll(60)
            assert message is not None, f"nothing from {topic}-{partition}"
            error = message.error()
            if error is not None:
                if error.name() == "_PARTITION_EOF":
                    return found
                raise KafkaException(error)
            found.append(
                Seen(
                    message.offset(),
                    message.timestamp(),
                    message.key(),
                    message.value(),
                    message.headers(),
                )
            )
    finally:
        consumer.close()


def everything(bootstrap: str, names: list[str]) -> dict[str, Any]:
    """Return all that must be the same on both sides, by topic and partition."""
    found: dict[str, Any] = {}
    counts = partitions(bootstrap)
    for name in names:
        for partition in range(counts[name]):
            found[f"{name}-{partition}"] = (
                watermarks(bootstrap, name, partition),
                read(bootstrap, name, partition),
            )
    return found
