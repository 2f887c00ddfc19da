"""Consumer groups: commits a second, the time of a rebalance, a coordinator's death."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from mpbroker.protocol.messages.join_group import (
    JoinGroupRequest,
    JoinGroupRequestProtocol,
    JoinGroupResponse,
)
from mpbroker.protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
    OffsetCommitResponse,
)
from mpbroker.protocol.messages.offset_fetch import (
    OffsetFetchRequest,
    OffsetFetchRequestGroup,
    OffsetFetchResponse,
)
from mpbroker.protocol.messages.sync_group import (
    SyncGroupRequest,
    SyncGroupRequestAssignment,
    SyncGroupResponse,
)
from tests.bench import wire
from tests.bench.brokers import Broker
from tests.bench.cases import Case, Context
from tests.bench.load import Template, run_load, same_as
from tests.bench.small_requests import DEPTH, produce_acks_1

OFFSET_COMMIT: Final = (8, 8)
OFFSET_FETCH: Final = (9, 8)
JOIN_GROUP: Final = (11, 6)
SYNC_GROUP: Final = (14, 4)
COMMIT_CONNECTIONS: Final = (1, 16, 64)
REBALANCE_MEMBERS: Final = (2, 100, 1000)
RESTART_GROUPS: Final = (1000, 10_000)
STALLED_MEMBERS: Final = 200
_GROUPS: Final = 64
_RETRIABLE: Final = (14, 15, 16)
_REBALANCES: Final = 5
_HEAD: Final = 5  # correlation id and tagged fields, before an answer's body


def commit_of(group: str, topic: str) -> bytes:
    request = OffsetCommitRequest(
        group_id=group,
        topics=[
            OffsetCommitRequestTopic(
                name=topic,
                partitions=[
                    OffsetCommitRequestPartition(
                        partition_index=0, committed_offset=7, committed_metadata=""
                    )
                ],
            )
        ],
    )
    return wire.request(OFFSET_COMMIT, request.encode(OFFSET_COMMIT[1]))


def commit(connection: wire.Connection, group: str, topic: str) -> bytes:
    """Commit until the coordinator is there; return the answer."""
    while True:
        payload = connection.ask(commit_of(group, topic))
        answer = OffsetCommitResponse.decode(OFFSET_COMMIT[1], payload[_HEAD:])
        code = answer.topics[0].partitions[0].error_code
        if code == 0:
            return payload
        if code not in _RETRIABLE:
            raise wire.AnswerError(f"error {code} in answer to a commit")
        time.sleep(0.05)


def commit_templates(broker: Broker) -> list[Template]:
    topic = broker.topic("bench-commit")
    with broker.connect() as connection:
        return [
            same_as(commit_of(group, topic), commit(connection, group, topic))
            for group in (f"bench-{number}" for number in range(_GROUPS))
        ]


def _ask_for(group: str) -> bytes:
    request = OffsetFetchRequest(
        groups=[OffsetFetchRequestGroup(group_id=group, topics=None)]
    )
    return wire.request(OFFSET_FETCH, request.encode(OFFSET_FETCH[1]))


def fetch_templates(broker: Broker) -> list[Template]:
    """Return an OffsetFetch for each group that `commit_templates` commits for."""
    commits = broker.once("groups/commit", lambda: commit_templates(broker))
    with broker.connect() as connection:
        return [
            same_as(request, connection.ask(request))
            for request in (_ask_for(f"bench-{n}") for n in range(len(commits)))
        ]


def _load_case(
    kind: str,
    make: Callable[[Broker], list[Template]],
    connections: int,
    depth: int = 1,
) -> Case:
    def run(context: Context) -> dict[str, float]:
        broker = context.broker
        templates = broker.once(f"groups/{kind}", lambda: make(broker))
        return run_load(
            broker.address,
            broker.tree,
            templates,
            connections=connections,
            depth=depth,
            measure_s=context.seconds,
        ).metrics()

    deep = "" if depth == 1 else f"x{depth}"
    return Case(f"groups/{kind}/{connections}{deep}", run)


class RawMember:
    """A member of a classic group, made of bytes: it does nothing by itself."""

    def __init__(self, broker: Broker, group: str) -> None:
        self.connection = broker.connect()
        self._group = group
        self.member_id = ""
        self.joined = JoinGroupResponse()
        self._joins = 0

    def send_join(self) -> None:
        # With other metadata each time: or a follower is told that nothing is new.
        self._joins += 1
        metadata = self._joins.to_bytes(30, "big")
        request = JoinGroupRequest(
            group_id=self._group,
            session_timeout_ms=60_000,
            rebalance_timeout_ms=60_000,
            member_id=self.member_id,
            protocol_type="consumer",
            protocols=[JoinGroupRequestProtocol(name="range", metadata=metadata)],
        )
        body = request.encode(JOIN_GROUP[1])
        self.connection.send(wire.request(JOIN_GROUP, body))

    def receive_join(self) -> int:
        payload = self.connection.receive()
        self.joined = JoinGroupResponse.decode(JOIN_GROUP[1], payload[_HEAD:])
        self.member_id = self.joined.member_id or self.member_id
        return self.joined.error_code

    def introduce(self) -> None:
        """Get an id, to join with."""
        self.send_join()
        self.receive_join()

    def send_sync(self, members: list[str]) -> None:
        request = SyncGroupRequest(
            group_id=self._group,
            generation_id=self.joined.generation_id,
            member_id=self.member_id,
            assignments=[
                SyncGroupRequestAssignment(member_id=each, assignment=b"\0" * 30)
                for each in members
            ],
        )
        body = request.encode(SYNC_GROUP[1])
        self.connection.send(wire.request(SYNC_GROUP, body))

    def receive_sync(self) -> None:
        payload = self.connection.receive()
        answer = SyncGroupResponse.decode(SYNC_GROUP[1], payload[_HEAD:])
        if answer.error_code:
            raise wire.AnswerError(f"error {answer.error_code} in answer to a sync")


def rebalance(members: list[RawMember]) -> float:
    """Let all join and sync; return how many seconds it took."""
    started = time.monotonic()
    for member in members:
        member.send_join()
    for member in members:
        if code := member.receive_join():
            raise wire.AnswerError(f"error {code} in answer to a join")
    sync(members)
    return time.monotonic() - started


def sync(members: list[RawMember]) -> None:
    """Let the leader say who has what, and all hear of it."""
    for member in members:
        leads = member.joined.leader == member.member_id
        ids = [row.member_id for row in member.joined.members] if leads else []
        member.send_sync(ids)
    for member in members:
        member.receive_sync()


def _rebalance_case(count: int) -> Case:
    def run(context: Context) -> dict[str, float]:
        broker = context.broker
        group = f"bench-rebalance-{count}-{broker.next_number()}"
        members = [RawMember(broker, group) for _ in range(count)]
        try:
            for member in members:
                member.introduce()
            rebalance(members)  # waits for group.initial.rebalance.delay.ms
            times = sorted(rebalance(members) for _ in range(_REBALANCES))
            return {"p50_ms": times[len(times) // 2] * 1e3, "p99_ms": times[-1] * 1e3}
        finally:
            for member in members:
                member.connection.close()

    return Case(f"groups/rebalance/{count}", run)


def _coordinator(broker: Broker) -> int:
    """The coordinator among a broker's processes."""
    for pid in broker.tree.pids():
        try:
            if b"group-coordinator" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
        except OSError:
            continue
    raise LookupError("this broker has no coordinator process")


def _commit_all(broker: Broker, groups: list[str], topic: str) -> None:
    """One commit of each group, many at a time."""
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(broker.connect()) for _ in range(64)]
        commit(connections[0], groups[0], topic)  # the topic is made, and loaded
        for first in range(0, len(groups), len(connections)):
            some = groups[first : first + len(connections)]
            for connection, group in zip(connections, some, strict=False):
                connection.send(commit_of(group, topic))
            for connection, _ in zip(connections, some, strict=False):
                payload = connection.receive()
                answer = OffsetCommitResponse.decode(OFFSET_COMMIT[1], payload[_HEAD:])
                if code := answer.topics[0].partitions[0].error_code:
                    raise wire.AnswerError(f"error {code} in answer to a commit")


def _restart_case(count: int) -> Case:
    name = "groups/coordinator-restart"
    if count != RESTART_GROUPS[0]:
        name += f"-{count}"
    return Case(name, partial(run_restart, count), starts_brokers=True)


def run_restart(count: int, context: Context) -> dict[str, float]:
    """Kill the coordinator of so many groups; wait for an answer about one."""
    with context.source.broker() as broker:
        topic = broker.topic("bench-restart")
        times = []
        groups = [f"bench-restart-{number}" for number in range(count)]
        _commit_all(broker, groups, topic)
        with broker.connect() as connection:
            framed = _ask_for(groups[-1])
            for _ in range(_REBALANCES):
                os.kill(_coordinator(broker), signal.SIGKILL)
                started = time.monotonic()
                while True:
                    payload = connection.ask(framed)
                    answer = OffsetFetchResponse.decode(
                        OFFSET_FETCH[1], payload[_HEAD:]
                    )
                    (found,) = answer.groups
                    if not found.error_code:
                        break
                    if found.error_code not in _RETRIABLE:
                        raise wire.AnswerError(f"error {found.error_code} in a fetch")
                times.append(time.monotonic() - started)
                (row,) = found.topics
                if row.partitions[0].committed_offset != 7:
                    raise wire.AnswerError("the coordinator came back without a group")
                time.sleep(1.0)  # a good life, so that the next starts at once
        times.sort()
        return {"p50_ms": times[len(times) // 2] * 1e3, "p99_ms": times[-1] * 1e3}


def run_stalled(context: Context) -> dict[str, float]:
    """Produce beside nothing, and beside a group that waits for one of its members.

    Twice each, in turns: the ratio is of the broker's CPU for a request.
    """
    broker = context.broker
    templates = broker.once("groups/produce", lambda: produce_acks_1(broker))
    group = f"bench-stalled-{broker.next_number()}"
    members = [RawMember(broker, group) for _ in range(STALLED_MEMBERS)]
    cpu: dict[bool, list[float]] = {False: [], True: []}
    p99: list[float] = []
    try:
        for member in members:
            member.introduce()
        rebalance(members)
        for stalled in (False, True, False, True):
            if stalled:
                for member in members[1:]:
                    member.send_join()  # and the first does not
            result = run_load(
                broker.address,
                broker.tree,
                templates,
                connections=16,
                measure_s=context.seconds,
            )
            cpu[stalled].append(result.broker_cpu_s / result.answered)
            if stalled:
                p99.append(result.p99_us / 1e3)
                members[0].send_join()
                for member in members:
                    if code := member.receive_join():
                        raise wire.AnswerError(f"error {code} in answer to a join")
                sync(members)
        return {
            "cpu_us": min(cpu[True]) * 1e6,
            "cpu_ratio": min(cpu[True]) / min(cpu[False]),
            "p99_ms": min(p99),
        }
    finally:
        for member in members:
            member.connection.close()


CASES: Final = [
    *(_load_case("commit", commit_templates, number) for number in COMMIT_CONNECTIONS),
    # As clients ask beside records, like the deep ones among the small requests.
    _load_case("commit", commit_templates, 16, DEPTH),
    _load_case("offset-fetch", fetch_templates, 16, DEPTH),
    *map(_rebalance_case, REBALANCE_MEMBERS),
    *map(_restart_case, RESTART_GROUPS),
    Case("groups/produce-beside-a-stalled-group", run_stalled),
]
