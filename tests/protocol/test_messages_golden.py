"""Requests as real clients sent them, byte for byte.

Each was the first of its kind when the named client, with client id "golden", produced
one record (key b"key", value b"value") to partition 0 of topic "golden" and read it
back from offset 0. The frame's length is not included.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.headers import encode_request_header, parse_request_header
from mpbroker.protocol.message import Message

GOLDEN = [
    (
        "librdkafka 2.16.0",
        ApiKey.PRODUCE,
        10,
        "0000000a000000030006676f6c64656e0000ffff000075300207676f6c64656e0200"
        "0000004d0000000000000000000000400000000002948f699c000000000000000001"
        "a1fc850e35000001a1fc850e350000000000000001000000000000000000011c0000"
        "00066b65790a76616c756500000000",
    ),
    (
        "librdkafka 2.16.0",
        ApiKey.FETCH,
        16,
        "00010010000000030006676f6c64656e00000001f400000001032000000100000000"
        "ffffffff025454545454545454545454545454545402000000000000000000000000"
        "00000000ffffffffffffffffffffffff001000000000010100",
    ),
    (
        "librdkafka 2.16.0",
        ApiKey.LIST_OFFSETS,
        7,
        "00020007000000020006676f6c64656e00ffffffff010207676f6c64656e02000000"
        "0000000000fffffffffffffffe000000",
    ),
    (
        "librdkafka 2.16.0",
        ApiKey.METADATA,
        13,
        "0003000d000000020006676f6c64656e000200000000000000000000000000000000"
        "07676f6c64656e00010000",
    ),
    (
        "librdkafka 2.16.0",
        ApiKey.API_VERSIONS,
        3,
        "00120003000000010006676f6c64656e0017636f6e666c75656e742d6b61666b612d"
        "707974686f6e16322e31362e312d72646b61666b612d322e31362e3000",
    ),
    (
        "librdkafka 2.16.0",
        ApiKey.INIT_PRODUCER_ID,
        4,
        "00160004000000020006676f6c64656e0000ffffffffffffffffffffffffffff00",
    ),
    (
        "kafka-python 3.0.12",
        ApiKey.PRODUCE,
        9,
        "00000009000000030006676f6c64656e0000ffff000075300207676f6c64656e0200"
        "0000004d00000000000000000000004000000000024f73e4d4000000000000000001"
        "a1fc8513d8000001a1fc8513d80000000000000001000000000000000000011c0000"
        "00066b65790a76616c756500000000",
    ),
    (
        "kafka-python 3.0.12",
        ApiKey.FETCH,
        12,
        "0001000c000000030006676f6c64656e00ffffffff000001f4000000010320000000"
        "00000000000000000207676f6c64656e0200000000000000000000000000000000ff"
        "ffffffffffffffffffffff001000000000010100",
    ),
    (
        "kafka-python 3.0.12",
        ApiKey.LIST_OFFSETS,
        11,
        "0002000b000000020006676f6c64656e00ffffffff000207676f6c64656e02000000"
        "00fffffffffffffffffffffffe00000000000000",
    ),
    (
        "kafka-python 3.0.12",
        ApiKey.METADATA,
        13,
        "0003000d000000020006676f6c64656e0001010000",
    ),
    (
        "kafka-python 3.0.12",
        ApiKey.API_VERSIONS,
        4,
        "00120004000000010006676f6c64656e000d6b61666b612d707974686f6e07332e302e313200",
    ),
    (
        "kafka-python 3.0.12",
        ApiKey.INIT_PRODUCER_ID,
        4,
        "00160004000000020006676f6c64656e000000000000ffffffffffffffffffff00",
    ),
    (
        "aiokafka 0.14.0",
        ApiKey.PRODUCE,
        7,
        "00000007000000020006676f6c64656effff000100009c40000000010006676f6c64"
        "656e00000001000000000000004c000000000000000000000040ffffffff0262cf9b"
        "76000000000000000001a1fc85155d000001a1fc85155dffffffffffffffffffff00"
        "000000000000011c000000066b65790a76616c756500",
    ),
    (
        "aiokafka 0.14.0",
        ApiKey.FETCH,
        11,
        "0001000b000000040006676f6c64656effffffff000001f400000001032000000000"
        "000000ffffffff000000010006676f6c64656e0000000100000000ffffffff000000"
        "0000000000ffffffffffffffff00100000000000000000",
    ),
    (
        "aiokafka 0.14.0",
        ApiKey.LIST_OFFSETS,
        3,
        "00020003000000020006676f6c64656effffffff00000000010006676f6c64656e00"
        "00000100000000fffffffffffffffe",
    ),
    (
        "aiokafka 0.14.0",
        ApiKey.METADATA,
        5,
        "00030005000000020006676f6c64656e0000000001",
    ),
    ("aiokafka 0.14.0", ApiKey.API_VERSIONS, 0, "00120000000000010006676f6c64656e"),
]


def request_class(api_key: ApiKey) -> type[Message]:
    module = importlib.import_module(
        f"mpbroker.protocol.messages.{api_key.name.lower()}"
    )
    name = "".join(word.capitalize() for word in api_key.name.split("_")) + "Request"
    found: type[Message] = getattr(module, name)
    return found


def name_of(value: Any) -> str:
    return value.name if isinstance(value, ApiKey) else str(value)[:20]


@pytest.mark.parametrize(("client", "api_key", "version", "sent"), GOLDEN, ids=name_of)
def test_what_clients_sent_is_read_and_written_the_same(
    client: str, api_key: ApiKey, version: int, sent: str
) -> None:
    frame = bytes.fromhex(sent)
    header = parse_request_header(memoryview(frame))
    assert (header.api_key, header.api_version) == (api_key, version)
    assert header.client_id == "golden"
    request = request_class(api_key).decode(version, frame, header.size)
    again = encode_request_header(
        header.api_key, header.api_version, header.correlation_id, header.client_id
    ) + request.encode(version)
    assert again == frame


@pytest.mark.parametrize(
    ("version", "sent"),
    [(row[2], row[3]) for row in GOLDEN if row[1] is ApiKey.PRODUCE],
)
def test_produce_requests_hold_the_record(version: int, sent: str) -> None:
    frame = bytes.fromhex(sent)
    header = parse_request_header(frame)
    request = request_class(ApiKey.PRODUCE).decode(version, frame, header.size)
    (topic,) = request.topic_data  # type: ignore[attr-defined]
    (partition,) = topic.partition_data
    assert (topic.name, partition.index) == ("golden", 0)
    assert bytes(partition.records).endswith(b"\x06key\x0avalue\x00")


@pytest.mark.parametrize(
    ("version", "sent"),
    [(row[2], row[3]) for row in GOLDEN if row[1] is ApiKey.FETCH],
)
def test_fetch_requests_ask_from_offset_0(version: int, sent: str) -> None:
    frame = bytes.fromhex(sent)
    header = parse_request_header(frame)
    request = request_class(ApiKey.FETCH).decode(version, frame, header.size)
    (topic,) = request.topics  # type: ignore[attr-defined]
    (partition,) = topic.partitions
    if version >= 13:
        assert (topic.topic, topic.topic_id) == ("", b"T" * 16)
    else:
        assert (topic.topic, topic.topic_id) == ("golden", bytes(16))
    assert (partition.partition, partition.fetch_offset) == (0, 0)
