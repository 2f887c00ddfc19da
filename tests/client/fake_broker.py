"""A broker in a thread: a real socket, logs in memory, and faults on request.

It serves what a client needs to produce and consume. `answer_with` scripts the next
answers to one API, for what a good broker never does.
"""

from __future__ import annotations

import hashlib
import hmac
import socket
import ssl
import struct
import threading
from base64 import b64decode, b64encode
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import suppress

from mpbroker.client.addresses import Address
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ProtocolError
from mpbroker.protocol.framing import FrameDecoder, encode_frame
from mpbroker.protocol.headers import encode_response_header, parse_request_header
from mpbroker.protocol.message import Message
from mpbroker.protocol.messages import (
    api_versions,
    create_partitions,
    create_topics,
    delete_topics,
    describe_configs,
    fetch,
    incremental_alter_configs,
    init_producer_id,
    list_offsets,
    metadata,
    offset_for_leader_epoch,
    produce,
    sasl_authenticate,
    sasl_handshake,
)
from mpbroker.protocol.records.record_batch import parse_batch_header, set_base_offset

CLOSE = object()  # an answer: hang up instead

SERVED: dict[ApiKey, type[Message]] = {
    ApiKey.API_VERSIONS: api_versions.ApiVersionsRequest,
    ApiKey.METADATA: metadata.MetadataRequest,
    ApiKey.PRODUCE: produce.ProduceRequest,
    ApiKey.FETCH: fetch.FetchRequest,
    ApiKey.LIST_OFFSETS: list_offsets.ListOffsetsRequest,
    ApiKey.OFFSET_FOR_LEADER_EPOCH: (
        offset_for_leader_epoch.OffsetForLeaderEpochRequest
    ),
    ApiKey.INIT_PRODUCER_ID: init_producer_id.InitProducerIdRequest,
    ApiKey.DESCRIBE_CONFIGS: describe_configs.DescribeConfigsRequest,
    ApiKey.CREATE_TOPICS: create_topics.CreateTopicsRequest,
    ApiKey.DELETE_TOPICS: delete_topics.DeleteTopicsRequest,
    ApiKey.CREATE_PARTITIONS: create_partitions.CreatePartitionsRequest,
    ApiKey.INCREMENTAL_ALTER_CONFIGS: (
        incremental_alter_configs.IncrementalAlterConfigsRequest
    ),
    ApiKey.SASL_HANDSHAKE: sasl_handshake.SaslHandshakeRequest,
    ApiKey.SASL_AUTHENTICATE: sasl_authenticate.SaslAuthenticateRequest,
}

Script = Callable[[Message], object]


class FakeBroker:
    """Listens on a port of its own; `topics` maps names to partition counts."""

    def __init__(
        self,
        topics: dict[str, int],
        max_api_versions: int = 4,
        *,
        tls: ssl.SSLContext | None = None,
        passwords: dict[str, str] | None = None,
        session_lifetime_ms: int = 0,
        host: str = "127.0.0.1",
    ) -> None:
        """Listen.

        Args:
            topics: partition counts.
            max_api_versions: the newest ApiVersions it knows.
            tls: encrypts all connections.
            passwords: of users; nothing is served to whoever gives none.
            session_lifetime_ms: what clients are told.
            host: what clients are told to dial.
        """
        self.tls = tls
        self.passwords = passwords
        self.session_lifetime_ms = session_lifetime_ms
        self.topics = topics
        self.configs: dict[str, dict[str, str]] = defaultdict(dict)
        self.max_api_versions = max_api_versions
        self.logs: dict[tuple[str, int], list[bytes]] = defaultdict(list)
        self.ends: dict[tuple[str, int], int] = defaultdict(int)
        self.starts: dict[tuple[str, int], int] = defaultdict(int)
        # The first offset that is not in the remote store, where there is one.
        self.local_starts: dict[tuple[str, int], int] = {}
        self.leader_epochs: dict[tuple[str, int], int] = defaultdict(int)
        self.max_versions: dict[ApiKey, int] = {}  # lower than what it can
        self.topic_ids: dict[str, bytes] = {}  # zeros where there is none
        self.leaderless: set[tuple[str, int]] = set()
        self.led_elsewhere: dict[tuple[str, int], Address] = {}  # by node 8
        self.shift_correlation_ids = 0
        self.requests: list[tuple[ApiKey, int, Message]] = []
        self._scripts: dict[ApiKey, deque[Script]] = defaultdict(deque)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = Address(host, self._listener.getsockname()[1])
        self._connections: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def answer_with(self, api: ApiKey, *scripts: Script) -> None:
        """Give the next requests to an API to functions: message, CLOSE or None.

        None is the usual answer.
        """
        self._scripts[api].extend(scripts)

    def seen(self, api: ApiKey) -> list[Message]:
        """Return the requests to an API so far."""
        return [message for key, _, message in self.requests if key == api]

    def append(self, topic: str, partition: int, batch: bytes) -> int:
        """Append a batch; return its base offset."""
        header = parse_batch_header(batch)
        base = self.ends[topic, partition]
        data = bytearray(batch)
        set_base_offset(memoryview(data), base, self.leader_epochs[topic, partition])
        self.logs[topic, partition].append(bytes(data))
        self.ends[topic, partition] = base + header.last_offset_delta + 1
        return base

    def elect(self, topic: str, partition: int, end: int) -> None:
        """Have a new leader, which lacks the batches from an offset on."""
        where = topic, partition
        self.leader_epochs[where] += 1
        self.logs[where] = [
            batch
            for batch in self.logs[where]
            if parse_batch_header(batch).next_offset <= end
        ]
        self.ends[where] = end

    def close(self) -> None:
        """Stop listening and hang up."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for connection in self._connections:
            connection.close()

    def _start(self, target: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._connections.append(connection)
                self._start(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        decoder = FrameDecoder()
        login = _Login(self.passwords or {})
        is_known = self.passwords is None
        with suppress(OSError):
            if self.tls is not None:
                plain = connection
                connection = self.tls.wrap_socket(plain, server_side=True)
                self._connections[self._connections.index(plain)] = connection
            while data := connection.recv(1 << 16):
                decoder.feed(data)
                try:
                    frames = list(iter(decoder.next_frame, None))
                except ProtocolError:  # TLS, say
                    connection.shutdown(socket.SHUT_RDWR)
                    return
                for frame in frames:
                    key = ApiKey(parse_request_header(frame).api_key)
                    if not is_known and key not in _BEFORE_LOGIN:
                        connection.shutdown(socket.SHUT_RDWR)
                        return
                    self._login = login
                    answer = self._answer(frame)
                    is_known |= login.is_done
                    if answer is CLOSE:
                        connection.shutdown(socket.SHUT_RDWR)
                        return
                    if isinstance(answer, bytes):
                        connection.sendall(answer)

    def _answer(self, frame: bytes) -> object:
        header = parse_request_header(frame)
        key, version = ApiKey(header.api_key), header.api_version
        correlation_id = header.correlation_id + self.shift_correlation_ids
        prefix = encode_response_header(key, version, correlation_id)
        if key == ApiKey.API_VERSIONS and version > self.max_api_versions:
            refusal = api_versions.ApiVersionsResponse(
                error_code=ErrorCode.UNSUPPORTED_VERSION
            )
            return encode_frame([prefix, refusal.encode(0)])
        request = SERVED[key].decode(version, frame, header.size)
        self.requests.append((key, version, request))
        response: object = None
        if self._scripts[key]:
            response = self._scripts[key].popleft()(request)
        if response is CLOSE:
            return CLOSE
        if response is None:
            response = getattr(self, "_" + key.name.lower())(request)
        if response is None:
            return None
        assert isinstance(response, Message)
        return encode_frame([prefix, response.encode(version)])

    def _api_versions(self, request: Message) -> Message:
        return api_versions.ApiVersionsResponse(
            api_keys=[
                api_versions.ApiVersion(
                    api_key=key,
                    min_version=message.valid_versions[0],
                    max_version=self.max_versions.get(key, message.valid_versions[-1]),
                )
                for key, message in SERVED.items()
            ]
        )

    def _sasl_handshake(self, request: sasl_handshake.SaslHandshakeRequest) -> Message:
        known = request.mechanism in MECHANISMS
        self._login.mechanism = request.mechanism
        return sasl_handshake.SaslHandshakeResponse(
            error_code=0 if known else ErrorCode.UNSUPPORTED_SASL_MECHANISM,
            mechanisms=list(MECHANISMS),
        )

    def _sasl_authenticate(
        self, request: sasl_authenticate.SaslAuthenticateRequest
    ) -> Message:
        token = self._login.take(bytes(request.auth_bytes))
        if token is None:
            return sasl_authenticate.SaslAuthenticateResponse(
                error_code=ErrorCode.SASL_AUTHENTICATION_FAILED,
                error_message="Authentication failed",
                auth_bytes=b"",
            )
        return sasl_authenticate.SaslAuthenticateResponse(
            error_message=None,
            auth_bytes=token,
            session_lifetime_ms=self.session_lifetime_ms,
        )

    def _metadata(self, request: metadata.MetadataRequest) -> Message:
        names = (
            list(self.topics)
            if request.topics is None
            else [topic.name or "" for topic in request.topics]
        )
        node = metadata.MetadataResponseBroker(
            node_id=7, host=self.address.host, port=self.address.port
        )
        others = [
            metadata.MetadataResponseBroker(node_id=8, host=at.host, port=at.port)
            for at in set(self.led_elsewhere.values())
        ]
        return metadata.MetadataResponse(
            brokers=[node, *others],
            controller_id=7,
            topics=[self._topic(name) for name in names],
        )

    def _topic(self, name: str) -> metadata.MetadataResponseTopic:
        known = name in self.topics
        return metadata.MetadataResponseTopic(
            error_code=0 if known else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
            name=name,
            topic_id=self.topic_ids.get(name, bytes(16)),
            partitions=[
                metadata.MetadataResponsePartition(
                    error_code=ErrorCode.LEADER_NOT_AVAILABLE if gone else 0,
                    partition_index=index,
                    leader_id=(
                        -1 if gone else 8 if (name, index) in self.led_elsewhere else 7
                    ),
                    leader_epoch=self.leader_epochs[name, index],
                )
                for index in range(self.topics.get(name, 0))
                for gone in [(name, index) in self.leaderless]
            ],
        )

    def _produce(self, request: produce.ProduceRequest) -> Message | None:
        response = produce.ProduceResponse(
            responses=[
                produce.TopicProduceResponse(
                    name=topic.name,
                    partition_responses=[
                        produce.PartitionProduceResponse(
                            index=data.index,
                            base_offset=self.append(
                                topic.name, data.index, bytes(data.records or b"")
                            ),
                        )
                        for data in topic.partition_data
                    ],
                )
                for topic in request.topic_data
            ]
        )
        return response if request.acks else None

    def _init_producer_id(self, request: Message) -> Message:
        return init_producer_id.InitProducerIdResponse(
            producer_id=4000, producer_epoch=0
        )

    def _describe_configs(
        self, request: describe_configs.DescribeConfigsRequest
    ) -> Message:
        return describe_configs.DescribeConfigsResponse(
            results=[
                describe_configs.DescribeConfigsResult(
                    resource_type=resource.resource_type,
                    resource_name=resource.resource_name,
                    configs=[
                        describe_configs.DescribeConfigsResourceResult(
                            name=name,
                            value=value,
                            config_source=1 if name != "max.message.bytes" else 5,
                        )
                        for name, value in (
                            {"max.message.bytes": "1048588"}
                            | self.configs[resource.resource_name]
                        ).items()
                        if resource.configuration_keys is None
                        or name in resource.configuration_keys
                    ],
                )
                for resource in request.resources
            ]
        )

    def _create_topics(self, request: create_topics.CreateTopicsRequest) -> Message:
        (topic,) = request.topics
        code = ErrorCode.NONE
        if topic.name in self.topics:
            code = ErrorCode.TOPIC_ALREADY_EXISTS
        elif not request.validate_only:
            self.topics[topic.name] = max(topic.num_partitions, 1)
            self.configs[topic.name] = {
                config.name: config.value or "" for config in topic.configs
            }
        result = create_topics.CreatableTopicResult(
            name=topic.name,
            error_code=code,
            topic_id=bytes(range(16)),
            num_partitions=max(topic.num_partitions, 1),
            configs=None,
            error_message="it is there" if code else None,
        )
        return create_topics.CreateTopicsResponse(topics=[result])

    def _delete_topics(self, request: delete_topics.DeleteTopicsRequest) -> Message:
        name = request.topics[0].name or ""
        known = self.topics.pop(name, None)
        result = delete_topics.DeletableTopicResult(
            name=name,
            error_code=0 if known else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        )
        return delete_topics.DeleteTopicsResponse(responses=[result])

    def _create_partitions(
        self, request: create_partitions.CreatePartitionsRequest
    ) -> Message:
        (topic,) = request.topics
        code = ErrorCode.NONE
        if topic.count <= self.topics[topic.name]:
            code = ErrorCode.INVALID_PARTITIONS
        else:
            self.topics[topic.name] = topic.count
        result = create_partitions.CreatePartitionsTopicResult(
            name=topic.name, error_code=code
        )
        return create_partitions.CreatePartitionsResponse(results=[result])

    def _incremental_alter_configs(
        self, request: incremental_alter_configs.IncrementalAlterConfigsRequest
    ) -> Message:
        (resource,) = request.resources
        for change in resource.configs:
            if change.config_operation:
                self.configs[resource.resource_name].pop(change.name, None)
            else:
                self.configs[resource.resource_name][change.name] = change.value or ""
        result = incremental_alter_configs.AlterConfigsResourceResponse(
            error_message=None,
            resource_type=resource.resource_type,
            resource_name=resource.resource_name,
        )
        return incremental_alter_configs.IncrementalAlterConfigsResponse(
            responses=[result]
        )

    def _list_offsets(self, request: list_offsets.ListOffsetsRequest) -> Message:
        return list_offsets.ListOffsetsResponse(
            topics=[
                list_offsets.ListOffsetsTopicResponse(
                    name=topic.name,
                    partitions=[
                        list_offsets.ListOffsetsPartitionResponse(
                            partition_index=entry.partition_index,
                            offset=self._offset(topic.name, entry),
                        )
                        for entry in topic.partitions
                    ],
                )
                for topic in request.topics
            ]
        )

    def _offset(self, topic: str, entry: list_offsets.ListOffsetsPartition) -> int:
        partition = topic, entry.partition_index
        if entry.timestamp == -1:
            return self.ends[partition]
        if entry.timestamp == -2:
            return self.starts[partition]
        if entry.timestamp in (-4, -5):
            first_local = self.local_starts.get(partition, self.starts[partition])
            return first_local if entry.timestamp == -4 else first_local - 1
        for batch in self.logs[partition]:
            header = parse_batch_header(batch)
            if header.max_timestamp >= entry.timestamp:
                return header.base_offset
        return -1

    def _offset_for_leader_epoch(
        self, request: offset_for_leader_epoch.OffsetForLeaderEpochRequest
    ) -> Message:
        return offset_for_leader_epoch.OffsetForLeaderEpochResponse(
            topics=[
                offset_for_leader_epoch.OffsetForLeaderTopicResult(
                    topic=topic.topic,
                    partitions=[
                        self._end_of_epoch(topic.topic, entry)
                        for entry in topic.partitions
                    ],
                )
                for topic in request.topics
            ]
        )

    def _end_of_epoch(
        self, topic: str, entry: offset_for_leader_epoch.OffsetForLeaderPartition
    ) -> offset_for_leader_epoch.EpochEndOffset:
        found = offset_for_leader_epoch.EpochEndOffset(partition=entry.partition)
        for batch in self.logs[topic, entry.partition]:
            header = parse_batch_header(batch)
            if header.partition_leader_epoch <= entry.leader_epoch:
                found.leader_epoch = header.partition_leader_epoch
                found.end_offset = header.next_offset
        return found

    def _fetch(self, request: fetch.FetchRequest) -> Message:
        return fetch.FetchResponse(
            responses=[
                fetch.FetchableTopicResponse(
                    topic=topic.topic,
                    partitions=[
                        self._partition(topic.topic, entry)
                        for entry in topic.partitions
                    ],
                )
                for topic in request.topics
            ]
        )

    def _partition(
        self, topic: str, entry: fetch.FetchPartition
    ) -> fetch.PartitionData:
        partition = topic, entry.partition
        start, end = self.starts[partition], self.ends[partition]
        epoch = self.leader_epochs[partition]
        if entry.current_leader_epoch not in (-1, epoch):
            return fetch.PartitionData(
                partition_index=entry.partition,
                error_code=ErrorCode.FENCED_LEADER_EPOCH
                if entry.current_leader_epoch < epoch
                else ErrorCode.UNKNOWN_LEADER_EPOCH,
                high_watermark=-1,
                aborted_transactions=None,
                records=None,
            )
        if not start <= entry.fetch_offset <= end:
            return fetch.PartitionData(
                partition_index=entry.partition,
                error_code=ErrorCode.OFFSET_OUT_OF_RANGE,
                high_watermark=-1,
                aborted_transactions=None,
                records=None,
            )
        batches = [
            batch
            for batch in self.logs[partition]
            if parse_batch_header(batch).last_offset >= entry.fetch_offset
        ]
        data = batches[0] if batches else b""
        for batch in batches[1:]:
            if len(data) + len(batch) > entry.partition_max_bytes:
                break
            data += batch
        return fetch.PartitionData(
            partition_index=entry.partition,
            high_watermark=end,
            last_stable_offset=end,
            log_start_offset=start,
            aborted_transactions=None,
            records=data,
        )


MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER")
_BEFORE_LOGIN = (
    ApiKey.API_VERSIONS,
    ApiKey.SASL_HANDSHAKE,
    ApiKey.SASL_AUTHENTICATE,
)


class _Login:
    """The broker's side of SASL on one connection, from RFC 5802's formulas."""

    def __init__(self, passwords: dict[str, str]) -> None:
        self.is_done = False
        self.mechanism = ""
        self._passwords = passwords
        self._messages: list[str] = []

    def take(self, token: bytes) -> bytes | None:
        """Return the answer; None: refused."""
        if self.mechanism == "PLAIN":
            _, user, password = token.decode().split("\0")
            self.is_done = self._passwords.get(user) == password
            return b"" if self.is_done else None
        if self.mechanism == "OAUTHBEARER":
            good = token.startswith(b"n,,\x01auth=Bearer good\x01")
            self.is_done = good
            return b"" if good else b'{"status":"invalid_token"}'
        if not self._messages:
            bare = token.decode().removeprefix("n,,")
            salt = b64encode(b"salt").decode()
            self._messages = [bare, f"{bare.partition('r=')[2]}x,s={salt},i=4096"]
            self._messages[1] = "r=" + self._messages[1]
            return self._messages[1].encode()
        return self._check(token.decode())

    def _check(self, final: str) -> bytes | None:
        algorithm = {"6": "sha256", "2": "sha512"}[self.mechanism[-1]]
        bare, first = self._messages
        self._messages = []
        user = bare.partition(",")[0].removeprefix("n=")
        user = user.replace("=2C", ",").replace("=3D", "=")
        without, _, proof = final.rpartition(",p=")
        message = ",".join([bare, first, without]).encode()
        password = self._passwords.get(user, "").encode()
        salted = hashlib.pbkdf2_hmac(algorithm, password, b"salt", 4096)
        client_key = hmac.digest(salted, b"Client Key", algorithm)
        stored = hashlib.new(algorithm, client_key).digest()
        signature = hmac.digest(stored, message, algorithm)
        theirs = bytes(a ^ b for a, b in zip(b64decode(proof), signature, strict=True))
        if theirs != client_key or user not in self._passwords:
            return None
        self.is_done = True
        server_key = hmac.digest(salted, b"Server Key", algorithm)
        return b"v=" + b64encode(hmac.digest(server_key, message, algorithm))


def split_every(data: bytes, step: int) -> list[bytes]:
    """Cut bytes into pieces of ``step``."""
    return [data[i : i + step] for i in range(0, len(data), step)]


def size_prefix(length: int) -> bytes:
    """Return a frame's four bytes of length, whatever it is."""
    return struct.pack(">i", length)
