"""Metrics: what the values of their settings mean, and OpenTelemetry's variables."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final

from mpbroker.base.config_def import (
    ConfigError,
    ConfigKey,
)
from mpbroker.config.machine import Machine

# Source: OpenTelemetry specification, "OTLP Exporter" and "Environment Variable
# Specification".


def default_endpoint(machine: Machine, key: ConfigKey) -> str | None:
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


def default_headers(machine: Machine, key: ConfigKey) -> str | None:
    def read(text: str) -> str | None:
        parse_headers(text)
        return text

    variables = ("OTEL_EXPORTER_OTLP_METRICS_HEADERS", "OTEL_EXPORTER_OTLP_HEADERS")
    return machine.first(variables, read, None)


def default_attributes(machine: Machine, key: ConfigKey) -> tuple[str, ...]:
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


# Compiled when they are first used: few brokers that start have a use for them.
_LISTENER: Final = r"HTTP://(?:\[([0-9A-Fa-f:.%]+)\]|([A-Za-z0-9_.\-]*)):(\d{1,5})"


def parse_metrics_listener(items: Sequence[str]) -> tuple[str, int] | None:
    """Return host and port; None: there shall be no such listener.

    Raises:
        ConfigError: it is not of the form HTTP://host:port, or there are several.
    """
    if not items:
        return None
    if len(items) > 1:
        raise ConfigError(f"metrics.listeners: {len(items)} addresses; one at most")
    match = re.fullmatch(_LISTENER, items[0].strip())
    if match is None or int(match[3]) > 65535:
        raise ConfigError(
            f"metrics.listeners: {items[0]!r:.100} is not HTTP://host:port, for example"
            " HTTP://127.0.0.1:9404"
        )
    return match[1] or match[2], int(match[3])


_ENDPOINT: Final = (
    r"(?i:(https?)://)(?:\[([0-9A-Fa-f:.%]+)\]|([A-Za-z0-9_.\-]+))(?::(\d{1,5}))?"
    r"(/[\x21\x24-\x7e]*)?"
)


def parse_otlp_endpoint(text: str) -> tuple[bool, str, int, str]:
    """Return whether it is HTTPS, and host, port and path.

    Raises:
        ConfigError: it is no such URL.
    """
    match = re.fullmatch(_ENDPOINT, text.strip())
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
_TOKEN: Final = r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
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
        if not re.fullmatch(_TOKEN, name):
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
