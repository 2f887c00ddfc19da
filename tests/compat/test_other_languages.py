"""Clients in JavaScript and Go: groups, commits, idempotence, what others wrote."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.compat.adapters import ADAPTERS, Message, Outgoing
from tests.compat.adapters.franz_go_adapter import FranzGoAdapter
from tests.compat.adapters.line_client import (
    ForeignClientError,
    LineClient,
    to_json,
    to_message,
)
from tests.compat.records import T0, as_messages
from tests.support.fetch_clients import FRANZ_GO, NODE_DIR, ROOT, have_kafkajs

MakeTopic = Callable[..., str]
Ask = Callable[..., Any]

needs_kafkajs = pytest.mark.skipif(
    not have_kafkajs(), reason="no kafkajs in .downloads/node: scripts/test fetches it"
)
needs_franz_go = pytest.mark.skipif(
    not FRANZ_GO.exists(),
    reason="no franz-go client in .downloads: scripts/test builds it with Go",
)


@pytest.fixture
def kafkajs(bootstrap: str) -> Iterator[Callable[[], Ask]]:
    """Start children that run kafkajs; each call is one."""
    children: list[LineClient] = []

    def start() -> Ask:
        script = ROOT / "tests" / "compat" / "node" / "kafkajs.cjs"
        # require() looks beside the script, and then here.
        environ = os.environ | {
            "NODE_PATH": str(NODE_DIR / "node_modules"),
            "KAFKAJS_NO_PARTITIONER_WARNING": "1",
        }
        child = LineClient(["node", str(script)], environ)
        children.append(child)

        def ask(command: str, **arguments: Any) -> Any:
            return child.ask(command, bootstrap=bootstrap, **arguments)

        return ask

    yield start
    for child in children:
        child.close()


def numbered(count: int, partitions: int) -> list[Outgoing]:
    return [
        Outgoing(b"v%d" % i, b"k%d" % i, (("h", b"\x00\xff"),), T0 + i, i % partitions)
        for i in range(count)
    ]


@needs_kafkajs
@pytest.mark.parametrize("codec", ["none", "gzip"])
@pytest.mark.parametrize("idempotent", [False, True])
def test_what_kafkajs_publishes_all_clients_read(
    bootstrap: str,
    make_topic: MakeTopic,
    kafkajs: Callable[[], Ask],
    codec: str,
    idempotent: bool,
) -> None:
    topic = make_topic()
    records = numbered(40, 1)
    assert kafkajs()(
        "produce",
        topic=topic,
        records=[to_json(record) for record in records],
        codec=codec,
        acks="all",
        idempotent=idempotent,
    ) == [[0, 0]]
    for adapter in ADAPTERS.values():
        with adapter(bootstrap) as client:
            assert client.consume(topic, 0, 0, 40) == as_messages(records), client.name


@needs_kafkajs
def test_kafkajs_creates_topics_and_refuses_those_there_are(
    topic_name: str, kafkajs: Callable[[], Ask]
) -> None:
    ask = kafkajs()
    config = {"retention.ms": "3600000"}
    assert ask("create_topic", topic=topic_name, partitions=3, config=config)
    assert ask("topics")[topic_name] == 3
    assert ask("offsets", topic=topic_name, partition=2) == [0, 0]
    with pytest.raises(ForeignClientError, match=r"replication factor|creation errors"):
        ask("create_topic", topic=topic_name + "-0", partitions=0, config={})
    ask("delete_topic", topic=topic_name)
    assert topic_name not in ask("topics")


@needs_kafkajs
def test_a_kafkajs_group_goes_on_where_it_committed(
    bootstrap: str, make_topic: MakeTopic, kafkajs: Callable[[], Ask]
) -> None:
    topic, group = make_topic(2), "kafkajs-resumes"
    first, later = numbered(20, 2), numbered(30, 2)[20:]
    with ADAPTERS["confluent-kafka"](bootstrap) as producer:
        producer.produce(topic, first)
        ask = kafkajs()
        found = ask("consume_group", topic=topic, group=group, count=20, commit=True)
        assert _by_partition(found) == _expected(first)
        assert sorted(ask("group_offsets", topic=topic, group=group)) == [
            [0, 10],
            [1, 10],
        ]
        assert group in ask("groups")
        producer.produce(topic, later)
    found = kafkajs()("consume_group", topic=topic, group=group, count=10, commit=True)
    assert sorted(each["offset"] for each in found) == sorted([*range(10, 15)] * 2)


@needs_franz_go
def test_a_franz_go_group_goes_on_where_it_committed(
    bootstrap: str, make_topic: MakeTopic
) -> None:
    topic, group = make_topic(2), "franz-resumes"
    with FranzGoAdapter(bootstrap) as client:
        client.produce(topic, numbered(20, 2), idempotent=True, codec="zstd")
        found = client.ask("consume_group", topic=topic, group=group, count=20)
        assert _by_partition(found) == _expected(numbered(20, 2))
        client.produce(topic, numbered(30, 2)[20:])
        found = client.ask("consume_group", topic=topic, group=group, count=10)
    assert sorted(each["offset"] for each in found) == sorted([*range(10, 15)] * 2)


def _by_partition(found: list[dict[str, Any]]) -> dict[int, list[Message]]:
    by_partition: dict[int, list[Message]] = {}
    for each in found:
        by_partition.setdefault(each["partition"], []).append(to_message(each))
    return by_partition


def _expected(records: list[Outgoing]) -> dict[int, list[Message]]:
    return {
        number: as_messages([r for r in records if r.partition == number])
        for number in sorted({record.partition for record in records})
    }
