"""Verified produce load over raw sockets: what was acknowledged, and where it lies."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from pathlib import Path
from typing import Any, Final

from mpbroker.ipc.named_segment import read_telemetry, start_time
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.headers import encode_request_header, response_header_version
from mpbroker.protocol.messages.create_topics import (
    CreatableTopic,
    CreateTopicsRequest,
    CreateTopicsResponse,
)
from mpbroker.protocol.messages.metadata import MetadataRequest, MetadataResponse
from mpbroker.protocol.messages.produce import (
    PartitionProduceData,
    ProduceRequest,
    ProduceResponse,
    TopicProduceData,
)
from mpbroker.protocol.records.batch_header import iter_batches
from mpbroker.protocol.records.record_batch import RecordBatchBuilder, iter_records
from tests.support.broker import Broker
from tests.support.promises import promised

TIMEOUT_S: Final = 90.0
TOPIC: Final = "load"
_PRODUCE_VERSION: Final = 9


def frame(api_key: ApiKey, version: int, body: bytes, correlation_id: int = 1) -> bytes:
    payload = encode_request_header(api_key, version, correlation_id, "load") + body
    return len(payload).to_bytes(4, "big") + payload


def dial(broker: Broker) -> socket.socket:
    host, _, port = broker.bootstrap.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), timeout=TIMEOUT_S)


def receive_frame(sock: socket.socket) -> bytes:
    """One answer; b"" if the connection is closed first."""
    data = b""
    while len(data) < 4 or len(data) < 4 + int.from_bytes(data[:4], "big"):
        chunk = sock.recv(1 << 20)
        if not chunk:
            return b""
        data += chunk
    return data[4:]


def ask(sock: socket.socket, api_key: ApiKey, version: int, body: bytes) -> memoryview:
    """Send one request; return the body of its answer.

    Raises:
        ConnectionResetError: the connection was closed instead.
    """
    sock.sendall(frame(api_key, version, body))
    answer = receive_frame(sock)
    if not answer:
        raise ConnectionResetError("closed instead of answered")
    return memoryview(answer)[4 + response_header_version(api_key, version) :]


def metadata_of(broker: Broker) -> MetadataResponse:
    """Ask this very broker: a client asks any of those that it knows of."""
    with dial(broker) as sock:
        answer = ask(sock, ApiKey.METADATA, 8, MetadataRequest(topics=None).encode(8))
    return MetadataResponse.decode(8, answer)


def api_versions(sock: socket.socket) -> bytes:
    return bytes(ask(sock, ApiKey.API_VERSIONS, 0, b""))


def create_topic(broker: Broker, name: str = TOPIC, partitions: int = 1) -> None:
    topic = CreatableTopic(name=name, num_partitions=partitions, replication_factor=1)
    request = CreateTopicsRequest(topics=[topic], timeout_ms=10_000)
    with dial(broker) as sock:
        body = ask(sock, ApiKey.CREATE_TOPICS, 5, request.encode(5))
    answer = CreateTopicsResponse.decode(5, body)
    assert answer.topics[0].error_code == 0, answer


def produce_body(payload: bytes, acks: int = 1, partitions: int = 1) -> bytes:
    """A record for each of the first partitions of the topic."""
    builder = RecordBatchBuilder()
    builder.append(time.time_ns() // 1_000_000, None, payload)
    records = bytes(builder.build())
    data = [PartitionProduceData(index=n, records=records) for n in range(partitions)]
    topic = TopicProduceData(name=TOPIC, partition_data=data)
    request = ProduceRequest(acks=acks, timeout_ms=10_000, topic_data=[topic])
    return request.encode(_PRODUCE_VERSION)


def states(broker: Broker) -> list[dict[str, Any]]:
    """What a broker says of its children."""
    state = read_telemetry(f"/mpbroker-{broker.pid}-{start_time(broker.pid)}")
    assert state is not None
    found: list[dict[str, Any]] = state["children"]
    return found


def children(broker: Broker, role: str = "") -> dict[tuple[str, int], int]:
    """Process ids of a broker's children by role and number."""
    return {
        (child["role"], child["id"]): child["pid"]
        for child in states(broker)
        if child["role"].startswith(role)
    }


def kill(broker: Broker, role: str, number: int = 0) -> int:
    """SIGKILL one child; return the process id it had."""
    pid = children(broker)[role, number]
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return pid


class _Connection:
    """One socket with at most one unique record in flight."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.losses = 0
        self.sock: socket.socket | None = None
        self.payload = b""
        self.received = b""

    def start(self) -> None:
        """Send the next record, over a new connection if need be."""
        while True:
            if self.sock is None:
                self.sock = dial(self.load.broker)
            self.payload = b"record %d" % next(self.load.numbers)
            self.received = b""
            try:
                body = produce_body(
                    self.payload, self.load.acks, len(self.load.offsets)
                )
                self.sock.sendall(frame(ApiKey.PRODUCE, _PRODUCE_VERSION, body))
                return
            except OSError:
                self.lose()

    def lose(self) -> None:
        assert self.sock is not None
        self.losses += 1
        self.sock.close()
        self.sock = None

    def readable(self) -> None:
        assert self.sock is not None
        try:
            data = self.sock.recv(65536)
        except OSError:
            data = b""
        if not data:
            self.lose()
            self.start()
            return
        self.received += data
        if len(self.received) < 4 + int.from_bytes(self.received[:4], "big"):
            return
        answer = ProduceResponse.decode(_PRODUCE_VERSION, memoryview(self.received)[9:])
        partitions = answer.responses[0].partition_responses
        for partition, offsets in zip(partitions, self.load.offsets, strict=True):
            assert partition.error_code == 0, partition
            assert self.payload not in offsets
            offsets[self.payload] = partition.base_offset
        self.start()


class Load:
    """Produces from several connections at once until told to stop.

    Args:
        partitions: to each of so many, in every request.
    """

    def __init__(
        self, broker: Broker, connections: int, acks: int = 1, partitions: int = 1
    ) -> None:
        self.broker = broker
        self.acks = acks
        self.numbers = iter(range(10**9))
        self.offsets: list[dict[bytes, int]] = [{} for _ in range(partitions)]
        self.acknowledged = self.offsets[0]
        self.connections = [_Connection(self) for _ in range(connections)]

    def __enter__(self) -> Load:
        for connection in self.connections:
            connection.start()
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self.connections:
            if connection.sock is not None:
                connection.sock.close()

    def run(self, count: int) -> None:
        """Go on until so many more records are acknowledged."""
        wanted = len(self.acknowledged) + count
        last, deadline = -1, 0.0
        while len(self.acknowledged) < wanted:
            if len(self.acknowledged) != last:
                last, deadline = len(self.acknowledged), time.monotonic() + TIMEOUT_S
            assert time.monotonic() < deadline, "the broker answers no more"
            socks = {c.sock.fileno(): c for c in self.connections if c.sock is not None}
            poll = select.poll()  # unlike select() of any descriptor
            for fd in socks:
                poll.register(fd, select.POLLIN)
            for fd, _ in poll.poll(1000):
                socks[fd].readable()

    @property
    def losses(self) -> list[int]:
        """How many connections each of the clients has lost."""
        return [connection.losses for connection in self.connections]

    @promised("the log holds every acknowledged record once")
    def verify(self, log: dict[int, bytes], partition: int = 0) -> None:
        """All that was acknowledged is in the log once, where it was said to be."""
        assert list(log) == list(range(len(log)))
        assert len(set(log.values())) == len(log), "a record was appended twice"
        for payload, offset in self.offsets[partition].items():
            assert log[offset] == payload


def read_log(data_dir: Path, partition: int = 0) -> dict[int, bytes]:
    """The values of a partition's records by offset, from its files."""
    found: dict[int, bytes] = {}
    for path in sorted((data_dir / f"{TOPIC}-{partition}").glob("*.log")):
        data = path.read_bytes()
        for _, batch in iter_batches(memoryview(data)):
            for record in iter_records(batch):
                assert record.offset not in found
                found[record.offset] = bytes(record.value)
    return found
