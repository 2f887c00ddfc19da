"""Find the sender of a request: principal, host and listener.

The connection's row, an entry of a table in shared memory, holds all three. But a
client may send a request and disconnect, and the row may belong to another client
before the request is executed. The row is the sender's only while it names the
request's slot (the request's own entry in shared memory): a slot is not used again
before its request is answered. So the slot is compared after the other fields were
read.

Source: Kafka's RequestContext and AuthorizableRequestContext.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from struct import Struct
from typing import TYPE_CHECKING, Final

from mpbroker.ipc.errors import DamagedSegmentError
from mpbroker.ipc.layout import (
    CONNECTION_LISTENER,
    CONNECTION_PEER_ADDRESS,
    CONNECTION_PRINCIPAL,
    connection_row,
    is_request_of,
)
from mpbroker.network.connection_rows import connection_name, peer_address

if TYPE_CHECKING:
    from mpbroker.server.request import Request

_MAX_SENDERS: Final = 4096
_KEY: Final = Struct("=4q")


class Sender:
    """Describes who sends requests: a principal at a host, connected to a listener.

    Many requests share one object.

    Attributes:
        key: identifies the sender in native/server/verdicts.c: 32 bytes, the words of
            a connection's row for principal, listener and address (two words), each 8
            bytes, native-endian. None: C must not know the sender.
    """

    __slots__ = ("host", "key", "listener_name", "principal", "security_protocol")

    def __init__(
        self,
        principal: str,
        host: str,
        listener_name: str,
        security_protocol: str,
        key: bytes | None = None,
    ) -> None:
        self.key = key
        self.principal = principal
        self.host = host
        self.listener_name = listener_name
        self.security_protocol = security_protocol


class RequestContext:
    """Tells an authorizer the sender of one request and the request's header.

    Attributes:
        principal: as Kafka prints it: ``User:alice``.
        host: the client's IP address.
        listener_name: the listener that the client is connected to.
        security_protocol: PLAINTEXT, SSL, SASL_PLAINTEXT or SASL_SSL.
        api_key, api_version, correlation_id: from the request's header.
        client_id: from the request's header; the client chooses it freely, so it must
            not decide about permissions.
    """

    __slots__ = (
        "_connection",
        "_name",
        "api_key",
        "api_version",
        "client_id",
        "correlation_id",
        "host",
        "listener_name",
        "principal",
        "security_protocol",
    )

    def __init__(
        self, sender: Sender, request: Request, name: Callable[[int], str]
    ) -> None:
        """Make the context of one request.

        Args:
            sender: the request's sender.
            request: the request.
            name: returns the id of a connection, by its row.
        """
        self.principal = sender.principal
        self.host = sender.host
        self.listener_name = sender.listener_name
        self.security_protocol = sender.security_protocol
        self.api_key = request.api_key
        self.api_version = request.api_version
        self.client_id = request.client_id
        self.correlation_id = request.correlation_id
        self._connection = request.connection
        self._name = name

    @property
    def connection_id(self) -> str:
        """The connection's id as Kafka writes it.

        It consists of the broker's address and port, the client's address and port, and
        a number.
        """
        return self._name(self._connection)


class RequestContexts:
    """Finds the senders of requests, and keeps up to 4096 of them.

    Args:
        words: the control segment (shared memory of all processes), in 64-bit words.
        principal_name: returns the text of a principal's number.
        listeners: name and security protocol of each listener, by index.
    """

    def __init__(
        self,
        words: memoryview,
        principal_name: Callable[[int], str],
        listeners: Sequence[tuple[str, str]],
    ) -> None:
        self._words = words
        self._principal_name = principal_name
        self._listeners = listeners
        self._senders: dict[tuple[int, int, int, int], Sender] = {}

    def sender(self, connection: int, slot: int) -> Sender | None:
        """Return the sender of the request in a slot; None if it has disconnected."""
        words, row = self._words, connection_row(connection)
        principal = words[row + CONNECTION_PRINCIPAL]
        listener = words[row + CONNECTION_LISTENER]
        high = words[row + CONNECTION_PEER_ADDRESS]
        low = words[row + CONNECTION_PEER_ADDRESS + 1]
        # Read this last: the slot is cleared before the row gets the values of another
        # connection, so the fields above are the sender's if the slot still is.
        if not is_request_of(words, row, slot):
            return None
        key = principal, listener, high, low
        known = self._senders.get(key)
        if known is None:
            known = self._read(key, connection, slot)
        return known

    def _read(
        self, key: tuple[int, int, int, int], connection: int, slot: int
    ) -> Sender | None:
        """Read a sender's principal and address from its connection's row; keep them.

        Return None if the sender has disconnected.

        Raises:
            DamagedSegmentError: the row's principal has a number that no principal has.
        """
        principal, listener, _, _ = key
        try:
            text = self._principal_name(principal)
            host = peer_address(self._words, connection)[0]
        except DamagedSegmentError:
            # A number is free once no connection has it.
            if not self._is_senders(connection, slot):
                return None
            raise
        # Once more, since the row was read once more: what is kept under the key must
        # be of this connection.
        if not self._is_senders(connection, slot):
            return None
        if len(self._senders) >= _MAX_SENDERS:
            self._senders.clear()
        sender = Sender(text, host, *self._listeners[listener], _KEY.pack(*key))
        self._senders[key] = sender
        return sender

    def _is_senders(self, connection: int, slot: int) -> bool:
        return is_request_of(self._words, connection_row(connection), slot)

    def name(self, connection: int) -> str:
        """Return a connection's id, as Kafka writes it."""
        return connection_name(self._words, connection)
