"""A coordinator's share groups without a process, a log or a clock."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

from mpbroker.coordinator.context import CoordinatorContext
from mpbroker.coordinator.outbox import Call, Outbox, share_partition
from mpbroker.coordinator.share.share_partition import Limits
from mpbroker.coordinator.share.share_records import ShareKey
from mpbroker.coordinator.share.share_service import GroupSettings, ShareService
from mpbroker.coordinator.share.share_states import ShareStates
from mpbroker.coordinator.timers import Timers
from mpbroker.protocol.messages import share_acknowledge, share_fetch
from tests.coordinator.rig import FakeTopics, no_sessions

T = b"t".ljust(16, b"\0")
PARTITIONS = 3
START_MS = 1_000_000


class FakeRead:
    """Batches of three records."""

    def __init__(self, offset: int, end: int, most: int) -> None:
        self.aborted: list[tuple[int, int]] = []
        self.batches = []
        while offset < end and len(self.batches) * 3 < most:
            last = min(offset - offset % 3 + 2, end - 1)
            self.batches.append((offset, last))
            offset = last + 1
        self.length = 10 * len(self.batches)

    def records(self, first: int, last: int) -> bytes:
        return f"{first}-{last}".encode()


class FakeReader:
    """A topic, of which only the offsets are known."""

    def __init__(self) -> None:
        self.start, self.end = [0, 0], [0, 0]
        self.watched: set[int] = set()

    def name(self, topic_id: bytes) -> str | None:
        return "t" if topic_id == T else None

    def has_partition(self, topic_id: bytes, partition: int) -> bool:
        return topic_id == T and 0 <= partition < 2

    def offsets(self, topic_id: bytes, partition: int) -> tuple[int, int]:
        return self.start[partition], self.end[partition]

    def offset_at(self, topic_id: bytes, partition: int, timestamp: int) -> int:
        return min(self.end[partition], max(0, timestamp - START_MS + 10))

    def read(
        self, key: ShareKey, offset: int, max_bytes: int, most: int, **how: bool
    ) -> FakeRead:
        return FakeRead(offset, self.end[key.partition], most)

    def watch(self, key: ShareKey) -> int | None:
        self.watched.add(key.partition)
        return key.partition


class ShareRig:
    """The share groups of one coordinator; its log outlives it."""

    def __init__(self, **settings: Any) -> None:
        limits = Limits(delivery_count=3, record_locks=100, lock_ms=1000)
        self.settings = GroupSettings(limits, auto_offset_reset="earliest")
        self.settings = self.settings._replace(**settings)
        self.reader = FakeReader()
        self.now_ms = START_MS
        self.log: list[tuple[int, bytes, bytes | None]] = []
        self.answers: list[tuple[Call, Any]] = []
        self.connection = (1, 1)
        self.closed: set[tuple[int, int]] = set()
        self._slots = itertools.count()
        self._start()

    def _start(self) -> None:
        self.out = Outbox()
        self.timers = Timers()
        context = CoordinatorContext(self.out, self.timers, FakeTopics(), no_sessions())
        self.states = ShareStates(
            context, PARTITIONS, lambda group_id: self.settings.limits, 5
        )
        self.service = ShareService(
            context,
            self.states,
            self.reader,
            lambda group_id: self.settings,
            lambda strategy: 7,
            self,
            3,  # sessions
        )

    def identify(self, call: Call) -> tuple[int, int]:
        return self.connection

    def is_open(self, connection: tuple[int, int]) -> bool:
        return connection not in self.closed

    def restart(self) -> None:
        """Kill the coordinator; a successor has what was written."""
        self.collect()
        self.answers.clear()
        self._start()
        self.states.begin_loading(range(PARTITIONS))
        for _, key, value in self.log:
            self.states.replay(key, value)
        for partition in range(PARTITIONS):
            self.states.loaded(partition, self.now_ms)

    def collect(self) -> None:
        """Write the records; keep the answers."""
        for number, records in self.out.take_records().items():
            partition = share_partition(number)
            assert partition is not None
            self.log += [(partition, key, value) for key, value in records]
        for answer in self.out.take_answers():
            self.answers.append((answer.call, answer.response))

    def wait(self, ms: int) -> None:
        self.now_ms += ms
        self.timers.expire(self.now_ms)
        self.collect()

    def append(self, partition: int, count: int) -> None:
        self.reader.end[partition] += count
        if partition in self.reader.watched:
            self.reader.watched.discard(partition)
            self.service.has_grown(partition)
            self.service.go_on(self.now_ms)
        self.collect()

    def answer_to(self, call: Call) -> Any:
        """Return the answer to a call; None: it waits."""
        for answered, response in self.answers:
            if answered is call:
                return response
        return None

    def call(self) -> Call:
        request = SimpleNamespace(slot=next(self._slots), connection=1)
        return Call(2, "client", "/host", request)

    def fetch(
        self,
        member: str,
        epoch: int,
        partitions: tuple[int, ...] = (0,),
        *,
        acks: dict[int, list[tuple[int, int, list[int]]]] | None = None,
        topic: bytes = T,
        group: str = "g",
        **fields: Any,
    ) -> Call:
        call = self.call()
        said = acks or {}
        request = share_fetch.ShareFetchRequest(
            group_id=group,
            member_id=member,
            share_session_epoch=epoch,
            topics=[
                share_fetch.FetchTopic(
                    topic_id=topic,
                    partitions=[
                        share_fetch.FetchPartition(
                            partition_index=number,
                            acknowledgement_batches=[
                                share_fetch.AcknowledgementBatch(
                                    first_offset=first,
                                    last_offset=last,
                                    acknowledge_types=types,
                                )
                                for first, last, types in said.get(number, ())
                            ],
                        )
                        for number in dict.fromkeys((*partitions, *said))
                    ],
                )
            ],
            **{
                "max_wait_ms": 100,
                "min_bytes": 1,
                "max_bytes": 1 << 20,
                "max_records": 6,
                **fields,
            },
        )
        self.service.share_fetch(call, request, self.now_ms)
        self.timers.expire(self.now_ms)
        self.collect()
        return call

    def acknowledge(
        self,
        member: str,
        epoch: int,
        said: dict[int, list[tuple[int, int, list[int]]]],
        *,
        renews: bool = False,
        topic: bytes = T,
    ) -> Any:
        call = self.call()
        request = share_acknowledge.ShareAcknowledgeRequest(
            group_id="g",
            member_id=member,
            share_session_epoch=epoch,
            is_renew_ack=renews,
            topics=[
                share_acknowledge.AcknowledgeTopic(
                    topic_id=topic,
                    partitions=[
                        share_acknowledge.AcknowledgePartition(
                            partition_index=number,
                            acknowledgement_batches=[
                                share_acknowledge.AcknowledgementBatch(
                                    first_offset=first,
                                    last_offset=last,
                                    acknowledge_types=types,
                                )
                                for first, last, types in batches
                            ],
                        )
                        for number, batches in said.items()
                    ],
                )
            ],
        )
        self.service.share_acknowledge(call, request, self.now_ms)
        self.timers.expire(self.now_ms)
        self.collect()
        return self.answer_to(call)

    def start_offset(self, partition: int = 0) -> int:
        state = self.states.get(ShareKey("g", T, partition))
        return -2 if state is None else state.start_offset


def acquired(answer: Any) -> dict[int, list[tuple[int, int, int]]]:
    """Return what an answer gives: by partition, first, last and delivery count."""
    return {
        row.partition_index: [
            (each.first_offset, each.last_offset, each.delivery_count)
            for each in row.acquired_records
        ]
        for topic in answer.responses
        for row in topic.partitions
        if row.acquired_records
    }


def codes(answer: Any) -> dict[int, int]:
    """Return the error codes of an answer's partitions."""
    return {
        row.partition_index: row.error_code
        for topic in answer.responses
        for row in topic.partitions
    }
