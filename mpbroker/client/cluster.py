"""The brokers behind some bootstrap addresses, and a connection to each one used."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final, NamedTuple, TypeVar

from mpbroker.client.addresses import Address
from mpbroker.client.errors import BrokerUnavailableError, check_error
from mpbroker.client.transport import Transport, connect_any
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.message import Message
from mpbroker.protocol.messages.metadata import (
    MetadataRequest,
    MetadataRequestTopic,
    MetadataResponse,
    MetadataResponseTopic,
)

ResponseT = TypeVar("ResponseT", bound=Message)

_RETRY_INTERVAL_S: Final = 0.1  # Kafka's retry.backoff.ms
# A topic that is just being created may be unknown for a moment; one that does not
# exist should not cost the whole timeout.
_UNKNOWN_TOPIC_RETRIES: Final = 3


class TopicPartition(NamedTuple):
    """A partition's name."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


class Cluster:
    """Connections by address; metadata is asked for, not cached."""

    def __init__(self, bootstrap: Sequence[Address], timeout_s: float) -> None:
        """Connect to nothing yet.

        Args:
            bootstrap: tried in order until one answers.
            timeout_s: for every connection and answer.
        """
        self.timeout_s = timeout_s
        self._bootstrap = list(bootstrap)
        self._transports: dict[Address, Transport] = {}
        self._nodes: dict[int, Address] = {}
        self._controller_id = -1

    def any_broker(self) -> Transport:
        """Return a connection to some broker.

        Raises:
            BrokerUnavailableError: no bootstrap address answers.
        """
        for transport in self._transports.values():
            return transport
        transport = connect_any(self._bootstrap, self.timeout_s)
        self._transports[transport.address] = transport
        return transport

    def controller(self) -> Transport:
        """Return a connection to the broker that changes topics are sent to."""
        if self._controller_id not in self._nodes:
            self.metadata([])
        if self._controller_id not in self._nodes:
            return self.any_broker()
        return self.broker(self._controller_id)

    def broker(self, node_id: int) -> Transport:
        """Return a connection to one broker.

        Raises:
            BrokerUnavailableError: it does not answer, or metadata never named it.
        """
        if node_id not in self._nodes:
            raise BrokerUnavailableError(f"no broker has the id {node_id}")
        address = self._nodes[node_id]
        if address not in self._transports:
            self._transports[address] = self._connect_advertised(address)
        return self._transports[address]

    def _connect_advertised(self, address: Address) -> Transport:
        try:
            return Transport.connect(address, self.timeout_s)
        except BrokerUnavailableError as error:
            bootstrap = ",".join(map(str, self._bootstrap))
            raise BrokerUnavailableError(
                f"{error} ({bootstrap} said to go to {address}: see the broker's"
                " advertised.listeners)"
            ) from error

    def request(
        self, request: Message, response_type: type[ResponseT], **options: int
    ) -> ResponseT:
        """Ask any broker; see `Transport.request`."""
        transport = self.any_broker()
        try:
            return transport.request(request, response_type, **options)
        except BrokerUnavailableError:
            self.drop(transport)
            raise

    def metadata(
        self, topics: Sequence[str] | None, *, auto_create: bool = False
    ) -> MetadataResponse:
        """Ask for brokers and topics, and remember the brokers.

        Args:
            topics: None for all. Each has an error code of its own in the answer.
            auto_create: let the broker create those that it does not have.
        """
        transport = self.any_broker()
        asked = None if topics is None else [_named(name) for name in topics]
        request = MetadataRequest(topics=asked, allow_auto_topic_creation=auto_create)
        if transport.version_for(MetadataRequest) < 4:
            request.allow_auto_topic_creation = True  # older versions always do
        response = self.request(request, MetadataResponse)
        self._nodes = {
            node.node_id: Address(node.host, node.port) for node in response.brokers
        }
        self._controller_id = response.controller_id
        return response

    def topic(self, name: str, *, auto_create: bool = False) -> MetadataResponseTopic:
        """Return a topic, waiting until each of its partitions has a leader.

        Raises:
            ApiError: no such topic, or no leader within the timeout.
        """
        deadline = time.monotonic() + self.timeout_s
        unknown = 0
        while True:
            topic = self.metadata([name], auto_create=auto_create).topics[0]
            code = topic.error_code
            if not code:
                codes = [partition.error_code for partition in topic.partitions]
                if ErrorCode.LEADER_NOT_AVAILABLE not in codes:
                    return topic
                code = ErrorCode.LEADER_NOT_AVAILABLE
            unknown += code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            retriable = code == ErrorCode.LEADER_NOT_AVAILABLE or (
                auto_create and 0 < unknown <= _UNKNOWN_TOPIC_RETRIES
            )
            if not retriable or time.monotonic() > deadline:
                check_error(code, f"topic {name!r}")
            time.sleep(_RETRY_INTERVAL_S)

    def drop(self, transport: Transport) -> None:
        """Close a connection that failed; the next use of its broker reconnects."""
        transport.close()
        self._transports.pop(transport.address, None)

    def close(self) -> None:
        """Close all connections."""
        for transport in self._transports.values():
            transport.close()
        self._transports.clear()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _named(name: str) -> MetadataRequestTopic:
    return MetadataRequestTopic(name=name)
