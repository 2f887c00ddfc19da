"""The process that copies the cluster's metadata is killed at lines of its code."""

from __future__ import annotations

import asyncio
import signal
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

import pytest

from mpbroker.cluster import metadata_replica
from mpbroker.cluster.database import ClusterDatabase
from mpbroker.cluster.errors import ClusterError
from mpbroker.cluster.metadata_adoption import adopt_metadata
from mpbroker.cluster.metadata_replica import MetadataReplica
from mpbroker.cluster.shared_metadata_log import SharedMetadataLog
from mpbroker.metadata import cluster_metadata_log, metadata_log
from mpbroker.metadata.cluster_metadata_log import (
    ClusterMetadataLog,
    change_socket_path,
)
from mpbroker.metadata.kraft_records import decode_record
from mpbroker.metadata.metadata_image import MetadataRecord
from mpbroker.metadata.metadata_log import MetadataLog
from mpbroker.metadata.topics import TopicRegistry
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from tests.support.children import Child, kill_at_line
from tests.support.metadata import registry, shared_cell

FILES = (metadata_replica.__file__,)
LINES = range(15, 200, 20)
AT_ONCE = 4
PATIENCE_S = 60


class Node:
    """A node: its directory, and its processes."""

    def __init__(self, url: str, directory: Path, number: int) -> None:
        self.url = url
        self.directory = directory
        self.number = number
        directory.mkdir()
        asyncio.run(self._adopt())
        self.cell = shared_cell()
        metadata_log.recover_metadata_log(str(directory), self.cell, 0)

    async def _adopt(self) -> None:
        async with ClusterDatabase(self.url) as database:
            log = SharedMetadataLog(database)
            own = uuid.UUID(int=self.number)
            await adopt_metadata(
                log, str(self.directory), own, self.number, is_member=False
            )

    def registry(self, log_class: type[MetadataLog]) -> TopicRegistry:
        return registry(
            self.directory, self.cell, broker_id=self.number, log_class=log_class
        )

    def replica(self, kill_at: int | None = None) -> Child:
        """Start the process that copies."""

        async def run() -> None:
            async with ClusterDatabase(self.url, connections=2) as database:
                await MetadataReplica(
                    SharedMetadataLog(database, timeout_s=PATIENCE_S),
                    self.registry(MetadataLog),
                    change_socket_path(str(self.directory)),
                ).run()

        def be() -> None:
            if kill_at is not None:
                kill_at_line(kill_at, FILES)
            asyncio.run(run())

        return Child(be)

    def creator(self, names: Sequence[str]) -> Child:
        """Start a process that creates topics, and asks again as a client does."""

        def create_all() -> None:
            known = self.registry(ClusterMetadataLog)
            deadline = time.monotonic() + PATIENCE_S
            for name in names:
                while not create(known, name):
                    assert time.monotonic() < deadline

        return Child(create_all)

    def copied(self) -> list[MetadataRecord]:
        """Return the records of the copy, as the database has them."""
        log = MetadataLog(str(self.directory), self.cell)
        try:
            return log.read_new()
        finally:
            log.close()


def create(known: TopicRegistry, name: str) -> bool:
    """Create a topic; return whether it is there."""
    try:
        known.create_topic(name, 3, {"retention.ms": "7"})
    except ApiError as error:
        assert error.error_code in (
            ErrorCode.REQUEST_TIMED_OUT,
            ErrorCode.TOPIC_ALREADY_EXISTS,
        )
        return error.error_code == ErrorCode.TOPIC_ALREADY_EXISTS
    return True


def in_database(url: str) -> list[MetadataRecord]:
    async def read() -> list[bytes]:
        async with ClusterDatabase(url) as database:
            return await SharedMetadataLog(database).read(0)

    return [decode_record(value) for value in asyncio.run(read())]


def test_a_change_counts_once_wherever_its_node_s_copier_is_killed(
    cluster_url, tmp_path, monkeypatch
):
    monkeypatch.setattr(cluster_metadata_log, "_START_S", PATIENCE_S)
    first = Node(cluster_url, tmp_path / "first", 1)
    second = Node(cluster_url, tmp_path / "second", 2)
    beside = second.replica()
    for kill_at in LINES:
        names = [f"t{kill_at}-{number}" for number in range(AT_ONCE)]
        creators = [each.creator(names) for each in (first, second)]
        assert first.replica(kill_at).wait() == -signal.SIGKILL
        successor = first.replica()
        assert [each.wait() for each in creators] == [0, 0]
        wanted = in_database(cluster_url)
        named = [each["name"] for each in wanted if each["type"] == "TopicRecord"]
        assert named[-AT_ONCE:] == names
        deadline = time.monotonic() + PATIENCE_S
        while first.copied() != wanted or second.copied() != wanted:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        successor.kill()
    beside.kill()


def test_two_nodes_that_create_the_same_topics_at_once_agree(cluster_url, tmp_path):
    nodes = [Node(cluster_url, tmp_path / str(number), number) for number in (1, 2)]
    replicas = [node.replica() for node in nodes]
    names = [f"t{number}" for number in range(30)]
    creators = [node.creator(names) for node in nodes for _ in range(2)]
    assert [each.wait() for each in creators] == [0] * 4
    wanted = in_database(cluster_url)
    named = [each["name"] for each in wanted if each["type"] == "TopicRecord"]
    assert named == names
    deadline = time.monotonic() + PATIENCE_S
    while any(node.copied() != wanted for node in nodes):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    for each in replicas:
        each.kill()


def test_a_node_that_has_more_than_the_database_says_so(cluster_url, tmp_path):
    node = Node(cluster_url, tmp_path / "node", 1)
    end = len(node.copied())
    copy = node.registry(MetadataLog)
    copy.create_topic("never", 1)

    async def run() -> None:
        async with ClusterDatabase(cluster_url) as database:
            path = change_socket_path(str(node.directory))
            log = SharedMetadataLog(database)
            await MetadataReplica(log, copy, path).run()

    with pytest.raises(ClusterError, match=rf"ends before record {end + 1}.*backup"):
        asyncio.run(run())
