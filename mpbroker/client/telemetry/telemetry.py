"""ClientTelemetry decides when a client asks which metrics to push, and pushes them.

It is sans-IO. The caller waits for `delay_ms`, sends `next_request`, and hands the
response to `take`.

    subscription needed -> asked -> push needed -> pushed -> push needed ...
                   ^------- refused, or lost -------'
    begin_end: one more push, which tells that it is the last; then terminated.

Source: KIP-714, "Client behavior" and its table of errors; Kafka's
ClientTelemetryReporter.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from enum import Enum
from typing import Final

from mpbroker.client.telemetry.telemetry_metrics import MetricsCollector
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.message import Message
from mpbroker.protocol.messages.get_telemetry_subscriptions import (
    GetTelemetrySubscriptionsRequest,
    GetTelemetrySubscriptionsResponse,
)
from mpbroker.protocol.messages.push_telemetry import (
    PushTelemetryRequest,
    PushTelemetryResponse,
)
from mpbroker.protocol.records.compression import Codec, compress

_log = logging.getLogger(__name__)

DEFAULT_INTERVAL_MS: Final = 300_000
# The first push comes after a random part of the interval: not all clients at once.
_FIRST_PUSH: Final = (0.5, 1.5)
_NOBODY: Final = bytes(16)
_NEVER: Final = float("inf")

_ASK_AT_ONCE: Final = (
    ErrorCode.UNKNOWN_SUBSCRIPTION_ID,
    ErrorCode.UNSUPPORTED_COMPRESSION_TYPE,
)
_ASK_LATER: Final = (
    ErrorCode.TELEMETRY_TOO_LARGE,
    ErrorCode.THROTTLING_QUOTA_EXCEEDED,
)


class TelemetryState(Enum):
    """The next step of a client's telemetry, or the step in progress."""

    SUBSCRIPTION_NEEDED = "subscription needed"
    SUBSCRIPTION_IN_PROGRESS = "subscription in progress"
    PUSH_NEEDED = "push needed"
    PUSH_IN_PROGRESS = "push in progress"
    TERMINATING_PUSH_NEEDED = "terminating push needed"
    TERMINATING_PUSH_IN_PROGRESS = "terminating push in progress"
    TERMINATED = "terminated"


_State = TelemetryState
_ENDING: Final = (
    _State.TERMINATING_PUSH_NEEDED,
    _State.TERMINATING_PUSH_IN_PROGRESS,
    _State.TERMINATED,
)


class ClientTelemetry:
    """Decides when to ask for a telemetry subscription, and when to push metrics.

    Times are in ms of the client's clock.
    """

    def __init__(self, collector: MetricsCollector, rng: random.Random) -> None:
        self.state = _State.SUBSCRIPTION_NEEDED
        self.instance_id = _NOBODY  # the first broker gives one, which is kept
        self.interval_ms = DEFAULT_INTERVAL_MS
        self._collector = collector
        self._rng = rng
        self._due_ms = -_NEVER
        self._subscription: GetTelemetrySubscriptionsResponse | None = None
        self._missing: set[int] = set()  # codecs whose library is not installed

    # -- what is due -------------------------------------------------------------------

    def delay_ms(self, now_ms: float) -> float:
        """Return how long to wait for the next request, in ms.

        It is inf while a response is awaited, and after the end.
        """
        return max(0.0, self._due_ms - now_ms)

    def next_request(self, now_ms: float) -> Message | None:
        """Return the telemetry request that is due; None if none is due after all."""
        self._due_ms = _NEVER
        if self.state is _State.SUBSCRIPTION_NEEDED:
            self.state = _State.SUBSCRIPTION_IN_PROGRESS
            return GetTelemetrySubscriptionsRequest(client_instance_id=self.instance_id)
        if self.state not in (_State.PUSH_NEEDED, _State.TERMINATING_PUSH_NEEDED):
            return None
        return self._push(now_ms)

    def _push(self, now_ms: float) -> Message | None:
        told = self._subscription
        assert told is not None
        limit = told.telemetry_max_bytes
        is_last = self.state is _State.TERMINATING_PUSH_NEEDED
        metrics = self._collector.collect(
            told.requested_metrics, told.delta_temporality, limit
        )
        if 0 < limit < len(metrics):
            # Even the metrics of the whole client alone are more than the broker takes.
            self._collector.refused()
            _log.debug("%d bytes of metrics; %d may be pushed", len(metrics), limit)
            if is_last:
                self.state = _State.TERMINATED
            else:
                self._due_ms = now_ms + self.interval_ms
            return None
        codec, data = self._compress(told.accepted_compression_types, metrics)
        self.state = (
            _State.TERMINATING_PUSH_IN_PROGRESS if is_last else _State.PUSH_IN_PROGRESS
        )
        return PushTelemetryRequest(
            client_instance_id=self.instance_id,
            subscription_id=told.subscription_id,
            terminating=is_last,
            compression_type=codec,
            metrics=data,
        )

    def _compress(self, accepted: Sequence[int], data: bytes) -> tuple[Codec, bytes]:
        """Compress data with the first installed codec that the broker accepts.

        Returns:
            The codec, which is NONE if there is none, and the data.
        """
        if data:
            for number in accepted:
                if number in self._missing or number not in _CODECS:
                    continue
                try:
                    return Codec(number), compress(number, data)
                except ImportError:
                    self._missing.add(number)
        return Codec.NONE, data

    # -- what came of it ---------------------------------------------------------------

    def take(self, request: Message, response: Message | None, now_ms: float) -> None:
        """Handle a telemetry request's response; ``response`` is None if none came."""
        if isinstance(request, PushTelemetryRequest) and request.terminating:
            self.disable()
        elif self.state in _ENDING:
            return  # a response to a request from before the end began
        elif isinstance(response, GetTelemetrySubscriptionsResponse):
            self._take_subscription(response, now_ms)
        elif isinstance(response, PushTelemetryResponse):
            self._take_push(response, now_ms)
        else:
            # The connection was lost; the next request may go to another broker.
            self._ask_in(self.interval_ms, now_ms)

    def _take_subscription(
        self, response: GetTelemetrySubscriptionsResponse, now_ms: float
    ) -> None:
        if response.error_code:
            self._refused(response.error_code, now_ms, is_push=False)
            return
        if response.client_instance_id == _NOBODY:
            _log.warning("the broker gave no client instance id: no metrics are pushed")
            self.disable()
            return
        before, self._subscription = self._subscription, response
        if before and before.delta_temporality != response.delta_temporality:
            self._collector.reset()
        self.instance_id = response.client_instance_id
        self.interval_ms = response.push_interval_ms
        if self.interval_ms <= 0:
            self.interval_ms = DEFAULT_INTERVAL_MS
        if not response.requested_metrics:
            self._ask_in(self.interval_ms, now_ms)
            return
        self.state = _State.PUSH_NEEDED
        self._due_ms = now_ms + round(
            self.interval_ms * self._rng.uniform(*_FIRST_PUSH)
        )

    def _take_push(self, response: PushTelemetryResponse, now_ms: float) -> None:
        if response.error_code:
            self._collector.refused()
            self._refused(response.error_code, now_ms, is_push=True)
            return
        self.state = _State.PUSH_NEEDED
        self._due_ms = now_ms + self.interval_ms

    def _refused(self, code: int, now_ms: float, *, is_push: bool) -> None:
        if is_push and code in _ASK_AT_ONCE:
            self._ask_in(0, now_ms)
        elif code in _ASK_LATER or code in _ASK_AT_ONCE:
            # To ask at once makes sense after a push. If a subscription request gets
            # the same error, asking at once could go on for ever.
            self._ask_in(self.interval_ms, now_ms)
        else:
            _log.info(
                "the broker refused metrics with error %d: no more are pushed", code
            )
            self.disable()

    def _ask_in(self, delay_ms: float, now_ms: float) -> None:
        self.state = _State.SUBSCRIPTION_NEEDED
        self._due_ms = now_ms + delay_ms

    # -- the end -----------------------------------------------------------------------

    def disable(self) -> None:
        """Ask for no more subscriptions, and push no more metrics."""
        self.state = _State.TERMINATED
        self._due_ms = _NEVER

    def begin_end(self, now_ms: float) -> None:
        """Make the last push of metrics due now; end at once without a subscription."""
        if self.state in (_State.PUSH_NEEDED, _State.PUSH_IN_PROGRESS):
            self.state = _State.TERMINATING_PUSH_NEEDED
            self._due_ms = now_ms
        elif self.state not in _ENDING:
            self.disable()

    @property
    def has_ended(self) -> bool:
        """Whether no telemetry request follows any more, and no response is awaited."""
        return self.state is _State.TERMINATED


_CODECS: Final = frozenset(Codec)
