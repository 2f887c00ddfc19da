"""GetTelemetrySubscriptions: tell a client which metrics to push, and how often.

Source: KIP-714; Kafka's ClientMetricsManager and ClientMetricsInstance.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mpbroker.metadata.meta_properties import random_uuid
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages.get_telemetry_subscriptions import (
    GetTelemetrySubscriptionsRequest,
    GetTelemetrySubscriptionsResponse,
)
from mpbroker.server.handler_context import HandlerContext
from mpbroker.server.request import CLOSE, Deferred
from mpbroker.server.telemetry.client_telemetry import (
    ACCEPTED_CODECS,
    NO_INSTANCE,
    NS_PER_MS,
    PushState,
    too_early,
)

if TYPE_CHECKING:
    from mpbroker.server.configs.client_metrics_config import Subscription

# A client whose push was refused with one of these must ask again, and may do so at
# once.
_ASK_AGAIN: Final = (
    ErrorCode.UNKNOWN_SUBSCRIPTION_ID,
    ErrorCode.UNSUPPORTED_COMPRESSION_TYPE,
)


def handle_get_telemetry_subscriptions(
    request: GetTelemetrySubscriptionsRequest, context: HandlerContext
) -> GetTelemetrySubscriptionsResponse | Deferred:
    """Answer with the client's subscription; a new client gets an instance id.

    Return CLOSE if the client has disconnected.

    Raises:
        ApiError: THROTTLING_QUOTA_EXCEEDED: the client asks too early, see `subscribe`.
    """
    telemetry, received = context.broker.telemetry, context.request
    assert telemetry is not None
    instance_id = request.client_instance_id
    if instance_id == NO_INSTANCE:
        instance_id = random_uuid()
    client = telemetry.client(received, instance_id)
    if client is None:
        return CLOSE
    with telemetry.held(received, instance_id) as state:
        return subscribe(
            instance_id,
            state,
            client.subscription,
            now_ns=received.received_ns,
            max_bytes=telemetry.max_bytes,
        )


def subscribe(
    instance_id: bytes,
    state: PushState,
    subscription: Subscription,
    *,
    now_ns: int,
    max_bytes: int,
) -> GetTelemetrySubscriptionsResponse:
    """Return a client's subscription, and store in its state when it asked.

    Args:
        instance_id: the client's id, 16 bytes.
        state: the client's state, which the caller has locked.
        subscription: the client's subscription.
        now_ns: when the request was received (CLOCK_MONOTONIC). If a handler has died
            and the request is executed again, its time is equal to the time in the
            state, so it is not refused as too early.
        max_bytes: telemetry.max.bytes.

    Raises:
        ApiError: THROTTLING_QUOTA_EXCEEDED: the client last asked or pushed less than
            an interval ago. A client whose push was refused because of its subscription
            or codec may ask at once.
    """
    last_ns = max(state.asked_ns, state.pushed_ns)
    is_early = now_ns - last_ns < subscription.interval_ms * NS_PER_MS
    if (
        last_ns
        and is_early
        and state.asked_ns != now_ns
        and state.refusal not in _ASK_AGAIN
    ):
        raise too_early(instance_id)
    state.asked_ns = now_ns
    state.refusal = ErrorCode.NONE
    return GetTelemetrySubscriptionsResponse(
        client_instance_id=instance_id,
        subscription_id=subscription.subscription_id,
        accepted_compression_types=list(ACCEPTED_CODECS),
        push_interval_ms=subscription.interval_ms,
        telemetry_max_bytes=max_bytes,
        delta_temporality=True,
        requested_metrics=subscription.metrics,
    )
