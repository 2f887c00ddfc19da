"""BrokerKey: a row of the table of the broker's settings.

In addition to what every ConfigKey says, a row of the broker says which processes read
a new value while the broker serves, and so whether the value can change then. The table
itself is BrokerConfig (broker_config.py).
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
    """The processes that read a setting, and how a new value gets there.

    Kafka's documentation calls some keys dynamic ("cluster-wide", "per-broker"). Here
    more keys are: if the processes of a role read a key when they start, new processes
    replace them one by one. No client notices that.
    """

    PAGE = "page"  # acceptors and processors, in shared memory (ipc/limits_page.py)
    POOLS = "pools"  # the supervisor, which starts or retires processes
    TOPICS = "topics"  # all processes, in the metadata log: a default of topics
    SOCKETS = "sockets"  # the supervisor, which has the listen sockets
    RING = "ring"  # processors, when they start
    HANDLER = "handler"  # handlers, when they start
    COORDINATOR = "coordinator"  # the coordinator, when it starts
    HOUSEKEEPER = "housekeeper"  # the housekeeper, when it starts
    EXPORTER = "exporter"  # the exporter, when it starts
    SECURITY = "security"  # processors, in the metadata log, for each new connection
    NONE = "none"  # no process: the value is kept for tools that set it


# As in Kafka, a setting of TLS or SASL can change for one listener only.
_MODES: Final = {Reader.SECURITY: UpdateMode.PER_BROKER}

if TYPE_CHECKING:
    from mpbroker.base.config_def import Columns

    Whole = Literal[ConfigType.INT, ConfigType.SHORT, ConfigType.LONG]
    Text = Literal[ConfigType.STRING, ConfigType.PASSWORD]

    class BrokerColumns(Columns, total=False):
        """The arguments of a BrokerKey that may be left out; it has their meanings."""

        reader: Reader
        room: Callable[[ListenerPools], Validator]

    class Values(Protocol):
        """A configuration: the values of keys, by name."""

        @property
        def attributes(self) -> Mapping[str, ConfigValue]: ...


T = TypeVar("T")


class ListenerPools:
    """The facts about a broker's listeners that limit the numbers of its processes.

    Attributes:
        listeners: the number of listeners.
        own_processors: the number of processors of each listener that has its own
            number, by name.
        has_control_plane: whether a listener has a handler of its own.
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
    """One setting of the broker, and the attribute of BrokerConfig with its value.

    A descriptor: ``BrokerConfig.num_io_threads`` is the key, and the same attribute of
    a configuration is its value. Its columns beside ConfigKey's:

        default: it may be Computed. Until the machine is known (see `on`), it is the
            default on a machine with one core and an empty environment.
        reader: the processes that read a new value while the broker serves; None: a
            new value counts from the next start on.
        room: a function that returns the limits that follow from the listeners; they
            replace ``validator``.
    """

    computed: Computed[Any] | None = None
    reader: Reader | None = None
    room: Callable[[ListenerPools], Validator] | None = None

    if TYPE_CHECKING:
        # One overload for each type of value; a value without a default may be None.

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
        # Not by ConfigKey.__init__(), which does not know a BrokerKey's columns.
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
        """Return the broker's key for a default of topics, made from its ConfigKey.

        Args:
            reader: further processes that read the value; None: it is read only through
                the view of the metadata log, which every process has.
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
        return self if config is None else config.attributes[self.name]

    @property
    def documentation(self) -> str:
        """The text for users, with the rule of the default if that is computed."""
        told = super().documentation
        return f"{told} Default: {self.computed.rule}." if self.computed else told

    def on(self, machine: Machine) -> Self:
        """Return this key with the default that it has on a given machine.

        Only a computed default differs from machine to machine.
        """
        if self.computed is None:
            return self
        return self.with_default(self.computed.value(machine, self))

    def beside(self, pools: ListenerPools) -> Self:
        """Return this key with the limits that follow from the broker's listeners."""
        return self if self.room is None else self.with_validator(self.room(pools))


def reader_of(key: ConfigKey) -> Reader | None:
    """Return the processes that read a key's new value while the broker serves.

    None: a new value counts from the next start on.
    """
    return key.reader if isinstance(key, BrokerKey) else None


# A key with one of these readers is not brought to a process by the supervisor: the
# processes read the metadata log themselves.
_NOT_TOLD: Final = (None, Reader.TOPICS, Reader.SECURITY)


def told_keys(definition: ConfigDef) -> list[BrokerKey[Any]]:
    """Return the keys whose new values processes get from the supervisor.

    Processes find new values of all other keys by themselves, or at the next start.
    """
    return [
        key
        for key in definition
        if isinstance(key, BrokerKey) and key.reader not in _NOT_TOLD
    ]
