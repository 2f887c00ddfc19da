"""The values of `NetworkClient`: requests in flight, their results, and counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

from mpbroker.base.errors import MpbrokerError
from mpbroker.client.addresses import Address
from mpbroker.client.errors import AuthenticationError, UnsupportedVersionError
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.message import Message
from mpbroker.protocol.primitives import Buffer

# From these versions on the client waits for throttle_time_ms before its next request.
# With older versions the broker itself has waited before it answered. Source: KIP-219.
THROTTLED_FROM: Final[Mapping[int, int]] = {
    ApiKey.PRODUCE: 6,
    ApiKey.FETCH: 8,
    ApiKey.LIST_OFFSETS: 3,
    ApiKey.METADATA: 6,
    ApiKey.OFFSET_COMMIT: 4,
    ApiKey.OFFSET_FETCH: 4,
    ApiKey.FIND_COORDINATOR: 2,
    ApiKey.JOIN_GROUP: 3,
    ApiKey.HEARTBEAT: 2,
    ApiKey.LEAVE_GROUP: 2,
    ApiKey.SYNC_GROUP: 2,
    ApiKey.API_VERSIONS: 2,
    ApiKey.INIT_PRODUCER_ID: 1,
    ApiKey.ADD_PARTITIONS_TO_TXN: 1,
    ApiKey.ADD_OFFSETS_TO_TXN: 1,
    ApiKey.END_TXN: 1,
    ApiKey.TXN_OFFSET_COMMIT: 1,
}


CLOSED_BY_BROKER: Final = "closed by the broker"
"""The reason that a `Wire` gives for a connection that its peer has closed."""


class ClientResponse(NamedTuple):
    """The result of a request: the response, or the error if none came.

    Attributes:
        node: the id of the node that the request was sent to.
        response: the response; None if there is none.
        error: the reason why no response came; None if one came, or none was expected.
        timed_out: whether the connection was closed because a response was too late.
        latency_ms: the time from the request to its end, in ms.
    """

    node: int
    request: Message
    response: Message | None
    error: MpbrokerError | None
    timed_out: bool
    latency_ms: float

    @property
    def disconnected(self) -> bool:
        """Whether no response came; the broker may have executed the request."""
        return self.response is None and not isinstance(
            self.error, UnsupportedVersionError
        )


Callback = Callable[[ClientResponse], None]


class Wire(Protocol):
    """The sockets that a `NetworkClient` works with: `Selector`, or a fake in tests."""

    connected: list[int]
    disconnected: dict[int, str]
    refused: dict[int, AuthenticationError]
    received: list[tuple[int, bytes]]
    wait_ns: int
    io_ns: int

    def connect(self, node: int, address: Address, host: str) -> None: ...
    def is_sending(self, node: int) -> bool: ...
    def send(self, node: int, data: bytes) -> None: ...
    def send_parts(self, node: int, parts: Sequence[Buffer]) -> None: ...
    def close(self, node: int) -> None: ...
    def poll(self, timeout_ms: float) -> None: ...
    def wakeup(self) -> None: ...
    def shutdown(self) -> None: ...


class NetworkCounts:
    """The totals of one client since it was made; any thread may read them."""

    __slots__ = (
        "bytes_in",
        "bytes_out",
        "connections_closed",
        "connections_made",
        "failed_authentications",
        "io_ns",
        "polls",
        "reauthentications",
        "requests",
        "responses",
        "transfers",
        "wait_ns",
    )

    def __init__(self) -> None:
        for name in self.__slots__:
            setattr(self, name, 0)

    def note_poll(self, wire: Wire) -> None:
        """Count one more poll, and copy the total times that all polls have taken."""
        self.polls += 1
        self.wait_ns, self.io_ns = wire.wait_ns, wire.io_ns

    bytes_in: int
    bytes_out: int
    connections_closed: int
    connections_made: int
    failed_authentications: int
    io_ns: int  # receiving and sending
    polls: int
    reauthentications: int
    requests: int
    responses: int
    transfers: int  # receives and sends
    wait_ns: int  # time in which polls waited


class InFlight:
    """A request that was sent and has no response yet.

    Times are in ms of the client's clock.
    """

    __slots__ = ("callback", "correlation_id", "deadline_ms", "request", "sent_ms")

    def __init__(
        self,
        correlation_id: int,
        request: Message,
        callback: Callback | None,
        sent_ms: float,
        deadline_ms: float,
    ) -> None:
        self.correlation_id = correlation_id
        self.request = request
        self.callback = callback  # None for the client's own Metadata requests
        self.sent_ms = sent_ms
        self.deadline_ms = deadline_ms
