"""The broker's keys for metrics and the request log: ours, as Kafka has JMX for it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from mpbroker.config_def import ConfigError, ConfigKey, ConfigType, at_least

METRICS_KEYS: Final = [
    # A port that nobody asked for is a surprise, and two brokers on one machine would
    # fight over it; the files in deploy/ and systemd/ ask for 127.0.0.1:9404.
    ConfigKey(
        "metrics.listeners",
        ConfigType.LIST,
        (),
        "Address of the metrics and the status page, as HTTP://host:port; one at most."
        " Unset, there is none. There is no authentication: keep it on loopback or in"
        " a network you trust. Port 0 lets the system choose.",
    ),
    ConfigKey(
        "metrics.kafka.names.enable",
        ConfigType.BOOLEAN,
        False,
        "Whether metrics are also shown under the names of kafka_exporter and of the"
        " JMX exporter's usual rules, for dashboards made for these.",
    ),
    ConfigKey(
        "request.log.path",
        ConfigType.STRING,
        None,
        "File to which requests are appended as lines of JSON, with the time stamps of"
        " all stages. Unset, none is written.",
    ),
    ConfigKey(
        "slow.request.log.threshold.ms",
        ConfigType.LONG,
        0,
        "Only requests that took at least so long in total are written to"
        " request.log.path; 0 writes all.",
        validator=at_least(0),
    ),
]

_LISTENER: Final = re.compile(
    r"HTTP://(?:\[([0-9A-Fa-f:.%]+)\]|([A-Za-z0-9_.\-]*)):(\d{1,5})"
)


def parse_metrics_listener(items: Sequence[str]) -> tuple[str, int] | None:
    """Return host and port; None: there shall be no such listener.

    Raises:
        ConfigError: it is not of the form HTTP://host:port, or there are several.
    """
    if not items:
        return None
    if len(items) > 1:
        raise ConfigError(f"metrics.listeners: {len(items)} addresses; one at most")
    match = _LISTENER.fullmatch(items[0].strip())
    if match is None or int(match[3]) > 65535:
        raise ConfigError(
            f"metrics.listeners: {items[0]!r:.100} is not HTTP://host:port, for example"
            " HTTP://127.0.0.1:9404"
        )
    return match[1] or match[2], int(match[3])
