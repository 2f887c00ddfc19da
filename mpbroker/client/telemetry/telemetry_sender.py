"""TelemetrySender: sends the requests of `ClientTelemetry` without delaying others.

It opens no connection, but uses those for metadata and for the client's own requests.
It stays with one broker as long as that is ready. A broker that does not serve both
APIs is not asked, and ends no wait.

Source: KIP-714; Kafka's NetworkClient.TelemetrySender.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from mpbroker.client.client_request import ClientResponse
from mpbroker.client.errors import UnsupportedVersionError
from mpbroker.client.metadata import Metadata
from mpbroker.client.network_client import NetworkClient
from mpbroker.client.telemetry.telemetry import DEFAULT_INTERVAL_MS, ClientTelemetry
from mpbroker.protocol.message import Message
from mpbroker.protocol.messages.get_telemetry_subscriptions import (
    GetTelemetrySubscriptionsRequest,
    GetTelemetrySubscriptionsResponse,
)
from mpbroker.protocol.messages.push_telemetry import (
    PushTelemetryRequest,
    PushTelemetryResponse,
)

_log = logging.getLogger(__name__)

_RESPONSES: Final[dict[type[Message], type[Message]]] = {
    GetTelemetrySubscriptionsRequest: GetTelemetrySubscriptionsResponse,
    PushTelemetryRequest: PushTelemetryResponse,
}
_LOOK_AGAIN_MS: Final = 1000.0
LAST_PUSH_MS: Final = 10_000.0  # the longest wait for the last push, when closing
SHORT_LAST_PUSH_MS: Final = 1000.0  # likewise, where the user's thread waits for it


class TelemetrySender:
    """Sends due telemetry requests; the `NetworkClient`'s thread runs it."""

    def __init__(
        self,
        client: NetworkClient,
        metadata: Metadata,
        telemetry: ClientTelemetry,
        clock: Callable[[], float],
        timeout_ms: float | None = None,
    ) -> None:
        """Make a sender; no request is sent yet.

        Args:
            client: sends the requests, and calls back.
            metadata: the client's metadata.
            telemetry: decides which requests are sent, and when.
            clock: returns the time of the client's clock, in ms.
            timeout_ms: the limit for a response, in ms; None: request.timeout.ms.
        """
        self._client = client
        self._metadata = metadata
        self._telemetry = telemetry
        self._clock = clock
        self._timeout_ms = timeout_ms
        self._node: int | None = None
        self._look_after_ms = -float("inf")
        self._end_by_ms: float | None = None

    def step(self, now_ms: float) -> float:
        """Send a telemetry request if one is due.

        Call it after the client has sent its own requests.

        Returns:
            The longest wait before the next call, in ms. inf: only an event, such as a
            response, can make a request due. 0: a client that closes need not wait any
            longer.
        """
        delay_ms = self._step(now_ms)
        if self._end_by_ms is None:
            return delay_ms
        if self._is_over(now_ms):
            return 0.0  # nothing to wait for any more
        return min(delay_ms, self._end_by_ms - now_ms)

    def _step(self, now_ms: float) -> float:
        if now_ms < self._look_after_ms:
            return float("inf")
        try:
            return self._telemetry.delay_ms(now_ms) or self._send(now_ms)
        except Exception:  # noqa: BLE001 - metrics must not stop the client itself
            _log.exception("pushing this client's metrics failed; no more are pushed")
            self._telemetry.disable()
            return float("inf")

    def _send(self, now_ms: float) -> float:
        client = self._client
        nodes = self._metadata.snapshot.nodes
        connected = [node for node in nodes if client.is_connected(node)]
        able = [node for node in connected if self._serves(node)]
        if not able:
            if connected:
                # A broker that comes later may serve them: look again, much later.
                self._look_after_ms = now_ms + DEFAULT_INTERVAL_MS
            return float("inf")
        ready = [node for node in able if client.is_ready(node, now_ms)]
        if not ready:
            return _LOOK_AGAIN_MS  # a node may become ready without ending a poll
        if self._node not in ready or self._end_by_ms is not None:
            self._node = min(ready, key=client.in_flight)
        request = self._telemetry.next_request(now_ms)
        if request is None:
            return self._telemetry.delay_ms(now_ms)
        assert self._node is not None
        response_type = _RESPONSES[type(request)]
        client.send(
            self._node,
            request,
            response_type,
            self._take,
            now_ms,
            timeout_ms=self._timeout_ms,
        )
        return float("inf")

    def _serves(self, node: int) -> bool:
        try:
            for request in _RESPONSES:
                self._client.version_for(node, request)
        except UnsupportedVersionError:
            return False
        return True

    def _take(self, answer: ClientResponse) -> None:
        self._telemetry.take(answer.request, answer.response, self._clock())

    def push_last(self, poll: Callable[[float], None]) -> None:
        """Send the last push and wait for its response, for clients without a loop.

        Args:
            poll: a function that sends and receives; its argument is the longest wait
                for events, in ms.
        """
        now_ms = self._clock()
        while self.must_end(now_ms, SHORT_LAST_PUSH_MS):
            poll(self.step(now_ms))
            now_ms = self._clock()

    def must_end(self, now_ms: float, limit_ms: float | None = None) -> bool:
        """Make the last push due at the first call; return whether to wait for it.

        Args:
            now_ms: the time of the client's clock, in ms.
            limit_ms: the longest wait from the first call on, in ms; None:
                `LAST_PUSH_MS`.
        """
        if self._end_by_ms is None:
            self._end_by_ms = now_ms + (LAST_PUSH_MS if limit_ms is None else limit_ms)
            self._telemetry.begin_end(now_ms)
        return not self._is_over(now_ms)

    def _is_over(self, now_ms: float) -> bool:
        """Return whether the last push was answered, or can no longer be answered."""
        client, nodes = self._client, self._metadata.snapshot.nodes
        return (
            self._telemetry.has_ended
            or now_ms < self._look_after_ms
            or self._end_by_ms is None
            or now_ms >= self._end_by_ms
            or not any(map(client.is_connected, nodes))
        )
