"""Reload: read the configuration again, and apply what can change while serving.

A key falls into one of three: the sizes of the pools, which are a resize; what the
processes of a role read when they start, for which these are replaced one by one; and
what the whole broker is built on, which waits for the next start.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from mpbroker.config import BrokerConfig
from mpbroker.logger import get_logger
from mpbroker.supervisor.child import Role
from mpbroker.supervisor.supervisor import Supervisor

_LOG = get_logger(__name__)

_POOLS: Final = ("num.io.threads", "num.network.threads")

# Read by one role's processes, as they start. Handlers decide most of it; topics'
# defaults (log.*) also concern the housekeeper.
_BY_PROCESSOR: Final = ("connections.max.idle.ms",)
_BY_HANDLER: Final = (
    "auto.create.topics.enable",
    "broker.rack",
    "delete.topic.enable",
    "fetch.max.bytes",
    "num.partitions",
)

Listed = list[dict[str, Any]]


class Reload:
    """What ``ctl reload`` does.

    Args:
        config: as the broker was started.
        supervisor: resizes and replaces.
        use: makes processes that are started from now on use other settings.
    """

    def __init__(
        self,
        config: BrokerConfig,
        supervisor: Supervisor,
        use: Callable[[BrokerConfig], None],
    ) -> None:
        self._config = config
        self._supervisor = supervisor
        self._use = use

    def run(self, arguments: dict[str, Any]) -> dict[str, Listed]:
        """Read, compare, apply; return what was applied and what waits for a start.

        Raises:
            ConfigError: the new settings are wrong; nothing is changed.
        """
        new = self._config.load_again()
        before, after = self._config.broker_values(), new.broker_values()
        changed = [key for key, value in after.items() if value != before[key]]
        applied: Listed = []
        waiting: Listed = []
        for key in changed:
            entry = {
                "setting": key,
                "from": _text(before[key]),
                "to": _text(after[key]),
            }
            (applied if _is_live(key) else waiting).append(entry)
        if any(key in _POOLS for key in changed):
            self._supervisor.resize(new.num_io_threads, new.num_network_threads)
        roles = {_role_of(key) for key in changed} - {None}
        if roles:
            self._use(new)
            for child in list(self._supervisor.children):
                if child.role in roles:
                    self._supervisor.restart(child.role, child.number)
        self._config = new
        for entry in applied:
            _LOG.info("reload: %(setting)s: %(from)s is now %(to)s", entry)
        return {"applied": applied, "needs_restart": waiting}


def _role_of(key: str) -> Role | None:
    if key in _BY_PROCESSOR:
        return Role.PROCESSOR
    return Role.HANDLER if key in _BY_HANDLER else None


def _is_live(key: str) -> bool:
    return key in _POOLS or _role_of(key) is not None


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return "" if value is None else str(value)
