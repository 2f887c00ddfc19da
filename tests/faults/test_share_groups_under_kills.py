"""SIGKILL for the coordinator, handlers and the whole broker under a share group.

The members speak the protocol by themselves. A record is done when the broker has
answered that it is acknowledged: it must never come again. Every other record must
come, however often processes die.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages.describe_share_group_offsets import (
    DescribeShareGroupOffsetsRequest,
    DescribeShareGroupOffsetsRequestGroup,
)
from mpbroker.protocol.messages.incremental_alter_configs import (
    AlterableConfig,
    AlterConfigsResource,
    IncrementalAlterConfigsRequest,
)
from mpbroker.protocol.messages.metadata import MetadataRequest, MetadataRequestTopic
from mpbroker.protocol.messages.share_acknowledge import (
    AcknowledgementBatch,
    AcknowledgePartition,
    AcknowledgeTopic,
    ShareAcknowledgeRequest,
)
from mpbroker.protocol.messages.share_fetch import (
    FetchPartition,
    FetchTopic,
    ShareFetchRequest,
)
from mpbroker.protocol.messages.share_group_heartbeat import (
    ShareGroupHeartbeatRequest,
)
from mpbroker.server.api_messages import response_class
from tests.bench import wire
from tests.faults.test_kill_one_process import pids_with
from tests.faults.test_kill_the_whole_tree import address_of
from tests.support.broker import Broker
from tests.support.children import TIMEOUT_S, wait_until

GROUP, TOPIC = "queue", "t"
PARTITIONS = 2
LOCK_MS = 1000
VERSIONS = {
    ApiKey.METADATA: 12,
    ApiKey.INCREMENTAL_ALTER_CONFIGS: 1,
    ApiKey.SHARE_GROUP_HEARTBEAT: 1,
    ApiKey.SHARE_FETCH: 2,
    ApiKey.SHARE_ACKNOWLEDGE: 2,
    ApiKey.DESCRIBE_SHARE_GROUP_OFFSETS: 1,
}
# A member begins a new session after these: its session, or a log, is not known (yet).
AGAIN = {
    ErrorCode.SHARE_SESSION_NOT_FOUND,
    ErrorCode.INVALID_SHARE_SESSION_EPOCH,
    ErrorCode.NOT_LEADER_OR_FOLLOWER,
    ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
    ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.INVALID_RECORD_STATE,
    ErrorCode.INVALID_REQUEST,  # the records were acquired before a kill
}


def ask(connection: wire.Connection, api_key: ApiKey, message: Any) -> Any:
    version = VERSIONS[api_key]
    payload = connection.ask(wire.request((api_key, version), message.encode(version)))
    return response_class(api_key).decode(version, payload[5:])


class Member(threading.Thread):
    """A member that acknowledges what it gets, until it is told to stop."""

    def __init__(self, broker: Broker, name: str, topic_id: bytes) -> None:
        super().__init__(daemon=True)
        self.broker = broker
        self.member_id = name
        self.topic_id = topic_id
        self.stopping = threading.Event()
        self.done: list[tuple[int, int]] = []  # acknowledged, and so answered
        self.wrong: list[str] = []
        self.epoch = 0

    def run(self) -> None:
        while not self.stopping.is_set():
            with (
                suppress(OSError, wire.AnswerError, EOFError),
                wire.Connection(address_of(self.broker), 10.0) as connection,
            ):
                self.epoch = 0
                while not self.stopping.is_set():
                    self.turn(connection)

    def turn(self, connection: wire.Connection) -> None:
        answer = ask(connection, ApiKey.SHARE_FETCH, self.fetch())
        if answer.error_code:
            self.begin_again(answer.error_code)
            return
        self.epoch += 1
        for topic in answer.responses:
            for row in topic.partitions:
                if row.error_code:
                    self.begin_again(row.error_code)
                    return
                for each in row.acquired_records:
                    offsets = range(each.first_offset, each.last_offset + 1)
                    self.acknowledge(connection, row.partition_index, offsets)
                    if not self.epoch:
                        return

    def begin_again(self, code: int) -> None:
        if code not in AGAIN:
            self.wrong.append(ErrorCode(code).name)
        self.epoch = 0

    def fetch(self) -> ShareFetchRequest:
        partitions = [
            FetchPartition(partition_index=number, acknowledgement_batches=[])
            for number in range(PARTITIONS)
        ]
        topics = [FetchTopic(topic_id=self.topic_id, partitions=partitions)]
        return ShareFetchRequest(
            group_id=GROUP,
            member_id=self.member_id,
            share_session_epoch=self.epoch,
            max_wait_ms=50,
            min_bytes=1,
            max_records=5,
            batch_size=5,
            topics=topics if not self.epoch else [],
        )

    def acknowledge(
        self, connection: wire.Connection, partition: int, offsets: range
    ) -> None:
        batch = AcknowledgementBatch(
            first_offset=offsets[0], last_offset=offsets[-1], acknowledge_types=[1]
        )
        row = AcknowledgePartition(
            partition_index=partition, acknowledgement_batches=[batch]
        )
        request = ShareAcknowledgeRequest(
            group_id=GROUP,
            member_id=self.member_id,
            share_session_epoch=self.epoch,
            topics=[AcknowledgeTopic(topic_id=self.topic_id, partitions=[row])],
        )
        answer = ask(connection, ApiKey.SHARE_ACKNOWLEDGE, request)
        if answer.error_code:
            self.begin_again(answer.error_code)
            return
        self.epoch += 1
        ((said,),) = (each.partitions for each in answer.responses)
        if said.error_code:
            self.begin_again(said.error_code)
        else:
            self.done += [(partition, offset) for offset in offsets]


def start_offsets(broker: Broker) -> list[tuple[int, int]]:
    """Return start offset and lag of the group in each partition."""
    group = DescribeShareGroupOffsetsRequestGroup(group_id=GROUP, topics=None)
    request = DescribeShareGroupOffsetsRequest(groups=[group])
    with suppress(OSError, EOFError), wire.Connection(address_of(broker)) as connection:
        answer = ask(connection, ApiKey.DESCRIBE_SHARE_GROUP_OFFSETS, request)
        return [
            (row.start_offset, row.lag)
            for topic in answer.groups[0].topics
            for row in topic.partitions
        ]
    return []


def prepare(broker: Broker) -> bytes:
    """Create topic and group; return the topic's id."""
    with wire.Connection(address_of(broker)) as connection:
        connection.create_topic(TOPIC, PARTITIONS)
        own = {
            "share.auto.offset.reset": "earliest",
            "share.delivery.count.limit": "10",
        }
        configs = [
            AlterableConfig(name=name, config_operation=0, value=value)
            for name, value in own.items()
        ]
        resource = AlterConfigsResource(
            resource_type=32, resource_name=GROUP, configs=configs
        )
        request = IncrementalAlterConfigsRequest(resources=[resource])
        answer = ask(connection, ApiKey.INCREMENTAL_ALTER_CONFIGS, request)
        assert not answer.responses[0].error_code
        topics = [MetadataRequestTopic(name=TOPIC)]
        found = ask(connection, ApiKey.METADATA, MetadataRequest(topics=topics))
        joining = ShareGroupHeartbeatRequest(
            group_id=GROUP,
            member_id="a",
            member_epoch=0,
            subscribed_topic_names=[TOPIC],
        )

        def joined() -> bool:
            said = ask(connection, ApiKey.SHARE_GROUP_HEARTBEAT, joining)
            return not said.error_code

        wait_until(joined)
        return bytes(found.topics[0].topic_id)


def produce(broker: Broker, count: int) -> None:
    """Append batches of four records to each partition in turn."""
    with wire.Connection(address_of(broker)) as connection:
        for number in range(count):
            batch = wire.record_batch([wire.RecordSpec(b"value")] * 4)
            payload = connection.ask(
                wire.produce(TOPIC, number % PARTITIONS, batch, acks=-1)
            )
            assert not wire.parse_produce(payload).error_code


def kill_one(broker: Broker, role: str) -> None:
    victim = min(pids_with(broker, role))
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: pids_with(broker, role) - {victim})


@pytest.mark.timeout(180)
def test_no_record_is_lost_or_stuck_and_none_comes_again(tmp_path: Path) -> None:
    config = {
        "share.coordinator.snapshot.update.records.per.snapshot": 7,
        "group.share.min.record.lock.duration.ms": 1000,
        "group.share.record.lock.duration.ms": LOCK_MS,
        "num.io.threads": 2,
    }
    with Broker(tmp_path / "data", config) as broker:
        topic_id = prepare(broker)
        members = [Member(broker, name, topic_id) for name in "abc"]
        for member in members:
            member.start()
        total = 0

        def all_done() -> int:
            return sum(len(member.done) for member in members)

        for victim in ("coordinator", "handler", "coordinator", "everything"):
            before = all_done()
            produce(broker, 20)
            total += 20 * 4
            wait_until(lambda before=before: all_done() > before)
            if victim == "everything":
                broker.kill()
                broker.start()
            else:
                kill_one(broker, victim)
        produce(broker, 4)
        total += 4 * 4
        half = total // PARTITIONS
        wait_until(
            lambda: start_offsets(broker) == [(half, 0)] * PARTITIONS, 2 * TIMEOUT_S
        )
        for member in members:
            member.stopping.set()
        for member in members:
            member.join(TIMEOUT_S)
        assert not [member.wrong for member in members if member.wrong]
        done = list(itertools.chain(*(member.done for member in members)))
        assert len(done) == len(set(done)), "acknowledged, and delivered again"
        assert len(done) <= total


@pytest.mark.timeout(120)
def test_records_of_a_member_that_has_gone_do_not_wait_for_the_lock(
    tmp_path: Path,
) -> None:
    config = {"group.share.max.record.lock.duration.ms": 3_600_000}
    config["group.share.record.lock.duration.ms"] = 3_600_000
    with Broker(tmp_path / "data", config) as broker:
        topic_id = prepare(broker)
        produce(broker, 1)
        one, other = (Member(broker, name, topic_id) for name in "ab")
        with wire.Connection(address_of(broker)) as connection:
            first = ask(connection, ApiKey.SHARE_FETCH, one.fetch())
        (row,) = first.responses[0].partitions
        assert row.acquired_records[0].delivery_count == 1
        with wire.Connection(address_of(broker)) as connection:
            request = other.fetch()
            request.max_wait_ms = 30_000
            again = ask(connection, ApiKey.SHARE_FETCH, request)
        (row,) = again.responses[0].partitions
        assert row.acquired_records[0].delivery_count == 2
