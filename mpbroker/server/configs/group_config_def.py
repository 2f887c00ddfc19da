"""Define the configs of groups, which replace the broker's values for one group.

Source: KIP-848; Kafka's GroupConfig.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from mpbroker.base.config_def import (
    ConfigDef,
    ConfigError,
    ConfigKey,
    ConfigType,
    Validator,
    at_least,
    one_of,
)
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.server.configs.config_entries import BrokerConfigs
from mpbroker.server.errors import invalid_request

SESSION_TIMEOUT: Final = "consumer.session.timeout.ms"
HEARTBEAT_INTERVAL: Final = "consumer.heartbeat.interval.ms"
SHARE_SESSION_TIMEOUT: Final = "share.session.timeout.ms"
SHARE_HEARTBEAT_INTERVAL: Final = "share.heartbeat.interval.ms"
STREAMS_SESSION_TIMEOUT: Final = "streams.session.timeout.ms"
STREAMS_HEARTBEAT_INTERVAL: Final = "streams.heartbeat.interval.ms"
SHARE_AUTO_OFFSET_RESET: Final = "share.auto.offset.reset"


def _is_reset_strategy(value: object) -> bool:
    return isinstance(value, str) and (
        value in ("latest", "earliest") or duration_ms(value) is not None
    )


def duration_ms(strategy: str) -> int | None:
    """Return the time of a strategy such as "by_duration:P1DT2H" in ms.

    Return None if the text has another form, as "earliest" has.

    Source: ISO 8601; java.time.Duration.parse.
    """
    found = _BY_DURATION.fullmatch(strategy)
    if found is None or not any(found.groups()):
        return None
    days, hours, minutes, seconds = (float(part or 0) for part in found.groups())
    return round((((days * 24 + hours) * 60 + minutes) * 60 + seconds) * 1000)


# fmt: off
_BY_DURATION: Final = re.compile(
    r"by_duration:P(?:(\d+)D)?(?:T(?=\d)(?:(\d+)H)?(?:(\d+)M)?(?:(\d+(?:\.\d+)?)S)?)?",
    re.IGNORECASE,
)

GROUP_CONFIG_DEF: Final = ConfigDef("group config", (
    ConfigKey(SESSION_TIMEOUT, ConfigType.INT, 45_000,
        "A member of the consumer protocol that is silent for so long is dead.",
        validator=at_least(1)),
    ConfigKey(HEARTBEAT_INTERVAL, ConfigType.INT, 5000,
        "Time between the heartbeats of such a member.",
        validator=at_least(1)),
    ConfigKey("consumer.assignment.interval.ms", ConfigType.INT, 1000,
        "A target assignment is made with each change of the group.",
        validator=at_least(0), has_effect=False),
    ConfigKey(SHARE_SESSION_TIMEOUT, ConfigType.INT, 45_000,
        "A member of the share group that is silent for so long is dead.",
        validator=at_least(1)),
    ConfigKey(SHARE_HEARTBEAT_INTERVAL, ConfigType.INT, 5000,
        "Time between the heartbeats of such a member.",
        validator=at_least(1)),
    ConfigKey("share.record.lock.duration.ms", ConfigType.INT, 30_000,
        "How long a member may keep a record before it is delivered again.",
        validator=at_least(1000)),
    ConfigKey("share.delivery.count.limit", ConfigType.INT, 5,
        "Most deliveries of a record.",
        validator=at_least(2)),
    ConfigKey("share.partition.max.record.locks", ConfigType.INT, 2000,
        "Most records of a partition that are delivered and not finished.",
        validator=at_least(100)),
    ConfigKey(SHARE_AUTO_OFFSET_RESET, ConfigType.STRING, "latest",
        "Where the group begins in a partition: `latest`, `earliest`, or"
        " `by_duration:` and an ISO 8601 duration.",
        validator=Validator("latest, earliest or by_duration:PnDTnHnMn.nS",
            _is_reset_strategy)),
    ConfigKey("share.isolation.level", ConfigType.STRING, "read_uncommitted",
        "Whether records of transactions are delivered before they are committed.",
        validator=one_of("read_committed", "read_uncommitted")),
    ConfigKey("share.renew.acknowledge.enable", ConfigType.BOOLEAN, True,
        "Whether members may renew the locks of their records."),
    ConfigKey("share.assignment.interval.ms", ConfigType.INT, 1000,
        "A target assignment is made with each change of the group.",
        validator=at_least(0), has_effect=False),
    ConfigKey(STREAMS_SESSION_TIMEOUT, ConfigType.INT, 45_000,
        "A member of the streams group that is silent for so long is dead.",
        validator=at_least(1)),
    ConfigKey(STREAMS_HEARTBEAT_INTERVAL, ConfigType.INT, 5000,
        "Time between the heartbeats of such a member.",
        validator=at_least(1)),
    ConfigKey("streams.num.standby.replicas", ConfigType.INT, 0,
        "Standbys of each task with state.",
        validator=at_least(0)),
    ConfigKey("streams.initial.rebalance.delay.ms", ConfigType.INT, 3000,
        "How long the group waits for more members before its first assignment.",
        validator=at_least(0)),
    ConfigKey("streams.assignment.interval.ms", ConfigType.INT, 1000,
        "A target assignment is made with each change of the group.",
        validator=at_least(0), has_effect=False),
    ConfigKey("streams.assignor.name", ConfigType.STRING, "sticky",
        "There is one assignor for streams groups.", has_effect=False),
    ConfigKey("streams.rack.aware.assignment.tags", ConfigType.LIST, (),
        "The assignor does not look at racks.", has_effect=False),
    ConfigKey("errors.deadletterqueue.copy.record.enable", ConfigType.BOOLEAN, False,
        "Share groups have no dead-letter queue.", has_effect=False),
    ConfigKey("errors.deadletterqueue.topic.name", ConfigType.STRING, "",
        "Share groups have no dead-letter queue.", has_effect=False),
))

# The broker's keys for the default, the smallest and the largest value of a group.
_BROKER_KEYS: Final[Mapping[str, tuple[str, str | None, str | None]]] = {
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
    SHARE_SESSION_TIMEOUT: (
        "group.share.session.timeout.ms",
        "group.share.min.session.timeout.ms",
        "group.share.max.session.timeout.ms",
    ),
    SHARE_HEARTBEAT_INTERVAL: (
        "group.share.heartbeat.interval.ms",
        "group.share.min.heartbeat.interval.ms",
        "group.share.max.heartbeat.interval.ms",
    ),
    "share.record.lock.duration.ms": (
        "group.share.record.lock.duration.ms",
        "group.share.min.record.lock.duration.ms",
        "group.share.max.record.lock.duration.ms",
    ),
    "share.delivery.count.limit": (
        "group.share.delivery.count.limit",
        "group.share.min.delivery.count.limit",
        "group.share.max.delivery.count.limit",
    ),
    "share.partition.max.record.locks": (
        "group.share.partition.max.record.locks",
        "group.share.min.partition.max.record.locks",
        "group.share.max.partition.max.record.locks",
    ),
    STREAMS_SESSION_TIMEOUT: (
        "group.streams.session.timeout.ms",
        "group.streams.min.session.timeout.ms",
        "group.streams.max.session.timeout.ms",
    ),
    STREAMS_HEARTBEAT_INTERVAL: (
        "group.streams.heartbeat.interval.ms",
        "group.streams.min.heartbeat.interval.ms",
        "group.streams.max.heartbeat.interval.ms",
    ),
    "streams.num.standby.replicas": (
        "group.streams.num.standby.replicas",
        None,
        "group.streams.max.standby.replicas",
    ),
    "streams.initial.rebalance.delay.ms": (
        "group.streams.initial.rebalance.delay.ms",
        None,
        None,
    ),
}
# fmt: on


def check_group_name(name: str) -> None:
    """Raise ApiError INVALID_REQUEST if a group's name is empty."""
    if not name:
        raise invalid_request("Group name must not be empty.")


def group_default(name: str, broker: BrokerConfigs) -> str:
    """Return the value of a key for groups that do not set it.

    It is that of the broker's key, if there is one, otherwise the key's default.
    """
    keys = _BROKER_KEYS.get(name)
    if keys is None:
        key = GROUP_CONFIG_DEF.key(name)
        return key.format(key.default) or ""
    return broker.synonyms(keys[0])[0].text


class GroupLimits:
    """Checks the configs of groups against the broker's, which are read only once.

    One request may set configs on thousands of groups, and all other changes of the
    metadata wait for it.

    Args:
        broker: the broker's configs, which have the defaults and the limits.
    """

    def __init__(self, broker: BrokerConfigs) -> None:
        self._defaults: dict[str, int] = {}
        self._bounds: dict[str, list[tuple[str, int, bool]]] = {}
        for name, (default, least, most) in _BROKER_KEYS.items():
            self._defaults[name] = int(broker.synonyms(default)[0].text)
            self._bounds[name] = [
                (limit, int(broker.synonyms(limit)[0].text), limit is least)
                for limit in (least, most)
                if limit is not None
            ]

    def check(self, overrides: Mapping[str, str]) -> None:
        """Check the configs of a group.

        Args:
            overrides: the values that the group sets, by key.

        Raises:
            ApiError: INVALID_CONFIG if a key is unknown, or a value cannot be parsed or
                is outside the broker's limits, or a session timeout is not greater than
                the heartbeat interval.
        """
        own: dict[str, int] = {}
        try:
            for name, text in overrides.items():
                value = GROUP_CONFIG_DEF.key(name).parse(text)
                if name in _BROKER_KEYS:
                    assert isinstance(value, int)
                    own[name] = value
        except ConfigError as error:
            raise ApiError(ErrorCode.INVALID_CONFIG, str(error)) from None
        for name, number in own.items():
            self._check_bounds(name, number)
        values = self._defaults | own
        for session, heartbeat in (
            (SESSION_TIMEOUT, HEARTBEAT_INTERVAL),
            (SHARE_SESSION_TIMEOUT, SHARE_HEARTBEAT_INTERVAL),
            (STREAMS_SESSION_TIMEOUT, STREAMS_HEARTBEAT_INTERVAL),
        ):
            if values[session] <= values[heartbeat]:
                raise ApiError(
                    ErrorCode.INVALID_CONFIG,
                    f"{session} ({values[session]}) must be greater than"
                    f" {heartbeat} ({values[heartbeat]})",
                )

    def _check_bounds(self, name: str, value: int) -> None:
        for limit, bound, is_least in self._bounds[name]:
            if value < bound if is_least else value > bound:
                side = "greater" if is_least else "less"
                raise ApiError(
                    ErrorCode.INVALID_CONFIG,
                    f"{name} must be {side} than or equal to {limit}, which is {bound};"
                    f" it is {value}",
                )
