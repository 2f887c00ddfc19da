"""Short requests whose answers could be very large keep no other client waiting."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any, Final

import pytest

from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.headers import response_header_version
from mpbroker.protocol.message import MAX_REQUEST_NAMES, Message
from mpbroker.protocol.messages.add_partitions_to_txn import (
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnResponse,
    AddPartitionsToTxnTopic,
)
from mpbroker.protocol.messages.describe_configs import (
    DescribeConfigsRequest,
    DescribeConfigsResource,
    DescribeConfigsResponse,
)
from mpbroker.protocol.messages.describe_groups import (
    DescribeGroupsRequest,
    DescribeGroupsResponse,
)
from mpbroker.protocol.messages.describe_transactions import (
    DescribeTransactionsRequest,
    DescribeTransactionsResponse,
)
from mpbroker.protocol.messages.init_producer_id import (
    InitProducerIdRequest,
    InitProducerIdResponse,
)
from mpbroker.protocol.messages.list_groups import ListGroupsRequest
from mpbroker.protocol.messages.metadata import MetadataRequest, MetadataRequestTopic
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
from tests.bench import wire
from tests.broker.load import frame, receive_frame
from tests.faults.test_kill_the_whole_tree import address_of
from tests.neighbours.clients import LONGEST_WAIT_S, Attack, Client, hostile
from tests.support.broker import Broker
from tests.support.children import wait_until
from tests.support.patience import LONGEST_S

TOPIC: Final = "wide"
PARTITIONS: Final = 200
ROUNDS: Final = 20
GROUP_RESOURCE: Final = 32


def framed(request: Message, version: int) -> bytes:
    return frame(request.api_key, version, request.encode(version))


def asked(sock: socket.socket, request: Message, version: int, response: Any) -> Any:
    sock.sendall(framed(request, version))
    answer = receive_frame(sock)
    start = 4 + response_header_version(request.api_key, version)
    return response.decode(version, memoryview(answer)[start:])


def producer(sock: socket.socket) -> tuple[int, int] | None:
    """Begin to be a transactional producer; None: not yet."""
    request = InitProducerIdRequest(
        transactional_id="x", transaction_timeout_ms=600_000
    )
    begun = asked(sock, request, 4, InitProducerIdResponse)
    return None if begun.error_code else (begun.producer_id, begun.producer_epoch)


def is_done(answer: OffsetCommitResponse) -> bool:
    (topic,) = answer.topics
    return not any(each.error_code for each in topic.partitions)


@pytest.fixture
def address(make_broker: Callable[..., Broker]) -> tuple[str, int]:
    """A broker with a wide topic, a transaction and offsets of all its partitions."""
    broker = make_broker({"num.network.threads": 1, "num.io.threads": 2})
    address = address_of(broker)
    with wire.Connection(address) as connection:
        connection.create_topic(TOPIC, PARTITIONS)
    with socket.create_connection(address, LONGEST_S) as sock:
        producer_id, epoch = wait_until(lambda: producer(sock))
        topic = AddPartitionsToTxnTopic(name=TOPIC, partitions=list(range(PARTITIONS)))
        adding = AddPartitionsToTxnRequest(
            v3_and_below_transactional_id="x",
            v3_and_below_producer_id=producer_id,
            v3_and_below_producer_epoch=epoch,
            v3_and_below_topics=[topic],
        )
        added = asked(sock, adding, 3, AddPartitionsToTxnResponse)
        assert "error_code=0" in repr(added)
        rows = [
            OffsetCommitRequestPartition(
                partition_index=number, committed_offset=1, committed_metadata="m" * 99
            )
            for number in range(PARTITIONS)
        ]
        commit = OffsetCommitRequest(
            group_id="g",
            topics=[OffsetCommitRequestTopic(name=TOPIC, partitions=rows)],
        )
        wait_until(lambda: is_done(asked(sock, commit, 8, OffsetCommitResponse)))
    return address


def transactions() -> tuple[Message, int, Any]:
    names = ["x"] * (MAX_REQUEST_NAMES - 1)
    request = DescribeTransactionsRequest(transactional_ids=names)
    return request, 0, DescribeTransactionsResponse


def offsets() -> tuple[Message, int, Any]:
    groups = [OffsetFetchRequestGroup(group_id="g", topics=None)] * 65_000
    return OffsetFetchRequest(groups=groups), 8, OffsetFetchResponse


def configs() -> tuple[Message, int, Any]:
    """Configs of groups that nobody has."""
    resources = [
        DescribeConfigsResource(resource_type=GROUP_RESOURCE, resource_name=str(number))
        for number in range(MAX_REQUEST_NAMES - 1)
    ]
    request = DescribeConfigsRequest(
        resources=resources, include_synonyms=True, include_documentation=True
    )
    return request, 4, DescribeConfigsResponse


def asking(
    address: tuple[str, int], framed: bytes, answered: threading.Semaphore
) -> Attack:
    """Return an attack: ask the same again and again, and read the answers."""

    def attack(end: threading.Event) -> None:
        with socket.create_connection(address, LONGEST_S) as sock:
            while not end.is_set():
                sock.sendall(framed)
                if not receive_frame(sock):
                    return
                answered.release()

    return attack


@pytest.mark.parametrize("kind", [transactions, offsets])
def test_answers_that_repeat_names(address, kind):
    request, version, _ = kind()
    answered = threading.Semaphore(0)
    attack = asking(address, framed(request, version), answered)
    # One is for a handler, the other for the coordinator.
    wanted = [wire.api_versions(), framed(ListGroupsRequest(), 3)]
    client = Client(address)
    with hostile(attack, attack):
        for number in range(ROUNDS):
            client.ask(wanted[number % 2])
        for _ in range(2):
            assert answered.acquire(timeout=LONGEST_S)
    assert client.longest_s < LONGEST_WAIT_S


@pytest.mark.parametrize("kind", [transactions, offsets, configs])
def test_such_an_answer_has_each_name_once_or_an_end(address, kind):
    request, version, response = kind()
    with socket.create_connection(address, LONGEST_S) as sock:
        answer = asked(sock, request, version, response)
    if kind is configs:
        codes = [each.error_code for each in answer.results]
        assert {codes[0], codes[-1]} == {0, ErrorCode.POLICY_VIOLATION}
        assert len(codes) == MAX_REQUEST_NAMES - 1
        return
    (row,) = answer.transaction_states if kind is transactions else answer.groups
    assert row.error_code == 0
    (topic,) = row.topics
    assert len(topic.partitions) == PARTITIONS


def test_a_request_with_too_many_names_is_refused_on_a_connection_that_stays(address):
    """Kafka answers up to a million; beyond that it closes the connection."""
    with socket.create_connection(address, LONGEST_S) as sock:
        groups = DescribeGroupsRequest(groups=["g"] * (MAX_REQUEST_NAMES + 1))
        for _ in range(2):
            (row,) = asked(sock, groups, 5, DescribeGroupsResponse).groups
            assert (row.error_code, row.group_id) == (ErrorCode.INVALID_REQUEST, "")
        topics = [MetadataRequestTopic(name="a")] * 1_000_001
        sock.sendall(framed(MetadataRequest(topics=topics), 9))
        assert receive_frame(sock) == b""
