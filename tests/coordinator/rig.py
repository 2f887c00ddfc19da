"""A coordinator without a process, with a clock and answers for tests."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest.mock import MagicMock

from mpbroker.coordinator.context import CoordinatorContext
from mpbroker.coordinator.groups.group_coordinator import GroupCoordinator
from mpbroker.coordinator.groups.group_records import read_record
from mpbroker.coordinator.outbox import Again, Call, Outbox
from mpbroker.coordinator.timers import Timers
from mpbroker.ipc.tables.member_sessions import MEMBER_SESSION_WORDS, MemberSessions
from mpbroker.protocol.message import Message
from mpbroker.protocol.messages.heartbeat import HeartbeatRequest
from mpbroker.protocol.messages.join_group import (
    JoinGroupRequest,
    JoinGroupRequestProtocol,
)
from mpbroker.protocol.messages.leave_group import LeaveGroupRequest, MemberIdentity
from mpbroker.protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
)
from mpbroker.protocol.messages.offset_fetch import (
    OffsetFetchRequest,
    OffsetFetchRequestGroup,
    OffsetFetchRequestTopics,
)
from mpbroker.protocol.messages.sync_group import (
    SyncGroupRequest,
    SyncGroupRequestAssignment,
)
from tests.support.coordinator_settings import group_settings

PARTITIONS = 5
START_MS = 1_000_000


def subscription(*topics: str) -> bytes:
    """Return the metadata of a joining consumer: version 0, topics, no user data."""
    data = b"\0\0" + len(topics).to_bytes(4, "big")
    for topic in topics:
        data += len(topic).to_bytes(2, "big") + topic.encode()
    return data + b"\xff\xff\xff\xff"


def no_sessions() -> MemberSessions:
    """Return the table of a broker that has just started."""
    return MemberSessions([0] * MEMBER_SESSION_WORDS)


def no_share_groups() -> Any:
    """Return the share groups of a coordinator that has none."""
    share = MagicMock()
    share.topic.has_changed = False
    share.topic.partitions_to_load.return_value = []
    share.service.go_on.return_value = False
    return share


class FakeTopics:
    """The topics that a test has defined."""

    def __init__(self) -> None:
        self.counts = {"t": 4, "u": 2}
        self.shared: set[str] = set()  # by a cluster
        self.configs: dict[str, dict[str, str]] = {}  # of created topics
        self.refused: dict[str, str] = {}  # why a topic cannot be created

    def partition_count(self, topic: str) -> int:
        return self.counts.get(topic, 0)

    def has_transactions(self, topic: str) -> bool:
        return topic not in self.shared

    def topic_name(self, topic_id: bytes) -> str | None:
        name = topic_id.rstrip(b"\0").decode()
        return name if name in self.counts else None

    def topic_id(self, topic: str) -> bytes | None:
        return topic.encode().ljust(16, b"\0") if topic in self.counts else None

    def topic_names(self) -> list[str]:
        return list(self.counts)

    def create(
        self, wanted: Sequence[tuple[str, int, Mapping[str, str]]]
    ) -> Mapping[str, str]:
        """Create topics, except those of which the test says that they cannot be."""
        failed = {}
        for name, count, configs in wanted:
            if name in self.refused:
                failed[name] = self.refused[name]
            else:
                self.counts[name] = count
                self.configs[name] = dict(configs)
        return failed

    def version(self) -> int:
        return hash(tuple(self.counts.items()))


class Rig:
    """One coordinator, and its decisions."""

    def __init__(self, **config: Any) -> None:
        self.config = group_settings(
            **{"group_initial_rebalance_delay_ms": 0, **config}
        )
        self.now_ms = START_MS
        self.topics = FakeTopics()
        self.log: list[tuple[int, bytes, bytes | None]] = []
        self.sessions = [0] * MEMBER_SESSION_WORDS  # outlives the coordinator
        self._ids = itertools.count(1)
        self.group_configs: dict[str, dict[str, str]] = {}
        self._start()

    def _start(self) -> None:
        self.repeated = 0  # requests that were executed by Call.again, too
        self._again: dict[tuple[str, bytes, int, str], tuple[Again, bytes]] = {}
        self.out = Outbox()
        self.timers = Timers()
        self.coordinator = GroupCoordinator(
            self.config,
            CoordinatorContext(
                self.out, self.timers, self.topics, MemberSessions(self.sessions)
            ),
            PARTITIONS,
            lambda: f"id{next(self._ids)}",
            overrides=lambda group_id: self.group_configs.get(group_id, {}),
        )

    def restart(self, while_loading: Callable[[], object] = lambda: None) -> None:
        """Restart the coordinator: the log and the members' sessions are left.

        Args:
            while_loading: called when the log is read and no group is served yet.
        """
        self.collect()
        self._start()
        self.coordinator.begin_loading(range(PARTITIONS))
        for _, key, value in self.log:
            read = read_record(key, value)
            assert read is not None
            self.coordinator.replay(*read, self.now_ms)
        while_loading()
        for partition in range(PARTITIONS):
            self.coordinator.loaded(partition, self.now_ms)
        self.collect()

    # -- calls ---------------------------------------------------------------------

    def access_of(self, client: str) -> Any:
        """The permissions of a client; None: all."""
        return None

    def send(
        self,
        name: str,
        request: Message,
        version: int,
        client: str = "c",
        parked_ms: int = 0,
    ) -> Call:
        """Send a request; ``answer(call)`` returns its answer, once there is one.

        If an equal one left a function in ``Call.again``, call that before. If it
        returns True, the answer must be the earlier one, and nothing is written.

        Args:
            parked_ms: how long a coordinator that was killed had parked it.
        """
        call = Call(version, client, "/host", access=self.access_of(client))
        call.request = None
        call.waited_ms, call.is_older = parked_ms, parked_ms > 0
        # Through bytes, as it would come: what a version lacks is not there.
        encoded = request.encode(version)
        key = name, encoded, version, client
        again, earlier = self._again.pop(key, (None, b""))
        self.collect()
        is_repeated = again is not None and again(self.now_ms)
        assert not self.out
        before = len(self.log)
        decoded = type(request).decode(version, encoded)
        getattr(self.coordinator, name)(call, decoded, self.now_ms)
        self.collect()
        if is_repeated:
            self.repeated += 1
            assert self.answer(call).encode(version) == earlier
            assert len(self.log) == before
        if call.again is not None:
            self._again[key] = call.again, self.answer(call).encode(version)
        return call

    def ask(self, name: str, request: Message, version: int, client: str = "c") -> Any:
        """Send a request that is answered at once; return the answer."""
        return self.answer(self.send(name, request, version, client))

    def collect(self) -> None:
        for partition, records in self.out.take_records().items():
            self.log.extend((partition, *record) for record in records)
        for answer in self.out.take_answers():
            assert answer.call.request is None, "answered twice"
            response = answer.response
            version = answer.call.version
            answer.call.request = type(response).decode(
                version, response.encode(version)
            )

    @staticmethod
    def answer(call: Call) -> Any:
        assert call.request is not None, "not answered yet"
        return call.request

    def advance(self, ms: int) -> None:
        """Let time pass, timer by timer."""
        end = self.now_ms + ms
        while self.timers.next_ms <= end:
            self.now_ms = max(self.now_ms, self.timers.next_ms)
            self.timers.expire(self.now_ms)
            self.collect()
        self.now_ms = end

    # -- requests of the classic protocol ------------------------------------------

    def join(
        self,
        member_id: str = "",
        *,
        group: str = "g",
        instance: str | None = None,
        protocols: dict[str, bytes] | None = None,
        protocol_type: str = "consumer",
        session_ms: int = 10_000,
        rebalance_ms: int = 20_000,
        version: int = 9,
        client: str = "c",
        parked_ms: int = 0,
    ) -> Call:
        if protocols is None:
            protocols = {"range": subscription("t")}
        return self.send(
            "join_group",
            JoinGroupRequest(
                group_id=group,
                session_timeout_ms=session_ms,
                rebalance_timeout_ms=rebalance_ms,
                member_id=member_id,
                group_instance_id=instance,
                protocol_type=protocol_type,
                protocols=[
                    JoinGroupRequestProtocol(name=name, metadata=metadata)
                    for name, metadata in protocols.items()
                ],
            ),
            version,
            client,
            parked_ms,
        )

    def new_id(self, **kwargs: Any) -> str:
        """Return a member id from an answer MEMBER_ID_REQUIRED."""
        answer = self.answer(self.join(**kwargs))
        assert answer.error_code == 79
        member_id: str = answer.member_id
        return member_id

    def sync(
        self,
        member_id: str,
        generation: int,
        assignments: dict[str, bytes] | None = None,
        *,
        group: str = "g",
        instance: str | None = None,
        version: int = 5,
        protocol: str | None = "range",
    ) -> Call:
        return self.send(
            "sync_group",
            SyncGroupRequest(
                group_id=group,
                generation_id=generation,
                member_id=member_id,
                group_instance_id=instance,
                protocol_type="consumer" if version >= 5 else None,
                protocol_name=protocol if version >= 5 else None,
                assignments=[
                    SyncGroupRequestAssignment(member_id=name, assignment=data)
                    for name, data in (assignments or {}).items()
                ],
            ),
            version,
        )

    def heartbeat(
        self,
        member_id: str,
        generation: int,
        *,
        group: str = "g",
        instance: str | None = None,
    ) -> int:
        request = HeartbeatRequest(
            group_id=group,
            generation_id=generation,
            member_id=member_id,
            group_instance_id=instance,
        )
        code: int = self.ask("heartbeat", request, 4).error_code
        return code

    def leave(self, *members: str | MemberIdentity, group: str = "g") -> Any:
        rows = [
            MemberIdentity(member_id=each) if isinstance(each, str) else each
            for each in members
        ]
        request = LeaveGroupRequest(group_id=group, members=rows)
        return self.ask("leave_group", request, 5)

    def stable(self, count: int, **kwargs: Any) -> list[str]:
        """Return the ids of a stable group of so many members; the first leads."""
        calls: dict[str, Call] = {}
        ids = [self.new_id(**kwargs) for _ in range(count)]
        for member_id in ids:
            calls[member_id] = self.join(member_id, **kwargs)
            joined = [m for m in calls if calls[m].answered]
            # The earlier members notice the rebalance and join again.
            for old in joined:
                if old != member_id:
                    calls[old] = self.join(old, **kwargs)
        generation = self.answer(calls[ids[0]]).generation_id
        leader = self.answer(calls[ids[0]]).leader
        given = {member_id: f"for {member_id}".encode() for member_id in ids}
        group = kwargs.get("group", "g")
        syncs = [self.sync(m, generation, group=group) for m in ids if m != leader]
        syncs.append(self.sync(leader, generation, given, group=group))
        for call in syncs:
            assert self.answer(call).error_code == 0
        return ids

    def group(self, group: str = "g") -> Any:
        return self.coordinator.group(group)

    # -- offsets -------------------------------------------------------------------

    def commit(
        self,
        offsets: dict[tuple[str, int], int],
        *,
        group: str = "g",
        member_id: str = "",
        generation: int = -1,
        instance: str | None = None,
        metadata: str | None = "",
        version: int = 8,
        retention_ms: int = -1,
    ) -> dict[tuple[str, int], int]:
        """Commit; return the error code of each partition."""
        request = OffsetCommitRequest(
            group_id=group,
            generation_id_or_member_epoch=generation,
            member_id=member_id,
            group_instance_id=instance,
            retention_time_ms=retention_ms,
            topics=[
                OffsetCommitRequestTopic(
                    name=topic if version < 10 else "",
                    topic_id=topic.encode().ljust(16, b"\0")
                    if version >= 10
                    else bytes(16),
                    partitions=[
                        OffsetCommitRequestPartition(
                            partition_index=partition,
                            committed_offset=offset,
                            committed_metadata=metadata,
                        )
                    ],
                )
                for (topic, partition), offset in offsets.items()
            ],
        )
        answer = self.ask("offset_commit", request, version)
        codes = [part.error_code for row in answer.topics for part in row.partitions]
        return dict(zip(offsets, codes, strict=True))

    def fetch(self, group: str = "g", version: int = 8) -> dict[tuple[str, int], int]:
        """Return all committed offsets of a group."""
        request = OffsetFetchRequest(
            groups=[OffsetFetchRequestGroup(group_id=group, topics=None)]
        )
        (row,) = self.ask("offset_fetch", request, version).groups
        assert row.error_code == 0
        return {
            (topic.name, part.partition_index): part.committed_offset
            for topic in row.topics
            for part in topic.partitions
        }

    def fetch_of(self, topic: str, partition: int, group: str = "g") -> Any:
        request = OffsetFetchRequest(
            groups=[
                OffsetFetchRequestGroup(
                    group_id=group,
                    topics=[
                        OffsetFetchRequestTopics(
                            name=topic, partition_indexes=[partition]
                        )
                    ],
                )
            ]
        )
        (row,) = self.ask("offset_fetch", request, 8).groups
        return row.topics[0].partitions[0]
