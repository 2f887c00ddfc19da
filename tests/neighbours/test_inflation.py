"""Batches that inflate: many of them in a request keep no other client waiting."""

from __future__ import annotations

import socket
import time
from pathlib import Path

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.headers import encode_request_header, parse_response_header
from mpbroker.protocol.messages.list_offsets import (
    ListOffsetsPartition,
    ListOffsetsRequest,
    ListOffsetsResponse,
    ListOffsetsTopic,
)
from mpbroker.protocol.messages.produce import (
    PartitionProduceData,
    ProduceRequest,
    ProduceResponse,
    TopicProduceData,
)
from mpbroker.protocol.records.compression import Codec, compress
from tests.broker.load import create_topic
from tests.neighbours.clients import LONGEST_WAIT_S, judged_s
from tests.support.batch_forgery import batch, record, varint
from tests.support.broker import Broker
from tests.support.pressure import Reading

VERSION = 9
INFLATED = 99_000_000
BATCHES = 300
LOOKED_UP = 60
MANY = 150
LOOKUP_VERSION = 7


def bomb() -> bytes:
    """Return a batch of 3 KB with a record of 99 MB."""
    now_ms = time.time_ns() // 1_000_000
    content = record(0, value=varint(INFLATED) + bytes(INFLATED))
    return bytes(
        batch(
            compress(Codec.ZSTD, content),
            1,
            attributes=Codec.ZSTD,
            base_timestamp=now_ms,
            max_timestamp=now_ms,
        )
    )


def frame(api_key: int, version: int, body: bytes) -> bytes:
    data = encode_request_header(api_key, version, 1, "neighbour") + body
    return len(data).to_bytes(4, "big") + data


def receive(sock: socket.socket) -> bytes:
    """Return the next answer, without its size field."""
    with sock.makefile("rb") as file:
        return file.read(int.from_bytes(file.read(4), "big"))


def test_lookups_by_timestamp_in_one_request_share_a_budget(tmp_path: Path) -> None:
    """A request of some hundred bytes had a handler inflate a bomb a partition."""
    with Broker(tmp_path / "data", {"num.io.threads": 2}) as broker:
        create_topic(broker, "t", LOOKED_UP)
        host, port = broker.bootstrap.rsplit(":", 1)
        address = host, int(port)
        records = bomb()
        with socket.create_connection(address) as sock:
            sock.settimeout(90)
            for number in range(LOOKED_UP):
                row = PartitionProduceData(index=number, records=records)
                topic = TopicProduceData(name="t", partition_data=[row])
                request = ProduceRequest(acks=1, timeout_ms=30_000, topic_data=[topic])
                parts = b"".join(map(bytes, request.encode_parts(VERSION)))
                sock.sendall(frame(ApiKey.PRODUCE, VERSION, parts))
                answer = memoryview(receive(sock))
                _, start = parse_response_header(answer, ApiKey.PRODUCE, VERSION)
                done = ProduceResponse.decode(VERSION, answer[start:])
                assert done.responses[0].partition_responses[0].error_code == 0
        rows = [
            ListOffsetsPartition(partition_index=number, timestamp=1)
            for number in range(LOOKED_UP)
        ]
        asked = ListOffsetsRequest(topics=[ListOffsetsTopic(name="t", partitions=rows)])
        hostile = [socket.create_connection(address) for _ in range(2)]
        for sock in hostile:
            sock.settimeout(90)
            sock.sendall(
                frame(ApiKey.LIST_OFFSETS, LOOKUP_VERSION, asked.encode(LOOKUP_VERSION))
            )
        assert longest_wait(address) < LONGEST_WAIT_S
        for sock in hostile:
            answer = memoryview(receive(sock))
            _, start = parse_response_header(
                answer, ApiKey.LIST_OFFSETS, LOOKUP_VERSION
            )
            response = ListOffsetsResponse.decode(LOOKUP_VERSION, answer[start:])
            codes = [each.error_code for each in response.topics[0].partitions]
            # One fits for sure; a client asks again for those that do not.
            assert codes[0] == 0
            assert codes[2:] == [ErrorCode.OFFSET_NOT_AVAILABLE] * (LOOKED_UP - 2)
            sock.close()


def longest_wait(address: tuple[str, int]) -> float:
    """Return the longest wait of a client that asks fifty times, in judged seconds."""
    longest = 0.0
    with socket.create_connection(address) as neighbour:
        neighbour.settimeout(90)
        for _ in range(50):
            began = Reading.now()
            neighbour.sendall(frame(ApiKey.API_VERSIONS, 0, b""))
            assert receive(neighbour)
            longest = max(longest, judged_s(began))
    return longest


def test_bombs_in_one_request_share_a_budget(tmp_path: Path) -> None:
    """Two requests of 3.3 MB kept both handlers busy until they were killed, 30 s."""
    with Broker(tmp_path / "data", {"num.io.threads": 2}) as broker:
        create_topic(broker, "t", BATCHES)
        host, port = broker.bootstrap.rsplit(":", 1)
        records = bomb()
        partitions = [
            PartitionProduceData(index=number, records=records)
            for number in range(BATCHES)
        ]
        topic = TopicProduceData(name="t", partition_data=partitions)
        request = ProduceRequest(acks=1, timeout_ms=30_000, topic_data=[topic])
        parts = b"".join(map(bytes, request.encode_parts(VERSION)))
        hostile = [socket.create_connection((host, int(port))) for _ in range(2)]
        for sock in hostile:
            sock.settimeout(90)
            sock.sendall(frame(ApiKey.PRODUCE, VERSION, parts))
        longest = longest_wait((host, int(port)))
        for sock in hostile:
            answer = memoryview(receive(sock))
            _, start = parse_response_header(answer, ApiKey.PRODUCE, VERSION)
            response = ProduceResponse.decode(VERSION, answer[start:])
            codes = [
                each.error_code for each in response.responses[0].partition_responses
            ]
            # The first fits into what one request may inflate to.
            assert codes == [0] + [ErrorCode.MESSAGE_TOO_LARGE] * (BATCHES - 1)
            sock.close()
        assert longest < LONGEST_WAIT_S


def test_bombs_on_many_connections_have_but_their_turns(tmp_path: Path) -> None:
    """In the order in which they came, the next request waited for all of them."""
    with Broker(tmp_path / "data", {"num.io.threads": 2}) as broker:
        create_topic(broker, "t")
        host, port = broker.bootstrap.rsplit(":", 1)
        row = PartitionProduceData(index=0, records=bomb())
        topic = TopicProduceData(name="t", partition_data=[row])
        request = ProduceRequest(acks=1, timeout_ms=30_000, topic_data=[topic])
        framed = frame(
            ApiKey.PRODUCE, VERSION, b"".join(map(bytes, request.encode_parts(VERSION)))
        )
        hostile = [socket.create_connection((host, int(port))) for _ in range(MANY)]
        for sock in hostile:
            sock.settimeout(90)
            sock.sendall(framed)
        assert longest_wait((host, int(port))) < LONGEST_WAIT_S
        codes = []
        for sock in hostile:
            answer = memoryview(receive(sock))
            _, start = parse_response_header(answer, ApiKey.PRODUCE, VERSION)
            response = ProduceResponse.decode(VERSION, answer[start:])
            codes.append(response.responses[0].partition_responses[0].error_code)
            sock.close()
        # Some may have waited for too long, on a busy machine.
        assert set(codes) <= {0, ErrorCode.REQUEST_TIMED_OUT}
        assert 0 in codes
