"""LogConfig: the settings of one topic, as typed attributes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from mpbroker.base.config_def import ConfigError, ConfigValue
from mpbroker.metadata.log_config_def import BROKER_SYNONYMS, LOG_CONFIG_DEF
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError

_DEFAULTS: Final = {key.name: key.default for key in LOG_CONFIG_DEF}
_ATTRIBUTES: Final = {key.name: key.attribute for key in LOG_CONFIG_DEF}


class LogConfig:
    """The settings of one topic; immutable.

    An attribute is a topic key with underscores: `retention_ms` is retention.ms, in
    milliseconds. -1 is "no limit" where the key's documentation says so. A size or a
    time that is never reached is the largest 64-bit integer.
    """

    __slots__ = ("_values", "overrides", *(key.attribute for key in LOG_CONFIG_DEF))

    overrides: Mapping[str, str]
    # The keys that code reads as attributes; all have one.
    cleanup_policy: tuple[str, ...]
    compression_type: str
    delete_retention_ms: int
    file_delete_delay_ms: int
    flush_messages: int
    flush_ms: int
    index_interval_bytes: int
    max_compaction_lag_ms: int
    max_message_bytes: int
    message_timestamp_after_max_ms: int
    message_timestamp_before_max_ms: int
    message_timestamp_type: str
    min_cleanable_dirty_ratio: float
    min_compaction_lag_ms: int
    preallocate: bool
    retention_bytes: int
    retention_ms: int
    segment_bytes: int
    segment_index_bytes: int
    segment_jitter_ms: int
    segment_ms: int

    def __init__(
        self,
        values: Mapping[str, ConfigValue] | None = None,
        overrides: Mapping[str, str] | None = None,
    ) -> None:
        """Take parsed values by topic key; a key without one has Kafka's default.

        Args:
            overrides: the texts that were set for the topic itself, by key.
        """
        merged = {**_DEFAULTS, **(values or {})}
        set_attribute = object.__setattr__
        set_attribute(self, "_values", merged)
        set_attribute(self, "overrides", dict(overrides or {}))
        for name, attribute in _ATTRIBUTES.items():
            set_attribute(self, attribute, merged[name])

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"LogConfig is immutable: cannot set {name}")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"LogConfig is immutable: cannot delete {name}")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LogConfig):
            return NotImplemented
        return self._mapping == other._mapping and self.overrides == other.overrides

    def __hash__(self) -> int:
        return hash(tuple(sorted(self.overrides.items())))

    def __repr__(self) -> str:
        return f"LogConfig({dict(self.overrides)!r})"

    def value(self, name: str) -> ConfigValue:
        """Return the value of a topic key.

        Raises:
            KeyError: there is no such key.
        """
        return self._mapping[name]

    @property
    def _mapping(self) -> dict[str, ConfigValue]:
        values: dict[str, ConfigValue] = object.__getattribute__(self, "_values")
        return values

    @classmethod
    def from_overrides(
        cls,
        broker_defaults: Mapping[str, ConfigValue],
        overrides: Mapping[str, str],
    ) -> LogConfig:
        """Resolve the settings of a topic.

        Args:
            broker_defaults: values by topic key, from defaults_of_broker().
            overrides: by topic key, the texts that were set for the topic itself.

        Raises:
            ApiError: INVALID_CONFIG; an unknown key, a value outside its limits, or a
                value above one that it must not exceed.
        """
        values = dict(broker_defaults)
        try:
            for name, text in overrides.items():
                values[name] = LOG_CONFIG_DEF.key(name).parse(text)
            config = cls(values, overrides)
            LOG_CONFIG_DEF.check_order(config.value)
        except ConfigError as error:
            raise ApiError(ErrorCode.INVALID_CONFIG, str(error)) from None
        return config

    @classmethod
    def from_accepted(
        cls,
        broker_defaults: Mapping[str, ConfigValue],
        overrides: Mapping[str, str],
    ) -> LogConfig:
        """Resolve settings that were accepted earlier; this never fails.

        Another release may have accepted more. An override that is not accepted now
        stays among the overrides, and has no effect.
        """
        values = dict(broker_defaults)
        for name, text in overrides.items():
            try:
                values[name] = LOG_CONFIG_DEF.key(name).parse(text)
            except ConfigError:
                continue
        return cls(values, overrides)


def defaults_of_broker(
    broker_values: Mapping[str, ConfigValue],
) -> dict[str, ConfigValue]:
    """Return the defaults of topics, by topic key.

    Args:
        broker_values: the broker's values by key. A synonym whose value is None is
            skipped: the next synonym supplies the default, and after the last one
            Kafka's default applies.
    """
    inherited: dict[str, ConfigValue] = {}
    for topic_name, synonyms in BROKER_SYNONYMS.items():
        for synonym in synonyms:
            value = broker_values.get(synonym.name)
            if value is not None:
                inherited[topic_name] = _in_topic_unit(value, synonym.factor)
                break
    return inherited


def _in_topic_unit(value: ConfigValue, factor: int) -> ConfigValue:
    # A negative age is "no limit" in every unit.
    if factor == 1 or not isinstance(value, int):
        return value
    return value * factor if value >= 0 else -1
