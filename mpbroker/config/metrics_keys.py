"""The broker's keys for metrics and the request log: ours, as Kafka has JMX for it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final

from mpbroker.base.config_def import (
    ConfigError,
    ConfigKey,
    ConfigType,
    at_least,
    between,
    one_of,
)
from mpbroker.config.broker_key import BrokerKey, Reader
from mpbroker.config.machine import Computed, Machine, of_variables

# Source: OpenTelemetry specification, "OTLP Exporter" and "Environment Variable
# Specification".


def _default_endpoint(machine: Machine, key: ConfigKey) -> str | None:
    environ = machine.environ
    exporters = environ.get("OTEL_METRICS_EXPORTER", "").lower()
    names = [each.strip() for each in exporters.split(",")]
    is_disabled = environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if is_disabled or (exporters and "otlp" not in names):
        return None

    def read(path: str, text: str) -> str | None:
        protocol = (
            environ.get("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL")
            or environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
            or ""
        )
        if protocol.lower().startswith("grpc"):
            raise ConfigError(
                "the protocol of OTEL_EXPORTER_OTLP_PROTOCOL is gRPC, and metrics are"
                " pushed by OTLP over HTTP only"
            )
        url = text.strip().rstrip("/") + path if path else text
        parse_otlp_endpoint(url)
        return url

    of_all = ("OTEL_EXPORTER_OTLP_ENDPOINT",)
    general = partial(machine.first, of_all, partial(read, "/v1/metrics"), None)
    own = ("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT",)
    return machine.first(own, partial(read, ""), None) or general()


def _default_headers(machine: Machine, key: ConfigKey) -> str | None:
    def read(text: str) -> str | None:
        parse_headers(text)
        return text

    variables = ("OTEL_EXPORTER_OTLP_METRICS_HEADERS", "OTEL_EXPORTER_OTLP_HEADERS")
    return machine.first(variables, read, None)


def _default_attributes(machine: Machine, key: ConfigKey) -> tuple[str, ...]:
    def read(text: str) -> tuple[str, ...]:
        items = tuple(item.strip() for item in text.split(",") if item.strip())
        parse_pairs(key.name, items)
        return items

    def read_name(text: str) -> tuple[str, ...]:
        escaped = text.replace("%", "%25").replace(",", "%2C")
        parse_pairs(key.name, (f"service.name={escaped}",))
        return (f"service.name={escaped}",)

    none: tuple[str, ...] = ()
    return (
        *machine.first(("OTEL_RESOURCE_ATTRIBUTES",), read, none),
        *machine.first(("OTEL_SERVICE_NAME",), read_name, none),
    )


METRICS_KEYS: Final = [
    # A port that nobody asked for is a surprise, and two brokers on one machine would
    # fight over it; the files in deploy/ and systemd/ ask for 127.0.0.1:9404.
    BrokerKey(
        "metrics.listeners",
        ConfigType.LIST,
        (),
        "Address of the metrics and the status page, as HTTP://host:port; one at most."
        " Unset, there is none. There is no authentication: keep it on loopback or in"
        " a network you trust. Port 0 lets the system choose.",
    ),
    BrokerKey(
        "metrics.kafka.names.enable",
        ConfigType.BOOLEAN,
        False,
        "Whether metrics are also shown under the names of kafka_exporter and of the"
        " JMX exporter's usual rules, for dashboards made for these.",
        reader=Reader.EXPORTER,
    ),
    BrokerKey(
        "request.log.path",
        ConfigType.STRING,
        None,
        "File to which requests are appended as lines of JSON, with the time stamps of"
        " all stages. Unset, none is written.",
    ),
    BrokerKey(
        "request.log.max.bytes",
        ConfigType.LONG,
        1024**3,
        "A file of request.log.path that is so large is renamed to that name and .1,"
        " and a new one begun: the log takes twice this, and what is written at once.",
        validator=at_least(1),
    ),
    BrokerKey(
        "slow.request.log.threshold.ms",
        ConfigType.LONG,
        0,
        "Only requests that took at least so long in total are written to"
        " request.log.path; 0 writes all.",
        validator=at_least(0),
        reader=Reader.EXPORTER,
    ),
    BrokerKey(
        "otlp.endpoint",
        ConfigType.STRING,
        Computed(
            _default_endpoint,
            "$OTEL_EXPORTER_OTLP_METRICS_ENDPOINT, else $OTEL_EXPORTER_OTLP_ENDPOINT"
            " with /v1/metrics behind it; none if they are not set, if"
            " $OTEL_METRICS_EXPORTER asks for another exporter, or if"
            " $OTEL_SDK_DISABLED is true",
        ),
        "URL of an OpenTelemetry collector to which the metrics are pushed as OTLP over"
        " HTTP, for example http://127.0.0.1:4318/v1/metrics. Without it nothing is"
        " pushed. What it asks with (?token=...) is shown to nobody.",
        is_url=True,
    ),
    BrokerKey(
        "otlp.interval.ms",
        ConfigType.LONG,
        of_variables(60_000, "OTEL_METRIC_EXPORT_INTERVAL"),
        "How often metrics are pushed to otlp.endpoint.",
        validator=at_least(100),
    ),
    BrokerKey(
        "otlp.timeout.ms",
        ConfigType.LONG,
        of_variables(
            10_000, "OTEL_EXPORTER_OTLP_METRICS_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT"
        ),
        "How long a push waits for the collector, whichever step it is at.",
        validator=between(1, 3_600_000),
    ),
    BrokerKey(
        "otlp.headers",
        ConfigType.PASSWORD,
        Computed(
            _default_headers,
            "$OTEL_EXPORTER_OTLP_METRICS_HEADERS, else $OTEL_EXPORTER_OTLP_HEADERS,"
            " else none",
        ),
        "Headers of each push, as NAME=VALUE,NAME=VALUE with values as in a URL, for"
        " example authorization=Bearer%20TOKEN.",
    ),
    BrokerKey(
        "otlp.compression",
        ConfigType.STRING,
        of_variables(
            "none",
            "OTEL_EXPORTER_OTLP_METRICS_COMPRESSION",
            "OTEL_EXPORTER_OTLP_COMPRESSION",
        ),
        "Whether pushes are compressed: none or gzip.",
        validator=one_of("none", "gzip"),
    ),
    BrokerKey(
        "otlp.resource.attributes",
        ConfigType.LIST,
        Computed(
            _default_attributes,
            "$OTEL_RESOURCE_ATTRIBUTES, and service.name of $OTEL_SERVICE_NAME",
        ),
        "What pushed metrics say of this broker, as NAME=VALUE, beside and before"
        " service.name=mpbroker, service.version and service.instance.id (the cluster's"
        " id and node.id).",
    ),
]

_LISTENER: Final = re.compile(
    r"HTTP://(?:\[([0-9A-Fa-f:.%]+)\]|([A-Za-z0-9_.\-]*)):(\d{1,5})"
)


def parse_metrics_listener(items: Sequence[str]) -> tuple[str, int] | None:
    """Return host and port; None: there shall be no such listener.

    Raises:
        ConfigError: it is not of the form HTTP://host:port, or there are several.
    """
    if not items:
        return None
    if len(items) > 1:
        raise ConfigError(f"metrics.listeners: {len(items)} addresses; one at most")
    match = _LISTENER.fullmatch(items[0].strip())
    if match is None or int(match[3]) > 65535:
        raise ConfigError(
            f"metrics.listeners: {items[0]!r:.100} is not HTTP://host:port, for example"
            " HTTP://127.0.0.1:9404"
        )
    return match[1] or match[2], int(match[3])


_ENDPOINT: Final = re.compile(
    r"(?i:(https?)://)(?:\[([0-9A-Fa-f:.%]+)\]|([A-Za-z0-9_.\-]+))(?::(\d{1,5}))?"
    r"(/[\x21\x24-\x7e]*)?"
)


def parse_otlp_endpoint(text: str) -> tuple[bool, str, int, str]:
    """Return whether it is HTTPS, and host, port and path.

    Raises:
        ConfigError: it is no such URL.
    """
    match = _ENDPOINT.fullmatch(text.strip())
    if match is None or int(match[4] or 0) > 65535:
        # A password may be in it, before the host or after a question mark.
        shown = "what is set" if "@" in text else f"{text.partition('?')[0]!r:.100}"
        raise ConfigError(
            f"otlp.endpoint: {shown} is not a URL of HTTP or HTTPS with no user in it,"
            " for example http://127.0.0.1:4318/v1/metrics"
        )
    is_secure = match[1].lower() == "https"
    port = int(match[4]) if match[4] else 443 if is_secure else 80
    return is_secure, match[2] or match[3], port, match[5] or "/"


def shown_endpoint(text: str) -> str:
    """Return the part of an endpoint that may be logged: what asks may hold a secret.

    Raises:
        ConfigError: it is no endpoint.
    """
    is_secure, host, port, path = parse_otlp_endpoint(text)
    named = f"[{host}]" if ":" in host else host
    scheme = "https" if is_secure else "http"
    return f"{scheme}://{named}:{port}{path.partition('?')[0]}"


def parse_pairs(key: str, items: Sequence[str]) -> dict[str, str]:
    """Read NAME=VALUE, values as in a URL; the last of a name counts.

    Raises:
        ConfigError: one is not of that form, or has what cannot be sent. It is not
            repeated: it may be secret.
    """
    return {name: value for _, name, value in _pairs(key, items)}


def _pairs(key: str, items: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Where it is, for people, name and value of each that is not empty."""
    from urllib.parse import unquote

    for number, item in enumerate(items, 1):
        where = f"{key}: item {number}"
        name, equals, value = item.strip().partition("=")
        name, value = name.strip(), unquote(value.strip())
        if not (name or equals):
            continue
        if not equals or not name.isascii() or not name.isprintable() or " " in name:
            raise ConfigError(f"{where} is not of the form NAME=VALUE")
        if not name or not value.isprintable():
            raise ConfigError(f"{where} has characters that cannot be sent")
        yield where, name, value


# Source: RFC 9110, section 5.6.2.
_TOKEN: Final = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_OUR_OWN: Final = ("content-length", "host", "transfer-encoding")


def parse_headers(text: str | None) -> dict[str, str]:
    """Read otlp.headers; names in small letters, as they mean the same in any.

    Raises:
        ConfigError: HTTP cannot send them. None of it is repeated: a name may hold
            a secret, too, where a colon was written for the "=".
    """
    found = {}
    items = text.split(",") if text else ()
    for where, name, value in _pairs("otlp.headers", items):
        if not _TOKEN.fullmatch(name):
            raise ConfigError(f"{where} is not of the form NAME=VALUE")
        if name.lower() in _OUR_OWN:
            raise ConfigError(f"{where} is a header that each push has of its own")
        if any(character > "\xff" for character in value):
            raise ConfigError(f"{where} has characters that cannot be sent")
        found[name.lower()] = value
    return found


def check_otlp(
    endpoint: str | None, headers: str | None, attributes: Sequence[str]
) -> None:
    """Raise ConfigError if metrics cannot be pushed by these."""
    if endpoint:
        parse_otlp_endpoint(endpoint)
        parse_headers(headers)
        parse_pairs("otlp.resource.attributes", attributes)
