"""LogConfig: the settings of one topic, as typed attributes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from mpbroker.base.config_def import ConfigError, ConfigValue
from mpbroker.metadata.log_config_def import BROKER_SYNONYMS, LOG_CONFIG_DEF
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError

_DEFAULTS: Final = {key.name: key.default for key in LOG_CONFIG_DEF}
_NONE: Final[Mapping[str, ConfigValue]] = {}
_ATTRIBUTES: Final = {key.name: key.attribute for key in LOG_CONFIG_DEF}

# Two of the broker's settings. They are among the defaults of topics only if the first
# is true, and the second is set.
REMOTE_SYSTEM: Final = "remote.log.storage.system.enable"
CLUSTER_DATABASE: Final = "cluster.database.url"
DISKLESS: Final = "diskless.enable"
_AS_A_WHOLE: Final = -2  # this value of local.retention.* means that of retention.*


class LogConfig:
    """The settings of one topic; immutable.

    An attribute is a topic key with underscores: `retention_ms` is retention.ms, in
    milliseconds. -1 is "no limit" where the key's documentation says so. A size or a
    time that is never reached is the largest 64-bit integer.
    """

    __slots__ = ("_others", "overrides", *(key.attribute for key in LOG_CONFIG_DEF))

    overrides: Mapping[str, str]
    _others: Mapping[str, ConfigValue]  # of the broker: REMOTE_SYSTEM, ...
    # The keys that code reads as attributes; all have one.
    cleanup_policy: tuple[str, ...]
    compression_type: str
    delete_retention_ms: int
    diskless_enable: bool
    file_delete_delay_ms: int
    flush_acks_all: bool
    flush_messages: int
    flush_ms: int
    index_interval_bytes: int
    local_retention_bytes: int
    local_retention_ms: int
    max_compaction_lag_ms: int
    max_message_bytes: int
    message_timestamp_after_max_ms: int
    message_timestamp_before_max_ms: int
    message_timestamp_type: str
    min_cleanable_dirty_ratio: float
    min_compaction_lag_ms: int
    mirror_source: str
    preallocate: bool
    remote_copy_lag_bytes: int
    remote_copy_lag_ms: int
    remote_log_copy_disable: bool
    remote_log_delete_on_disable: bool
    remote_storage_enable: bool
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
        """Set all attributes from parsed values.

        Args:
            values: values by topic key; a key without a value gets Kafka's default.
            overrides: the texts that were set for the topic itself, by key.
        """
        merged = {**_DEFAULTS, **(values or {})}
        set_attribute = object.__setattr__
        # There may be very many topics, and each process has the settings of all.
        others = {name: merged[name] for name in merged.keys() - _ATTRIBUTES.keys()}
        set_attribute(self, "_others", others or _NONE)
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
        return self.overrides == other.overrides and all(
            object.__getattribute__(self, each) == object.__getattribute__(other, each)
            for each in ("_others", *_ATTRIBUTES.values())
        )

    def __hash__(self) -> int:
        return hash(tuple(sorted(self.overrides.items())))

    def __repr__(self) -> str:
        return f"LogConfig({dict(self.overrides)!r})"

    def value(self, name: str) -> ConfigValue:
        """Return the topic's value of a key, such as retention.ms.

        Raises:
            KeyError: there is no such key.
        """
        attribute = _ATTRIBUTES.get(name)
        if attribute is None:
            return self._others[name]
        value: ConfigValue = object.__getattribute__(self, attribute)
        return value

    @classmethod
    def from_overrides(
        cls,
        broker_defaults: Mapping[str, ConfigValue],
        overrides: Mapping[str, str],
    ) -> LogConfig:
        """Return the settings of a topic, after checking its own ones.

        Args:
            broker_defaults: values by topic key, from defaults_of_broker().
            overrides: by topic key, the texts that were set for the topic itself.

        Raises:
            ApiError: INVALID_CONFIG: an unknown key; a value outside its limits, or
                above another one that it must not exceed; or remote.storage.enable or
                diskless.enable where the broker or another setting does not allow it.
        """
        values = dict(broker_defaults)
        try:
            for name, text in overrides.items():
                values[name] = LOG_CONFIG_DEF.key(name).parse(text)
            config = cls(values, overrides)
            LOG_CONFIG_DEF.check_order(config.value)
            if config.remote_storage_enable:
                _check_remote(config)
            if config.diskless_enable:
                _check_diskless(config)
        except ConfigError as error:
            raise ApiError(ErrorCode.INVALID_CONFIG, str(error)) from None
        return config

    @classmethod
    def from_accepted(
        cls,
        broker_defaults: Mapping[str, ConfigValue],
        overrides: Mapping[str, str],
    ) -> LogConfig:
        """Return the settings of a topic whose own settings were accepted earlier.

        This never fails. Another release may have accepted more settings. A text that
        this release does not accept stays among the overrides, and has no effect.

        Args:
            broker_defaults: values by topic key, from defaults_of_broker().
            overrides: by topic key, the texts that were set for the topic itself.
        """
        values = dict(broker_defaults)
        for name, text in overrides.items():
            try:
                values[name] = LOG_CONFIG_DEF.key(name).parse(text)
            except ConfigError:
                continue
        return cls(values, overrides)


def check_alteration(before: LogConfig, after: LogConfig) -> None:
    """Refuse to switch a topic's remote storage off while its objects would be left.

    Raises:
        ApiError: INVALID_CONFIG.

    Source: Kafka's LogConfig.validateTurningOffRemoteStorageWithDelete (KIP-950).
    """
    if (
        before.remote_storage_enable
        and not after.remote_storage_enable
        and not after.remote_log_delete_on_disable
    ):
        raise ApiError(
            ErrorCode.INVALID_CONFIG,
            "remote.storage.enable=false: what is in the remote store would be left"
            " there; set remote.log.delete.on.disable=true, too, to delete it, or keep"
            " remote.storage.enable=true and set remote.log.copy.disable=true to read"
            " it without copying more",
        )


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
    if broker_values.get(REMOTE_SYSTEM) is True:
        inherited[REMOTE_SYSTEM] = True
    if broker_values.get(CLUSTER_DATABASE):
        inherited[CLUSTER_DATABASE] = True
    return inherited


def check_still_shared(before: LogConfig, after: LogConfig) -> None:
    """Refuse to change a topic's diskless.enable: a topic stays shared, or local.

    A shared topic (diskless.enable=true) is served by all nodes of a cluster.

    Raises:
        ApiError: INVALID_CONFIG.
    """
    if before.diskless_enable != after.diskless_enable:
        raise ApiError(
            ErrorCode.INVALID_CONFIG,
            f"{DISKLESS} is {str(before.diskless_enable).lower()} for as long as the"
            " topic exists; create another topic, and copy its records",
        )


def _check_diskless(config: LogConfig) -> None:
    """Raise ConfigError if a topic cannot have diskless.enable=true."""
    if not config._others.get(CLUSTER_DATABASE):
        raise ConfigError(
            f"{DISKLESS}=true: the broker is in no cluster; set {CLUSTER_DATABASE} and"
            " diskless.storage.url, and start the broker again"
        )
    if "compact" in config.cleanup_policy:
        raise ConfigError(
            f"{DISKLESS}=true: cleanup.policy must be delete, since shared topics are"
            " not compacted"
        )
    if config.remote_storage_enable:
        raise ConfigError(
            f"{DISKLESS}=true: remote.storage.enable must be false, since all records"
            " of a shared topic are in the cluster's store"
        )
    if config.mirror_source:
        raise ConfigError(
            f"{DISKLESS}=true: mirror.source cannot be set, since the offsets of a"
            " shared topic are given by the cluster's database"
        )


def _check_remote(config: LogConfig) -> None:
    """Raise ConfigError if a topic cannot have remote.storage.enable=true.

    Source: Kafka's LogConfig.validateRemoteStorageOnlyIfSystemEnabled and its siblings.
    """
    if not config._others.get(REMOTE_SYSTEM):
        raise ConfigError(
            f"remote.storage.enable=true: the broker has {REMOTE_SYSTEM}=false; set it"
            " to true, with remote.storage.url, and start the broker again"
        )
    if "compact" in config.cleanup_policy:
        raise ConfigError(
            "remote.storage.enable=true: cleanup.policy must be delete, since compacted"
            " segments do not stay as they were copied"
        )
    for name in ("retention.bytes", "retention.ms"):
        local, whole = config.value(f"local.{name}"), config.value(name)
        assert isinstance(local, int) and isinstance(whole, int)
        if local != _AS_A_WHOLE and whole != -1 and not 0 <= local <= whole:
            raise ConfigError(
                f"local.{name}={local}: above {name}={whole}, which limits the whole"
                " log; lower it"
            )
        effective = whole if local == _AS_A_WHOLE else local
        lag_name = f"remote.copy.lag.{name.removeprefix('retention.')}"
        lag = config.value(lag_name)
        assert isinstance(lag, int)
        if 0 <= effective < lag:
            raise ConfigError(
                f"{lag_name}={lag}: above local.{name}, which is {effective} here, and"
                " only what is copied leaves the disk; lower it"
            )
        if config.remote_log_copy_disable and local not in (_AS_A_WHOLE, whole):
            raise ConfigError(
                f"remote.log.copy.disable=true: local.{name}={local} has to be -2, or"
                f" {name}={whole}, because no more segments are copied"
            )


def _in_topic_unit(value: ConfigValue, factor: int) -> ConfigValue:
    # A negative age is "no limit" in every unit.
    if factor == 1 or not isinstance(value, int):
        return value
    return value * factor if value >= 0 else -1
