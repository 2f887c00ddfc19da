"""Push the broker's metrics to an OpenTelemetry collector: OTLP over HTTP.

The figures are those of the Prometheus port, under the same names. The exporter's loop
collects them and goes on; a thread encodes them as protobuf, sends them, and waits for
the collector. There is one push at a time. A push that would begin meanwhile is left
out: counters are totals, so the next push includes it. If the collector asks for it or
cannot be reached, a push is tried again a few times, and then given up. The log has one
line when pushes begin to fail and one when they work again; the metrics count them. A
broker that stops pushes once more, tries that once, and waits for it a few seconds.

Source: opentelemetry-proto, OTLP/HTTP specification ("Failures", "Retryable Response
Codes"); semantic conventions for service attributes.
"""

from __future__ import annotations

import contextlib
import gzip
import http.client
import random
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from mpbroker.base.logger import get_logger
from mpbroker.base.named_tuple import NamedTuple
from mpbroker.config.metrics_settings import (
    parse_headers,
    parse_otlp_endpoint,
    parse_pairs,
    shown_endpoint,
)
from mpbroker.exporter.exposition import Family, counter
from mpbroker.ipc.counters.request_metrics import bounds_s
from mpbroker.protocol.otlp_encode import (
    Distribution,
    HistogramPoint,
    Metric,
    Point,
    encode_metrics,
)

if TYPE_CHECKING:
    from mpbroker.config import BrokerConfig
    from mpbroker.exporter.exposition import Labels

_LOG = get_logger(__name__)

_ATTEMPTS: Final = 4
_FIRST_PAUSE_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 30.0
_GZIP_LEVEL: Final = 6
_LAST_PUSH_S: Final = 3.0  # the stop of the broker waits for it
_TRY_AGAIN: Final = frozenset({429, 502, 503, 504})
_MAX_ANSWER_BYTES: Final = 64 * 1024
_PREFIX: Final = "mpbroker_"
_UNITS: Final = (("_seconds", "s"), ("_bytes", "By"), ("_ratio", "1"))
_BOUNDS: Final = tuple(bounds_s())


class Target(NamedTuple):
    """The OpenTelemetry collector to send metrics to, and the resource attributes."""

    endpoint: str
    headers: Mapping[str, str]  # names in lower case
    timeout_s: float
    resource: Mapping[str, str]
    compresses: bool = False  # by gzip, which any collector takes


def target_of(config: BrokerConfig, told: Mapping[str, object]) -> Target | None:
    """Return the OTLP collector to push metrics to; None: otlp.endpoint is not set.

    Args:
        config: the settings.
        told: the broker's figures that the supervisor publishes. Its version and
            cluster id become attributes of the resource.
    """
    endpoint, headers = config.otlp_endpoint, config.otlp_headers
    if not endpoint:
        return None
    resource = {
        "service.name": "mpbroker",
        "service.version": str(told.get("version", "")),
        "service.instance.id": f"{told.get('cluster_id', '')}/{config.node_id}",
        **parse_pairs("otlp.resource.attributes", config.otlp_resource_attributes),
    }
    return Target(
        endpoint,
        parse_headers(headers),
        config.otlp_timeout_ms / 1e3,
        resource,
        config.otlp_compression == "gzip",
    )


class OtlpPusher:
    """Pushes metrics to an OpenTelemetry collector, one push at a time, in a thread.

    The thread is a daemon: the end of the process does not wait for it.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._shown = shown_endpoint(target.endpoint)
        self._thread: threading.Thread | None = None
        self._ending = threading.Event()
        self._pause_s = _FIRST_PAUSE_S
        self._fails = False
        self.pushed = 0  # pushes that the collector took
        self.left = 0  # pushes that were given up, or left out

    def family(self) -> Family:
        """Return the metric that counts the pushes of this process, by result."""
        pushes = counter(
            "mpbroker_otlp_pushes_total",
            "Pushes to otlp.endpoint: taken; or failed, or left out behind a slow one.",
        )
        pushes.add(self.pushed, result="taken")
        pushes.add(self.left, result="failed")
        return pushes

    def push(self, families: Sequence[Family], started_ns: int, now_ns: int) -> None:
        """Send metrics to the OpenTelemetry collector, unless a push is under way.

        Args:
            started_ns: Unix time at which the counters began.
            now_ns: Unix time of the figures.
        """
        if self._thread is not None and self._thread.is_alive():
            self.left += 1
            return
        self._thread = threading.Thread(
            target=self._run, args=(families, started_ns, now_ns), daemon=True
        )
        self._thread.start()

    def push_last(
        self, families: Sequence[Family], started_ns: int, now_ns: int
    ) -> None:
        """Send metrics to the collector; wait a few seconds until they are sent."""
        until = time.monotonic() + _LAST_PUSH_S
        self._ending.set()
        self._wait_until(until)
        self.push(families, started_ns, now_ns)
        self._wait_until(until)

    def _wait_until(self, moment: float) -> None:
        if self._thread is not None:
            self._thread.join(max(0.0, moment - time.monotonic()))

    def _run(self, families: Sequence[Family], started_ns: int, now_ns: int) -> None:
        try:
            metrics = otlp_metrics(families, started_ns, now_ns)
            body = encode_metrics(self._target.resource, metrics)
            if body and self._target.compresses:
                body = gzip.compress(body, _GZIP_LEVEL)
            if body:
                self._deliver(body)
        except Exception:  # noqa: BLE001 - a bug must not end later pushes
            _LOG.exception("otlp.endpoint: a push failed; this is a bug")

    def _deliver(self, body: bytes) -> None:
        pause_s, failure = self._pause_s, ""
        for attempt in range(_ATTEMPTS):
            if attempt:
                # At random, so that not all brokers retry at the same moment.
                pause = min(pause_s, _LONGEST_PAUSE_S) * random.uniform(0.8, 1.2)
                if self._ending.wait(pause):
                    break
                pause_s *= 2
            try:
                status, reason, wanted_s = self._send(body)
            except (OSError, http.client.HTTPException, ValueError) as error:
                failure = str(error) or type(error).__name__
                continue
            if 200 <= status < 300:
                self._say_success()
                return
            failure = f"it answers {status} {reason}".rstrip()
            if status not in _TRY_AGAIN:
                break
            if wanted_s is not None:
                pause_s = wanted_s
        self._say_failure(failure)

    def _send(self, body: bytes) -> tuple[int, str, float | None]:
        """Post metrics to the collector; return status, reason, and Retry-After (s).

        Raises:
            OSError, HTTPException: the collector cannot be reached, does not speak
                HTTP, or has not answered in time.
        """
        target = self._target
        is_secure, host, port, path = parse_otlp_endpoint(target.endpoint)
        kind = http.client.HTTPSConnection if is_secure else http.client.HTTPConnection
        connection = kind(host, port, timeout=target.timeout_s)
        try:
            connection.connect()
            with _at_most(target.timeout_s, connection.sock):
                headers = {"content-type": "application/x-protobuf", **target.headers}
                if target.compresses:
                    headers["content-encoding"] = "gzip"
                connection.request("POST", path, body, headers)
                answer = connection.getresponse()
                answer.read(_MAX_ANSWER_BYTES)
            return answer.status, answer.reason[:100], _seconds(answer)
        finally:
            connection.close()

    def _say_success(self) -> None:
        self.pushed += 1
        if self._fails:
            self._fails = False
            _LOG.info("otlp.endpoint=%s: takes metrics again", self._shown)

    def _say_failure(self, failure: str) -> None:
        self.left += 1
        if not self._fails:
            self._fails = True
            _LOG.warning(
                "otlp.endpoint=%s: cannot push metrics: %s; every otlp.interval.ms is"
                " another try, and nothing more is said until one succeeds",
                self._shown,
                failure,
            )


@contextlib.contextmanager
def _at_most(timeout_s: float, sock: socket.socket) -> Iterator[None]:
    """Shut a connection down if the ``with`` block takes longer than ``timeout_s``.

    The socket's own timeout starts anew with each byte: a collector that sends one now
    and then would hold up all later pushes.

    Raises:
        TimeoutError: the connection was shut down.
    """
    cut = threading.Event()

    def cut_off() -> None:
        cut.set()
        # Not SSLSocket's method: it drops the TLS state that the thread is using.
        with contextlib.suppress(OSError):
            socket.socket.shutdown(sock, socket.SHUT_RDWR)

    timer = threading.Timer(timeout_s, cut_off)
    timer.daemon = True
    timer.start()
    try:
        yield
    except (OSError, http.client.HTTPException) as error:
        if not cut.is_set():
            raise
        raise TimeoutError("timed out") from error
    finally:
        timer.cancel()
    if cut.is_set():  # http.client takes a head that was cut off for a complete one
        raise TimeoutError("timed out")


def _seconds(answer: http.client.HTTPResponse) -> float | None:
    """Return the value of Retry-After, if it is a number of seconds."""
    text = answer.headers.get("Retry-After", "")
    return float(text) if text.isdigit() and len(text) < 6 else None


def otlp_metrics(
    families: Iterable[Family], start_ns: int, now_ns: int
) -> Iterable[Metric | Distribution]:
    """Convert families to OTLP's metrics: those named mpbroker_*, not Kafka's names."""
    for family in families:
        if not family.name.startswith(_PREFIX) or not family.samples:
            continue
        name, text = family.name, family.text
        if family.kind in ("histogram", "summary"):
            points = _histogram_points(family, start_ns, now_ns)
            yield Distribution(name, _BOUNDS, points, _unit(name), text)
            continue
        is_sum = family.kind == "counter"
        start = start_ns if is_sum else 0
        yield Metric(
            name,
            is_sum,
            False,
            [
                Point(value, start, now_ns, _texts(labels))
                for _, labels, value in family.samples
            ],
            _unit(name),
            text,
        )


def _histogram_points(
    family: Family, start_ns: int, now_ns: int
) -> list[HistogramPoint]:
    points, counts, before, total = [], [], 0, 0.0
    for suffix, labels, value in family.samples:
        if suffix == "_bucket":  # a Prometheus bucket counts all below its bound
            counts.append(int(value) - before)
            before = int(value)
        elif suffix == "_sum":
            total = float(value)
        else:
            points.append(
                HistogramPoint(
                    int(value), total, counts, start_ns, now_ns, _texts(labels)
                )
            )
            counts, before = [], 0
    return points


def _unit(name: str) -> str:
    stem = name.removesuffix("_total")
    return next((unit for suffix, unit in _UNITS if stem.endswith(suffix)), "")


def _texts(labels: Labels) -> dict[str, str]:
    return {name: str(value) for name, value in labels}
