"""The broker's keys for metrics and the request log: ours, as Kafka has JMX for it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from mpbroker.config_def import (
    ConfigError,
    ConfigKey,
    ConfigType,
    ConfigValue,
    at_least,
)

METRICS_KEYS: Final = [
    # A port that nobody asked for is a surprise, and two brokers on one machine would
    # fight over it; the files in deploy/ and systemd/ ask for 127.0.0.1:9404.
    ConfigKey(
        "metrics.listeners",
        ConfigType.LIST,
        (),
        "Address of the metrics and the status page, as HTTP://host:port; one at most."
        " Unset, there is none. There is no authentication: keep it on loopback or in"
        " a network you trust. Port 0 lets the system choose.",
    ),
    ConfigKey(
        "metrics.kafka.names.enable",
        ConfigType.BOOLEAN,
        False,
        "Whether metrics are also shown under the names of kafka_exporter and of the"
        " JMX exporter's usual rules, for dashboards made for these.",
    ),
    ConfigKey(
        "request.log.path",
        ConfigType.STRING,
        None,
        "File to which requests are appended as lines of JSON, with the time stamps of"
        " all stages. Unset, none is written.",
    ),
    ConfigKey(
        "slow.request.log.threshold.ms",
        ConfigType.LONG,
        0,
        "Only requests that took at least so long in total are written to"
        " request.log.path; 0 writes all.",
        validator=at_least(0),
    ),
    ConfigKey(
        "otlp.endpoint",
        ConfigType.STRING,
        None,
        "URL of an OpenTelemetry collector to which the metrics are pushed as OTLP over"
        " HTTP, for example http://127.0.0.1:4318/v1/metrics. Unset, what"
        " OTEL_EXPORTER_OTLP_METRICS_ENDPOINT or OTEL_EXPORTER_OTLP_ENDPOINT says;"
        " without them nothing is pushed.",
    ),
    ConfigKey(
        "otlp.interval.ms",
        ConfigType.LONG,
        60_000,
        "How often metrics are pushed to otlp.endpoint; OTEL_METRIC_EXPORT_INTERVAL"
        " gives the default.",
        validator=at_least(100),
    ),
    ConfigKey(
        "otlp.timeout.ms",
        ConfigType.LONG,
        10_000,
        "How long a push waits for the collector, whichever step it is at;"
        " OTEL_EXPORTER_OTLP_METRICS_TIMEOUT or OTEL_EXPORTER_OTLP_TIMEOUT gives the"
        " default.",
        validator=at_least(1),
    ),
    ConfigKey(
        "otlp.headers",
        ConfigType.PASSWORD,
        None,
        "Headers of each push, as NAME=VALUE,NAME=VALUE with values as in a URL, for"
        " example authorization=Bearer%20TOKEN. OTEL_EXPORTER_OTLP_METRICS_HEADERS or"
        " OTEL_EXPORTER_OTLP_HEADERS gives the default.",
    ),
    ConfigKey(
        "otlp.resource.attributes",
        ConfigType.LIST,
        (),
        "What pushed metrics say of this broker, as NAME=VALUE, beside and before"
        " service.name=mpbroker, service.version and service.instance.id (the cluster's"
        " id and node.id). OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME give the"
        " default.",
    ),
]

# The first that is set counts. Source: OpenTelemetry specification, "OTLP Exporter" and
# "Environment Variable Specification".
_OTEL_VARIABLES: Final = {
    "otlp.interval.ms": ("OTEL_METRIC_EXPORT_INTERVAL",),
    "otlp.timeout.ms": (
        "OTEL_EXPORTER_OTLP_METRICS_TIMEOUT",
        "OTEL_EXPORTER_OTLP_TIMEOUT",
    ),
    "otlp.headers": (
        "OTEL_EXPORTER_OTLP_METRICS_HEADERS",
        "OTEL_EXPORTER_OTLP_HEADERS",
    ),
    "otlp.resource.attributes": ("OTEL_RESOURCE_ATTRIBUTES",),
}

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


def otlp_defaults(environ: Mapping[str, str]) -> dict[str, ConfigValue]:
    """Defaults of the otlp. keys, from OpenTelemetry's own variables.

    Raises:
        ConfigError: one of them cannot be such a value.
    """
    found: dict[str, ConfigValue] = {}
    keys = {key.name: key for key in METRICS_KEYS}
    for name, variables in _OTEL_VARIABLES.items():
        for variable in variables:
            if environ.get(variable):
                try:
                    found.setdefault(name, keys[name].parse(environ[variable]))
                except ConfigError as error:
                    raise ConfigError(f"{error} ({variable})") from None
    endpoint = environ.get("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT")
    if not endpoint and environ.get("OTEL_EXPORTER_OTLP_ENDPOINT"):
        endpoint = environ["OTEL_EXPORTER_OTLP_ENDPOINT"].rstrip("/") + "/v1/metrics"
    if endpoint and environ.get("OTEL_SDK_DISABLED", "").lower() != "true":
        found["otlp.endpoint"] = endpoint
    if environ.get("OTEL_SERVICE_NAME"):
        others = found.get("otlp.resource.attributes", ())
        assert isinstance(others, tuple)
        name = f"service.name={environ['OTEL_SERVICE_NAME']}"
        found["otlp.resource.attributes"] = (*others, name)
    return found


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
        raise ConfigError(
            f"otlp.endpoint: {text!r:.100} is not a URL of HTTP or HTTPS, and no user"
            " in it, for example http://127.0.0.1:4318/v1/metrics"
        )
    is_secure = match[1].lower() == "https"
    port = int(match[4]) if match[4] else 443 if is_secure else 80
    return is_secure, match[2] or match[3], port, match[5] or "/"


def parse_pairs(key: str, items: Sequence[str]) -> dict[str, str]:
    """Read NAME=VALUE, values as in a URL; the last of a name counts.

    Raises:
        ConfigError: one is not of that form, or has what no header may have. It is not
            repeated: it may be secret.
    """
    from urllib.parse import unquote

    found = {}
    for number, item in enumerate(items, 1):
        name, equals, value = item.strip().partition("=")
        name, value = name.strip(), unquote(value.strip())
        if not equals or not name.isascii() or not name.isprintable() or " " in name:
            raise ConfigError(f"{key}: item {number} is not of the form NAME=VALUE")
        if not name or not value.isprintable():
            raise ConfigError(
                f"{key}: item {number} has characters that cannot be sent"
            )
        found[name] = value
    return found


def check_otlp(
    endpoint: str | None, headers: str | None, attributes: Sequence[str]
) -> None:
    """Raise ConfigError if metrics cannot be pushed by these."""
    if endpoint:
        parse_otlp_endpoint(endpoint)
        parse_pairs("otlp.headers", headers.split(",") if headers else ())
        parse_pairs("otlp.resource.attributes", attributes)
