"""Reload: read the configuration again, and apply what can change while serving.

The keys that can change are those that a dynamic config can change as well
(config/broker_key.py). They are applied in the same way; the pools' sizes are applied
as a resize. All other changes wait for the next start.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpbroker.base.config_def import ConfigDef, ConfigKey
from mpbroker.base.logger import get_logger
from mpbroker.config import BrokerConfig
from mpbroker.config.broker_config import PROCESSORS_KEY
from mpbroker.config.broker_key import Reader, reader_of
from mpbroker.supervisor.supervisor import Supervisor

_LOG = get_logger(__name__)

Listed = list[dict[str, Any]]


class Reload:
    """Carries out ``ctl reload``.

    Args:
        config: the settings with which the broker was started.
        supervisor: resizes the pools.
        use: makes the broker use other settings, and replaces processes for it.
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
        """Read the configuration again and apply the changes.

        Returns:
            The changes under "applied", and under "needs_restart" those that wait for
            the next start.

        Raises:
            ConfigError: the new settings are wrong; nothing is changed.
        """
        new = self._config.load_again()
        before, after = self._config.broker_values(), new.broker_values()
        changed = [key for key, value in after.items() if value != before[key]]
        applied: Listed = []
        waiting: Listed = []
        for key in changed:
            row = new.definition.key(key)
            is_live = reader_of(row) is not None
            (applied if is_live else waiting).append(
                _entry(row, key, before[key], after[key])
            )
        for name in new.advertised:
            for key in _keys_of_listener(new.definition):
                old, own = self._config.own_value(name, key), new.own_value(name, key)
                if old != own:
                    (waiting if key == PROCESSORS_KEY else applied).append(
                        _entry(
                            new.definition.key(key),
                            f"listener.name.{name.lower()}.{key}",
                            old,
                            own,
                        )
                    )
        definition = new.definition
        if any(reader_of(definition.key(key)) is Reader.POOLS for key in changed):
            self._supervisor.resize(new.num_io_threads, new.num_network_threads)
        if applied:
            self._use(new)
        self._config = new
        for entry in applied:
            _LOG.info("reload: %(setting)s: %(from)s is now %(to)s", entry)
        return {"applied": applied, "needs_restart": waiting}


def _keys_of_listener(definition: ConfigDef) -> list[str]:
    """Return the keys that can be set for one listener, without those of security."""
    return sorted(
        key.name
        for key in definition
        if key.per_listener and reader_of(key) is not Reader.SECURITY
    )


def _entry(
    key: ConfigKey, setting: str, before: object, after: object
) -> dict[str, Any]:
    return {"setting": setting, "from": _text(key, before), "to": _text(key, after)}


def _text(key: ConfigKey, value: object) -> str:
    if isinstance(value, tuple):
        value = ",".join(map(str, value))
    return "" if value is None else key.shown(str(value))
