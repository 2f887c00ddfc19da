"""Who receives clients' metrics: the plug-in's interface, and the file of lines.

A receiver of one's own is a class in Python that ``client.telemetry.receiver.class
.name`` names; each process that executes requests makes one. Without a receiver
clients are not asked for metrics at all: the two APIs are not served.

Source: KIP-714; Kafka's ClientTelemetryReceiver and ClientTelemetryPayload.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from mpbroker.logger import get_logger
from mpbroker.protocol.otlp_metrics import read_metrics

_LOG = get_logger(__name__)
_MODE: Final = 0o640
# So long the reader of a pipe is waited for that has taken a part of a line.
_PATIENCE_S: Final = 0.1


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
        path: made if it is not there; never rotated here: it is opened for each push,
            so that it may be moved away at any time.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._failed = False
        self._is_cut = False  # the last line has no end

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
        self._write(orjson.dumps(line) + b"\n")

    def _write(self, data: bytes) -> None:
        # A pipe without a reader, or with a slow one, must hold up nobody.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            fd = os.open(self._path, flags, _MODE)
            try:
                self._write_whole(fd, b"\n" + data if self._is_cut else data)
            finally:
                os.close(fd)
            self._failed = False
        except OSError as error:
            # No fault of the client's, who would never push again.
            if not self._failed:  # once, until it works again
                _LOG.error("client.telemetry.log.path=%s: %s", self._path, error)
            self._failed = True

    def _write_whole(self, fd: int, data: bytes) -> None:
        """Raises:
        OSError: it cannot be written, or not as a whole.
        """
        # One call, if it can be: lines of several processes do not mix.
        rest = memoryview(data)[os.write(fd, data) :]
        self._is_cut = bool(rest)
        until = time.monotonic() + _PATIENCE_S
        while rest:  # longer than what a pipe has room for: somebody does read it
            room = select.poll()
            room.register(fd, select.POLLOUT)
            if not room.poll(max(0.0, until - time.monotonic()) * 1e3):
                raise OSError(errno.EAGAIN, "its reader is too slow: a line was cut")
            with contextlib.suppress(BlockingIOError):
                rest = rest[os.write(fd, rest) :]
        self._is_cut = False


class Receivers(ClientTelemetryReceiver):
    """Several, each of which gets every push."""

    def __init__(self, receivers: Sequence[ClientTelemetryReceiver]) -> None:
        self._receivers = receivers

    def export_metrics(
        self, context: ClientTelemetryContext, payload: ClientTelemetryPayload
    ) -> None:
        for receiver in self._receivers:
            receiver.export_metrics(context, payload)
