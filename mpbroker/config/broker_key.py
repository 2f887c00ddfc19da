"""BrokerKey: a row of the broker's table of settings.

Beside what every key has, a row of the broker says which processes read the value, and
so whether, and how, it can change while the broker serves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Generic,
    Literal,
    Protocol,
    Self,
    TypeVar,
    Unpack,
    overload,
)

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


# What TLS and SASL read can change for one listener only, as in Kafka.
_MODES: Final = {Reader.SECURITY: UpdateMode.PER_BROKER}

if TYPE_CHECKING:
    from mpbroker.base.config_def import Columns

    Whole = Literal[ConfigType.INT, ConfigType.SHORT, ConfigType.LONG]
    Text = Literal[ConfigType.STRING, ConfigType.PASSWORD]

    class BrokerColumns(Columns, total=False):
        """The columns that a row may leave out; see BrokerKey for what they mean."""

        reader: Reader
        room: Callable[[ListenerPools], Validator]

    class Values(Protocol):
        """A configuration: the values of keys, by name."""

        @property
        def attributes(self) -> Mapping[str, ConfigValue]: ...


T = TypeVar("T")


class ListenerPools:
    """A broker's listeners, as far as they limit the numbers of its processes.

    Attributes:
        listeners: how many there are.
        own_processors: by name, of those that do not follow num.network.threads.
        has_control_plane: whether one of them has a handler of its own.
    """

    __slots__ = ("has_control_plane", "listeners", "own_processors")

    def __init__(
        self,
        listeners: int,
        own_processors: Mapping[str, int],
        has_control_plane: bool,
    ) -> None:
        self.listeners = listeners
        self.own_processors = own_processors
        self.has_control_plane = has_control_plane


_SMALLEST: Final = Machine(1, {})


class BrokerKey(ConfigKey, Generic[T]):
    """One setting of the broker, and the attribute of BrokerConfig that has its value.

    Its columns beside ConfigKey's:

    default: may be computed; until the machine is known (see `on`) it is what it
        would be with one core and no environment.
    reader: which processes read a new value while the broker serves; None: a new
        value counts from the next start on.
    room: limits that follow from the listeners, instead of ``validator``'s.
    """

    computed: Computed[Any] | None = None
    reader: Reader | None = None
    room: Callable[[ListenerPools], Validator] | None = None

    if TYPE_CHECKING:
        # One for each type of value. What has no default may be None.

        @overload
        def __init__(
            self: BrokerKey[bool],
            name: str,
            type: Literal[ConfigType.BOOLEAN],
            default: bool,
            documentation: str,
            **columns: Unpack[BrokerColumns],
        ) -> None: ...
        @overload
        def __init__(
            self: BrokerKey[int],
            name: str,
            type: Whole,
            default: int | Computed[int],
            documentation: str,
            **columns: Unpack[BrokerColumns],
        ) -> None: ...
        @overload
        def __init__(
            self: BrokerKey[int | None],
            name: str,
            type: Whole,
            default: None,
            documentation: str,
            **columns: Unpack[BrokerColumns],
        ) -> None: ...
        @overload
        def __init__(
            self: BrokerKey[float],
            name: str,
            type: Literal[ConfigType.DOUBLE],
            default: float,
            documentation: str,
            **columns: Unpack[BrokerColumns],
        ) -> None: ...
        @overload
        def __init__(
            self: BrokerKey[str],
            name: str,
            type: Text,
            default: str | Computed[str],
            documentation: str,
            **columns: Unpack[BrokerColumns],
        ) -> None: ...
        @overload
        def __init__(
            self: BrokerKey[str | None],
            name: str,
            type: Text,
            default: Computed[str | None] | None,
            documentation: str,
            **columns: Unpack[BrokerColumns],
        ) -> None: ...
        @overload
        def __init__(
            self: BrokerKey[tuple[str, ...]],
            name: str,
            type: Literal[ConfigType.LIST],
            default: tuple[str, ...] | Computed[tuple[str, ...]],
            documentation: str,
            **columns: Unpack[BrokerColumns],
        ) -> None: ...
        @overload
        def __init__(
            self: BrokerKey[tuple[str, ...] | None],
            name: str,
            type: Literal[ConfigType.LIST],
            default: None,
            documentation: str,
            **columns: Unpack[BrokerColumns],
        ) -> None: ...

    def __init__(
        self,
        name: str,
        type: ConfigType,
        default: Any,
        documentation: str,
        **columns: Unpack[BrokerColumns],
    ) -> None:
        # ConfigKey.__init__() knows none of our columns.
        self.__dict__.update(
            columns, name=name, type=type, default=default, meaning=documentation
        )
        if "reader" in columns:
            self.update_mode = _MODES.get(columns["reader"], UpdateMode.CLUSTER_WIDE)
        if isinstance(default, Computed):
            self.computed = default
            self.default = default.value(_SMALLEST, self)

    @classmethod
    def of_topics(cls, key: ConfigKey, reader: Reader | None = None) -> BrokerKey[Any]:
        """Return the row of a key that supplies a default of topics.

        Args:
            reader: which processes read it beside the views of the metadata log.
        """
        if reader is None and key.update_mode is UpdateMode.CLUSTER_WIDE:
            reader = Reader.TOPICS
        row: BrokerKey[Any] = cls.__new__(cls)
        row.__dict__.update(key.__dict__, reader=reader)
        return row

    def __set_name__(self, owner: type, name: str) -> None:
        if name != self.attribute:
            raise AttributeError(f"{self.name} is in the row of {name}")

    @overload
    def __get__(self, config: None, owner: type) -> Self: ...
    @overload
    def __get__(self, config: Values, owner: type) -> T: ...
    def __get__(self, config: Values | None, owner: type) -> Any:
        # The class has the row, a configuration the value.
        return self if config is None else config.attributes[self.name]

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


def told_keys(definition: ConfigDef) -> list[BrokerKey[Any]]:
    """Return the keys whose new values the supervisor brings to their readers."""
    return [
        key
        for key in definition
        if isinstance(key, BrokerKey) and key.reader not in _NOT_TOLD
    ]
