"""Subscriptions to clients' metrics: what they are made of, and whom they are about.

A subscription is a resource of configs: prefixes of metrics' names, an interval, and
patterns that a client has to match. What a client shall push is what all subscriptions
that it matches want together, as often as the most eager of them wants it.

Source: KIP-714; Kafka's ClientMetricsConfigs and ClientMetricsManager.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple, Protocol

from mpbroker.base.config_def import (
    ConfigDef,
    ConfigError,
    ConfigKey,
    ConfigType,
    between,
)
from mpbroker.metadata.metadata_image import (
    MetadataImage,
    MetadataRecord,
    config_record,
)
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.records.crc32c import crc32c
from mpbroker.server.configs.config_entries import CLIENT_METRICS_RESOURCE

METRICS: Final = "metrics"
INTERVAL: Final = "interval.ms"
MATCH: Final = "match"
ALL_METRICS: Final = "*"
_DEFAULT_INTERVAL_MS: Final = 300_000

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
        " client_source_port; PATTERN is a regular expression for the whole value."
        " Empty, it is about all clients."),
))
# fmt: on


class Client(NamedTuple):
    """What a subscription may go by; the names are those of its patterns."""

    client_instance_id: str
    client_id: str | None
    client_software_name: str
    client_software_version: str
    client_source_address: str
    client_source_port: str


class Subscription(NamedTuple):
    """What one client shall push."""

    subscription_id: int
    metrics: list[str]
    interval_ms: int


class Registry(Protocol):
    """The part of the TopicRegistry that knows the subscriptions."""

    @property
    def image(self) -> MetadataImage: ...


def subscription_names(registry: Registry) -> list[str]:
    """The names of all subscriptions."""
    return [
        name for kind, name in registry.image.configs if kind == CLIENT_METRICS_RESOURCE
    ]


def check_subscription_name(name: str) -> None:
    """Raise ApiError INVALID_REQUEST unless a subscription is named."""
    if not name:
        raise ApiError(
            ErrorCode.INVALID_REQUEST,
            "Client metrics subscription name must not be empty.",
        )


def check_client_metrics_configs(overrides: Mapping[str, str]) -> None:
    """Raise what is wrong with the configs of a subscription.

    Raises:
        ApiError: INVALID_REQUEST: unknown, unreadable, or outside the limits;
            INVALID_CONFIG: no pattern of that form.
    """
    try:
        for name, text in overrides.items():
            CLIENT_METRICS_CONFIG_DEF.key(name).parse(text)
    except ConfigError as error:
        raise ApiError(ErrorCode.INVALID_REQUEST, str(error)) from None
    _patterns(overrides.get(MATCH, ""))


def subscription_records(
    name: str, before: Mapping[str, str], after: Mapping[str, str]
) -> list[MetadataRecord]:
    """The records that make a subscription's configs other ones."""
    return [
        config_record(CLIENT_METRICS_RESOURCE, name, key, after.get(key))
        for key in sorted({*before, *after})
        if before.get(key) != after.get(key)
    ]


def subscription_of(registry: Registry, client: Client, uuid: bytes) -> Subscription:
    """What a client shall push; no metrics at all if nobody wants any.

    Its id changes with what it says, and is another for each client; but it is the same
    in whichever process it is made.
    """
    metrics: set[str] = set()
    interval_ms = _DEFAULT_INTERVAL_MS
    for (kind, _), texts in registry.image.configs.items():
        if kind == CLIENT_METRICS_RESOURCE and _is_match(texts, client):
            metrics.update(_list(METRICS, texts.get(METRICS, "")))
            interval_ms = min(interval_ms, _interval_ms(texts))
    wanted = [ALL_METRICS] if ALL_METRICS in metrics else sorted(metrics)
    said = ",".join((*wanted, str(interval_ms))).encode() + uuid
    return Subscription(_int32(crc32c(said)), wanted, interval_ms)


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


def _is_match(texts: Mapping[str, str], client: Client) -> bool:
    for name, pattern in _patterns(texts.get(MATCH, "")).items():
        value = getattr(client, name)
        if value is None or not pattern.fullmatch(value):
            return False
    return True


def _patterns(text: str) -> dict[str, re.Pattern[str]]:
    """Read a list of patterns, by what they are about."""
    patterns = {}
    for item in _list(MATCH, text):
        name, equals, pattern = (part.strip() for part in item.partition("="))
        try:
            if not equals or not pattern or name not in Client._fields:
                raise ValueError(f"it must be NAME=PATTERN, NAME one of {_NAMES}")
            patterns[name] = re.compile(pattern)
        except (ValueError, re.error) as error:
            raise ApiError(
                ErrorCode.INVALID_CONFIG,
                f"Illegal client matching pattern: {item}: {error}",
            ) from None
    return patterns


_NAMES: Final = ", ".join(Client._fields)


def _int32(number: int) -> int:
    return number - (1 << 32) if number >= 1 << 31 else number
