"""Share groups beside classic groups: the same records, fetched by 50 consumers each.

Both kinds of consumers are simple ones of this process, with one request in flight
each, and get one batch with each answer. So the rates say little by themselves; what
counts are the ratios of one run, in which both kinds take turns. A member of a share
group acknowledges each batch with its next ShareFetch, which the broker writes to its
log; a consumer of a classic group commits nothing here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from statistics import median
from typing import Final, NamedTuple

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.messages import incremental_alter_configs as configs
from mpbroker.protocol.messages.metadata import (
    MetadataRequest,
    MetadataRequestTopic,
    MetadataResponse,
)
from mpbroker.protocol.messages.share_fetch import (
    AcknowledgementBatch,
    FetchPartition,
    FetchTopic,
    ShareFetchRequest,
    ShareFetchResponse,
)
from mpbroker.protocol.messages.share_group_heartbeat import (
    ShareGroupHeartbeatRequest,
    ShareGroupHeartbeatResponse,
)
from tests.bench import wire
from tests.bench.brokers import Broker
from tests.bench.cases import Case, Context

CONSUMERS: Final = 50  # and as many partitions
RECORDS: Final = 500  # of a batch: max.poll.records
_VALUE_BYTES: Final = 100
_BATCHES_PER_S: Final = 10  # of each partition, for each second of a measurement
_ROUNDS: Final = 3
_STALL_S: Final = 30.0
HEAD: Final = 5  # correlation id and tagged fields, before an answer's body
_METADATA: Final = (ApiKey.METADATA, 12)
_ALTER: Final = (ApiKey.INCREMENTAL_ALTER_CONFIGS, 1)
_HEARTBEAT: Final = (ApiKey.SHARE_GROUP_HEARTBEAT, 1)
_SHARE_FETCH: Final = (ApiKey.SHARE_FETCH, 2)
_GROUP: Final = 32  # type of a resource that has configs


class Topic(NamedTuple):
    """A topic with as many partitions as there are consumers, and its batches."""

    name: str
    topic_id: bytes
    batches: int  # of each partition
    batch_bytes: int


class _Figures(NamedTuple):
    """What one read of all records took."""

    records_per_s: float
    cpu_us: float  # the broker's, for each answer with a batch


def fill(broker: Broker, batches: int) -> Topic:
    """Make a topic with this number of batches in each partition."""
    name = broker.topic(f"share-{broker.next_number()}", CONSUMERS)
    specs = [wire.RecordSpec(wire.filler(_VALUE_BYTES, i)) for i in range(RECORDS)]
    batch = wire.record_batch(specs)
    with broker.connect() as connection:
        for partition in range(CONSUMERS):
            for _ in range(batches):
                payload = connection.ask(wire.produce(name, partition, batch))
                if error := wire.parse_produce(payload).error_code:
                    raise wire.AnswerError(f"produce: error {error}")
        asked = MetadataRequest(topics=[MetadataRequestTopic(name=name)])
        payload = connection.ask(wire.request(_METADATA, asked.encode(_METADATA[1])))
        found = MetadataResponse.decode(_METADATA[1], payload[HEAD:])
    return Topic(name, bytes(found.topics[0].topic_id), batches, len(batch))


def _read_all(
    broker: Broker,
    topic: Topic,
    ask: Callable[[int], bytes],
    took: Callable[[int, bytes], int],
) -> _Figures:
    """Let all consumers read all records.

    Args:
        ask: returns a consumer's next request.
        took: takes a consumer's answer, and returns how many records it has.
    """
    wanted = topic.batches * CONSUMERS * RECORDS
    records = answers = 0
    with ExitStack() as stack:
        connections = [stack.enter_context(broker.connect()) for _ in range(CONSUMERS)]
        cpu_s, began = broker.tree.cpu_seconds(), time.monotonic()
        for number, connection in enumerate(connections):
            connection.send(ask(number))
        deadline = time.monotonic() + _STALL_S
        while time.monotonic() < deadline:
            before = records
            for number, connection in enumerate(connections):
                found = took(number, connection.receive())
                records += found
                answers += bool(found)
                if records >= wanted:
                    seconds = time.monotonic() - began
                    cpu_s = broker.tree.cpu_seconds() - cpu_s
                    return _Figures(records / seconds, cpu_s / answers * 1e6)
                connection.send(ask(number))
            if records > before:
                deadline = time.monotonic() + _STALL_S
    raise wire.AnswerError(f"stuck after {records} of {wanted} records")


def _classic(broker: Broker, topic: Topic) -> _Figures:
    offsets = [0] * CONSUMERS

    def ask(number: int) -> bytes:
        return wire.fetch(
            topic.name, number, offsets[number], max_bytes=topic.batch_bytes
        )

    def took(number: int, payload: bytes) -> int:
        found = wire.parse_fetch(payload)
        if found.error_code:
            raise wire.AnswerError(f"fetch: error {found.error_code}")
        count = RECORDS * (len(found.records) // topic.batch_bytes)
        offsets[number] += count
        return count

    return _read_all(broker, topic, ask, took)


def begin_at_the_start(broker: Broker) -> str:
    """Return the name of a new share group, which begins with the first records."""
    group = f"share-{broker.next_number()}"
    entry = configs.AlterableConfig(
        name="share.auto.offset.reset", config_operation=0, value="earliest"
    )
    resource = configs.AlterConfigsResource(
        resource_type=_GROUP, resource_name=group, configs=[entry]
    )
    altering = configs.IncrementalAlterConfigsRequest(resources=[resource])
    with broker.connect() as connection:
        connection.ask(wire.request(_ALTER, altering.encode(_ALTER[1])))
    return group


def _begin_group(broker: Broker, topic: Topic) -> str:
    """Let 50 members join a new share group."""
    group = begin_at_the_start(broker)
    with broker.connect() as connection:
        for number in range(CONSUMERS):
            joining = ShareGroupHeartbeatRequest(
                group_id=group,
                member_id=f"m{number}",
                member_epoch=0,
                subscribed_topic_names=[topic.name],
            )
            framed = wire.request(_HEARTBEAT, joining.encode(_HEARTBEAT[1]))
            while True:
                answer = ShareGroupHeartbeatResponse.decode(
                    _HEARTBEAT[1], connection.ask(framed)[HEAD:]
                )
                if not answer.error_code:
                    break
                time.sleep(0.05)  # the coordinator is loading
    return group


def _shared(broker: Broker, topic: Topic) -> _Figures:
    group = _begin_group(broker, topic)
    epochs = [0] * CONSUMERS
    # By member: the offsets that its next request acknowledges.
    held: list[list[AcknowledgementBatch]] = [[] for _ in range(CONSUMERS)]

    def ask(number: int) -> bytes:
        row = FetchPartition(
            partition_index=number, acknowledgement_batches=held[number]
        )
        topics = [FetchTopic(topic_id=topic.topic_id, partitions=[row])]
        request = ShareFetchRequest(
            group_id=group,
            member_id=f"m{number}",
            share_session_epoch=epochs[number],
            max_wait_ms=0,
            min_bytes=1,
            max_bytes=1 << 20,
            max_records=RECORDS,
            batch_size=RECORDS,
            topics=topics if held[number] or not epochs[number] else [],
        )
        return wire.request(_SHARE_FETCH, request.encode(_SHARE_FETCH[1]))

    def took(number: int, payload: bytes) -> int:
        answer = ShareFetchResponse.decode(_SHARE_FETCH[1], payload[HEAD:])
        epochs[number] += 1
        held[number] = []
        count = 0
        rows = [row for each in answer.responses for row in each.partitions]
        for code in (
            answer.error_code,
            *(row.error_code or row.acknowledge_error_code for row in rows),
        ):
            if code:
                raise wire.AnswerError(f"share fetch: error {code}")
        for row in rows:
            for each in row.acquired_records:
                count += each.last_offset - each.first_offset + 1
                held[number].append(
                    AcknowledgementBatch(
                        first_offset=each.first_offset,
                        last_offset=each.last_offset,
                        acknowledge_types=[1],
                    )
                )
        return count

    return _read_all(broker, topic, ask, took)


def _run(context: Context) -> dict[str, float]:
    broker = context.broker
    batches = max(2, round(_BATCHES_PER_S * context.seconds))
    topic = fill(broker, batches)
    classic, shared = [], []
    for _ in range(_ROUNDS):
        classic.append(_classic(broker, topic))
        shared.append(_shared(broker, topic))
    pairs = list(zip(classic, shared, strict=True))
    return {
        "records_per_s": median(each.records_per_s for each in shared),
        "rate_ratio": median(b.records_per_s / a.records_per_s for a, b in pairs),
        "cpu_us": median(each.cpu_us for each in shared),
        "bare_cpu_us": median(each.cpu_us for each in classic),
        "cpu_ratio": median(b.cpu_us / a.cpu_us for a, b in pairs),
    }


CASES: Final = [Case(f"share/{CONSUMERS}", _run)]
