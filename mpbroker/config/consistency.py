"""Settings that are good alone and must not contradict each other."""

from __future__ import annotations

from collections.abc import Callable

from mpbroker.base.config_def import ConfigDef, ConfigError, ConfigValue


def check_values(definition: ConfigDef, value: Callable[[str], ConfigValue]) -> None:
    """Check values that are good alone and may contradict each other.

    Args:
        value: gives a setting's value by its name.

    Raises:
        ConfigError: two of them contradict each other.
    """
    definition.check_order(value)
    if value("max.connections.per.ip") == 0 and not value(
        "max.connections.per.ip.overrides"
    ):
        raise ConfigError(
            "max.connections.per.ip=0 refuses every client; it can be set to zero only"
            " if max.connections.per.ip.overrides names exceptions"
        )
