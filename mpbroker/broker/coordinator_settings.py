"""The parts of the broker's settings that the coordinator needs.

The coordinator is below the settings, and so has its own types for them. Their fields
have the names of the settings' attributes. The names and defaults are in broker_config
alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, TypeVar

from mpbroker.coordinator.groups.group_config import GroupConfig
from mpbroker.coordinator.share.share_partition import Limits
from mpbroker.coordinator.share.share_service import GroupSettings
from mpbroker.coordinator.streams.streams_config import StreamsConfig
from mpbroker.coordinator.transactions.transaction_coordinator import TransactionConfig

if TYPE_CHECKING:
    from mpbroker.config import BrokerConfig

_MS_PER_MINUTE: Final = 60_000
_STREAMS: Final = "group_streams_"

_SettingsT = TypeVar("_SettingsT", GroupConfig, StreamsConfig, TransactionConfig)


def group_config(config: BrokerConfig) -> GroupConfig:
    """Return the group coordinator's part of the broker's settings."""
    return _part(
        GroupConfig,
        config,
        message_max_bytes=min(
            config.message_max_bytes, config.offsets_topic_segment_bytes
        ),
        offsets_retention_ms=config.offsets_retention_minutes * _MS_PER_MINUTE,
        rebalance_protocols=tuple(config.group_coordinator_rebalance_protocols),
        group_consumer_assignors=tuple(config.group_consumer_assignors),
        streams=_part(
            StreamsConfig, config, _STREAMS, max_size=config.group_streams_max_size
        ),
    )


def transaction_config(config: BrokerConfig) -> TransactionConfig:
    """Return the transaction coordinator's part of the broker's settings."""
    return _part(TransactionConfig, config)


def _part(
    kind: type[_SettingsT], config: BrokerConfig, prefix: str = "", /, **computed: Any
) -> _SettingsT:
    """Return some of the broker's settings.

    Args:
        kind: has the settings' names, as its fields.
        config: all settings.
        prefix: what their names begin with, in front of the fields'.
        computed: the values that are not settings as they are.
    """
    names = kind._fields
    copied = {n: getattr(config, prefix + n) for n in names if n not in computed}
    return kind(**copied, **computed)


def share_settings(config: BrokerConfig, own: Mapping[str, str]) -> GroupSettings:
    """Return a share group's settings: its own, or else those of the broker."""

    def number(name: str, default: int) -> int:
        return int(own.get(name, default))

    return GroupSettings(
        Limits(
            number(
                "share.delivery.count.limit", config.group_share_delivery_count_limit
            ),
            number(
                "share.partition.max.record.locks",
                config.group_share_partition_max_record_locks,
            ),
            number(
                "share.record.lock.duration.ms",
                config.group_share_record_lock_duration_ms,
            ),
            own.get("share.renew.acknowledge.enable", "true").lower() == "true",
        ),
        own.get("share.isolation.level") == "read_committed",
        own.get("share.auto.offset.reset", "latest"),
    )
