"""What is in a partition, as librdkafka reads it."""

from __future__ import annotations

from confluent_kafka import Consumer, KafkaError, Message, TopicPartition

PATIENCE_S = 90  # for one record


def topic_records(
    bootstrap: str,
    topic: str,
    partition: int = 0,
    *,
    isolation: str = "read_committed",
    count: int = 0,
) -> list[Message]:
    """Return all records up to the end that readers see.

    Args:
        count: wait for so many; the end may lie before them for a moment, since a
            commit is answered when it is decided, and its markers come behind.
    """
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "none",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "isolation.level": isolation,
        }
    )
    consumer.assign([TopicPartition(topic, partition, 0)])
    found: list[Message] = []
    try:
        while True:
            message = consumer.poll(PATIENCE_S)
            assert message is not None, f"{len(found)} records, and no end"
            error = message.error()
            if error is None:
                found.append(message)
            # Others tell of a connection that was lost, and is made again.
            elif error.code() == KafkaError._PARTITION_EOF and len(found) >= count:
                return found
    finally:
        consumer.close()
