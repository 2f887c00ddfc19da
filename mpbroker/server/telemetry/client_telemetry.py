"""Find the client that sent a request about metrics, and its subscription.

Source: KIP-714; Kafka's ClientMetricsManager and ClientMetricsInstance.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Final, Protocol

from mpbroker.base.logger import get_logger
from mpbroker.base.named_tuple import NamedTuple
from mpbroker.ipc.layout import CONNECTION_COOKIE, connection_row
from mpbroker.ipc.tables.client_software import software_of
from mpbroker.network.connection_rows import peer_address
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError, ProtocolError
from mpbroker.protocol.records.compression import Codec

if TYPE_CHECKING:
    from mpbroker.ipc.tables.client_instances import ClientInstances
    from mpbroker.metadata.topics import TopicRegistry
    from mpbroker.server.configs.client_metrics_config import Subscription
    from mpbroker.server.request import Request
    from mpbroker.server.request_context import RequestContexts
    from mpbroker.server.telemetry.client_telemetry_receiver import (
        ClientTelemetryContext,
        ClientTelemetryPayload,
        ClientTelemetryReceiver,
    )

_LOG = get_logger(__name__)

# The codecs that a client may use, the best first: it takes the first that it has.
ACCEPTED_CODECS: Final = (Codec.ZSTD, Codec.LZ4, Codec.GZIP, Codec.SNAPPY)
NO_INSTANCE: Final = bytes(16)  # a client that has no instance id yet
RESERVED_INSTANCES: Final = (NO_INSTANCE, bytes(15) + b"\1")  # Kafka's Uuid.RESERVED
NS_PER_MS: Final = 1_000_000
_UNKNOWN: Final = "unknown"


class PushState(Protocol):
    """Holds a client's state, which all handlers share.

    It may be changed only while it is locked. Times are ns of CLOCK_MONOTONIC.

    Attributes:
        asked_ns: when the client last got its subscription; 0: never.
        pushed_ns: when a push of the client last came in time; 0: never.
        refusal: the error code with which its last push was refused; 0: none.
        is_terminating: whether its last push said that the client terminates.
    """

    asked_ns: int
    pushed_ns: int
    refusal: int
    is_terminating: bool


class PushingClient(NamedTuple):
    """Describes the client that sent a request, and the metrics that it shall push."""

    context: ClientTelemetryContext
    subscription: Subscription


class ClientTelemetry:
    """Finds the client of a request, and gives its metrics to the receiver.

    Args:
        words: the control segment (shared memory of all processes), in 64-bit words.
        registry: has the subscriptions.
        instances: the clients' states, shared by all handlers.
        contexts: finds the sender of a request.
        receiver: gets the metrics.
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
        self.max_bytes = max_bytes

    def client(self, request: Request, instance_id: bytes) -> PushingClient | None:
        """Return the client that sent a request; None if it has disconnected."""
        from mpbroker.server.configs.client_metrics_config import (
            Client,
            subscription_of,
        )

        context = self._context(request, instance_id)
        if context is None:
            return None
        client = Client(
            context.client_instance_id,
            context.client_id,
            context.client_software_name,
            context.client_software_version,
            context.host,
            str(peer_address(self._words, request.connection)[1]),
        )
        subscription = subscription_of(self._registry, client, instance_id)
        return PushingClient(context, subscription)

    def _context(
        self, request: Request, instance_id: bytes
    ) -> ClientTelemetryContext | None:
        from mpbroker.metadata.meta_properties import uuid_to_text
        from mpbroker.server.telemetry.client_telemetry_receiver import (
            ClientTelemetryContext,
        )

        name, version = software_of(self._words, request.connection)
        connection_id = self._contexts.name(request.connection)
        # Read this last: if it finds the sender, the fields above are the sender's.
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

    def held(
        self, request: Request, instance_id: bytes
    ) -> AbstractContextManager[PushState]:
        """Return a context manager that locks a client's state and returns it."""
        row = connection_row(request.connection)
        cookie = self._words[row + CONNECTION_COOKIE]
        return self._instances.held(
            instance_id, request.connection, cookie, request.received_ns
        )

    def export(
        self, context: ClientTelemetryContext, payload: ClientTelemetryPayload
    ) -> None:
        """Give the metrics of a push to the operator's receiver, an object in Python.

        Raises:
            ApiError: INVALID_RECORD. Either the metrics cannot be read, or the receiver
                raised an exception, which is logged.
        """
        try:
            self._receiver.export_metrics(context, payload)
        except ProtocolError as error:
            raise ApiError(ErrorCode.INVALID_RECORD, str(error)) from None
        except Exception:  # noqa: BLE001 - whatever it is, serving goes on
            _LOG.exception("the receiver of clients' metrics failed")
            raise ApiError(
                ErrorCode.INVALID_RECORD, "the receiver of clients' metrics failed"
            ) from None


def too_early(instance_id: bytes) -> ApiError:
    """Return the error for a client that asks or pushes before its interval is over."""
    return ApiError(
        ErrorCode.THROTTLING_QUOTA_EXCEEDED,
        f"client instance {instance_id.hex()} came before its interval was over",
    )
