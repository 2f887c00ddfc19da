"""AlterReplicaLogDirs and DescribeLogDirs, as ReplicaManager answers them."""

from __future__ import annotations

import pytest

from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.messages import alter_replica_log_dirs as alter
from mpbroker.protocol.messages import describe_log_dirs as dirs
from mpbroker.server.handler_context import Volume
from mpbroker.server.handlers.alter_replica_log_dirs import (
    handle_alter_replica_log_dirs,
)
from mpbroker.server.handlers.describe_log_dirs import handle_describe_log_dirs
from mpbroker.storage.replica_directories import FutureReplica
from tests.server.contexts import context, fake_logs
from tests.support.metadata import start

E = ErrorCode
VOLUMES = {"/d0": Volume(1000, 400), "/d1": Volume(10, 4), "/offline": None}


@pytest.fixture
def registry(tmp_path):
    registry = start(tmp_path)
    registry.create_topic("t", 3)
    registry.create_topic("long" * 60, 1)
    return registry


def ask(registry, wanted, move):
    """Return the error by (topic, partition); ``wanted``: (path, topic, partitions)."""
    request = alter.AlterReplicaLogDirsRequest(
        dirs=[
            alter.AlterReplicaLogDir(
                path=path,
                topics=[alter.AlterReplicaLogDirTopic(name=name, partitions=numbers)],
            )
            for path, name, numbers in wanted
        ]
    )
    decoded = alter.AlterReplicaLogDirsRequest.decode(2, request.encode(2))
    response = handle_alter_replica_log_dirs(
        decoded,
        context(
            registry,
            logs=fake_logs(move=move),
            log_dirs=list(VOLUMES),
            volume=VOLUMES.get,
        ),
    )
    return {
        (topic.topic_name, each.partition_index): each.error_code
        for topic in alter.AlterReplicaLogDirsResponse.decode(
            2, response.encode(2)
        ).results
        for each in topic.partitions
    }


def test_moves_are_begun_and_each_partition_is_answered(registry):
    begun = []

    def move(topic, index, path):
        begun.append((topic.name, index, path))

    wanted = [("/d1", "t", [0, 2]), ("/d0", "t", [1])]
    assert ask(registry, wanted, move) == dict.fromkeys(
        [("t", 0), ("t", 1), ("t", 2)], E.NONE
    )
    assert sorted(begun) == [("t", 0, "/d1"), ("t", 1, "/d0"), ("t", 2, "/d1")]


@pytest.mark.parametrize(
    ("path", "topic", "partition", "error"),
    [
        ("/d1", "long" * 60, 0, E.INVALID_TOPIC_EXCEPTION),
        ("/elsewhere", "t", 0, E.LOG_DIR_NOT_FOUND),
        ("/d1/", "t", 0, E.LOG_DIR_NOT_FOUND),
        ("/elsewhere", "nope", 0, E.LOG_DIR_NOT_FOUND),
        ("/offline", "t", 0, E.KAFKA_STORAGE_ERROR),
        ("/d1", "nope", 0, E.UNKNOWN_TOPIC_OR_PARTITION),
        ("/d1", "t", 3, E.UNKNOWN_TOPIC_OR_PARTITION),
        ("/d1", "t", -1, E.UNKNOWN_TOPIC_OR_PARTITION),
    ],
)
def test_refusals_are_kafkas(registry, path, topic, partition, error):
    def move(*_):
        raise AssertionError

    answers = ask(registry, [(path, topic, [partition])], move)
    assert answers == {(topic, partition): error}


@pytest.mark.parametrize(
    ("refusal", "told"),
    [
        (E.KAFKA_STORAGE_ERROR, E.KAFKA_STORAGE_ERROR),
        (E.NOT_LEADER_OR_FOLLOWER, E.REPLICA_NOT_AVAILABLE),
    ],
)
def test_one_partition_that_is_refused_does_not_stop_the_others(
    registry, refusal, told
):
    def move(topic, index, path):
        if index == 1:
            raise ApiError(refusal, "for a test")

    answers = ask(registry, [("/d1", "t", [0, 1, 2])], move)
    assert answers == {("t", 0): E.NONE, ("t", 1): told, ("t", 2): E.NONE}


def test_copies_are_described_with_their_lag(registry):
    copies = [
        FutureReplica("t", 0, "/d1", "/d1/t-0.x-future"),
        FutureReplica("t", 1, "/d1", "/d1/t-1.x-future"),
        FutureReplica("other", 0, "/d1", "/d1/other-0.x-future"),
    ]

    def progress(topic, future):
        if future.partition == 1:
            raise ApiError(E.UNKNOWN_TOPIC_OR_PARTITION, "of another topic")
        return 30, 7

    response = handle_describe_log_dirs(
        dirs.DescribeLogDirsRequest(
            topics=[dirs.DescribableLogDirTopic(topic="t", partitions=[0, 1])]
        ),
        context(
            registry,
            logs=fake_logs(
                place_and_size=lambda topic, index: ("/d0", 100),
                future_replicas=lambda: copies,
                progress=progress,
            ),
            log_dirs=list(VOLUMES),
            volume=VOLUMES.get,
        ),
    )
    told = {
        result.log_dir: (
            result.error_code,
            [
                (p.partition_index, p.partition_size, p.offset_lag, p.is_future_key)
                for topic in result.topics
                for p in topic.partitions
            ],
        )
        for result in response.results
    }
    assert told == {
        "/d0": (E.NONE, [(0, 100, 0, False), (1, 100, 0, False)]),
        "/d1": (E.NONE, [(0, 30, 7, True)]),
        "/offline": (E.KAFKA_STORAGE_ERROR, []),
    }
