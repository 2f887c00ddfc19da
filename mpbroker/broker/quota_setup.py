"""Client quotas of one process, from the settings and what all processes share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mpbroker.ipc.tables.quota_table import QuotaTable
from mpbroker.server.quotas.client_quotas import ClientQuotas

if TYPE_CHECKING:
    from mpbroker.config import BrokerConfig
    from mpbroker.metadata.topics import TopicRegistry
    from mpbroker.supervisor.memory import BrokerMemory

_NS_PER_S: Final = 1_000_000_000


def quota_table(config: BrokerConfig, memory: BrokerMemory) -> QuotaTable:
    """A process's view of what clients have done."""
    return QuotaTable(
        memory.quotas,
        config.quota_window_num,
        config.quota_window_size_seconds * _NS_PER_S,
    )


def client_quotas(
    config: BrokerConfig, memory: BrokerMemory, registry: TopicRegistry
) -> ClientQuotas:
    """What a handler asks about its requests."""
    return ClientQuotas(
        quota_table(config, memory),
        registry,
        memory.control.words,
        memory.principals.name,
        mutation_burst_s=(
            config.controller_quota_window_num
            * config.controller_quota_window_size_seconds
        ),
    )
