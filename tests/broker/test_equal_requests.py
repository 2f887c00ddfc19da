"""Requests that equal earlier ones of their connection: their answers are today's."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages.delete_groups import (
    DeleteGroupsRequest,
    DeleteGroupsResponse,
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
    OffsetFetchRequestTopics,
    OffsetFetchResponse,
)
from tests.bench import wire
from tests.support.children import wait_until

COMMIT, FETCH, DELETE = (8, 9), (9, 9), (42, 2)
HEAD = 5  # correlation id and tagged fields
COMING = {
    ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
    ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.NOT_COORDINATOR,
}


class Member:
    """One connection, which commits and fetches the offsets of two partitions."""

    def __init__(self, connection: wire.Connection, name: str) -> None:
        self.connection = connection
        self.name = name  # of topic and group

    def commit(self, offset: int) -> list[int]:
        request = OffsetCommitRequest(
            group_id=self.name,
            topics=[
                OffsetCommitRequestTopic(
                    name=self.name,
                    partitions=[
                        OffsetCommitRequestPartition(
                            partition_index=number,
                            committed_offset=offset + number,
                            committed_leader_epoch=number,
                            committed_metadata="",
                        )
                        for number in range(2)
                    ],
                )
            ],
        )
        answer = self.connection.ask(wire.request(COMMIT, request.encode(COMMIT[1])))
        topics = OffsetCommitResponse.decode(COMMIT[1], answer[HEAD:]).topics
        return [part.error_code for row in topics for part in row.partitions]

    def fetch(self) -> list[int]:
        request = OffsetFetchRequest(
            groups=[
                OffsetFetchRequestGroup(
                    group_id=self.name,
                    topics=[
                        OffsetFetchRequestTopics(
                            name=self.name, partition_indexes=[0, 1]
                        )
                    ],
                )
            ]
        )
        answer = self.connection.ask(wire.request(FETCH, request.encode(FETCH[1])))
        (group,) = OffsetFetchResponse.decode(FETCH[1], answer[HEAD:]).groups
        assert group.error_code == 0
        return [part.committed_offset for part in group.topics[0].partitions]


@pytest.fixture
def members(bootstrap: str) -> Iterator[list[Member]]:
    """Two members of no group, with a topic and offsets of their own."""
    host, _, port = bootstrap.rpartition(":")
    name = f"equal-{uuid.uuid4()}"
    with ExitStack() as stack:
        connections = [
            stack.enter_context(wire.Connection((host, int(port)))) for _ in range(2)
        ]
        connections[0].create_topic(name, 2)
        made = [Member(connection, name) for connection in connections]
        wait_until(lambda: not COMING & set(made[0].commit(0)))
        yield made


def test_equal_requests_see_what_was_committed_meanwhile(members: list[Member]) -> None:
    one, other = members
    for offset in (10, 20, 30):
        assert one.commit(offset) == [0, 0]
        for member in (one, other, one):
            assert member.fetch() == [offset, offset + 1]
        assert other.commit(offset + 5) == [0, 0]
        assert one.fetch() == [offset + 5, offset + 6]


def test_equal_requests_see_that_a_group_was_deleted(members: list[Member]) -> None:
    one, other = members
    one.commit(10)
    for _ in range(2):
        assert one.fetch() == [10, 11]
    request = DeleteGroupsRequest(groups_names=[one.name]).encode(DELETE[1])
    answer = other.connection.ask(wire.request(DELETE, request))
    (result,) = DeleteGroupsResponse.decode(DELETE[1], answer[HEAD:]).results
    assert result.error_code == 0
    assert one.fetch() == [-1, -1]
    assert one.commit(20) == [0, 0]
    assert one.fetch() == [20, 21]


def test_equal_requests_see_that_a_topic_was_deleted(members: list[Member]) -> None:
    one, other = members
    for offset in (10, 20):
        assert one.commit(offset) == [0, 0]
        assert one.fetch() == [offset, offset + 1]
    other.connection.delete_topic(one.name)
    wait_until(lambda: one.fetch() == [-1, -1])
    assert set(one.commit(30)) == {ErrorCode.UNKNOWN_TOPIC_OR_PARTITION}
    assert one.fetch() == [-1, -1]
