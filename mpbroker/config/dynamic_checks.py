"""Check all dynamic configs together, before they go to the metadata log."""

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
    """Return the broker's keys, with a check whether dynamic configs can be used.

    The check takes all dynamic configs together, with the settings of the start.
    """

    def check(
        own: Mapping[str, str], of_all: Mapping[str, str], touched: Collection[str]
    ) -> None:
        layers = {str(config.node_id): own, "": of_all}
        now = DynamicConfig(config, lambda name: layers.get(name, {}))
        if any(name in own or name in of_all for name in touched):
            _check_together(now)  # to remove a value is always allowed
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
    """Check that TLS and SASL of the listeners can be used after a change of configs.

    Only listeners to which the change applies are checked.

    Args:
        touched: the keys whose values are new or removed.
        wanted: the keys that have a dynamic value after the change.
    """
    endpoints = {each.listener_name.lower(): each for each in now.config.endpoints}
    listeners: dict[str, EndPoint] = {}
    for name in touched:
        found = now.config.definition.of_listener(name)
        if found is None and _is_of_security(name, now.config.definition):
            # It counts for each listener that has no value of its own.
            for listener, endpoint in endpoints.items():
                if endpoint.security_protocol != "PLAINTEXT":
                    listeners[listener] = endpoint
            continue
        if found is None or reader_of(found.key) is not Reader.SECURITY:
            continue
        listener, mechanism = found.listener, found.mechanism
        own = endpoints.get(listener)
        if own is not None and own.security_protocol != "PLAINTEXT":
            listeners[listener] = own
        elif name in wanted:  # to remove a value is always allowed
            raise UnusableConfigError(
                f"{name}: there is no such listener; there are {', '.join(endpoints)}"
                if own is None
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


def _is_of_security(name: str, definition: ConfigDef) -> bool:
    key = definition.get(name)
    return key is not None and reader_of(key) is Reader.SECURITY
