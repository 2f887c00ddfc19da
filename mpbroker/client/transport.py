"""A `Connection` on a blocking socket."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable
from typing import Final, TypeVar

from mpbroker.client.addresses import Address
from mpbroker.client.connection import SOFTWARE_NAME, Answer, Connection
from mpbroker.client.errors import BrokerUnavailableError, RequestTimeoutError
from mpbroker.protocol.errors import ProtocolError
from mpbroker.protocol.framing import DEFAULT_MAX_FRAME_BYTES
from mpbroker.protocol.message import Message

ResponseT = TypeVar("ResponseT", bound=Message)

# Large enough that a fetch of megabytes takes few system calls.
_RECEIVE_BYTES: Final = 256 * 1024


class Transport:
    """One connected broker. Every wait ends after ``timeout_s``."""

    def __init__(self, address: Address, sock: socket.socket, timeout_s: float) -> None:
        self.address = address
        self.timeout_s = timeout_s
        self._socket = sock
        self._connection = Connection(SOFTWARE_NAME, DEFAULT_MAX_FRAME_BYTES)
        self._answers: dict[int, Message] = {}

    @classmethod
    def connect(cls, address: Address, timeout_s: float) -> Transport:
        """Connect and agree on versions.

        Raises:
            BrokerUnavailableError: says what was tried and why it failed.
        """
        try:
            sock = socket.create_connection(address, timeout_s)
        except OSError as error:
            raise BrokerUnavailableError(_why_unreachable(address, error)) from error
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        transport = cls(address, sock, timeout_s)
        try:
            transport._negotiate()
        except ProtocolError as error:
            transport.close()
            raise BrokerUnavailableError(
                f"{address} does not answer as a Kafka broker does: {error}"
            ) from error
        except BaseException:
            transport.close()
            raise
        return transport

    def _negotiate(self) -> None:
        self._connection.negotiate()
        deadline = time.monotonic() + self.timeout_s
        while not self._connection.is_ready:
            self._flush()
            self._receive(deadline)

    def version_for(
        self, request: type[Message], max_version: int | None = None
    ) -> int:
        """See `Connection.version_for`."""
        return self._connection.version_for(request, max_version)

    def request(
        self,
        request: Message,
        response_type: type[ResponseT],
        *,
        max_version: int | None = None,
        timeout_s: float | None = None,
    ) -> ResponseT:
        """Send a request and wait for its answer.

        Raises:
            RequestTimeoutError: no answer in ``timeout_s`` (the transport's if None).
            BrokerUnavailableError: the connection broke.
            ProtocolError: the answer is not one; the transport is of no use any more.
        """
        sent = self.send(request, response_type, max_version=max_version)
        return self.wait(sent, response_type, timeout_s)

    def send(
        self,
        request: Message,
        response_type: type[Message],
        *,
        max_version: int | None = None,
        expect_answer: bool = True,
    ) -> int:
        """Send a request; its answer is for `wait`. See `Connection.send`."""
        sent = self._connection.send(
            request,
            response_type,
            max_version=max_version,
            expect_answer=expect_answer,
        )
        self._flush()
        return sent

    def wait(
        self,
        correlation_id: int,
        response_type: type[ResponseT],
        timeout_s: float | None = None,
    ) -> ResponseT:
        """Wait for the answer to one request sent before; raises as `request`."""
        wait_s = self.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + wait_s
        while correlation_id not in self._answers:
            for answer in self._receive(deadline):
                self._answers[answer.correlation_id] = answer.response
        response = self._answers.pop(correlation_id)
        assert isinstance(response, response_type)
        return response

    def _flush(self) -> None:
        data = self._connection.data_to_send()
        if not data:
            return
        self._socket.settimeout(self.timeout_s)
        try:
            self._socket.sendall(data)
        except TimeoutError as error:
            raise RequestTimeoutError(
                f"{self.address} took no bytes for {self.timeout_s:g} s"
            ) from error
        except OSError as error:
            raise self._lost(error.strerror or str(error)) from error

    def _receive(self, deadline: float) -> Iterable[Answer]:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise RequestTimeoutError(f"{self.address} did not answer in time")
        self._socket.settimeout(left_s)
        try:
            data = self._socket.recv(_RECEIVE_BYTES)
        except TimeoutError as error:
            raise RequestTimeoutError(
                f"{self.address} did not answer in time"
            ) from error
        except OSError as error:
            raise self._lost(error.strerror or str(error)) from error
        if not data:
            raise self._lost("closed by the broker")
        return self._connection.receive_data(data)

    def _lost(self, reason: str) -> BrokerUnavailableError:
        return BrokerUnavailableError(
            f"lost the connection to {self.address}: {reason.lower()}"
        )

    def close(self) -> None:
        """Close the socket; unanswered requests may or may not be acted upon."""
        self._socket.close()


def connect_any(
    addresses: Iterable[Address],
    timeout_s: float,
    connect: Callable[[Address, float], Transport] = Transport.connect,
) -> Transport:
    """Connect to the first address that answers.

    Raises:
        BrokerUnavailableError: none did; the text has a reason for each.
    """
    reasons = []
    for address in addresses:
        try:
            return connect(address, timeout_s)
        except BrokerUnavailableError as error:
            reasons.append(error)
    raise BrokerUnavailableError("; ".join(map(str, reasons)))


def _why_unreachable(address: Address, error: OSError) -> str:
    if isinstance(error, ConnectionRefusedError):
        return f"cannot reach {address}: connection refused; is the broker running?"
    if isinstance(error, socket.gaierror):
        return f"cannot reach {address}: unknown host name {address.host!r}"
    if isinstance(error, TimeoutError):
        return f"cannot reach {address}: no answer in time"
    return f"cannot reach {address}: {(error.strerror or str(error)).lower()}"
