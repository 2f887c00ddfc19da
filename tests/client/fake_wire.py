"""A network without sockets: what was sent lies in a list, answers come when told.

ApiVersions and Metadata answer themselves unless a test wants otherwise. Time stands
still until a test moves it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from mpbroker.client.addresses import Address
from mpbroker.client.errors import AuthenticationError
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.framing import FrameDecoder, encode_frame
from mpbroker.protocol.headers import encode_response_header, parse_request_header
from mpbroker.protocol.message import Message
from mpbroker.protocol.messages import (
    add_offsets_to_txn,
    add_partitions_to_txn,
    api_versions,
    end_txn,
    find_coordinator,
    init_producer_id,
    metadata,
    produce,
    sasl_authenticate,
    sasl_handshake,
    txn_offset_commit,
)

SERVED: dict[ApiKey, type[Message]] = {
    ApiKey.API_VERSIONS: api_versions.ApiVersionsRequest,
    ApiKey.METADATA: metadata.MetadataRequest,
    ApiKey.PRODUCE: produce.ProduceRequest,
    ApiKey.INIT_PRODUCER_ID: init_producer_id.InitProducerIdRequest,
    ApiKey.FIND_COORDINATOR: find_coordinator.FindCoordinatorRequest,
    ApiKey.ADD_PARTITIONS_TO_TXN: add_partitions_to_txn.AddPartitionsToTxnRequest,
    ApiKey.ADD_OFFSETS_TO_TXN: add_offsets_to_txn.AddOffsetsToTxnRequest,
    ApiKey.TXN_OFFSET_COMMIT: txn_offset_commit.TxnOffsetCommitRequest,
    ApiKey.END_TXN: end_txn.EndTxnRequest,
    ApiKey.SASL_HANDSHAKE: sasl_handshake.SaslHandshakeRequest,
    ApiKey.SASL_AUTHENTICATE: sasl_authenticate.SaslAuthenticateRequest,
}


class Sent(NamedTuple):
    """A request that waits for its answer."""

    node: int
    key: ApiKey
    version: int
    correlation_id: int
    request: Message


class FakeWire:
    """implements `client_request.Wire`; `sent` holds what no answer was given to."""

    def __init__(self, topics: dict[str, list[int]] | None = None) -> None:
        """Serve topics: the node that leads each partition."""
        self.now_ms = 1000.0
        self.topics = {name: list(nodes) for name, nodes in (topics or {}).items()}
        self.epochs: dict[tuple[str, int], int] = {}
        self.nodes = {0: Address("b0", 9092), 1: Address("b1", 9092)}
        self.connected: list[int] = []
        self.disconnected: dict[int, str] = {}
        self.refused: dict[int, AuthenticationError] = {}
        self.received: list[tuple[int, bytes]] = []
        self.wait_ns = self.io_ns = 0
        self.sent: list[Sent] = []
        self.all_sent: list[Sent] = []
        self.connects: list[tuple[int, Address]] = []
        self.waits: list[float] = []
        self.refuse_connect: set[int] = set()
        self.hang_connect: set[int] = set()
        self.silent: set[ApiKey] = set()  # never answered of themselves
        self.versions: dict[ApiKey, tuple[int, int]] = {}
        self.features: dict[str, int] = {}
        self.on_api_versions: (
            Callable[[Sent], api_versions.ApiVersionsResponse | None] | None
        ) = None
        self.blocked: set[int] = set()
        self.open: set[int] = set()
        self._decoders: dict[int, FrameDecoder] = {}
        self._events: deque[tuple[str, int, object]] = deque()
        self.is_shut_down = False

    def clock(self) -> float:
        return self.now_ms

    # -- what NetworkClient calls ------------------------------------------------------

    def connect(self, node: int, address: Address, host: str) -> None:
        assert node not in self.open
        self.connects.append((node, address))
        self.open.add(node)
        self._decoders[node] = FrameDecoder()
        if node in self.refuse_connect:
            self._events.append(("disconnect", node, "connection refused"))
        elif node not in self.hang_connect:
            self._events.append(("connect", node, None))

    def is_sending(self, node: int) -> bool:
        return node in self.blocked

    def send(self, node: int, data: bytes) -> None:
        assert node in self.open
        decoder = self._decoders[node]
        decoder.feed(data)
        while (frame := decoder.next_frame()) is not None:
            header = parse_request_header(frame)
            key = ApiKey(header.api_key)
            request = SERVED[key].decode(header.api_version, frame, header.size)
            sent = Sent(node, key, header.api_version, header.correlation_id, request)
            self.all_sent.append(sent)
            self._take(sent)

    def send_parts(self, node: int, parts: Sequence[bytes]) -> None:
        self.send(node, b"".join(parts))

    def close(self, node: int) -> None:
        self.open.discard(node)
        self.sent = [each for each in self.sent if each.node != node]
        self._events = deque(event for event in self._events if event[1] != node)

    def poll(self, timeout_ms: float) -> None:
        self.waits.append(timeout_ms)
        self.connected, self.received, self.disconnected = [], [], {}
        while self._events:
            kind, node, what = self._events.popleft()
            if node not in self.open:
                continue
            if kind == "connect":
                self.connected.append(node)
            elif kind == "data":
                assert isinstance(what, bytes)
                self.received.append((node, what))
            else:
                self.close(node)
                self.disconnected[node] = str(what)

    def wakeup(self) -> None: ...

    def shutdown(self) -> None:
        self.is_shut_down = True

    # -- answers -----------------------------------------------------------------------

    def _take(self, sent: Sent) -> None:
        if sent.key == ApiKey.PRODUCE and not sent.request.acks:  # type: ignore[attr-defined]
            return
        self.sent.append(sent)
        if sent.key in self.silent:
            return
        if sent.key == ApiKey.API_VERSIONS:
            if self.on_api_versions is not None:
                answer = self.on_api_versions(sent)
                if answer is None:
                    return
                unknown = answer.error_code == ErrorCode.UNSUPPORTED_VERSION
                self.answer(answer, sent, version=0 if unknown else None)
                return
            self.answer(self.api_versions(), sent)
        elif sent.key == ApiKey.METADATA:
            self.answer(self.metadata(sent.request), sent)

    def api_versions(self) -> Message:
        return api_versions.ApiVersionsResponse(
            finalized_features=[
                api_versions.FinalizedFeatureKey(
                    name=name, max_version_level=level, min_version_level=level
                )
                for name, level in self.features.items()
            ],
            api_keys=[
                api_versions.ApiVersion(api_key=key, min_version=low, max_version=high)
                for key, message in SERVED.items()
                for low, high in [
                    self.versions.get(
                        key, (message.valid_versions[0], message.valid_versions[-1])
                    )
                ]
            ],
        )

    def metadata(self, request: Message) -> Message:
        names = [topic.name for topic in request.topics or ()]  # type: ignore[attr-defined]
        return metadata.MetadataResponse(
            brokers=[
                metadata.MetadataResponseBroker(node_id=node, host=a.host, port=a.port)
                for node, a in self.nodes.items()
            ],
            controller_id=0,
            topics=[self._topic(name) for name in names],
        )

    def _topic(self, name: str) -> metadata.MetadataResponseTopic:
        leaders = self.topics.get(name)
        if leaders is None:
            return metadata.MetadataResponseTopic(
                error_code=ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, name=name
            )
        return metadata.MetadataResponseTopic(
            name=name,
            partitions=[
                metadata.MetadataResponsePartition(
                    partition_index=index,
                    leader_id=leader,
                    leader_epoch=self.epochs.get((name, index), 0),
                    error_code=5 if leader < 0 else 0,
                )
                for index, leader in enumerate(leaders)
            ],
        )

    def waiting(self, key: ApiKey, node: int | None = None) -> list[Sent]:
        """Return the requests to an API that have no answer yet."""
        return [
            each
            for each in self.sent
            if each.key == key and (node is None or each.node == node)
        ]

    def answer(
        self, response: Message, sent: Sent | None = None, version: int | None = None
    ) -> None:
        """Answer a request, the oldest one if none is named."""
        if sent is None:
            sent = self.sent[0]
        self.sent.remove(sent)
        used = sent.version if version is None else version
        header = encode_response_header(sent.key, used, sent.correlation_id)
        self.raw(sent.node, encode_frame([header, response.encode(used)]))

    def raw(self, node: int, data: bytes) -> None:
        """Have bytes come from a node."""
        self._events.append(("data", node, data))

    def hang_up(self, node: int, reason: str = "closed by the broker") -> None:
        """End a connection from the other side."""
        self._events.append(("disconnect", node, reason))
