"""NetworkClient sends requests to many brokers at once, and connects when needed.

It is sans-IO: a `Selector` moves the bytes, and the time comes in as ``now_ms``. So
each peer and each timing can be tested without sockets. One thread runs it, by

    if client.ready(node, now_ms):
        client.send(node, request, ResponseClass, callback, now_ms)
    client.poll(timeout_ms, now_ms)

A connection negotiates versions and logs in before it is ready. If a login or a
certificate is refused, the callers that wait are told so. The connection is tried again
after its backoff, like one that was lost: the password, or the certificate, may be
changed meanwhile. Responses come in the order of requests. A response with another
correlation id than the oldest request's ends its connection. All requests that were in
flight on a lost connection fail as disconnected, in the order sent.

Source: Kafka protocol guide, "Network"; KIP-144 (backoff), KIP-219 (throttling),
KIP-601 (connection setup timeouts), KIP-1102 (bootstrapping again).
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Callable, Mapping

from mpbroker.base.errors import MpbrokerError
from mpbroker.client.addresses import Address
from mpbroker.client.client_request import (
    THROTTLED_FROM,
    Callback,
    ClientResponse,
    InFlight,
    NetworkCounts,
    Wire,
)
from mpbroker.client.connection import Connection
from mpbroker.client.errors import (
    AuthenticationError,
    DisconnectedError,
    UnsupportedVersionError,
)
from mpbroker.client.metadata import Metadata
from mpbroker.client.node_connection import NodeConnection, NodeState, why_unreachable
from mpbroker.client.settings import ClientSettings
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError, ProtocolError
from mpbroker.protocol.message import Message
from mpbroker.protocol.messages.metadata import MetadataResponse

_log = logging.getLogger(__name__)


class NetworkClient:
    """Sends requests to many brokers, connects again, and keeps metadata up to date."""

    def __init__(
        self,
        wire: Wire,
        metadata: Metadata,
        settings: ClientSettings,
        resolve: Callable[[str, int], list[Address]],
        clock: Callable[[], float],
        rng: random.Random | None = None,
    ) -> None:
        """Make a client without connections.

        Args:
            wire: the sockets, which move the bytes; `close_all` closes them.
            metadata: the metadata that this client keeps up to date.
            settings: the settings of connections, as plain values.
            resolve: returns the numeric addresses of a host and port; raises OSError.
            clock: returns the time of a monotonic clock, in ms; read after waiting.
            rng: makes jitter, and chooses among equal nodes.
        """
        self._wire = wire
        self._metadata = metadata
        self._settings = settings
        self._resolve = resolve
        self._clock = clock
        self._rng = rng or random.Random()
        self._bootstrap = {
            -1 - index: address for index, address in enumerate(settings.bootstrap)
        }
        self._nodes: dict[int, NodeConnection] = {}
        self._in_flight: dict[int, deque[InFlight]] = {}
        self._done: list[tuple[Callback, ClientResponse]] = []
        self._metadata_node: int | None = None
        self._last_error = ""
        self._features: Mapping[str, int] = {}
        self._features_epoch = -1
        self.counts = NetworkCounts()

    # -- nodes -------------------------------------------------------------------------

    def _addresses(self) -> Mapping[int, Address]:
        return self._metadata.snapshot.nodes or self._bootstrap

    def _node(self, node: int) -> NodeConnection:
        found = self._nodes.get(node)
        if found is None:
            found = self._nodes[node] = NodeConnection(self._settings)
        return found

    def ready(self, node: int, now_ms: float) -> bool:
        """Return whether a request can be sent to a node now; if not, begin to connect.

        While a metadata update is due, no node is ready, because leaders may have
        moved.
        """
        if self.is_ready(node, now_ms):
            return True
        if self._node(node).may_connect(now_ms):
            self._connect(node, now_ms)
        return False

    def is_ready(self, node: int, now_ms: float) -> bool:
        """Return whether a request can be sent to a node now."""
        asks = self._metadata_node is not None
        metadata_due = not asks and not self._metadata.delay_ms(now_ms)
        return not metadata_due and self._can_send(node, now_ms)

    def _can_send(self, node: int, now_ms: float) -> bool:
        found = self._nodes.get(node)
        return (
            found is not None and found.is_ready(now_ms) and not self.is_occupied(node)
        )

    def is_occupied(self, node: int) -> bool:
        """Return whether a node takes no more requests until a response comes."""
        load = len(self._in_flight.get(node, ()))
        return load >= self._settings.max_in_flight or self._wire.is_sending(node)

    def delay_ms(self, node: int, now_ms: float) -> float:
        """Return how long to wait before trying a node, in ms.

        It is 0 if the node was never tried, and else the rest of its backoff or
        throttling. It is inf while the node is connected or connecting, or while
        metadata must first tell its address.
        """
        if not self.knows(node):
            return float("inf")
        found = self._nodes.get(node)
        return 0.0 if found is None else found.delay_ms(now_ms)

    def knows(self, node: int) -> bool:
        """Return whether a node's address is in the metadata or the bootstrap list."""
        return node in self._addresses()

    def in_flight(self, node: int | None = None) -> int:
        """Return how many requests to a node, or to all, wait for their responses."""
        if node is None:
            return sum(map(len, self._in_flight.values()))
        return len(self._in_flight.get(node, ()))

    def is_connected(self, node: int) -> bool:
        """Return whether a node is connected, as far as is known."""
        found = self._nodes.get(node)
        return found is not None and found.state in (
            NodeState.READY,
            NodeState.REAUTHENTICATING,
        )

    def failures(self, node: int) -> int:
        """Return the number of failed or lost connections to a node in a row."""
        found = self._nodes.get(node)
        return 0 if found is None else found.failures

    def error_of(self, node: int) -> MpbrokerError:
        """Return the error that ended the last connection to a node; one must exist."""
        error = self._node(node).last_error
        assert error is not None, f"node {node} has not failed"
        return error

    def version_for(
        self, node: int, request: type[Message], max_version: int | None = None
    ) -> int:
        """Return the highest version of a request that both sides know.

        The node must be ready. `Connection.version_for` has the arguments.
        """
        connection = self._node(node).connection
        assert connection is not None
        return connection.version_for(request, max_version)

    def feature_level(self, name: str) -> int:
        """Return the level of a finalized feature of the cluster; any thread may call.

        It is the newest level that a connection has learnt; 0 if the feature is unknown
        or not switched on.
        """
        return self._features.get(name, 0)

    def connection_count(self) -> int:
        """Return how many nodes are connected or connecting; any thread may call."""
        nodes = list(
            self._nodes.values()
        )  # the client's thread may add nodes meanwhile
        return sum(found.state is not NodeState.DISCONNECTED for found in nodes)

    def least_loaded_node(self, now_ms: float) -> int | None:
        """Return the node to send a request to that all nodes can answer, or None.

        The best is a ready node with the fewest requests in flight; then a node that is
        connecting; then the disconnected node whose last attempt is longest ago. None
        means that no node can take a request or be connected now.
        """
        nodes = list(self._addresses())
        self._rng.shuffle(nodes)
        best, fewest = None, 1 << 30
        connecting = None
        oldest, oldest_ms = None, float("inf")
        for node in nodes:
            found = self._node(node)
            if self._can_send(node, now_ms):
                load = self.in_flight(node)
                if load < fewest:
                    best, fewest = node, load
            elif found.is_connecting:
                connecting = node
            elif found.may_connect(now_ms) and found.last_attempt_ms < oldest_ms:
                oldest, oldest_ms = node, found.last_attempt_ms
        if best is not None:
            return best
        return connecting if connecting is not None else oldest

    def _connect(self, node: int, now_ms: float) -> None:
        address = self._addresses().get(node)
        if address is None:
            self._metadata.request_update()
            return
        found = self._node(node)
        try:
            numeric = found.next_address(address, self._resolve)
            found.connecting(now_ms, self._rng)
            self._wire.connect(node, numeric, address.host)
        except OSError as error:
            self._disconnected(node, why_unreachable(address, error), now_ms)
            return
        self._in_flight.setdefault(node, deque())

    # -- sending -----------------------------------------------------------------------

    def send(
        self,
        node: int,
        request: Message,
        response_type: type[Message],
        callback: Callback,
        now_ms: float,
        *,
        max_version: int | None = None,
        expect_answer: bool = True,
        timeout_ms: float | None = None,
    ) -> None:
        """Send a request to a node that is `ready`.

        Args:
            node: the node's id.
            request: the request, sent in the highest version that both sides know.
            response_type: the class that decodes the response.
            callback: called once, by a later `poll`, with the response or the error,
                also if the node does not know the request's version. It gets neither if
                no response is expected.
            now_ms: the time of the client's clock, in ms.
            max_version: the highest version to send; None: no limit.
            expect_answer: False for a Produce with acks=0.
            timeout_ms: close the connection if the response takes longer, in ms; None:
                request.timeout.ms.
        """
        assert self._can_send(node, now_ms), f"node {node} is not ready"
        try:
            self._put(
                node,
                request,
                response_type,
                callback,
                now_ms,
                max_version,
                expect_answer,
                timeout_ms,
            )
        except (UnsupportedVersionError, ProtocolError) as error:
            refusal = UnsupportedVersionError(str(error))
            refusal.__cause__ = error
            response = ClientResponse(node, request, None, refusal, False, 0.0)
            self._done.append((callback, response))

    def _put(
        self,
        node: int,
        request: Message,
        response_type: type[Message],
        callback: Callback | None,
        now_ms: float,
        max_version: int | None = None,
        expect_answer: bool = True,
        timeout_ms: float | None = None,
    ) -> None:
        connection = self._node(node).connection
        assert connection is not None
        correlation_id = connection.send(
            request,
            response_type,
            max_version=max_version,
            expect_answer=expect_answer,
        )
        if expect_answer:
            limit_ms = timeout_ms or self._settings.request_timeout_ms
            self._in_flight[node].append(
                InFlight(correlation_id, request, callback, now_ms, now_ms + limit_ms)
            )
        elif callback is not None:
            response = ClientResponse(node, request, None, None, False, 0.0)
            self._done.append((callback, response))
        self._node(node).last_used_ms = now_ms
        parts = connection.parts_to_send()
        self.counts.requests += 1
        self.counts.bytes_out += sum(map(len, parts))
        self.counts.transfers += 1
        self._wire.send_parts(node, parts)

    # -- the loop ----------------------------------------------------------------------

    def poll(self, timeout_ms: float, now_ms: float) -> None:
        """Send due requests, wait for events up to ``timeout_ms``, and call callbacks.

        An exception of a callback is logged; the other callbacks are called all the
        same.
        """
        if self._done:
            timeout_ms = 0
        metadata_ms = self._update_metadata(now_ms)
        wait_ms = min(timeout_ms, metadata_ms, self._next_deadline_ms(now_ms) - now_ms)
        self._wire.poll(max(0.0, wait_ms))
        self.counts.note_poll(self._wire)
        if wait_ms > 0:
            now_ms = self._clock()
        self._take_events(now_ms)
        self._reauthenticate(now_ms)
        self._drop_late(now_ms)
        self._close_idle(now_ms)
        # Only after all responses are read: the last poll may be minutes ago.
        if self._settings.rebootstrap and self._metadata.is_overdue(
            now_ms, self._settings.metadata_recovery_rebootstrap_trigger_ms
        ):
            self._rebootstrap(now_ms, "no metadata for too long")
        done, self._done = self._done, []
        for callback, response in done:
            try:
                callback(response)
            except Exception:  # noqa: BLE001 - a callback must not end the loop
                _log.exception("callback of %s", type(response.request).__name__)

    def _take_events(self, now_ms: float) -> None:
        wire = self._wire
        for node in wire.connected:
            self.counts.connections_made += 1
            found = self._node(node)
            found.connection = Connection(
                self._settings.client_id,
                authenticator=self._settings.security.make_authenticator(),
            )
            found.state = NodeState.CHECKING_API_VERSIONS
            found.connection.negotiate()
            wire.send(node, found.connection.data_to_send())
        for node, data in wire.received:
            self.counts.bytes_in += len(data)
            self.counts.transfers += 1
            self._receive(node, data, now_ms)
        for node, refusal in list(wire.refused.items()):
            self._refused(node, refusal, now_ms)
        for node, reason in list(wire.disconnected.items()):
            address = self._addresses().get(node, node)
            text = self._node(node).why_lost(address, reason)
            self._disconnected(node, text, now_ms)

    def _receive(self, node: int, data: bytes, now_ms: float) -> None:
        found = self._node(node)
        if found.connection is None:
            return  # closed since
        was_ready = found.connection.is_ready
        try:
            answers = found.connection.receive_data(data)
        except (AuthenticationError, UnsupportedVersionError) as error:
            self._wire.close(node)
            self._refused(node, error, now_ms)
            return
        except (ProtocolError, ApiError) as error:
            address = self._addresses().get(node, node)
            self._wire.close(node)
            self._disconnected(
                node,
                f"{address} does not answer like a Kafka broker: {error}",
                now_ms,
            )
            return
        found.last_used_ms = now_ms
        if not was_ready:
            again = found.connection.data_to_send()
            if again:
                self._wire.send(node, again)  # ApiVersions again, or the login
            if found.connection.is_ready:
                renewed = found.state is NodeState.REAUTHENTICATING
                self.counts.reauthentications += renewed
                found.connected(now_ms, self._rng)
                if found.connection.features_epoch >= self._features_epoch:
                    self._features = found.connection.features
                    self._features_epoch = found.connection.features_epoch
        connection = found.connection
        for answer in answers:
            if found.connection is not connection:
                break  # an answer made us disconnect: all in flight has failed
            self._complete(node, answer.response, answer.version, now_ms)

    def _complete(
        self, node: int, response: Message, version: int, now_ms: float
    ) -> None:
        waiting = self._in_flight[node].popleft()
        self.counts.responses += 1
        self._node(node).has_answered = True
        throttle_ms = getattr(response, "throttle_time_ms", 0)
        if throttle_ms > 0 and version >= THROTTLED_FROM.get(response.api_key, 1 << 15):
            self._node(node).throttled_until_ms = now_ms + throttle_ms
            for other in self._in_flight[node]:
                other.deadline_ms += throttle_ms
        if waiting.callback is None:
            assert isinstance(response, MetadataResponse)
            self._take_metadata(response, now_ms)
            return
        answer = ClientResponse(
            node, waiting.request, response, None, False, now_ms - waiting.sent_ms
        )
        self._done.append((waiting.callback, answer))

    def _refused(self, node: int, error: MpbrokerError, now_ms: float) -> None:
        """Handle a connection that the TLS handshake or the login has closed.

        Its requests fail, and waits for metadata raise the refusal.
        """
        address = self._addresses().get(node, node)
        self.counts.failed_authentications += 1
        refusal = AuthenticationError(f"cannot use {address}: {error}")
        if isinstance(error, AuthenticationError):
            refusal = type(error)(str(refusal))
        refusal.__cause__ = error
        self._disconnected(node, str(refusal), now_ms, error=refusal)
        self._metadata.refuse(refusal)

    def _disconnected(
        self,
        node: int,
        reason: str,
        now_ms: float,
        timed_out: bool = False,
        error: MpbrokerError | None = None,
    ) -> None:
        """Handle a connection that is closed already: fail its requests in flight."""
        _log.debug("node %d: %s", node, reason)
        self._last_error = reason
        self.counts.connections_closed += not self._node(node).is_connecting
        error = error or DisconnectedError(reason)
        self._node(node).disconnected(error, now_ms, self._rng)
        lost, self._in_flight[node] = self._in_flight.get(node, deque()), deque()
        if self._metadata_node == node:
            self._metadata_node = None
            self._metadata.fail_update(now_ms)
        for waiting in lost:
            if waiting.callback is not None:
                answer = ClientResponse(
                    node,
                    waiting.request,
                    None,
                    error,
                    timed_out,
                    now_ms - waiting.sent_ms,
                )
                self._done.append((waiting.callback, answer))
        self._metadata.request_update()

    def disconnect(
        self, node: int, now_ms: float, reason: str = "closed by us"
    ) -> None:
        """Close a node's connection, if there is one; all requests in flight fail."""
        if self._node(node).state is not NodeState.DISCONNECTED:
            self._wire.close(node)
            self._disconnected(node, reason, now_ms)

    def _next_deadline_ms(self, now_ms: float) -> float:
        deadline = float("inf")
        for node, found in self._nodes.items():
            deadline = min(deadline, found.reauthenticate_at_ms)
            if found.has_deadline:
                deadline = min(deadline, found.setup_deadline_ms)
            # Look at all requests: each has its own deadline, and some have none.
            for waiting in self._in_flight.get(node, ()):
                deadline = min(deadline, waiting.deadline_ms)
        return deadline

    def _drop_late(self, now_ms: float) -> None:
        for node, found in list(self._nodes.items()):
            address = self._addresses().get(node, node)
            if found.has_deadline and now_ms >= found.setup_deadline_ms:
                self._wire.close(node)
                self._disconnected(
                    node, f"cannot reach {address}: no connection in time", now_ms
                )
                continue
            waiting = self._in_flight.get(node)
            if waiting and any(now_ms >= each.deadline_ms for each in waiting):
                waited_ms = now_ms - waiting[0].sent_ms
                self._wire.close(node)
                self._disconnected(
                    node,
                    f"{address} did not answer for {waited_ms:.0f} ms"
                    " (request.timeout.ms)",
                    now_ms,
                    timed_out=True,
                )

    def _reauthenticate(self, now_ms: float) -> None:
        """Log in again on connections whose session ends soon (KIP-368)."""
        for node, found in self._nodes.items():
            if found.state is NodeState.READY and now_ms >= found.reauthenticate_at_ms:
                assert found.connection is not None
                found.state = NodeState.REAUTHENTICATING
                found.reauthenticate_at_ms = float("inf")
                found.setup_deadline_ms = now_ms + self._settings.request_timeout_ms
                found.connection.authenticate()
                self._wire.send(node, found.connection.data_to_send())

    def _close_idle(self, now_ms: float) -> None:
        limit_ms = self._settings.connections_max_idle_ms
        for node, found in self._nodes.items():
            if (
                found.state is NodeState.READY
                and not self._in_flight[node]
                and now_ms - found.last_used_ms > limit_ms
            ):
                self._wire.close(node)
                found.state = NodeState.DISCONNECTED
                found.connection = None

    # -- metadata ----------------------------------------------------------------------

    def _update_metadata(self, now_ms: float) -> float:
        """Send a Metadata request if one is due; return how long to wait, in ms."""
        delay_ms = self._metadata.delay_ms(now_ms)
        if self._metadata_node is not None:
            return float("inf")
        if delay_ms > 0:
            return delay_ms
        node = self.least_loaded_node(now_ms)
        if node is None:
            return self._no_node(now_ms)
        if self._can_send(node, now_ms):
            request = self._metadata.next_request(now_ms)
            try:
                self._put(node, request, MetadataResponse, None, now_ms)
            except (UnsupportedVersionError, ProtocolError) as error:
                self._metadata.fail(error)
                return float("inf")
            self._metadata_node = node
            return float("inf")
        if self._node(node).may_connect(now_ms):
            self._connect(node, now_ms)
        return float("inf") if self._node(node).is_connecting else 1.0

    def _no_node(self, now_ms: float) -> float:
        """Return how long to wait, in ms, when no node can be asked for metadata.

        If all known brokers have failed, forget them, so that the bootstrap addresses
        are tried: all brokers may have moved.
        """
        snapshot = self._metadata.snapshot
        if (
            snapshot.nodes
            and self._settings.rebootstrap
            and not self.in_flight()
            and all(self._node(node).has_failed for node in snapshot.nodes)
            and set(snapshot.nodes.values()) != set(self._bootstrap.values())
        ):
            self._metadata.forget_nodes()
            return 0.0
        waits = [self._node(node).delay_ms(now_ms) for node in self._addresses()]
        return max(1.0, min(waits, default=float("inf")))

    def _rebootstrap(self, now_ms: float, why: str) -> None:
        """Disconnect from all brokers, and begin again with the bootstrap addresses."""
        for node in list(self._nodes):
            self.disconnect(node, now_ms, f"bootstrapping again: {why}")
        self._metadata.forget_nodes()

    def _take_metadata(self, response: MetadataResponse, now_ms: float) -> None:
        self._metadata_node = None
        if response.error_code == ErrorCode.REBOOTSTRAP_REQUIRED:
            self._rebootstrap(now_ms, "the broker said so")
            return
        self._metadata.update(response, now_ms)
        known = self._metadata.snapshot.nodes
        for node in list(self._nodes):
            # Drop the connections to bootstrap addresses, now that the brokers' own
            # addresses are known, and to brokers that are gone. A node with a request
            # in flight stays.
            if node not in known and not self._in_flight.get(node):
                self._wire.close(node)
                self._nodes.pop(node)
                self._in_flight.pop(node, None)

    # -- the end -----------------------------------------------------------------------

    @property
    def last_error(self) -> str:
        """The reason why the last connection ended; "" if none has ended."""
        return self._last_error

    def wakeup(self) -> None:
        """End the `poll` that runs now, or the next one; any thread may call."""
        self._wire.wakeup()

    def close_all(self) -> None:
        """Close every connection; callbacks of requests in flight are not called."""
        self._wire.shutdown()
        self._nodes.clear()
        self._in_flight.clear()
