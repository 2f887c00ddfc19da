"""NodeConnection: the state of one broker's connection, and when to try it again."""

from __future__ import annotations

import errno
import os
import random
import socket
from collections.abc import Callable
from enum import Enum
from typing import Final

from mpbroker.base.errors import MpbrokerError
from mpbroker.client.addresses import Address
from mpbroker.client.backoff import Backoff
from mpbroker.client.client_request import CLOSED_BY_BROKER
from mpbroker.client.connection import Connection
from mpbroker.client.errors import AuthenticationError
from mpbroker.client.settings import ClientSettings

# Advice for users, by the reason why an attempt to connect failed.
_HINTS: Final = {
    os.strerror(errno.ECONNREFUSED).lower(): "; is the broker running?",
    CLOSED_BY_BROKER: "; is security.protocol the listener's?",
}


def why_unreachable(address: Address, error: OSError) -> str:
    """Return the error text for an attempt to connect that could not even begin."""
    reason = (error.strerror or str(error)).lower()
    if isinstance(error, socket.gaierror):
        reason = f"unknown host name {address.host!r} ({reason})"
    return f"cannot reach {address}: {reason}"


class NodeState(Enum):
    """The states of a connection, from no socket to one that takes requests."""

    DISCONNECTED = "disconnected"  # there is no socket; a backoff may run
    CONNECTING = "connecting"  # the socket is not connected yet
    CHECKING_API_VERSIONS = "checking api versions"  # likewise while it logs in
    REAUTHENTICATING = "reauthenticating"  # it logs in again; no request is sent
    READY = "ready"  # requests may be sent


class NodeConnection:
    """The state of the connection to one broker, its backoff and its throttling.

    Times are in ms of the client's clock.
    """

    def __init__(self, settings: ClientSettings) -> None:
        self.state = NodeState.DISCONNECTED
        self.connection: Connection | None = None
        self.last_attempt_ms = -float("inf")
        self.last_used_ms = 0.0
        self.setup_deadline_ms = float("inf")
        self.throttled_until_ms = -float("inf")
        self.reauthenticate_at_ms = float("inf")
        self._reconnect = Backoff(
            settings.reconnect_backoff_ms, settings.reconnect_backoff_max_ms
        )
        self._setup = Backoff(
            settings.socket_connection_setup_timeout_ms,
            settings.socket_connection_setup_timeout_max_ms,
        )
        self.failures = 0  # in a row
        self.has_answered = False  # a request of ours, since it was connected last
        self.last_error: MpbrokerError | None = None
        self._not_before_ms = -float("inf")
        self._resolved_from: Address | None = None
        self._addresses: list[Address] = []
        self._last_address: Address | None = None

    @property
    def is_connecting(self) -> bool:
        return self.state in (NodeState.CONNECTING, NodeState.CHECKING_API_VERSIONS)

    @property
    def has_deadline(self) -> bool:
        """Whether the connection must be ready by ``setup_deadline_ms``."""
        return self.is_connecting or self.state is NodeState.REAUTHENTICATING

    @property
    def has_failed(self) -> bool:
        """Whether the last attempt to connect failed."""
        return self.failures > 0

    def is_ready(self, now_ms: float) -> bool:
        """Return whether requests may be sent: connected, logged in, not throttled."""
        return (
            self.state is NodeState.READY
            and self.throttled_until_ms <= now_ms < self.reauthenticate_at_ms
        )

    def may_connect(self, now_ms: float) -> bool:
        """Return whether the node is disconnected and its backoff is over."""
        return self.state is NodeState.DISCONNECTED and now_ms >= self._not_before_ms

    def delay_ms(self, now_ms: float) -> float:
        """Return how long a caller that cannot send now should wait, in ms.

        After the end of a connection it is the rest of the backoff, 0 when that is
        over; else the rest of the throttling. It is inf if there is no time to wait
        for: the connection is ready (see ``is_ready``), or an event of its socket tells
        when it will be.
        """
        if self.state is NodeState.DISCONNECTED:
            return max(0.0, self._not_before_ms - now_ms)
        if self.throttled_until_ms > now_ms:
            return self.throttled_until_ms - now_ms
        return float("inf")

    def next_address(
        self, address: Address, resolve: Callable[[str, int], list[Address]]
    ) -> Address:
        """Return the numeric address to try next; a name's addresses take turns.

        The name is resolved again when all were tried, and after a success.

        Raises:
            OSError: the name cannot be resolved.
        """
        if self._resolved_from != address or not self._addresses:
            self._addresses = resolve(*address)
            self._resolved_from = address
            # Do not begin with the address that has just failed or hung up.
            if len(self._addresses) > 1 and self._addresses[0] == self._last_address:
                self._addresses.append(self._addresses.pop(0))
        self._last_address = self._addresses.pop(0)
        return self._last_address

    def connecting(self, now_ms: float, rng: random.Random) -> None:
        """Note that an attempt to connect begins."""
        self.state = NodeState.CONNECTING
        self.has_answered = False
        self.last_attempt_ms = now_ms
        self.setup_deadline_ms = now_ms + self._setup.delay_ms(self.failures, rng)

    def connected(self, now_ms: float, rng: random.Random) -> None:
        """Note that the connection is ready; forget earlier failures to connect."""
        self.state = NodeState.READY
        assert self.connection is not None
        lifetime_ms = self.connection.session_lifetime_ms
        # As in Kafka: early enough, and not all clients of a broker at the same time.
        self.reauthenticate_at_ms = (
            now_ms + lifetime_ms * rng.uniform(0.85, 0.95)
            if lifetime_ms > 0
            else float("inf")
        )
        self.failures = 0
        self._addresses = []

    def why_lost(self, address: Address | int, reason: str) -> str:
        """Return the error text for a lost connection, or for a failed attempt."""
        hint = _HINTS.get(reason, "")
        if not self.is_connecting:
            # A listener that wants a login closes upon the first request without one.
            hint = "" if self.has_answered else hint
            return f"lost the connection to {address}: {reason}{hint}"
        return f"cannot reach {address}: {reason}{hint}"

    def disconnected(
        self, error: MpbrokerError, now_ms: float, rng: random.Random
    ) -> None:
        """Note that the connection was lost, or that the attempt failed.

        An attempt has failed when all addresses of the name were tried, or one has
        refused the login: they are addresses of one broker.
        """
        has_another = self.is_connecting and bool(self._addresses)
        if isinstance(error, AuthenticationError):
            has_another, self._addresses = False, []
        self.state = NodeState.DISCONNECTED
        self.connection = None
        self.last_error = error
        self.last_attempt_ms = now_ms
        self._not_before_ms = now_ms
        if not has_another:
            self._not_before_ms += self._reconnect.delay_ms(self.failures, rng)
            self.failures += 1
