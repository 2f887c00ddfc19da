"""Who sent a request, from where and by which listener.

A connection's row says it all, and belongs to the connection only as long as that is
there: a client may send a request and close, and the row be another client's before
the request is executed. What the row then says is not about the sender. As long as it
names the request's slot it is, since no slot is used again before it is answered.

Source: Kafka's RequestContext and AuthorizableRequestContext.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from struct import Struct
from typing import TYPE_CHECKING, Final

from mpbroker.ipc.layout import (
    CONNECTION_LISTENER,
    CONNECTION_PEER_ADDRESS,
    CONNECTION_PRINCIPAL,
    CONNECTION_SLOT,
    connection_row,
)
from mpbroker.network.connection_rows import connection_name, peer_address

if TYPE_CHECKING:
    from mpbroker.server.request import Request

_MAX_SENDERS: Final = 4096
_KEY: Final = Struct("=4q")


class Sender:
    """What all requests of a principal from a host by a listener have in common.

    ``key`` tells it from others in native/server/verdicts.c: principal, listener and
    address as words of a connection's row. None: it is not known there.
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
    """What is known of a request's sender.

    Attributes:
        principal: as Kafka prints it: ``User:alice``.
        host: the address of the client's end.
        listener_name: of the listener that the client has dialled.
        security_protocol: PLAINTEXT, SSL, SASL_PLAINTEXT or SASL_SSL.
        api_key: of the request.
        api_version: likewise.
        client_id: what the client calls itself, which proves nothing.
        correlation_id: likewise.
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
            name: makes the id of a connection.
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
        """Kafka's form: local address and port, peer's, and a number."""
        return self._name(self._connection)


class RequestContexts:
    """Finds the senders of requests, and remembers those it has seen.

    Args:
        words: of the control segment.
        principal_name: the text of a principal's number.
        listeners: name and security protocol of each, by index.
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
        """Return who sent the request in a slot; None: its connection has gone."""
        words, row = self._words, connection_row(connection)
        principal = words[row + CONNECTION_PRINCIPAL]
        listener = words[row + CONNECTION_LISTENER]
        high = words[row + CONNECTION_PEER_ADDRESS]
        low = words[row + CONNECTION_PEER_ADDRESS + 1]
        # Last: who takes the row forgets the slot before it writes anything else.
        if words[row + CONNECTION_SLOT] != slot + 1:
            return None
        key = principal, listener, high, low
        known = self._senders.get(key)
        if known is None:
            if len(self._senders) >= _MAX_SENDERS:
                self._senders.clear()
            known = self._senders[key] = Sender(
                self._principal_name(principal),
                peer_address(words, connection)[0],
                *self._listeners[listener],
                _KEY.pack(*key),
            )
        return known

    def name(self, connection: int) -> str:
        """A connection's id, for people."""
        return connection_name(self._words, connection)
