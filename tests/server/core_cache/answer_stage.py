"""A handler whose Metadata, FindCoordinator and ListOffsets the core may repeat."""

from __future__ import annotations

import socket
import struct

from mpbroker.ipc.layout import (
    CONNECTION_LISTENER,
    CONNECTION_LOCAL_ADDRESS,
    CONNECTION_LOCAL_PORT,
    CONNECTION_PEER_ADDRESS,
    CONNECTION_PRINCIPAL,
    CONNECTION_SLOT,
    connection_row,
)
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.headers import encode_request_header
from mpbroker.protocol.messages.find_coordinator import FindCoordinatorRequest
from mpbroker.protocol.messages.list_offsets import (
    ListOffsetsPartition,
    ListOffsetsRequest,
    ListOffsetsTopic,
)
from mpbroker.protocol.messages.metadata import MetadataRequest, MetadataRequestTopic
from mpbroker.server.apis import APIS
from mpbroker.server.core_cache import NoCoreCache
from mpbroker.server.message_apis import served_apis
from mpbroker.server.request_context import RequestContexts
from tests.server.contexts import broker_of
from tests.server.core_cache.handler_stage import Stage

SERVED = (ApiKey.METADATA, ApiKey.LIST_OFFSETS, ApiKey.FIND_COORDINATOR)
PRINCIPALS = ("User:ANONYMOUS", "User:alice", "User:bob")
LATEST, EARLIEST = -1, -2
SLOT = 3


class AnswerStage(Stage):
    """A stage with one connection. Clients of listener 0 are told what they dialled.

    Args:
        nodes: the other nodes of the cluster; None: it is in no cluster.
    """

    def __init__(self, memory, data, *, nodes=None, **options):
        self._nodes = nodes
        super().__init__(memory, data, short=True, **options)
        self.words = memory.control.words
        if self.authorization is not None:
            listeners = [("ONE", "SASL_SSL"), ("TWO", "SASL_SSL")]
            contexts = RequestContexts(self.words, PRINCIPALS.__getitem__, listeners)
            self.authorization._contexts = contexts
        self.is_from()

    def _serve(self, produce, fetch):
        self.broker = broker_of(
            self.registry,
            logs=self.logs,
            words=self.memory.control.words,
            advertised=[("", 0), ("two.example", 9094)],
            quotas=self.quotas,
            nodes=self._nodes,
        )
        rows = [APIS[key] for key in SERVED]
        own = served_apis(rows, self.broker, {}, print, self.authorization)
        return super()._serve(produce, fetch) | own

    def is_from(
        self,
        principal="User:ANONYMOUS",
        *,
        host="10.0.0.1",
        listener=0,
        dialled=("127.0.0.1", 9092),
    ):
        """From now on requests come from another client, or by another connection."""
        words, row = self.words, connection_row(0)
        words[row + CONNECTION_SLOT] = SLOT + 1
        words[row + CONNECTION_PRINCIPAL] = PRINCIPALS.index(principal)
        words[row + CONNECTION_LISTENER] = listener
        words[row + CONNECTION_LOCAL_PORT] = dialled[1]
        for at, address in (
            (CONNECTION_PEER_ADDRESS, host),
            (CONNECTION_LOCAL_ADDRESS, dialled[0]),
        ):
            # An IPv4 address within an IPv6 one, as connection_rows.py keeps them.
            packed = socket.inet_pton(socket.AF_INET6, f"::ffff:{address}")
            for word, value in enumerate(struct.unpack("=2q", packed)):
                words[row + at + word] = value

    def both(self, frame: bytes) -> bytes:
        """Return an answer, after a comparison with what Python alone answers."""
        found = self.ask(frame, SLOT)
        handler = self.handler
        core = handler._execute_in_core, handler._core_cache
        handler._execute_in_core = lambda slot: None
        handler._core_cache = NoCoreCache()
        try:
            assert self.ask(frame, SLOT) == found
        finally:
            handler._execute_in_core, handler._core_cache = core
        return found[1]

    def is_repeated(self, frame: bytes) -> bool:
        """Return whether the core answers a request, as Python does."""
        self.short_ways.clear()
        self.both(frame)
        return bool(self.short_ways)


def framed(api, version, message, *, client_id="test", correlation_id=7):
    header = encode_request_header(api, version, correlation_id, client_id)
    return header + message.encode(version)


def metadata(*names, version=9, **options):
    topics = [MetadataRequestTopic(name=name) for name in names]
    message = MetadataRequest(topics=topics, allow_auto_topic_creation=True)
    return framed(ApiKey.METADATA, version, message, **options)


def list_offsets(
    wanted, *, topic="one", version=7, committed=False, epoch=-1, **options
):
    """Ask for a topic's offsets: pairs of a partition and a timestamp."""
    message = ListOffsetsRequest(
        replica_id=-1,
        isolation_level=int(committed and version >= 2),
        topics=[
            ListOffsetsTopic(
                name=topic,
                partitions=[
                    ListOffsetsPartition(
                        partition_index=index,
                        timestamp=timestamp,
                        current_leader_epoch=epoch,
                    )
                    for index, timestamp in wanted
                ],
            )
        ],
    )
    return framed(ApiKey.LIST_OFFSETS, version, message, **options)


def find_coordinator(key="group", *, version=4, key_type=0, **options):
    if version < 4:
        message = FindCoordinatorRequest(key=key, key_type=key_type)
    else:
        message = FindCoordinatorRequest(key_type=key_type, coordinator_keys=[key])
    return framed(ApiKey.FIND_COORDINATOR, version, message, **options)
