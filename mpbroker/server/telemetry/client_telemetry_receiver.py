"""Define the receiver of clients' metrics: the interface, and a file of JSON lines.

The setting ``client.telemetry.receiver.class.name`` may name a Python class of the
operator's. Each process that executes requests makes one instance of it. Without a
receiver the two APIs are not served, so clients push no metrics.

Source: KIP-714; Kafka's ClientTelemetryReceiver and ClientTelemetryPayload.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from mpbroker.base.line_file import LineFile
from mpbroker.base.named_tuple import NamedTuple
from mpbroker.protocol.otlp_metrics import read_metrics


class ClientTelemetryContext(NamedTuple):
    """Describes the client that pushes metrics.

    Attributes:
        client_instance_id: in Kafka's text form: 22 characters of base64.
        client_id: from the request's header.
        client_software_name, client_software_version: from ApiVersions; "unknown" if
            the client did not tell them.
        principal: as Kafka prints it: ``User:alice``.
        host: the client's IP address.
        listener_name: the listener that the client is connected to.
        connection_id: as Kafka writes it: the broker's address and port, the client's
            address and port, and a number.
    """

    client_instance_id: str
    client_id: str | None
    client_software_name: str
    client_software_version: str
    principal: str
    host: str
    listener_name: str
    connection_id: str


class ClientTelemetryPayload(NamedTuple):
    """Holds the metrics of one push.

    Attributes:
        data: MetricsData of OpenTelemetry in protobuf, decompressed.
        is_terminating: whether the client says that it terminates.
        content_type: the format of the data: OTLP.
    """

    data: bytes
    is_terminating: bool
    content_type: str = "OTLP"


class ClientTelemetryReceiver(ABC):
    """Receives the metrics that clients push.

    Each process that executes requests has one instance, which only one thread uses. A
    push comes twice if the process dies before it has answered. Methods must return
    quickly: all requests of this process wait meanwhile.
    """

    def configure(self, settings: Mapping[str, str]) -> None:  # noqa: B027 - optional
        """Take the broker's settings, by key. The base class does nothing.

        Called once, before other methods.

        Raises:
            ValueError: a setting is wrong; the broker prints the message and ends.
        """

    @abstractmethod
    def export_metrics(
        self, context: ClientTelemetryContext, payload: ClientTelemetryPayload
    ) -> None:
        """Take the metrics of one push.

        If this method raises an exception, the broker logs it and answers
        INVALID_RECORD, so the client stops pushing.
        """


class TelemetryLog(ClientTelemetryReceiver):
    """Appends each push to a file, as a line of JSON.

    Args:
        path, max_bytes: the file, and the size at which it is renamed; see LineFile.
    """

    def __init__(self, path: str, max_bytes: int) -> None:
        # LineFile logs a failed write and raises nothing: an exception would tell the
        # client to stop pushing, and the failure is not the client's.
        self._file = LineFile(path, "client.telemetry.log.path", max_bytes)

    def export_metrics(
        self, context: ClientTelemetryContext, payload: ClientTelemetryPayload
    ) -> None:
        """Append a push of metrics to the file, as one line of JSON.

        Raises:
            ProtocolError: the data cannot be parsed as metrics.
        """
        # Imported here: most processes never get a push.
        import orjson

        line = {
            "time": time.time(),
            **context._asdict(),
            "terminating": payload.is_terminating,
            "resources": read_metrics(payload.data),
        }
        self._file.append(orjson.dumps(line) + b"\n")


class Receivers(ClientTelemetryReceiver):
    """Gives every push to each of several receivers."""

    def __init__(self, receivers: Sequence[ClientTelemetryReceiver]) -> None:
        self._receivers = receivers

    def export_metrics(
        self, context: ClientTelemetryContext, payload: ClientTelemetryPayload
    ) -> None:
        for receiver in self._receivers:
            receiver.export_metrics(context, payload)
