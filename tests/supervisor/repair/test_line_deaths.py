"""Real brokers whose processes die at any point, under a verified load.

Any source line of the Python twins, and any step of the compiled core.

A hundred times as many seams as a timer's kills meet.
"""

from __future__ import annotations

import os
import random
import socket
import sys
from typing import Final

import pytest

from mpbroker.cli.ctl.ctl_connection import ControlClient
from mpbroker.ipc.compiled import IS_COMPILED
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages.create_acls import (
    AclCreation,
    CreateAclsRequest,
    CreateAclsResponse,
)
from mpbroker.protocol.messages.create_partitions import (
    CreatePartitionsRequest,
    CreatePartitionsResponse,
    CreatePartitionsTopic,
)
from mpbroker.protocol.messages.create_topics import (
    CreatableTopic,
    CreateTopicsRequest,
    CreateTopicsResponse,
)
from mpbroker.protocol.messages.delete_acls import (
    DeleteAclsFilter,
    DeleteAclsRequest,
    DeleteAclsResponse,
)
from mpbroker.protocol.messages.delete_topics import (
    DeleteTopicsRequest,
    DeleteTopicsResponse,
)
from tests.bench import wire
from tests.broker.load import Load, ask, create_topic, dial, read_log
from tests.chaos.events import control_socket
from tests.support.broker import Broker
from tests.support.children import wait_until

# How many records are acknowledged; more with MPBROKER_TEST_LINE_RECORDS=20000.
RECORDS: Final = int(os.environ.get("MPBROKER_TEST_LINE_RECORDS", "150"))

STANDARD_AUTHORIZER: Final = "org.apache.kafka.metadata.authorizer.StandardAuthorizer"

compiled = pytest.mark.skipif(not IS_COMPILED, reason="the compiled core is not there")


def dying(tmp_path, role, points, mean, **settings: str) -> Broker:
    return Broker(
        tmp_path / "data",
        {"num.network.threads": 2, "num.io.threads": 2, **settings},
        command=[
            *(sys.executable, "-m", "tests.supervisor.repair.dying_by_line"),
            *(role, points, str(mean)),
        ],
    )


def verify(broker: Broker, load: Load, partition: int = 0) -> None:
    # A dozen die at the least, as a rule; but where is left to chance.
    assert "died: signal 9" in broker.log_path.read_text()
    # Whoever loses a connection sends its record again.
    assert sum(load.losses) == 0, broker.log_tail()
    load.verify(read_log(broker.data_dir, partition), partition)


@pytest.mark.parametrize(
    ("role", "points", "mean", "acks"),
    [
        ("handler", "lines", 1500, 1),
        ("handler", "lines", 1500, -1),
        ("processor", "lines", 1500, 1),
        ("processor", "lines", 800, 1),  # most die while they take over
        ("both", "lines", 3000, 1),
        pytest.param("handler", "steps", 300, 1, marks=compiled),
        pytest.param("processor", "steps", 200, 1, marks=compiled),
        pytest.param("both", "steps", 400, 1, marks=compiled),
    ],
)
def test_nothing_acknowledged_is_lost_or_doubled(tmp_path, role, points, mean, acks):
    with dying(tmp_path, role, points, mean) as broker:
        create_topic(broker)
        with Load(broker, 6, acks) as load:
            load.run(RECORDS)
    verify(broker, load)


@pytest.mark.parametrize(
    ("points", "mean", "acks"),
    [
        ("lines", 4000, 1),
        pytest.param("steps", 300, 1, marks=compiled),
        pytest.param("steps", 300, -1, marks=compiled),
    ],
)
def test_a_request_to_several_partitions_is_in_each_of_them_once(
    tmp_path, points, mean, acks
):
    with dying(tmp_path, "handler", points, mean) as broker:
        create_topic(broker, partitions=5)
        with Load(broker, 4, acks, partitions=5) as load:
            load.run(RECORDS)
    for partition in range(5):
        verify(broker, load, partition)


@pytest.mark.parametrize(
    ("role", "points", "mean"),
    [
        ("processor", "lines", 3000),
        ("keeper", "lines", 300),
        pytest.param("processor", "steps", 300, marks=compiled),
    ],
)
def test_connections_move_between_processors_that_die(tmp_path, role, points, mean):
    """From one size to the next, wherever the last resize has got to."""
    picker = random.Random(mean)
    with dying(tmp_path, role, points, mean) as broker:
        create_topic(broker)
        with ControlClient(control_socket(broker), 30.0) as client:
            with Load(broker, 12) as load:
                for _ in range(RECORDS // 15):
                    client.request("resize", processors=picker.randint(1, 4))
                    load.run(15)
            client.request("resize", processors=2)
            wait_until(lambda: not client.request("figures")["resizing"])
    verify(broker, load)


def test_topics_are_changed_once_and_the_client_is_told_so(tmp_path):
    """Whether its handler dies before a change, or between that and the answer."""
    with dying(tmp_path, "admin", "lines", 4000) as broker, dial(broker) as sock:
        for number in range(RECORDS // 6):
            name = f"topic-{number}"
            assert create(sock, name) == ErrorCode.NONE, broker.log_tail()
            assert create(sock, name) == ErrorCode.TOPIC_ALREADY_EXISTS
            assert grow(sock, name, 3) == ErrorCode.NONE, broker.log_tail()
            assert grow(sock, name, 3) == ErrorCode.INVALID_PARTITIONS
            assert delete(sock, name) == ErrorCode.NONE, broker.log_tail()
            assert delete(sock, name) == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert "died: signal 9" in broker.log_path.read_text()


def test_acls_are_deleted_once_and_the_client_is_told_of_each(tmp_path):
    """Who asks again, because nobody answered, would be told that there are none."""
    settings = {
        "authorizer.class.name": STANDARD_AUTHORIZER,
        "super.users": "User:ANONYMOUS",
    }
    with (
        dying(tmp_path, "admin", "lines", 2000, **settings) as broker,
        dial(broker) as sock,
    ):
        for number in range(RECORDS // 10):
            names = [f"topic-{number}-{which}" for which in range(3)]
            allow(sock, names)
            assert forbid(sock, names[:2]) == [[name] for name in names[:2]]
            assert forbid(sock, names) == [[], [], [names[2]]], broker.log_tail()
    assert "died: signal 9" in broker.log_path.read_text()


def allow(sock: socket.socket, names: list[str]) -> None:
    creations = [
        AclCreation(
            resource_type=2,
            resource_name=name,
            resource_pattern_type=3,
            principal="User:alice",
            host="*",
            operation=3,
            permission_type=3,
        )
        for name in names
    ]
    request = CreateAclsRequest(creations=creations)
    body = ask(sock, ApiKey.CREATE_ACLS, 3, request.encode(3))
    results = CreateAclsResponse.decode(3, body).results
    assert [each.error_code for each in results] == [0] * len(names)


def forbid(sock: socket.socket, names: list[str]) -> list[list[str]]:
    """Delete the entries of some topics; what the broker says went, for each."""
    filters = [
        DeleteAclsFilter(
            resource_type_filter=2,
            resource_name_filter=name,
            pattern_type_filter=3,
            principal_filter=None,
            host_filter=None,
            operation=1,
            permission_type=1,
        )
        for name in names
    ]
    request = DeleteAclsRequest(filters=filters)
    body = ask(sock, ApiKey.DELETE_ACLS, 3, request.encode(3))
    results = DeleteAclsResponse.decode(3, body).filter_results
    assert [each.error_code for each in results] == [0] * len(names)
    return [[acl.resource_name for acl in each.matching_acls] for each in results]


def create(sock: socket.socket, name: str) -> int:
    topic = CreatableTopic(name=name, num_partitions=1, replication_factor=1)
    request = CreateTopicsRequest(topics=[topic], timeout_ms=10_000)
    body = ask(sock, ApiKey.CREATE_TOPICS, 5, request.encode(5))
    return CreateTopicsResponse.decode(5, body).topics[0].error_code


def grow(sock: socket.socket, name: str, count: int) -> int:
    topic = CreatePartitionsTopic(name=name, count=count, assignments=None)
    request = CreatePartitionsRequest(
        topics=[topic], timeout_ms=10_000, validate_only=False
    )
    body = ask(sock, ApiKey.CREATE_PARTITIONS, 2, request.encode(2))
    return CreatePartitionsResponse.decode(2, body).results[0].error_code


def delete(sock: socket.socket, name: str) -> int:
    request = DeleteTopicsRequest(topic_names=[name], timeout_ms=10_000)
    body = ask(sock, ApiKey.DELETE_TOPICS, 4, request.encode(4))
    return DeleteTopicsResponse.decode(4, body).responses[0].error_code


def test_a_connection_outlives_the_acceptor_that_has_just_accepted_it(tmp_path):
    """Wherever it dies: even where nobody else has heard of the connection."""
    with dying(tmp_path, "acceptor", "lines", 60) as broker:
        host, _, port = broker.bootstrap.rpartition(":")
        for _ in range(RECORDS // 6):
            with socket.create_connection((host, int(port)), 60.0) as client:
                client.sendall(wire.api_versions())
                assert client.recv(4), broker.log_tail()
    assert "died: signal 9" in broker.log_path.read_text()
