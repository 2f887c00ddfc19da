"""What is in a partition, and in a checkpoint; transactions that go on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

from confluent_kafka import (
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    Producer,
    TopicPartition,
)

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
            "fetch.wait.max.ms": 20,  # it is asked at the end, where nothing comes
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


def offsets_in(document: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    """Return the offsets of a checkpoint's document, without the topics' ids."""
    return {topic: found for topic, found in document.items() if "@" not in topic}


@contextmanager
def going_transactions(bootstrap: str, topic: str) -> Iterator[None]:
    """Write transactions of three records to partition 0; every third is aborted."""
    producer = Producer(
        {"bootstrap.servers": bootstrap, "transactional.id": f"going-{topic}"}
    )
    producer.init_transactions(PATIENCE_S)
    enough = threading.Event()
    failures: list[KafkaException] = []

    def write() -> None:
        try:
            for turn in count():
                if enough.is_set():
                    return
                producer.begin_transaction()
                for number in range(3):
                    producer.produce(topic, b"%d" % (3 * turn + number), partition=0)
                if turn % 3 == 2:
                    producer.flush(PATIENCE_S)  # abort_transaction() drops the rest
                    producer.abort_transaction(PATIENCE_S)
                else:
                    producer.commit_transaction(PATIENCE_S)
        except KafkaException as error:  # the test's thread raises it
            failures.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        enough.set()
        thread.join()
    if failures:
        raise failures[0]
