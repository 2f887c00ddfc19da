"""Parse the settings of metrics, and read OpenTelemetry's variables."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final

from mpbroker.base.config_def import (
    ConfigError,
    ConfigKey,
)
from mpbroker.base.named_tuple import NamedTuple
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
                "OTEL_EXPORTER_OTLP_PROTOCOL asks for gRPC, and metrics are pushed by"
                " OTLP over HTTP only"
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


# Compiled at their first use, because most brokers that start do not use them.
_LISTENER: Final = r"(HTTPS?)://(?:\[([0-9A-Fa-f:.%]+)\]|([A-Za-z0-9_.\-]*)):(\d{1,5})"


class HttpListener(NamedTuple):
    """An address of metrics.listeners or console.listeners."""

    host: str
    port: int
    is_secure: bool  # HTTPS


def parse_http_listener(
    key: str, items: Sequence[str], *, may_be_secure: bool = False
) -> HttpListener | None:
    """Parse metrics.listeners or console.listeners.

    Returns:
        The address; None: the setting is empty.

    Raises:
        ConfigError: an item is not HTTP://host:port (or HTTPS, if it may be), or there
            are several items.
    """
    if not items:
        return None
    if len(items) > 1:
        raise ConfigError(f"{key}: {len(items)} addresses are named; name one at most")
    match = re.fullmatch(_LISTENER, items[0].strip())
    is_secure = match is not None and match[1] == "HTTPS"
    if match is None or int(match[4]) > 65535 or (is_secure and not may_be_secure):
        forms = "HTTP://host:port" + (" or HTTPS://host:port" if may_be_secure else "")
        raise ConfigError(
            f"{key}: {items[0]!r:.100} is not {forms}, for example"
            " HTTP://127.0.0.1:9404"
        )
    return HttpListener(match[2] or match[3], int(match[4]), is_secure)


_ENDPOINT: Final = (
    r"(?i:(https?)://)(?:\[([0-9A-Fa-f:.%]+)\]|([A-Za-z0-9_.\-]+))(?::(\d{1,5}))?"
    r"(/[\x21\x24-\x7e]*)?"
)


def parse_otlp_endpoint(text: str) -> tuple[bool, str, int, str]:
    """Parse otlp.endpoint.

    Returns:
        Whether the scheme is HTTPS; then host, port and path.

    Raises:
        ConfigError: the text is not a URL of HTTP or HTTPS, or has a user in it.
    """
    match = re.fullmatch(_ENDPOINT, text.strip())
    if match is None or int(match[4] or 0) > 65535:
        # Do not show a password: it may be before the host or after a "?".
        shown = "its value" if "@" in text else f"{text.partition('?')[0]!r:.100}"
        raise ConfigError(
            f"otlp.endpoint: {shown} is not a URL of HTTP or HTTPS without a user, for"
            " example http://127.0.0.1:4318/v1/metrics"
        )
    is_secure = match[1].lower() == "https"
    port = int(match[4]) if match[4] else 443 if is_secure else 80
    return is_secure, match[2] or match[3], port, match[5] or "/"


def shown_endpoint(text: str) -> str:
    """Return an endpoint without its query, which may hold a secret.

    Raises:
        ConfigError: see parse_otlp_endpoint().
    """
    is_secure, host, port, path = parse_otlp_endpoint(text)
    named = f"[{host}]" if ":" in host else host
    scheme = "https" if is_secure else "http"
    return f"{scheme}://{named}:{port}{path.partition('?')[0]}"


def parse_pairs(key: str, items: Sequence[str]) -> dict[str, str]:
    """Parse items NAME=VALUE, with values encoded as in a URL.

    If several items have the same name, the last one counts.

    Raises:
        ConfigError: an item has another form, or characters that cannot be sent. The
            text does not repeat the item, which may be secret.
    """
    return {name: value for _, name, value in _pairs(key, items)}


def _pairs(key: str, items: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Yield the place (for messages), name and value of each item that is not empty."""
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
    """Parse otlp.headers; names become lower case.

    Raises:
        ConfigError: HTTP cannot send a header. The text does not repeat it: if a colon
            was written instead of "=", even the name may hold a secret.
    """
    found = {}
    items = text.split(",") if text else ()
    for where, name, value in _pairs("otlp.headers", items):
        if not re.fullmatch(_TOKEN, name):
            raise ConfigError(f"{where} is not of the form NAME=VALUE")
        if name.lower() in _OUR_OWN:
            raise ConfigError(f"{where} is a header that mpbroker sets itself")
        if any(character > "\xff" for character in value):
            raise ConfigError(f"{where} has characters that cannot be sent")
        found[name.lower()] = value
    return found


def check_otlp(
    endpoint: str | None, headers: str | None, attributes: Sequence[str]
) -> None:
    """Raise ConfigError if metrics cannot be pushed with these settings."""
    if endpoint:
        parse_otlp_endpoint(endpoint)
        parse_headers(headers)
        parse_pairs("otlp.resource.attributes", attributes)
