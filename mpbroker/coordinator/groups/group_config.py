"""Define the group coordinator's settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from mpbroker.base.named_tuple import NamedTuple
from mpbroker.coordinator.streams.streams_config import StreamsConfig

# The longest rebalance timeout, unless sessions may be longer: half an hour, which is
# Kafka's default for group.max.session.timeout.ms. Kafka has no limit here.
_MAX_REBALANCE_TIMEOUT_MS: Final = 1_800_000


class GroupConfig(NamedTuple):
    """Limits and times of groups and offsets.

    Names are those of Kafka's settings, with underscores for dots. Times are in
    milliseconds. See broker/coordinator_settings.py.
    """

    group_initial_rebalance_delay_ms: int
    group_min_session_timeout_ms: int
    group_max_session_timeout_ms: int
    group_max_size: int
    offset_metadata_max_bytes: int
    message_max_bytes: int
    offsets_retention_ms: int
    offsets_retention_check_interval_ms: int
    rebalance_protocols: tuple[str, ...]
    group_consumer_session_timeout_ms: int
    group_consumer_heartbeat_interval_ms: int
    group_consumer_max_size: int
    group_consumer_assignors: tuple[str, ...]
    group_consumer_migration_policy: str
    group_share_session_timeout_ms: int
    group_share_heartbeat_interval_ms: int
    group_share_max_size: int
    streams: StreamsConfig

    @property
    def max_rebalance_timeout_ms(self) -> int:
        """The longest time in ms for which a rebalance waits for a group's members.

        Clients set the rebalance timeout to max.poll.interval.ms, and some set that to
        the largest int32, which is 24.8 days. Parked requests would keep their slots
        (entries) in shared memory for as long.
        """
        return max(_MAX_REBALANCE_TIMEOUT_MS, self.group_max_session_timeout_ms)


def setting_of(overrides: Mapping[str, str], name: str, default: int) -> int:
    """Return a group's own value of a setting, or ``default`` if the group has none."""
    text = overrides.get(name)
    return default if text is None else int(text)
