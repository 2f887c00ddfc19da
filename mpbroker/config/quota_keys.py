"""Kafka's broker keys for client quotas."""

from __future__ import annotations

from typing import Final

from mpbroker.base.config_def import ConfigType, Importance, between
from mpbroker.config.broker_key import BrokerKey
from mpbroker.ipc.quota_layout import MAX_QUOTA_SAMPLES

# A quota's samples have a place in shared memory; Kafka's default is 11, and the more
# there are, the longer a burst is remembered.
_SAMPLES: Final = between(1, MAX_QUOTA_SAMPLES)
_SECONDS: Final = between(1, 3600)

QUOTA_KEYS: Final = [
    BrokerKey(
        "quota.window.num",
        ConfigType.INT,
        11,
        "How many samples of a client's rate are kept for produce, fetch and request"
        " quotas: the one that is being filled, and those before it.",
        validator=_SAMPLES,
        importance=Importance.LOW,
    ),
    BrokerKey(
        "quota.window.size.seconds",
        ConfigType.INT,
        1,
        "How long each of these samples is.",
        validator=_SECONDS,
        importance=Importance.LOW,
    ),
    BrokerKey(
        "controller.quota.window.num",
        ConfigType.INT,
        11,
        "So many windows of controller.quota.window.size.seconds together say how many"
        " changes of topics a client may make at once before its"
        " controller_mutation_rate counts.",
        validator=_SAMPLES,
        importance=Importance.LOW,
    ),
    BrokerKey(
        "controller.quota.window.size.seconds",
        ConfigType.INT,
        1,
        "How long each of these windows is.",
        validator=_SECONDS,
        importance=Importance.LOW,
    ),
]
