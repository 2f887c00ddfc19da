"""BrokerKey: a row of the broker's table of settings.

Beside what every key has, a row of the broker says which processes read the value, and
so whether, and how, it can change while the broker serves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self, Unpack

from mpbroker.base.config_def import (
    ConfigDef,
    ConfigKey,
    ConfigType,
    ConfigValue,
    UpdateMode,
    Validator,
)
from mpbroker.config.machine import Computed, Machine


class Reader(Enum):
    """Which processes read a setting that can change, and how a new value reaches them.

    Kafka's documentation marks some keys as dynamic ("cluster-wide", "per-broker").
    Here more are: what the processes of a role read when they start is changed by
    replacing them one by one, which no client notices.
    """

    PAGE = "page"  # acceptors and processors, from shared memory (ipc/limits_page.py)
    POOLS = "pools"  # the supervisor, which starts or retires processes
    TOPICS = "topics"  # every view of the metadata log, as the default of topics
    SOCKETS = "sockets"  # the supervisor, which has the listen sockets
    RING = "ring"  # processors, when they start
    HANDLER = "handler"  # handlers, when they start
    COORDINATOR = "coordinator"
    HOUSEKEEPER = "housekeeper"
    EXPORTER = "exporter"
    SECURITY = "security"  # processors, from the metadata log, per new connection
    NONE = "none"  # no process: the value is kept for tools that set it


_MODES: Final = {
    None: UpdateMode.READ_ONLY,
    # TLS and SASL can change for one listener only, as in Kafka.
    Reader.SECURITY: UpdateMode.PER_BROKER,
}

if TYPE_CHECKING:
    from mpbroker.base.config_def import Columns


class ListenerPools(NamedTuple):
    """A broker's listeners, as far as they limit the numbers of its processes.

    Attributes:
        names: of all listeners.
        own_processors: by name, of those that do not follow num.network.threads.
        has_control_plane: whether one of them has a handler of its own.
    """

    names: Sequence[str]
    own_processors: Mapping[str, int]
    has_control_plane: bool


_SMALLEST: Final = Machine(1, {})


class BrokerKey(ConfigKey):
    """One setting of the broker. Its columns beside ConfigKey's:

    default: may be computed; until the machine is known (see `on`) it is what it
        would be with one core and no environment.
    reader: which processes read a new value while the broker serves; None: a new
        value counts from the next start on.
    room: limits that follow from the listeners, instead of ``validator``'s.
    """

    def __init__(
        self,
        name: str,
        type: ConfigType,
        default: ConfigValue | Computed[Any],
        documentation: str,
        *,
        reader: Reader | None = None,
        room: Callable[[ListenerPools], Validator] | None = None,
        **columns: Unpack[Columns],
    ) -> None:
        self.computed = default if isinstance(default, Computed) else None
        value = None if isinstance(default, Computed) else default
        super().__init__(name, type, value, documentation, **columns)
        if self.computed is not None:
            self.default = self.computed.value(_SMALLEST, self)
        self.reader = reader
        self.room = room
        self.update_mode = _MODES.get(reader, UpdateMode.CLUSTER_WIDE)

    @property
    def documentation(self) -> str:
        """What people are told, with the rule by which a default is computed."""
        told = super().documentation
        return f"{told} Default: {self.computed.rule}." if self.computed else told

    def on(self, machine: Machine) -> Self:
        """Return this key with the default that it has on a machine."""
        if self.computed is None:
            return self
        return self.with_default(self.computed.value(machine, self))

    def beside(self, pools: ListenerPools) -> Self:
        """Return this key with the limits that it has beside these listeners."""
        return self if self.room is None else self.with_validator(self.room(pools))


def reader_of(key: ConfigKey) -> Reader | None:
    """Return the reader of a broker's key; None: no process reads a new value."""
    return key.reader if isinstance(key, BrokerKey) else None


# These processes read the metadata log themselves; to the others a new value is told.
_NOT_TOLD: Final = (None, Reader.TOPICS, Reader.SECURITY)


def told_keys(definition: ConfigDef) -> list[BrokerKey]:
    """Return the keys whose new values the supervisor brings to their readers."""
    return [
        key
        for key in definition
        if isinstance(key, BrokerKey) and key.reader not in _NOT_TOLD
    ]
