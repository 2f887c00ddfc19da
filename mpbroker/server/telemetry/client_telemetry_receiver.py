"""Who receives clients' metrics: the plug-in's interface, and the file of lines.

A receiver of one's own is a class in Python that ``client.telemetry.receiver.class
.name`` names; each process that executes requests makes one. Without a receiver
clients are not asked for metrics at all: the two APIs are not served.

Source: KIP-714; Kafka's ClientTelemetryReceiver and ClientTelemetryPayload.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mpbroker.base.line_file import LineFile
from mpbroker.protocol.otlp_metrics import read_metrics


class ClientTelemetryContext(NamedTuple):
    """Who pushes.

    Attributes:
        client_instance_id: in Kafka's text form.
        principal: as Kafka prints it: ``User:alice``.
        connection_id: Kafka's form: local address and port, peer's, and a number.
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
    """What is pushed.

    Attributes:
        data: MetricsData of OpenTelemetry, in protobuf, inflated.
        is_terminating: whether the client says that it ends.
        content_type: of the data: OTLP.
    """

    data: bytes
    is_terminating: bool
    content_type: str = "OTLP"


class ClientTelemetryReceiver(ABC):
    """Gets what clients push. One in each process; not for several threads.

    A push may come twice, if the process dies before it has answered. No method may
    wait for long: all requests that this process executes wait meanwhile.
    """

    def configure(self, settings: Mapping[str, str]) -> None:  # noqa: B027 - may be
        """Take the broker's settings, by key, before anything is pushed.

        Raises:
            ValueError: they are wrong; the message becomes the broker's last words.
        """

    @abstractmethod
    def export_metrics(
        self, context: ClientTelemetryContext, payload: ClientTelemetryPayload
    ) -> None:
        """Take a push. Whatever is raised is logged, and the client told to stop."""


class TelemetryLog(ClientTelemetryReceiver):
    """Appends each push to a file, as a line of JSON.

    Args:
        path, max_bytes: see LineFile.
    """

    def __init__(self, path: str, max_bytes: int) -> None:
        # What it cannot write is no fault of a client's, who would never push again.
        self._file = LineFile(path, "client.telemetry.log.path", max_bytes)

    def export_metrics(
        self, context: ClientTelemetryContext, payload: ClientTelemetryPayload
    ) -> None:
        """Append a line.

        Raises:
            ProtocolError: these are no metrics.
        """
        # Imported here: only who gets a push needs it.
        import orjson

        line = {
            "time": time.time(),
            **context._asdict(),
            "terminating": payload.is_terminating,
            "resources": read_metrics(payload.data),
        }
        self._file.append(orjson.dumps(line) + b"\n")


class Receivers(ClientTelemetryReceiver):
    """Several, each of which gets every push."""

    def __init__(self, receivers: Sequence[ClientTelemetryReceiver]) -> None:
        self._receivers = receivers

    def export_metrics(
        self, context: ClientTelemetryContext, payload: ClientTelemetryPayload
    ) -> None:
        for receiver in self._receivers:
            receiver.export_metrics(context, payload)
