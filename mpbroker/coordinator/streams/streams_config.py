"""Define the settings of streams groups."""

from __future__ import annotations

from typing import Final

from mpbroker.base.named_tuple import NamedTuple

SESSION_TIMEOUT: Final = "streams.session.timeout.ms"
HEARTBEAT_INTERVAL: Final = "streams.heartbeat.interval.ms"
NUM_STANDBY_REPLICAS: Final = "streams.num.standby.replicas"
INITIAL_REBALANCE_DELAY: Final = "streams.initial.rebalance.delay.ms"


class StreamsConfig(NamedTuple):
    """The broker's values; a group may have its own, except for ``max_size``.

    Names are those of Kafka's keys behind ``group.streams.``, with underscores for
    dots; ``_ms`` ends names in milliseconds.
    """

    session_timeout_ms: int
    heartbeat_interval_ms: int
    max_size: int
    num_standby_replicas: int
    initial_rebalance_delay_ms: int
