"""The two APIs of clients' metrics: decode, handle, encode."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from mpbroker.protocol.api_key import ApiKey
from mpbroker.server.request import Deferred, Request

if TYPE_CHECKING:
    from mpbroker.server.telemetry.client_telemetry import ClientTelemetry


class TelemetryApis:
    """What answers them in one handler process."""

    def __init__(self, telemetry: ClientTelemetry) -> None:
        self._telemetry = telemetry

    def handlers(self) -> dict[ApiKey, Callable[[Request], bytes | Deferred]]:
        """Return what answers each API."""
        return {
            ApiKey.GET_TELEMETRY_SUBSCRIPTIONS: self._get_subscriptions,
            ApiKey.PUSH_TELEMETRY: self._push,
        }

    def _get_subscriptions(self, request: Request) -> bytes | Deferred:
        from mpbroker.protocol.messages.get_telemetry_subscriptions import (
            GetTelemetrySubscriptionsRequest,
        )
        from mpbroker.server.handlers.get_telemetry_subscriptions import (
            handle_get_telemetry_subscriptions,
        )

        version = request.api_version
        message = GetTelemetrySubscriptionsRequest.decode(version, request.body)
        response = handle_get_telemetry_subscriptions(message, request, self._telemetry)
        return response if isinstance(response, Deferred) else response.encode(version)

    def _push(self, request: Request) -> bytes | Deferred:
        from mpbroker.protocol.messages.push_telemetry import PushTelemetryRequest
        from mpbroker.server.handlers.push_telemetry import handle_push_telemetry

        version = request.api_version
        message = PushTelemetryRequest.decode(version, request.body)
        response = handle_push_telemetry(message, request, self._telemetry)
        return response if isinstance(response, Deferred) else response.encode(version)
