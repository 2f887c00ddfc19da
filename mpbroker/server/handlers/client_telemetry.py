"""GetTelemetrySubscriptions and PushTelemetry: clients' metrics, as they are asked for.

Source: KIP-714; Kafka's ClientMetricsManager and ClientMetricsInstance.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.messages.get_telemetry_subscriptions import (
    GetTelemetrySubscriptionsResponse,
)
from mpbroker.protocol.messages.push_telemetry import PushTelemetryRequest
from mpbroker.protocol.records.compression import (
    Codec,
    DecompressionError,
    DecompressionLimitError,
    decompress,
)
from mpbroker.server.configs.client_metrics_config import Subscription

# What a client may compress with, the best first; it takes the first that it can.
ACCEPTED: Final = (Codec.ZSTD, Codec.LZ4, Codec.GZIP, Codec.SNAPPY)
_NS_PER_MS: Final = 1_000_000
# Who was refused for one of these has to ask again, and may do so at once.
_ASK_AGAIN: Final = (
    ErrorCode.UNKNOWN_SUBSCRIPTION_ID,
    ErrorCode.UNSUPPORTED_COMPRESSION_TYPE,
)


class ClientInstance(Protocol):
    """What is known of a client, and noted of it now.

    Attributes:
        asked_ns: when it was last told its subscription; 0: never.
        pushed_ns: when a push of it was last let pass; 0: never.
        refusal: the error code of its last push; 0: none.
        is_terminating: whether its last push said that it ends.
    """

    asked_ns: int
    pushed_ns: int
    refusal: int
    is_terminating: bool


def handle_get_telemetry_subscriptions(
    instance_id: bytes,
    client: ClientInstance,
    subscription: Subscription,
    *,
    now_ns: int,
    max_bytes: int,
) -> GetTelemetrySubscriptionsResponse:
    """Say what a client shall push.

    Args:
        instance_id: the client's, maybe just made for it.
        now_ns: when the request was received. It is as good as a name for it: one that
            is executed again, since its handler died, is let pass again.
        max_bytes: telemetry.max.bytes.

    Raises:
        ApiError: THROTTLING_QUOTA_EXCEEDED: less than an interval after it last asked
            or pushed.
    """
    last_ns = max(client.asked_ns, client.pushed_ns)
    is_early = now_ns - last_ns < subscription.interval_ms * _NS_PER_MS
    if (
        last_ns
        and is_early
        and client.asked_ns != now_ns
        and client.refusal not in _ASK_AGAIN
    ):
        raise _too_early(instance_id)
    client.asked_ns = now_ns
    client.refusal = ErrorCode.NONE
    return GetTelemetrySubscriptionsResponse(
        client_instance_id=instance_id,
        subscription_id=subscription.subscription_id,
        accepted_compression_types=list(ACCEPTED),
        push_interval_ms=subscription.interval_ms,
        telemetry_max_bytes=max_bytes,
        delta_temporality=True,
        requested_metrics=subscription.metrics,
    )


def admit_push(
    request: PushTelemetryRequest,
    client: ClientInstance,
    subscription: Subscription,
    *,
    now_ns: int,
    max_bytes: int,
) -> None:
    """Note a push, and refuse it if it must not be.

    Right after it has asked a client may push, then once an interval, and once more
    when it ends.

    Raises:
        ApiError: INVALID_REQUEST: it has said that it ends;
            THROTTLING_QUOTA_EXCEEDED: too early;
            UNKNOWN_SUBSCRIPTION_ID: not what it was last told, or no longer right;
            UNSUPPORTED_COMPRESSION_TYPE;
            TELEMETRY_TOO_LARGE: more than telemetry.max.bytes.
    """
    is_again = client.pushed_ns == now_ns
    had_ended = client.is_terminating and not is_again
    client.is_terminating = request.terminating
    elapsed_ns = now_ns - client.pushed_ns
    may_push = (
        is_again
        or client.asked_ns > client.pushed_ns
        or not client.pushed_ns
        or elapsed_ns >= subscription.interval_ms * _NS_PER_MS
    )
    try:
        if had_ended:
            raise ApiError(
                ErrorCode.INVALID_REQUEST,
                f"client instance {request.client_instance_id.hex()} pushes after it"
                " said that it ends",
            )
        if may_push:
            client.pushed_ns = now_ns
        elif not request.terminating:
            raise _too_early(request.client_instance_id)
        _check(request, subscription, max_bytes)
    except ApiError as error:
        client.refusal = error.error_code
        raise
    client.refusal = ErrorCode.NONE


def _check(
    request: PushTelemetryRequest, subscription: Subscription, max_bytes: int
) -> None:
    if request.subscription_id != subscription.subscription_id:
        raise ApiError(
            ErrorCode.UNKNOWN_SUBSCRIPTION_ID,
            f"subscription {request.subscription_id} is not"
            f" {subscription.subscription_id}, which is the client's",
        )
    if request.compression_type not in (Codec.NONE, *ACCEPTED):
        raise ApiError(
            ErrorCode.UNSUPPORTED_COMPRESSION_TYPE,
            f"compression type {request.compression_type} is none of 0 to 4",
        )
    if len(request.metrics) > max_bytes:
        raise _too_large(f"{len(request.metrics)} bytes", max_bytes)


def receive_push(
    request: PushTelemetryRequest, max_bytes: int, export: Callable[[bytes], None]
) -> None:
    """Give the metrics of a push that was admitted to whoever receives them.

    Raises:
        ApiError: INVALID_RECORD: they are not compressed as they are said to be;
            TELEMETRY_TOO_LARGE: inflated they are more than telemetry.max.bytes; or
            what ``export`` raises.
    """
    if not len(request.metrics):
        return
    try:
        data = decompress(request.compression_type, request.metrics, max_bytes)
    except DecompressionLimitError as error:
        raise _too_large(str(error), max_bytes) from None
    except DecompressionError as error:
        raise ApiError(ErrorCode.INVALID_RECORD, str(error)) from None
    export(data)


def _too_early(instance_id: bytes) -> ApiError:
    return ApiError(
        ErrorCode.THROTTLING_QUOTA_EXCEEDED,
        f"client instance {instance_id.hex()} came before its interval was over",
    )


def _too_large(what: str, max_bytes: int) -> ApiError:
    return ApiError(
        ErrorCode.TELEMETRY_TOO_LARGE,
        f"{what}: more than telemetry.max.bytes={max_bytes}",
    )
