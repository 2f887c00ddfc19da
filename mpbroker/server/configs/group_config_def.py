"""Define the configs of groups: values of a group that differ from the broker's.

Source: KIP-848; Kafka's GroupConfig.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from mpbroker.base.config_def import (
    ConfigDef,
    ConfigError,
    ConfigKey,
    ConfigType,
    at_least,
)
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.server.configs.config_entries import BrokerConfigs
from mpbroker.server.errors import invalid_request

SESSION_TIMEOUT: Final = "consumer.session.timeout.ms"
HEARTBEAT_INTERVAL: Final = "consumer.heartbeat.interval.ms"

# fmt: off
GROUP_CONFIG_DEF: Final = ConfigDef("group config", (
    ConfigKey(SESSION_TIMEOUT, ConfigType.INT, 45_000,
        "A member of the consumer protocol that is silent for so long is dead.",
        validator=at_least(1)),
    ConfigKey(HEARTBEAT_INTERVAL, ConfigType.INT, 5000,
        "Time between the heartbeats of such a member.",
        validator=at_least(1)),
))

# The broker's keys for the default, the smallest and the largest value of a group.
_BROKER_KEYS: Final = {
    SESSION_TIMEOUT: (
        "group.consumer.session.timeout.ms",
        "group.consumer.min.session.timeout.ms",
        "group.consumer.max.session.timeout.ms",
    ),
    HEARTBEAT_INTERVAL: (
        "group.consumer.heartbeat.interval.ms",
        "group.consumer.min.heartbeat.interval.ms",
        "group.consumer.max.heartbeat.interval.ms",
    ),
}
# fmt: on


def check_group_name(name: str) -> None:
    """Raise ApiError INVALID_REQUEST if a group's name is empty."""
    if not name:
        raise invalid_request("Group name must not be empty.")


def group_default(name: str, broker: BrokerConfigs) -> str:
    """Return the value of a group that sets none itself: the broker's."""
    return broker.synonyms(_BROKER_KEYS[name][0])[0].text


def check_group_configs(overrides: Mapping[str, str], broker: BrokerConfigs) -> None:
    """Check the configs of a group.

    Raises:
        ApiError: INVALID_CONFIG: a key is unknown, or a value cannot be parsed or is
            outside the broker's limits.
    """
    values: dict[str, int] = {}
    try:
        for key in GROUP_CONFIG_DEF:
            text = overrides.get(key.name)
            number = key.parse(
                group_default(key.name, broker) if text is None else text
            )
            assert isinstance(number, int)
            values[key.name] = number
        for name in overrides:
            GROUP_CONFIG_DEF.key(name)
    except ConfigError as error:
        raise ApiError(ErrorCode.INVALID_CONFIG, str(error)) from None
    for name, value in values.items():
        _, least, most = _BROKER_KEYS[name]
        for limit, is_wrong in ((least, int.__lt__), (most, int.__gt__)):
            bound = int(broker.synonyms(limit)[0].text)
            if name in overrides and is_wrong(value, bound):
                side = "greater" if limit is least else "less"
                raise ApiError(
                    ErrorCode.INVALID_CONFIG,
                    f"{name} must be {side} than or equal to {limit}, which is {bound};"
                    f" it is {value}",
                )
    if values[SESSION_TIMEOUT] <= values[HEARTBEAT_INTERVAL]:
        raise ApiError(
            ErrorCode.INVALID_CONFIG,
            f"{SESSION_TIMEOUT} ({values[SESSION_TIMEOUT]}) must be greater than"
            f" {HEARTBEAT_INTERVAL} ({values[HEARTBEAT_INTERVAL]})",
        )
