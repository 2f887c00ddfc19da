"""A share group of librdkafka's beside a classic group of it: 50 consumers each.

Three kinds of consumers take turns in one run, each kind with a topic of its own that
is filled with the same batches beforehand: members of a share group, members of a
classic group, and the bare bound, which are consumers that were assigned a partition
each, in no group. All have librdkafka's defaults: a share consumer gets 500 records
with a fetch, which it acknowledges with the next one, while the others fetch ahead as
much as they may, and commit every five seconds.

The clock starts with the first record that arrives, when all consumers have joined. One
thread polls them all, and stands for an application that does nothing with the records.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from statistics import median
from typing import Any, Final, NamedTuple

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.messages.share_group_describe import (
    ShareGroupDescribeRequest,
    ShareGroupDescribeResponse,
)
from tests.bench import wire
from tests.bench.brokers import Broker
from tests.bench.cases import Case, Context
from tests.bench.rdkafka import RdKafkaError
from tests.bench.share_groups import (
    CONSUMERS,
    HEAD,
    RECORDS,
    Topic,
    begin_at_the_start,
    fill,
)

_BATCHES_PER_S: Final = 40  # of each partition, for each second of a measurement
_ROUNDS: Final = 3
_DESCRIBE: Final = (ApiKey.SHARE_GROUP_DESCRIBE, 1)
_STALL_S: Final = 30.0

# Returns the messages that a consumer has now; it does not wait.
Poll = Callable[[Any], Sequence[Any]]


class _Figures(NamedTuple):
    """What it took one kind of consumers to read all records."""

    records_per_s: float
    cpu_s_per_million: float  # the broker's


def _settings(broker: Broker, group: str) -> dict[str, Any]:
    return {
        "bootstrap.servers": broker.bootstrap,
        "group.id": group,
        "auto.offset.reset": "earliest",
        "log_level": 3,  # not that share consumers are a preview
    }


@contextmanager
def _open(make: Callable[[], Any]) -> Iterator[list[Any]]:
    """Yield as many consumers as are wanted; close them all at the same time.

    One after another, each would leave its group to a rebalance of the others.
    """
    consumers = [make() for _ in range(CONSUMERS)]
    try:
        yield consumers
    finally:
        with ThreadPoolExecutor(CONSUMERS) as pool:
            for closing in [pool.submit(each.close) for each in consumers]:
                closing.result()


def _await_members(broker: Broker, group: str) -> None:
    """Return when all consumers are members of a share group, with partitions."""
    asked = ShareGroupDescribeRequest(group_ids=[group])
    framed = wire.request(_DESCRIBE, asked.encode(_DESCRIBE[1]))
    deadline = time.monotonic() + _STALL_S
    with broker.connect() as connection:
        while time.monotonic() < deadline:
            answer = ShareGroupDescribeResponse.decode(
                _DESCRIBE[1], connection.ask(framed)[HEAD:]
            )
            ready = sum(
                bool(member.assignment.topic_partitions)
                for member in answer.groups[0].members
            )
            if ready == CONSUMERS:
                return
            time.sleep(0.05)
    raise RdKafkaError(f"{ready} of {CONSUMERS} members have joined the share group")


def _read_all(
    broker: Broker, topic: Topic, consumers: Sequence[Any], poll: Poll
) -> _Figures:
    wanted = topic.batches * CONSUMERS * RECORDS
    taken = 0
    by_partition: Counter[int] = Counter()
    cpu_s = began = 0.0
    deadline = time.monotonic() + _STALL_S
    while taken < wanted:
        found = 0
        for consumer in consumers:
            messages = poll(consumer)
            if not messages:
                continue
            if not began:
                cpu_s, began = broker.tree.cpu_seconds(), time.monotonic()
            found += len(messages)
            # The first tells of an error, and that nobody reads anything twice.
            if error := messages[0].error():
                raise RdKafkaError(str(error))
            by_partition[messages[0].partition()] += len(messages)
        taken += found
        if found:
            deadline = time.monotonic() + _STALL_S
        elif time.monotonic() > deadline:
            raise RdKafkaError(f"stuck after {taken} of {wanted} records")
        else:
            time.sleep(0.001)
    seconds = time.monotonic() - began
    cpu_s = broker.tree.cpu_seconds() - cpu_s
    if set(by_partition.values()) != {topic.batches * RECORDS}:
        raise RdKafkaError(f"records were read twice: {by_partition}")
    return _Figures(wanted / seconds, cpu_s / wanted * 1e6)


def _shared(broker: Broker, topic: Topic) -> _Figures:
    from confluent_kafka import ShareConsumer

    group = begin_at_the_start(broker)
    settings = _settings(broker, group)
    del settings["auto.offset.reset"]
    with _open(lambda: ShareConsumer(settings)) as consumers:
        for consumer in consumers:
            consumer.subscribe([topic.name])
        _await_members(broker, group)
        return _read_all(broker, topic, consumers, lambda each: each.poll(timeout=0))


def _consumers(
    broker: Broker, topic: Topic, begin: Callable[[Any, int], object]
) -> _Figures:
    from confluent_kafka import Consumer

    settings = _settings(broker, f"classic-{broker.next_number()}")
    with _open(lambda: Consumer(settings)) as consumers:
        for number, consumer in enumerate(consumers):
            begin(consumer, number)
        return _read_all(
            broker, topic, consumers, lambda each: each.consume(RECORDS, timeout=0)
        )


def _classic(broker: Broker, topic: Topic) -> _Figures:
    return _consumers(broker, topic, lambda each, _: each.subscribe([topic.name]))


def _bare(broker: Broker, topic: Topic) -> _Figures:
    from confluent_kafka import TopicPartition

    return _consumers(
        broker,
        topic,
        lambda each, number: each.assign([TopicPartition(topic.name, number, 0)]),
    )


def _run(context: Context) -> dict[str, float]:
    broker = context.broker
    batches = max(2, round(_BATCHES_PER_S * context.seconds))
    kinds = (_bare, _classic, _shared)
    figures: dict[Callable[..., _Figures], list[_Figures]] = {k: [] for k in kinds}
    for number in range(_ROUNDS):
        # Each kind is the first one once.
        for kind in kinds[number % 3 :] + kinds[: number % 3]:
            topic = fill(broker, batches)
            figures[kind].append(kind(broker, topic))
            with broker.connect() as connection:
                connection.delete_topic(topic.name)
    bare, classic, shared = (figures[kind] for kind in kinds)
    pairs = list(zip(classic, shared, strict=True))
    return {
        "records_per_s": median(each.records_per_s for each in shared),
        "classic_records_per_s": median(each.records_per_s for each in classic),
        "bare_records_per_s": median(each.records_per_s for each in bare),
        "rate_ratio": median(b.records_per_s / a.records_per_s for a, b in pairs),
        "cpu_s_per_million": median(each.cpu_s_per_million for each in shared),
        "classic_cpu_s_per_million": median(each.cpu_s_per_million for each in classic),
    }


CASES: Final = [Case(f"share/librdkafka/{CONSUMERS}", _run)]
