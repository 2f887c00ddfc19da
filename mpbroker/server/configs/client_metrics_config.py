"""Define subscriptions to clients' metrics, and compute what each client pushes.

A subscription is a resource with configs: prefixes of metric names, an interval, and
patterns that a client has to match. A client pushes the metrics of all subscriptions
that it matches, with the shortest of their intervals.

Source: KIP-714; Kafka's ClientMetricsConfigs and ClientMetricsManager.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, Protocol

from mpbroker.base.config_def import (
    ConfigDef,
    ConfigError,
    ConfigKey,
    ConfigType,
    between,
)
from mpbroker.base.linear_regex import InvalidRegexError, LinearRegex
from mpbroker.base.named_tuple import NamedTuple
from mpbroker.metadata.metadata_image import MetadataImage
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.records.crc32c import crc32c
from mpbroker.server.configs.config_entries import CLIENT_METRICS_RESOURCE
from mpbroker.server.errors import invalid_request

METRICS: Final = "metrics"
INTERVAL: Final = "interval.ms"
MATCH: Final = "match"
ALL_METRICS: Final = "*"
_DEFAULT_INTERVAL_MS: Final = 300_000
# Each client that asks is matched with the patterns of all subscriptions. RE2 takes
# half a second for 16 KiB of the worst ones: see linear_regex.py.
_MAX_PATTERNS: Final = 16 * 1024

# fmt: off
CLIENT_METRICS_CONFIG_DEF: Final = ConfigDef("client metrics config", (
    ConfigKey(METRICS, ConfigType.LIST, (),
        "What the names of the wanted metrics begin with; * wants all of them."),
    ConfigKey(INTERVAL, ConfigType.INT, _DEFAULT_INTERVAL_MS,
        "Time between a client's pushes, in milliseconds.",
        validator=between(100, 3_600_000)),
    ConfigKey(MATCH, ConfigType.LIST, (),
        "Which clients it is about: each entry is NAME=PATTERN, and a client has to"
        " match all. NAME is one of client_instance_id, client_id,"
        " client_software_name, client_software_version, client_source_address and"
        " client_source_port; PATTERN is a regular expression of RE2 for the whole"
        " value. Empty, it is about all clients. The first"
        f" {_MAX_PATTERNS} characters of all subscriptions' patterns count."),
))
# fmt: on


class Client(NamedTuple):
    """Holds the properties of a client that the patterns of subscriptions can name."""

    client_instance_id: str
    client_id: str | None
    client_software_name: str
    client_software_version: str
    client_source_address: str
    client_source_port: str


class Subscription(NamedTuple):
    """Says which metrics one client shall push, and how often.

    Attributes:
        subscription_id: a checksum of the other fields and of the client's id.
        metrics: prefixes of metric names, sorted; ["*"]: all metrics; empty: none.
        interval_ms: the time between two pushes.
    """

    subscription_id: int
    metrics: list[str]
    interval_ms: int


class Registry(Protocol):
    """Gives access to the metadata image, which has the subscriptions (KIP-714).

    TopicRegistry, a process's view of the metadata log, is such an object.
    """

    @property
    def image(self) -> MetadataImage: ...


def subscription_names(registry: Registry) -> list[str]:
    """Return the names of all subscriptions to clients' metrics."""
    return [
        name for kind, name in registry.image.configs if kind == CLIENT_METRICS_RESOURCE
    ]


def check_subscription_name(name: str) -> None:
    """Raise ApiError INVALID_REQUEST if a metrics subscription's name is empty."""
    if not name:
        raise invalid_request(
            "Client metrics subscription name must not be empty.",
        )


def check_client_metrics_configs(overrides: Mapping[str, str]) -> None:
    """Check the configs of a subscription to clients' metrics (KIP-714).

    Raises:
        ApiError: INVALID_REQUEST if a key is unknown, or a value cannot be parsed or
            is outside its limits. INVALID_CONFIG if a pattern is not of the form
            NAME=PATTERN, or not a regular expression.
    """
    try:
        for name, text in overrides.items():
            CLIENT_METRICS_CONFIG_DEF.key(name).parse(text)
    except ConfigError as error:
        raise invalid_request(str(error)) from None
    _patterns(overrides.get(MATCH, ""))


def subscription_of(registry: Registry, client: Client, uuid: bytes) -> Subscription:
    """Return which metrics a client shall push.

    There are none if the client matches no subscription. The subscription's id depends
    only on its content and on the client, so all processes compute the same id.

    Args:
        registry: knows the subscriptions.
        client: the client's properties.
        uuid: the client's instance id, 16 bytes.
    """
    metrics: set[str] = set()
    interval_ms = _DEFAULT_INTERVAL_MS
    room = _MAX_PATTERNS
    for (kind, _), texts in registry.image.configs.items():
        if kind != CLIENT_METRICS_RESOURCE:
            continue
        patterns = texts.get(MATCH, "")
        room -= len(patterns)
        if (not patterns or room >= 0) and _is_match(patterns, client):
            metrics.update(_list(METRICS, texts.get(METRICS, "")))
            interval_ms = min(interval_ms, _interval_ms(texts))
    wanted = [ALL_METRICS] if ALL_METRICS in metrics else sorted(metrics)
    content = ",".join((*wanted, str(interval_ms))).encode() + uuid
    return Subscription(_int32(crc32c(content)), wanted, interval_ms)


def _interval_ms(texts: Mapping[str, str]) -> int:
    value = CLIENT_METRICS_CONFIG_DEF.key(INTERVAL).parse(
        texts.get(INTERVAL, str(_DEFAULT_INTERVAL_MS))
    )
    assert isinstance(value, int)
    return value


def _list(name: str, text: str) -> Iterable[str]:
    value = CLIENT_METRICS_CONFIG_DEF.key(name).parse(text)
    assert isinstance(value, tuple)
    return value


def _is_match(text: str, client: Client) -> bool:
    try:
        patterns = _patterns(text)
    except ApiError:
        return False  # an earlier version has accepted patterns that RE2 has not
    for name, pattern in patterns.items():
        value = getattr(client, name)
        if value is None or not pattern.matches(value):
            return False
    return True


def _patterns(text: str) -> dict[str, LinearRegex]:
    """Parse a list of NAME=PATTERN; return the patterns by name.

    Raises:
        ApiError: INVALID_CONFIG if an item has another form.
    """
    patterns: dict[str, LinearRegex] = {}
    if len(text) > _MAX_PATTERNS:
        raise ApiError(
            ErrorCode.INVALID_CONFIG,
            f"{MATCH} has {len(text)} characters; the limit of all subscriptions"
            f" together is {_MAX_PATTERNS}",
        )
    for item in _list(MATCH, text):
        name, equals, pattern = (part.strip() for part in item.partition("="))
        try:
            if not equals or not pattern or name not in Client._fields:
                raise ValueError(f"it must be NAME=PATTERN, NAME one of {_NAMES}")
            patterns[name] = LinearRegex(pattern)
        except (ValueError, InvalidRegexError) as error:
            raise ApiError(
                ErrorCode.INVALID_CONFIG,
                f"Illegal client matching pattern: {item}: {error}",
            ) from None
    return patterns


_NAMES: Final = ", ".join(Client._fields)


def _int32(number: int) -> int:
    return number - (1 << 32) if number >= 1 << 31 else number
