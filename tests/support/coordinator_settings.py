"""The coordinator's settings, for tests: the broker's defaults, and what differs."""

from typing import Any, Final

from mpbroker.broker.coordinator_settings import group_config, transaction_config
from mpbroker.config import BrokerConfig
from mpbroker.coordinator.groups.group_config import GroupConfig
from mpbroker.coordinator.streams.streams_config import StreamsConfig
from mpbroker.coordinator.transactions.transaction_coordinator import TransactionConfig

_BROKER: Final = BrokerConfig.load({}, None, {}, cores=1)


def group_settings(**changed: Any) -> GroupConfig:
    return group_config(_BROKER)._replace(**changed)


def streams_settings(**changed: Any) -> StreamsConfig:
    return group_config(_BROKER).streams._replace(**changed)


def transaction_settings(**changed: Any) -> TransactionConfig:
    return transaction_config(_BROKER)._replace(**changed)
