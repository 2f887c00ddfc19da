"""One group consumer in a process of its own, so that it can be killed.

    python -m tests.compat.group_member LIBRARY BOOTSTRAP GROUP TOPIC OPTIONS_JSON

Prints a JSON line whenever its assignment changes, {"assigned": [partitions]}, or
records have come, {"got": [[partition, offset], ...]}, which it then commits. SIGTERM
makes it leave the group, SIGUSR1 makes it say where it is.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import signal
import sys
from contextlib import suppress
from types import FrameType
from typing import Any

SESSION_MS = 1500
HEARTBEAT_MS = 100

stopping = False


def stop(_number: int, _frame: FrameType | None) -> None:
    global stopping
    stopping = True


def say(**words: Any) -> None:
    print(json.dumps(words), flush=True)


class Reporter:
    """Says what has changed."""

    def __init__(self) -> None:
        self._assigned: list[int] = []

    def assigned(self, partitions: list[int]) -> None:
        if sorted(partitions) != self._assigned:
            self._assigned = sorted(partitions)
            say(assigned=self._assigned)


def run_confluent(bootstrap: str, group: str, topic: str, options: Any) -> None:
    from confluent_kafka import Consumer

    config = {
        "debug": "cgrp,protocol",  # to stderr, which is shown if it does not end
        "bootstrap.servers": bootstrap,
        "group.id": group,
        "auto.offset.reset": "earliest",
        "enable.auto.commit": False,
        "partition.assignment.strategy": options.get("strategy", "range"),
        "session.timeout.ms": options.get("session_ms", SESSION_MS),
        "heartbeat.interval.ms": HEARTBEAT_MS,
    }
    if options.get("protocol") == "consumer":
        for name in ("partition.assignment.strategy", "session.timeout.ms"):
            del config[name]
        del config["heartbeat.interval.ms"]
        config["group.protocol"] = "consumer"
        if "strategy" in options:
            config["group.remote.assignor"] = options["strategy"]
    if "instance" in options:
        config["group.instance.id"] = options["instance"]
    consumer = Consumer(config)
    consumer.subscribe([topic])
    reporter = Reporter()
    owes_commit = False
    while not stopping:
        messages = [m for m in consumer.consume(500, 0.1) if m.error() is None]
        reporter.assigned([row.partition for row in consumer.assignment()])
        if messages:
            # Said first: who is killed in between has not committed in silence.
            say(got=[[m.partition(), m.offset()] for m in messages])
            owes_commit = True
        if owes_commit:
            owes_commit = not has_committed(consumer)
    consumer.close()


def has_committed(consumer: Any) -> bool:
    """Whether it has no more to commit: that is done, or it will read it again.

    Nobody reads again what could not be committed for want of a coordinator.
    """
    from confluent_kafka import KafkaError, KafkaException

    try:
        consumer.commit(asynchronous=False)
    except KafkaException as error:
        # A rebalance was faster: what was read is another's, or to be read once more.
        return bool(error.args[0].code() == KafkaError._NO_OFFSET)
    return True


def run_kafka_python(bootstrap: str, group: str, topic: str, options: Any) -> None:
    from kafka import KafkaConsumer
    from kafka.coordinator.assignors.range import RangePartitionAssignor
    from kafka.errors import KafkaError

    consumer = KafkaConsumer(
        topic,
        bootstrap_servers=bootstrap,
        group_id=group,
        group_instance_id=options.get("instance"),
        auto_offset_reset="earliest",
        enable_auto_commit=False,
        partition_assignment_strategy=[RangePartitionAssignor],
        session_timeout_ms=options.get("session_ms", SESSION_MS),
        heartbeat_interval_ms=HEARTBEAT_MS,
    )
    reporter = Reporter()
    while not stopping:
        # Not shorter: a poll that gives up on a join is what forgets it.
        found = consumer.poll(timeout_ms=500)
        join_again_if_forgotten(consumer)
        reporter.assigned([row.partition for row in consumer.assignment()])
        if found:
            say(got=[[m.partition, m.offset] for rows in found.values() for m in rows])
            with suppress(KafkaError):
                consumer.commit()
    consumer.close()


def join_again_if_forgotten(consumer: Any) -> None:
    """Make up for what kafka-python 3.0.12 does when a join ends between two polls.

    A leader that joins once more because a topic's metadata came late takes the new
    metadata for known as soon as it has computed the assignment. If its SyncGroup is
    answered just after a poll has given up waiting, the next poll sees no need to join,
    never looks at the answer, and never sends a heartbeat again (`join_group_async`
    in kafka/coordinator/base.py): a member without partitions, for ever.
    """
    coordinator = consumer._coordinator
    join = coordinator._join_task
    if join is not None and join.is_done and not coordinator.need_rejoin():
        coordinator.request_rejoin()


async def run_aiokafka(bootstrap: str, group: str, topic: str, options: Any) -> None:
    from aiokafka import AIOKafkaConsumer
    from aiokafka.coordinator.assignors.range import RangePartitionAssignor
    from aiokafka.errors import KafkaError

    consumer = AIOKafkaConsumer(
        topic,
        bootstrap_servers=bootstrap,
        group_id=group,
        group_instance_id=options.get("instance"),
        auto_offset_reset="earliest",
        enable_auto_commit=False,
        partition_assignment_strategy=(RangePartitionAssignor,),
        session_timeout_ms=options.get("session_ms", SESSION_MS),
        heartbeat_interval_ms=HEARTBEAT_MS,
    )
    await consumer.start()
    reporter = Reporter()
    while not stopping:
        found = await consumer.getmany(timeout_ms=100)
        reporter.assigned([row.partition for row in consumer.assignment()])
        if found:
            say(got=[[m.partition, m.offset] for rows in found.values() for m in rows])
            with suppress(KafkaError):
                await consumer.commit()
    await consumer.stop()


def main() -> None:
    signal.signal(signal.SIGTERM, stop)
    faulthandler.register(signal.SIGUSR1)
    library, bootstrap, group, topic, options = sys.argv[1:]
    arguments = bootstrap, group, topic, json.loads(options)
    if library == "confluent-kafka":
        run_confluent(*arguments)
    elif library == "kafka-python":
        run_kafka_python(*arguments)
    else:
        asyncio.run(run_aiokafka(*arguments))


if __name__ == "__main__":
    main()
