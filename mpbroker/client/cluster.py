"""Cluster: send requests to the brokers of a cluster, and wait for each response.

    with Cluster(parse_addresses("localhost:9092"), timeout_s=10) as cluster:
        cluster.metadata(["events"])
        cluster.broker(1).request(request, ResponseClass)

A `NetworkClient` does the work, as for the producer. But here the caller waits for each
answer, and gets an error at once if a broker cannot be reached, because no thread tries
again in the background. Brokers are known by address, so a broker that is in the
bootstrap list and in the metadata has one connection. One thread uses a cluster.
"""

from __future__ import annotations

import random
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Final, NamedTuple, TypeVar

from mpbroker.base.errors import MpbrokerError
from mpbroker.client.addresses import Address
from mpbroker.client.client_request import ClientResponse
from mpbroker.client.errors import (
    BrokerUnavailableError,
    RequestTimeoutError,
    check_error,
)
from mpbroker.client.metadata import NO_NODE, Metadata, Snapshot
from mpbroker.client.selector import make_network_client, monotonic_ms
from mpbroker.client.settings import ClientSettings
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ProtocolError
from mpbroker.protocol.message import Message
from mpbroker.protocol.messages.metadata import (
    MetadataRequest,
    MetadataRequestTopic,
    MetadataResponse,
    MetadataResponseTopic,
)

ResponseT = TypeVar("ResponseT", bound=Message)
EntryT = TypeVar("EntryT")

_RETRY_INTERVAL_S: Final = 0.1  # Kafka's retry.backoff.ms
# A topic that was just created may be unknown for a moment. For a topic that does not
# exist, the caller should not wait for the whole timeout.
_UNKNOWN_TOPIC_RETRIES: Final = 3
_SOFTWARE_NAME: Final = "mpbroker"
# Brokers with older versions of Metadata may tell outdated leader epochs.
_EPOCHS_SINCE: Final = 9


class TopicPartition(NamedTuple):
    """The name of a partition: its topic and its number."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


class _Addresses(Metadata):
    """Brokers' addresses in the place of metadata; the `Cluster` sets them itself."""

    def delay_ms(self, now_ms: float) -> float:
        return float("inf")

    def fail(self, error: MpbrokerError) -> None:
        """Forget the error of a login: the next request may log in again.

        The request that needed the login gets the error by another way.
        """

    def set(self, nodes: Mapping[int, Address]) -> None:
        self.snapshot = Snapshot(nodes, {}, {})


class Pending:
    """A request that was sent, and its response once it has come; see `Broker.wait`."""

    __slots__ = ("answer",)

    def __init__(self) -> None:
        self.answer: ClientResponse | None = None

    def take(self, answer: ClientResponse) -> None:
        self.answer = answer


class Broker:
    """One broker of a cluster; it is connected by the first request."""

    def __init__(self, cluster: Cluster, number: int, address: Address) -> None:
        self.address = address
        self._cluster = cluster
        self._number = number

    def version_for(
        self, request: type[Message], max_version: int | None = None
    ) -> int:
        """Return the highest version of a request that both sides know.

        Args:
            request: the request's class.
            max_version: the highest version to return, for callers that rely on the
                behaviour of an older one.

        Raises:
            BrokerUnavailableError, UnsupportedVersionError: see `request`.
        """
        self._cluster.connect(self._number)
        return self._cluster.client.version_for(self._number, request, max_version)

    def request(
        self,
        request: Message,
        response_type: type[ResponseT],
        *,
        max_version: int | None = None,
        timeout_s: float | None = None,
    ) -> ResponseT:
        """Send a request and wait for its response.

        Raises:
            RequestTimeoutError: no response in ``timeout_s`` (None: the cluster's).
            BrokerUnavailableError: the broker cannot be reached, or the connection
                broke.
            AuthenticationError: a login or a certificate was refused.
            UnsupportedVersionError: the broker does not know the request.
        """
        pending = self.send(request, response_type, max_version=max_version)
        return self.wait(pending, response_type, timeout_s)

    def send(
        self,
        request: Message,
        response_type: type[Message],
        *,
        max_version: int | None = None,
    ) -> Pending:
        """Send a request, whose response `wait` returns; raise as `request` does."""
        ready_ms = self._cluster.connect(self._number)
        return self._send(request, response_type, ready_ms, max_version)

    def send_if_ready(
        self,
        request: Message,
        response_type: type[Message],
        *,
        max_version: int | None = None,
    ) -> Pending | None:
        """Send a request if the broker is ready; else begin to connect, return None."""
        now_ms = monotonic_ms()
        if not self._cluster.client.ready(self._number, now_ms):
            return None
        return self._send(request, response_type, now_ms, max_version)

    def _send(
        self,
        request: Message,
        response_type: type[Message],
        ready_ms: float,
        max_version: int | None,
    ) -> Pending:
        client = self._cluster.client
        pending = Pending()
        client.send(
            self._number,
            request,
            response_type,
            pending.take,
            ready_ms,  # not the time now: the session may have ended since then
            max_version=max_version,
            # The answer may have come long before the caller waits for it.
            timeout_ms=float("inf"),
        )
        return pending

    def is_ready(self) -> bool:
        """Return whether a request can be sent now; if not, begin to connect."""
        return self._cluster.client.ready(self._number, monotonic_ms())

    @property
    def failures(self) -> int:
        """The number of failed attempts or lost connections since the last success."""
        return self._cluster.client.failures(self._number)

    @property
    def delay_ms(self) -> float:
        """The time to wait before a request is tried, in ms.

        It is infinite while there is a connection or an attempt to connect.
        """
        return self._cluster.client.delay_ms(self._number, monotonic_ms())

    @property
    def failure(self) -> MpbrokerError:
        """The error that ended the last connection or attempt; there must be one."""
        return self._cluster.failure(self._number)

    def give_up(self) -> RequestTimeoutError:
        """Close the connection to a broker that is too slow; return the error."""
        text = f"{self.address} did not answer in time"
        # A late answer would be taken for the answer to another request.
        self._cluster.client.disconnect(self._number, monotonic_ms(), text)
        return RequestTimeoutError(text)

    def wait(
        self,
        pending: Pending,
        response_type: type[ResponseT],
        timeout_s: float | None = None,
    ) -> ResponseT:
        """Wait for the response to a request that was sent; raise as `request` does."""
        client = self._cluster.client
        limit_s = self._cluster.timeout_s if timeout_s is None else timeout_s
        now_ms = monotonic_ms()
        deadline_ms = now_ms + limit_s * 1000
        while (answer := pending.answer) is None:
            deadline_ms = min(deadline_ms, self._cluster.end_by_ms)
            if now_ms >= deadline_ms:
                raise self.give_up()
            client.poll(deadline_ms - now_ms, now_ms)
            now_ms = monotonic_ms()
        if answer.response is not None:
            assert isinstance(answer.response, response_type)
            return answer.response
        assert answer.error is not None
        raise answer.error


class Cluster:
    """Sends requests to the brokers of a cluster, and waits for each response.

    Each call for metadata sends a request; there is no cache.

    Attributes:
        client: the client that has the connections. It knows a broker by a number that
            the cluster has given to the broker's address.
        addresses: the addresses of these numbers.
        timeout_s: the limit for every connection and response, in seconds.
        end_by_ms: no call waits beyond this time of the monotonic clock, in ms; see
            `end_by`.
    """

    def __init__(
        self,
        bootstrap: Sequence[Address],
        timeout_s: float,
        settings: ClientSettings | None = None,
    ) -> None:
        """Make a cluster without connections.

        Args:
            bootstrap: addresses to try, in order, until one answers.
            timeout_s: the limit for every connection and response, in seconds.
            settings: all other settings, such as those of TLS and SASL.
        """
        self.timeout_s = timeout_s
        self.end_by_ms = float("inf")
        timeout_ms = max(1, int(timeout_s * 1000))
        settings = settings or ClientSettings((), _SOFTWARE_NAME)
        settings = settings._replace(
            bootstrap=tuple(bootstrap),
            client_id=settings.client_id or _SOFTWARE_NAME,
            request_timeout_ms=timeout_ms,
            socket_connection_setup_timeout_ms=timeout_ms,
            socket_connection_setup_timeout_max_ms=timeout_ms,
            max_in_flight=1 << 30,
        )
        self.addresses = _Addresses()
        self._settings = settings
        self.client = make_network_client(settings, self.addresses, random.Random())
        self._numbers = {
            address: number for number, address in enumerate(settings.bootstrap)
        }
        self._nodes: dict[int, Address] = {}
        self._controller_id = -1
        self._publish()

    def _publish(self) -> None:
        self.addresses.set({number: at for at, number in self._numbers.items()})

    # -- connections -------------------------------------------------------------------

    def at(self, address: Address) -> Broker:
        """Return the broker at an address."""
        number = self._numbers.get(address)
        if number is None:
            number = self._numbers[address] = len(self._numbers)
            self._publish()
        return Broker(self, number, address)

    def connect(self, number: int) -> float:
        """Wait until a broker is ready; return the time at which it was, in ms.

        Args:
            number: the number that the cluster has given to the broker's address.

        Raises:
            BrokerUnavailableError: an attempt failed, or the timeout is over.
            AuthenticationError: a login or a certificate was refused.
        """
        client = self.client
        now_ms = monotonic_ms()
        deadline_ms = now_ms + self.timeout_s * 1000
        client.poll(0, now_ms)  # the broker may have closed it long ago
        failures = client.failures(number)
        while not client.ready(number, now_ms):
            deadline_ms = min(deadline_ms, self.end_by_ms)
            if client.failures(number) > failures and client.delay_ms(number, now_ms):
                raise self.failure(number)
            if now_ms >= deadline_ms:
                after = f"after {self.timeout_s:g} s"
                if now_ms >= self.end_by_ms:
                    after = "when the client was to end"
                text = f"cannot reach {self._address(number)}: not ready {after}"
                if client.failures(number):
                    text += f"; the last attempt: {client.error_of(number)}"
                raise RequestTimeoutError(text)
            wait_ms = min(client.delay_ms(number, now_ms), deadline_ms - now_ms)
            client.poll(wait_ms, now_ms)
            now_ms = monotonic_ms()
        return now_ms

    def _address(self, number: int) -> Address:
        return next(at for at, known in self._numbers.items() if known == number)

    def failure(self, number: int) -> MpbrokerError:
        """Return the error of the last attempt to connect to a broker, by its number.

        If metadata named the broker's address, the error says so.
        """
        error = self.client.error_of(number)
        address = self._address(number)
        if address in self._settings.bootstrap or not isinstance(
            error, BrokerUnavailableError
        ):
            return error
        bootstrap = ",".join(map(str, self._settings.bootstrap))
        return BrokerUnavailableError(
            f"{error} (the broker at {bootstrap} named {address}: see its"
            " advertised.listeners)"
        )

    def any_broker(self) -> Broker:
        """Return a connected broker; connect to a bootstrap address if there is none.

        Raises:
            BrokerUnavailableError: no bootstrap address answers; the text has the
                reason for each.
            AuthenticationError: a login or a certificate was refused.
        """
        for address, number in self._numbers.items():
            if self.client.is_connected(number):
                return Broker(self, number, address)
        reasons = []
        for address in self._settings.bootstrap:
            number = self._numbers[address]
            try:
                self.connect(number)
            except BrokerUnavailableError as error:
                reasons.append(error)
            else:
                return Broker(self, number, address)
        raise BrokerUnavailableError("; ".join(map(str, reasons)))

    def await_broker(self, timeout_s: float) -> None:
        """Connect to any broker, and try again for a while if none can be reached.

        Nothing is asked of the broker, so there is nothing that could be done twice.

        Args:
            timeout_s: how long to try, in seconds. An attempt that has begun may take
                `Cluster.timeout_s` in addition.

        Raises:
            BrokerUnavailableError, AuthenticationError: see `any_broker`.
        """
        deadline = time.monotonic() + timeout_s
        self.poll(0)  # a broker may have closed its connection since the last call
        while True:
            try:
                self.any_broker()
            except BrokerUnavailableError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(_RETRY_INTERVAL_S)
            else:
                return

    def controller(self) -> Broker:
        """Return the controller, which changes topics; any broker if none is known."""
        if self._controller_id not in self._nodes:
            self.metadata([])
        if self._controller_id not in self._nodes:
            return self.any_broker()
        return self.broker(self._controller_id)

    def broker(self, node_id: int) -> Broker:
        """Connect to the broker with an id, and return it.

        Raises:
            BrokerUnavailableError: it does not answer, or the metadata lacks it.
        """
        broker = self.named(node_id)
        self.connect(self._numbers[broker.address])
        return broker

    def named(self, node_id: int) -> Broker:
        """Return the broker with an id; do not connect to it.

        Raises:
            BrokerUnavailableError: the metadata lacks it.
        """
        if node_id == NO_NODE:
            raise BrokerUnavailableError(
                "a partition has no leader: its broker is not there, or the log"
                " directory that has it"
            )
        if node_id not in self._nodes:
            raise BrokerUnavailableError(f"no broker has the id {node_id}")
        return self.at(self._nodes[node_id])

    def is_named(self, node_id: int) -> bool:
        """Return whether the newest metadata has a broker's address."""
        return node_id in self._nodes

    def is_reachable(self, node_id: int) -> bool:
        """Return whether a broker can be expected to answer; begin to connect if not.

        Return False if it is not connected and the last attempt to connect failed.
        """
        broker = self.named(node_id)
        number = self._numbers[broker.address]
        failures = self.client.failures(number)
        return self.client.ready(number, monotonic_ms()) or not failures

    def poll(self, wait_ms: float) -> None:
        """Receive and send; wait up to ``wait_ms`` for events."""
        self.client.poll(wait_ms, monotonic_ms())

    def request(
        self,
        request: Message,
        response_type: type[ResponseT],
        *,
        max_version: int | None = None,
    ) -> ResponseT:
        """Send a request to any broker, as `Broker.request` does."""
        return self.any_broker().request(
            request, response_type, max_version=max_version
        )

    # -- what is where -----------------------------------------------------------------

    def metadata(
        self, topics: Sequence[str] | None, *, auto_create: bool = False
    ) -> MetadataResponse:
        """Ask for brokers and topics, and remember the brokers.

        Args:
            topics: names of topics, each with an error code of its own in the response;
                None asks for all.
            auto_create: whether the broker may create topics that it does not have.
        """
        broker = self.any_broker()
        asked = None if topics is None else [_named(name) for name in topics]
        request = MetadataRequest(topics=asked, allow_auto_topic_creation=auto_create)
        version = broker.version_for(MetadataRequest)
        if version < 4:
            request.allow_auto_topic_creation = True  # older versions always do
        response = broker.request(request, MetadataResponse)
        if version < _EPOCHS_SINCE:
            for topic in response.topics:
                for partition in topic.partitions:
                    partition.leader_epoch = -1
        self._nodes = {
            node.node_id: Address(node.host, node.port) for node in response.brokers
        }
        self._controller_id = response.controller_id
        return response

    def topic(
        self,
        name: str,
        *,
        auto_create: bool = False,
        wait: bool = True,
        needed: Collection[int] = (),
    ) -> MetadataResponseTopic:
        """Return a topic, waiting until each of its partitions has a leader.

        Args:
            name: the topic's name.
            auto_create: whether the broker may create the topic.
            wait: whether to wait for leaders; if not, return partitions without one.
            needed: the partitions whose leaders are waited for; none: all.

        Raises:
            ApiError: there is no such topic, or a partition has no leader within the
                timeout.
        """
        deadline = time.monotonic() + self.timeout_s
        unknown = 0
        while True:
            answer = self.metadata([name], auto_create=auto_create)
            topic = only(answer.topics, "the broker")
            code = topic.error_code
            if not code:
                codes = [
                    partition.error_code
                    for partition in topic.partitions
                    if not needed or partition.partition_index in needed
                ]
                if not wait or ErrorCode.LEADER_NOT_AVAILABLE not in codes:
                    return topic
                code = ErrorCode.LEADER_NOT_AVAILABLE
            unknown += code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            retriable = (wait and code == ErrorCode.LEADER_NOT_AVAILABLE) or (
                auto_create and 0 < unknown <= _UNKNOWN_TOPIC_RETRIES
            )
            if not retriable or time.monotonic() > deadline:
                check_error(code, f"topic {name!r}")
            time.sleep(_RETRY_INTERVAL_S)

    def end_by(self, end_s: float) -> None:
        """Let no call wait beyond a time, not even one that waits now.

        Any thread may call this.

        Args:
            end_s: the time of the monotonic clock, in seconds.
        """
        self.end_by_ms = end_s * 1000
        self.client.wakeup()

    def close(self) -> None:
        """Close all connections; the cluster cannot be used any more."""
        self.client.close_all()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def only(entries: Sequence[EntryT], broker: object) -> EntryT:
    """Return the first entry of a response to a request that named one resource.

    Args:
        entries: the response's list of results.
        broker: the name of the broker that answered, for the error.

    Raises:
        ProtocolError: the response has no entry.
    """
    if not entries:
        raise ProtocolError(f"the answer of {broker} lacks what was asked for")
    return entries[0]


def _named(name: str) -> MetadataRequestTopic:
    return MetadataRequestTopic(name=name)
