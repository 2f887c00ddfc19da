"""PushTelemetry: check whether a client may push metrics now, and pass them on.

Source: KIP-714; Kafka's ClientMetricsManager and ClientMetricsInstance.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.messages.push_telemetry import (
    PushTelemetryRequest,
    PushTelemetryResponse,
)
from mpbroker.protocol.records.compression import (
    Codec,
    DecompressionError,
    DecompressionLimitError,
    decompress,
)
from mpbroker.server.errors import invalid_request
from mpbroker.server.handler_context import HandlerContext
from mpbroker.server.request import CLOSE, Deferred
from mpbroker.server.telemetry.client_telemetry import (
    ACCEPTED_CODECS,
    NS_PER_MS,
    RESERVED_INSTANCES,
    PushState,
    too_early,
)
from mpbroker.server.telemetry.client_telemetry_receiver import ClientTelemetryPayload

if TYPE_CHECKING:
    from mpbroker.server.configs.client_metrics_config import Subscription


def handle_push_telemetry(
    request: PushTelemetryRequest, context: HandlerContext
) -> PushTelemetryResponse | Deferred:
    """Check a push, decompress its metrics and give them to the receiver.

    Return CLOSE if the client has disconnected.

    Raises:
        ApiError: INVALID_REQUEST: the request has no client instance id. `admit_push`,
            `inflate` and `ClientTelemetry.export` raise further errors.
    """
    telemetry, received = context.broker.telemetry, context.request
    assert telemetry is not None
    instance_id, max_bytes = request.client_instance_id, telemetry.max_bytes
    if instance_id in RESERVED_INSTANCES:
        raise invalid_request("a push without an instance id")
    client = telemetry.client(received, instance_id)
    if client is None:
        return CLOSE
    with telemetry.held(received, instance_id) as state:
        admit_push(
            request,
            state,
            client.subscription,
            now_ns=received.received_ns,
            max_bytes=max_bytes,
        )
    metrics = inflate(request, max_bytes)
    if metrics is not None:
        payload = ClientTelemetryPayload(metrics, request.terminating)
        telemetry.export(client.context, payload)
    return PushTelemetryResponse()


def admit_push(
    request: PushTelemetryRequest,
    state: PushState,
    subscription: Subscription,
    *,
    now_ns: int,
    max_bytes: int,
) -> None:
    """Check whether a client may push now, and note the result in the client's state.

    A client may push right after it got its subscription, after that once in an
    interval, and once more when it terminates. As in Kafka, a push that comes in time
    and is refused uses up its interval, too. The metrics are not decompressed.

    Args:
        request: the push.
        state: the client's state, which the caller has locked.
        subscription: the client's subscription as it is now.
        now_ns: when the request was received; see `subscribe`.
        max_bytes: telemetry.max.bytes.

    Raises:
        ApiError: INVALID_REQUEST: the client has said before that it terminates;
            THROTTLING_QUOTA_EXCEEDED: the interval is not over;
            UNKNOWN_SUBSCRIPTION_ID: the client's subscription has changed;
            UNSUPPORTED_COMPRESSION_TYPE: the codec is unknown;
            TELEMETRY_TOO_LARGE: the push has more than telemetry.max.bytes.
    """
    is_again = state.pushed_ns == now_ns
    had_ended = state.is_terminating and not is_again
    state.is_terminating = request.terminating
    elapsed_ns = now_ns - state.pushed_ns
    may_push = (
        is_again
        or state.asked_ns > state.pushed_ns
        or not state.pushed_ns
        or elapsed_ns >= subscription.interval_ms * NS_PER_MS
    )
    try:
        if had_ended:
            raise invalid_request(
                f"client instance {request.client_instance_id.hex()} pushes after it"
                " said that it ends",
            )
        if may_push:
            state.pushed_ns = now_ns
        elif not request.terminating:
            raise too_early(request.client_instance_id)
        _check(request, subscription, max_bytes)
    except ApiError as error:
        state.refusal = error.error_code
        raise
    state.refusal = ErrorCode.NONE


def _check(
    request: PushTelemetryRequest, subscription: Subscription, max_bytes: int
) -> None:
    if request.subscription_id != subscription.subscription_id:
        raise ApiError(
            ErrorCode.UNKNOWN_SUBSCRIPTION_ID,
            f"subscription {request.subscription_id} is not"
            f" {subscription.subscription_id}, which is the client's",
        )
    if request.compression_type not in (Codec.NONE, *ACCEPTED_CODECS):
        raise ApiError(
            ErrorCode.UNSUPPORTED_COMPRESSION_TYPE,
            f"compression type {request.compression_type} is none of 0 to 4",
        )
    if len(request.metrics) > max_bytes:
        raise _too_large(f"{len(request.metrics)} bytes", max_bytes)


def inflate(request: PushTelemetryRequest, max_bytes: int) -> bytes | None:
    """Return the decompressed metrics of a push; None if it has no metrics.

    Raises:
        ApiError: INVALID_RECORD: the codec of the request cannot decompress them;
            TELEMETRY_TOO_LARGE: decompressed they exceed telemetry.max.bytes.
    """
    if not len(request.metrics):
        return None
    try:
        return decompress(request.compression_type, request.metrics, max_bytes)
    except DecompressionLimitError as error:
        raise _too_large(str(error), max_bytes) from None
    except DecompressionError as error:
        raise ApiError(ErrorCode.INVALID_RECORD, str(error)) from None


def _too_large(what: str, max_bytes: int) -> ApiError:
    return ApiError(
        ErrorCode.TELEMETRY_TOO_LARGE,
        f"{what}: more than telemetry.max.bytes={max_bytes}",
    )
