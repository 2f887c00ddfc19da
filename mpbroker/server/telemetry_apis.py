"""The two APIs of clients' metrics: who asks, what is known of it, and who receives."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Final

from mpbroker.base.logger import get_logger
from mpbroker.ipc.layout import CONNECTION_COOKIE, connection_row
from mpbroker.ipc.tables.client_software import software_of
from mpbroker.network.connection_rows import peer_address
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError, ProtocolError
from mpbroker.server.request import CLOSE, Deferred, Request

if TYPE_CHECKING:
    from mpbroker.ipc.tables.client_instances import ClientInstance, ClientInstances
    from mpbroker.metadata.topics import TopicRegistry
    from mpbroker.server.configs.client_metrics_config import Subscription
    from mpbroker.server.request_context import RequestContexts
    from mpbroker.server.telemetry.client_telemetry_receiver import (
        ClientTelemetryContext,
        ClientTelemetryPayload,
        ClientTelemetryReceiver,
    )

_LOG = get_logger(__name__)
_NOBODY: Final = bytes(16)
_RESERVED: Final = (_NOBODY, bytes(15) + b"\1")  # Kafka's Uuid.RESERVED
_UNKNOWN: Final = "unknown"


class TelemetryApis:
    """What answers them in one handler process.

    Args:
        words: of the control segment.
        max_bytes: telemetry.max.bytes.
    """

    def __init__(
        self,
        words: memoryview,
        registry: TopicRegistry,
        instances: ClientInstances,
        contexts: RequestContexts,
        receiver: ClientTelemetryReceiver,
        max_bytes: int,
    ) -> None:
        self._words = words
        self._registry = registry
        self._instances = instances
        self._contexts = contexts
        self._receiver = receiver
        self._max_bytes = max_bytes

    def handlers(self) -> dict[ApiKey, Callable[[Request], bytes | Deferred]]:
        """Return what answers each API."""
        return {
            ApiKey.GET_TELEMETRY_SUBSCRIPTIONS: self._get_subscriptions,
            ApiKey.PUSH_TELEMETRY: self._push,
        }

    def _get_subscriptions(self, request: Request) -> bytes | Deferred:
        from mpbroker.metadata.meta_properties import random_uuid
        from mpbroker.protocol.messages.get_telemetry_subscriptions import (
            GetTelemetrySubscriptionsRequest,
        )
        from mpbroker.server.handlers.client_telemetry import (
            handle_get_telemetry_subscriptions,
        )

        version = request.api_version
        message = GetTelemetrySubscriptionsRequest.decode(version, request.body)
        instance_id = message.client_instance_id
        if instance_id == _NOBODY:
            instance_id = random_uuid()
        context = self._context(request, instance_id)
        if context is None:
            return CLOSE  # nobody is there to be answered
        subscription = self._subscription(request, context, instance_id)
        with self._held(request, instance_id) as client:
            response = handle_get_telemetry_subscriptions(
                instance_id,
                client,
                subscription,
                now_ns=request.received_ns,
                max_bytes=self._max_bytes,
            )
        return response.encode(version)

    def _push(self, request: Request) -> bytes | Deferred:
        from mpbroker.protocol.messages.push_telemetry import (
            PushTelemetryRequest,
            PushTelemetryResponse,
        )
        from mpbroker.server.handlers.client_telemetry import admit_push, receive_push
        from mpbroker.server.telemetry.client_telemetry_receiver import (
            ClientTelemetryPayload,
        )

        version = request.api_version
        message = PushTelemetryRequest.decode(version, request.body)
        instance_id = message.client_instance_id
        if instance_id in _RESERVED:
            raise ApiError(ErrorCode.INVALID_REQUEST, "a push without an instance id")
        context = self._context(request, instance_id)
        if context is None:
            return CLOSE
        subscription = self._subscription(request, context, instance_id)
        with self._held(request, instance_id) as client:
            admit_push(
                message,
                client,
                subscription,
                now_ns=request.received_ns,
                max_bytes=self._max_bytes,
            )

        def export(data: bytes) -> None:
            payload = ClientTelemetryPayload(data, message.terminating)
            self._export(context, payload)

        receive_push(message, self._max_bytes, export)
        return PushTelemetryResponse().encode(version)

    def _context(
        self, request: Request, instance_id: bytes
    ) -> ClientTelemetryContext | None:
        """Who sends a request; None: its connection has gone."""
        from mpbroker.metadata.meta_properties import uuid_to_text
        from mpbroker.server.telemetry.client_telemetry_receiver import (
            ClientTelemetryContext,
        )

        name, version = software_of(self._words, request.connection)
        connection_id = self._contexts.name(request.connection)
        # Last: what was read before is about the sender if it is still there.
        sender = self._contexts.sender(request.connection, request.slot)
        if sender is None:
            return None
        return ClientTelemetryContext(
            uuid_to_text(instance_id),
            request.client_id,
            name or _UNKNOWN,
            version or _UNKNOWN,
            sender.principal,
            sender.host,
            sender.listener_name,
            connection_id,
        )

    def _subscription(
        self, request: Request, context: ClientTelemetryContext, instance_id: bytes
    ) -> Subscription:
        from mpbroker.server.configs.client_metrics_config import (
            Client,
            subscription_of,
        )

        client = Client(
            context.client_instance_id,
            context.client_id,
            context.client_software_name,
            context.client_software_version,
            context.host,
            str(peer_address(self._words, request.connection)[1]),
        )
        return subscription_of(self._registry, client, instance_id)

    def _held(
        self, request: Request, instance_id: bytes
    ) -> AbstractContextManager[ClientInstance]:
        row = connection_row(request.connection)
        cookie = self._words[row + CONNECTION_COOKIE]
        return self._instances.held(
            instance_id, request.connection, cookie, request.received_ns
        )

    def _export(
        self, context: ClientTelemetryContext, payload: ClientTelemetryPayload
    ) -> None:
        try:
            self._receiver.export_metrics(context, payload)
        except ProtocolError as error:
            raise ApiError(ErrorCode.INVALID_RECORD, str(error)) from None
        except Exception:  # noqa: BLE001 - whatever it is, serving goes on
            _LOG.exception("the receiver of clients' metrics failed")
            raise ApiError(
                ErrorCode.INVALID_RECORD, "the receiver of clients' metrics failed"
            ) from None
