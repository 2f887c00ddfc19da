"""Check dynamic configs, all taken together, before they are written to the log."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from mpbroker.base.config_def import (
    ConfigDef,
    ConfigError,
    UnusableConfigError,
)
from mpbroker.config.broker_config import PROCESSORS_KEY, BrokerConfig
from mpbroker.config.broker_key import Reader, reader_of
from mpbroker.config.consistency import check_values
from mpbroker.config.dynamic import DynamicConfig
from mpbroker.config.listeners import EndPoint
from mpbroker.config.resolution import SASL_MECHANISMS
from mpbroker.ipc.layout import MAX_PROCESSORS


def checked_definition(config: BrokerConfig) -> ConfigDef:
    """Return the broker's keys, with a check of the dynamic configs taken together."""

    def check(
        own: Mapping[str, str], of_all: Mapping[str, str], touched: Collection[str]
    ) -> None:
        layers = {str(config.node_id): own, "": of_all}
        now = DynamicConfig(config, lambda name: layers.get(name, {}))
        if any(name in own or name in of_all for name in touched):
            _check_together(now)  # but a value may always be taken away
        _check_security(now, touched, own.keys() | of_all.keys())

    return config.definition.with_check(check)


def _check_together(now: DynamicConfig) -> None:
    check_values(now.config.definition, now.value)
    each = {
        endpoint.listener_name: now.integer(PROCESSORS_KEY, endpoint.listener_name)
        for endpoint in now.config.endpoints
    }
    if sum(each.values()) > MAX_PROCESSORS:
        told = ", ".join(f"{name} {number}" for name, number in each.items())
        raise ConfigError(
            f"{PROCESSORS_KEY}: {sum(each.values())} processors over all listeners"
            f" ({told}); at most {MAX_PROCESSORS} can run; lower one of them"
        )


def _check_security(
    now: DynamicConfig, touched: Collection[str], wanted: Collection[str]
) -> None:
    """Try the settings of TLS and SASL of the listeners that change.

    Args:
        touched: the names whose values are new or gone.
        wanted: the names that have a value afterwards.
    """
    endpoints = {each.listener_name.lower(): each for each in now.config.endpoints}
    listeners: dict[str, EndPoint] = {}
    for name in touched:
        found = now.config.definition.of_listener(name)
        if found is None or reader_of(found.key) is not Reader.SECURITY:
            continue
        listener, mechanism = found.listener, found.mechanism
        endpoint = endpoints.get(listener)
        if endpoint is not None and endpoint.security_protocol != "PLAINTEXT":
            listeners[listener] = endpoint
        elif name in wanted:  # a value may always be taken away
            raise UnusableConfigError(
                f"{name}: there is no such listener; there are {', '.join(endpoints)}"
                if endpoint is None
                else f"{name}: {listener} is a listener of PLAINTEXT, which has"
                " neither TLS nor SASL: see listener.security.protocol.map"
            )
        if mechanism and mechanism not in SASL_MECHANISMS and name in wanted:
            raise UnusableConfigError(
                f"{name}: there is no SASL mechanism {mechanism!r:.100}; names of"
                f" settings spell them {', '.join(SASL_MECHANISMS)}"
            )
    if not listeners:
        return
    # Imported here, because most brokers have no listener with TLS or SASL.
    from mpbroker.config.listener_security import security_settings

    for listener, endpoint in listeners.items():
        try:
            security_settings(now, endpoint).check()
        except ConfigError as error:
            raise UnusableConfigError(f"listener {listener}: {error}") from None
