"""LiveConfig: bring new values of settings to the processes that read them.

A running broker has the settings that it was started with, and dynamic configs, which
count before them (config/dynamic.py). The table of keys (config/broker_key.py) names
the reader of each, which decides how a new value gets there:

    PAGE            published in shared memory at once
    SOCKETS         set on the listen sockets at once
    POOLS, TOPICS   the readers look at the metadata log themselves
    other readers   the processes of the role are replaced one by one, as by ctl restart

A death cannot interrupt this half-way: every process that starts gets the settings as
they are then.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from mpbroker.base.config_def import ConfigValue
from mpbroker.base.logger import get_logger
from mpbroker.config import BrokerConfig
from mpbroker.config.broker_key import Reader, told_keys
from mpbroker.config.dynamic import DynamicConfig
from mpbroker.config.listeners import parse_connection_overrides
from mpbroker.ipc.limits_page import (
    NO_LIMIT,
    UNSET,
    Address,
    AddressLimits,
    BrokerLimits,
    Limits,
    LimitsPage,
    ListenerLimits,
)
from mpbroker.ipc.ring import RequestRing
from mpbroker.metadata.quota_records import IP
from mpbroker.metadata.topics import TopicRegistry
from mpbroker.supervisor.child import ChildState, Role
from mpbroker.supervisor.host_names import HostNames
from mpbroker.supervisor.listen_sockets import Listener
from mpbroker.supervisor.memory import BrokerMemory
from mpbroker.supervisor.supervisor import Supervisor

_LOG = get_logger(__name__)

_ROLES: Final[Mapping[Reader | None, Sequence[Role]]] = {
    Reader.RING: (Role.PROCESSOR,),
    Reader.HANDLER: (Role.HANDLER,),
    Reader.COORDINATOR: (Role.COORDINATOR,),
    Reader.HOUSEKEEPER: (Role.HOUSEKEEPER,),
    Reader.EXPORTER: (Role.EXPORTER,),
}
_IP_RATE: Final = "connection_creation_rate"
# A successor is ready before a process of these roles retires.
_REPLACED: Final = (Role.HANDLER, Role.PROCESSOR)


class LiveConfig:
    """Applies changed settings to the processes that read them.

    Args:
        config: the settings that the broker was started with.
        registry: the supervisor's own copy of the metadata: topics and configs.
        use: is called with the settings for processes that start from now on.
    """

    def __init__(
        self,
        config: BrokerConfig,
        registry: TopicRegistry,
        memory: BrokerMemory,
        listeners: Sequence[Listener],
        use: Callable[[BrokerConfig], None],
    ) -> None:
        self._registry = registry
        self._memory = memory
        self._listeners = listeners
        self._use = use
        self._page = LimitsPage(memory.limits)
        self._dynamic = DynamicConfig(config, registry.broker_overrides)
        self._readers = {key.name: key.reader for key in told_keys(config.definition)}
        self._version = registry.version
        self._host_names = HostNames()
        self._values = self._read_values()
        self._limits = self._read_limits()
        self._page.publish(self._limits)
        use(self._dynamic.effective())
        self._set_sockets(None)
        if self._values["queued.max.requests"] != config.queued_max_requests:
            self._replace_ring()

    def turn(self, supervisor: Supervisor) -> None:
        """Apply the dynamic configs that have changed since the last call."""
        self._registry.catch_up()
        if self._registry.version != self._version or self._host_names.has_news:
            self._version = self._registry.version
            self._apply(supervisor)
        self._host_names.look_up(supervisor)

    def has_news(self) -> bool:
        """Return whether the next turn will apply a changed setting."""
        self._registry.catch_up()
        return (
            self._registry.version != self._version
            and self._read_values() != self._values
        )

    def rebase(self, supervisor: Supervisor, config: BrokerConfig) -> None:
        """Take other settings as those of the start, beside the dynamic configs.

        ``ctl reload`` does so with a changed file.
        """
        before = self._dynamic.config
        self._dynamic = DynamicConfig(config, self._registry.broker_overrides)
        told = [Role.HANDLER]  # handlers answer DescribeConfigs
        if config.log_defaults() != before.log_defaults():
            told += [Role.COORDINATOR, Role.HOUSEKEEPER, Role.EXPORTER]
        self._apply(supervisor, told)

    def _apply(self, supervisor: Supervisor, told: Sequence[Role] = ()) -> None:
        limits = self._read_limits()
        if limits != self._limits:
            self._limits = limits
            self._page.publish(limits)
        before, self._values = self._values, self._read_values()
        changed = [
            key for key, value in self._values.items() if value != before.get(key)
        ]
        if not changed and not told:
            return
        for key in changed:
            _LOG.info("%s is now %s", key, self._values[key])
        self._use(self._dynamic.effective())
        self._set_sockets(changed)
        if "queued.max.requests" in changed:
            self._replace_ring()
        roles = {
            role for key in changed for role in _ROLES.get(self._readers[key], ())
        }.union(told)
        for child in list(supervisor.children):
            if child.role not in roles or child.state is ChildState.DRAINING:
                continue
            if child.role in _REPLACED:
                supervisor.restart(child.role, child.number)
            else:
                supervisor.renew(child)

    def _read_values(self) -> dict[str, ConfigValue]:
        return {key: self._dynamic.value(key) for key in self._readers}

    def _replace_ring(self) -> None:
        """Make the queue of requests (a ring) anew, with the new queued.max.requests.

        Processors that are forked from now on use it.
        """
        memory = self._memory
        limit = self._dynamic.integer("queued.max.requests")
        memory.ring = RequestRing(memory.control, memory.handler_bells, limit)

    # -- the limits that acceptors and processors read -------------------------------

    def _read_limits(self) -> Limits:
        integer, rates = self._dynamic.integer, self._address_rates()
        names = [each.endpoint.listener_name for each in self._listeners]
        return Limits(
            BrokerLimits(
                max_connections=integer("max.connections"),
                creation_rate=integer("max.connection.creation.rate"),
                max_per_address=integer("max.connections.per.ip"),
                address_rate=rates.get(None, NO_LIMIT),
                protected_listener=self._protected(names),
                max_idle_ms=integer("connections.max.idle.ms"),
                rate_samples=integer("quota.window.num"),
                rate_window_ms=1000 * integer("quota.window.size.seconds"),
            ),
            [
                ListenerLimits(
                    integer("max.connections", name)
                    if self._is_own(name, "max.connections")
                    else ListenerLimits().max_connections,
                    integer("max.connection.creation.rate", name)
                    if self._is_own(name, "max.connection.creation.rate")
                    else ListenerLimits().creation_rate,
                    integer("socket.send.buffer.bytes", name),
                    integer("socket.receive.buffer.bytes", name),
                )
                for name in names
            ],
            self._addresses(rates),
        )

    def _address_rates(self) -> dict[str | None, int]:
        """Return the quotas connection_creation_rate by address, connections a second.

        The key None is the default of all other addresses.
        """
        quotas = self._registry.client_quotas.by_name(IP, _IP_RATE)
        return {name: min(int(rate), NO_LIMIT) for name, rate in quotas.items()}

    def _is_own(self, listener: str, key: str) -> bool:
        """Return whether a listener has a value of its own for a key.

        Its limit then counts beside the broker's.
        """
        return self._dynamic.own_of_listener(listener, key) is not None

    def _protected(self, names: Sequence[str]) -> int:
        """Return the index of the listener in inter.broker.listener.name, or UNSET.

        As in Kafka it is exempt from the broker's limits, if there is another listener.
        """
        name = self._dynamic.config.inter_broker_listener_name
        if name is None or len(names) < 2 or name.upper() not in names:
            return UNSET
        return names.index(name.upper())

    def _addresses(
        self, rates: Mapping[str | None, int]
    ) -> dict[Address, AddressLimits]:
        items = self._dynamic.value("max.connections.per.ip.overrides")
        assert isinstance(items, tuple)
        counts = parse_connection_overrides(items)
        hosts = {name for name in rates if name is not None}.union(counts)
        addresses = self._host_names.addresses(hosts)
        found: dict[Address, AddressLimits] = {}
        for host, most in counts.items():
            for address in addresses[host]:
                found[address] = AddressLimits(most)
        for name, rate in rates.items():
            for address in () if name is None else addresses[name]:
                limits = found.get(address, AddressLimits())
                found[address] = limits._replace(creation_rate=rate)
        return found

    # -- listen sockets ---------------------------------------------------------------

    def _set_sockets(self, changed: Sequence[str] | None) -> None:
        """Set options of the listen sockets.

        Args:
            changed: the keys with new values; None: at the start, all keys whose value
                is not the one that the sockets were opened with.
        """
        if changed is None:
            changed = [
                key
                for key, reader in self._readers.items()
                if reader is Reader.SOCKETS
                and self._values[key] != self._dynamic.config.resolved(key).value
            ]
        backlog = self._dynamic.integer("socket.listen.backlog.size")
        for listener in self._listeners:
            if "socket.listen.backlog.size" in changed:
                listener.sock.listen(backlog)
            receive = self._dynamic.integer("socket.receive.buffer.bytes")
            if "socket.receive.buffer.bytes" in changed and receive >= 0:
                listener.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive)
