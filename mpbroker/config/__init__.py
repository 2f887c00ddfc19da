"""The broker's configuration: Kafka's keys, from arguments, environment and a file.

BrokerConfig            all settings of a broker; a new key is a row of broker_config.py
BROKER_CONFIG_DEF       the keys
explain                 explains a key and its value
EndPoint, AdvertisedEndPoint    one listener, one advertised address
"""

from typing import TYPE_CHECKING

from mpbroker.base.config_def import ConfigError
from mpbroker.config.broker_config import (
    BROKER_CONFIG_DEF,
    BrokerConfig,
)
from mpbroker.config.listeners import AdvertisedEndPoint, EndPoint
from mpbroker.config.resolution import ResolvedValue
from mpbroker.config.sources import Source

if TYPE_CHECKING:
    from mpbroker.config.explanation import Explanation, explain

__all__ = [
    "BROKER_CONFIG_DEF",
    "AdvertisedEndPoint",
    "BrokerConfig",
    "ConfigError",
    "EndPoint",
    "Explanation",
    "ResolvedValue",
    "Source",
    "explain",
]


def __getattr__(name: str) -> object:
    # Imported only if it is used: a broker that starts does not explain settings.
    if name in ("Explanation", "explain"):
        from mpbroker.config import explanation

        return getattr(explanation, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
