"""Struct, field() and array(): the tables of which messages are made.

The body of a struct's class lists its fields, as rows of a table. Its constructor is
generated when it is first called. See `message` for the functions that are generated
from the rows.

Source: Kafka's message definition format for the words "versions", "nullable", "tag",
"ignorable" and "default".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Final,
    Generic,
    TypeVar,
    dataclass_transform,
    overload,
)

from mpbroker.protocol.primitives import ZERO_UUID, Buffer
from mpbroker.protocol.source_writer import SourceWriter

T = TypeVar("T")
S = TypeVar("S", bound="Struct")

Decoder = Callable[[Buffer, int], T]
Encoder = Callable[[T], list[Any]]

FOREVER: Final = 0x7FFF  # the last version of "9+"
UNSET: Final = object()  # an argument that was not given; None means null


class Kind(Generic[T]):
    """A primitive type of the protocol; T is its type in Python."""

    __slots__ = ("code", "default", "name")

    def __init__(self, name: str, code: str, default: T) -> None:
        self.name = name
        self.code = code  # its code in the module `struct`; "": its size is not fixed
        self.default = default


BOOLEAN: Final = Kind("boolean", "?", False)
INT8: Final = Kind("int8", "b", 0)
INT16: Final = Kind("int16", "h", 0)
UINT16: Final = Kind("uint16", "H", 0)
INT32: Final = Kind("int32", "i", 0)
UINT32: Final = Kind("uint32", "I", 0)
INT64: Final = Kind("int64", "q", 0)
FLOAT64: Final = Kind("float64", "d", 0.0)
UUID: Final = Kind("uuid", "16s", ZERO_UUID)
STRING: Final = Kind("string", "", "")
BYTES: Final[Kind[Buffer]] = Kind("bytes", "", b"")
RECORDS: Final[Kind[Any]] = Kind("records", "", None)


class Field:
    """A field of a struct: a row of the table in its class; see `field`."""

    __slots__ = (
        "_default",
        "_nullable",
        "_versions",
        "ignorable",
        "is_array",
        "kind",
        "name",
        "tag",
    )

    def __init__(
        self,
        kind: Kind[Any] | type[Struct],
        is_array: bool,
        versions: str,
        nullable: str | None,
        default: Any,
        tag: int | None,
        ignorable: bool,
    ) -> None:
        self.name = ""
        self.kind = kind
        self.is_array = is_array
        self._versions = versions
        self._nullable = nullable
        self._default = default
        self.tag = tag
        self.ignorable = ignorable

    def present_in(self, version: int) -> bool:
        """Return whether a version of the message has the field."""
        return _includes(self._versions, version)

    def nullable_in(self, version: int) -> bool:
        """Return whether the field may be null in a version of the message."""
        return self._nullable is not None and _includes(self._nullable, version)

    @property
    def is_nullable(self) -> bool:
        """Whether the field may be null in any version."""
        return self._nullable is not None

    @property
    def struct(self) -> type[Struct] | None:
        """The Struct class of the field's value or elements; None: a primitive type."""
        return self.kind if isinstance(self.kind, type) else None

    @property
    def code(self) -> str:
        """The field's code in the module `struct`; "": its size is not fixed."""
        return "" if isinstance(self.kind, type) else self.kind.code

    @property
    def default(self) -> Any:
        """The value that the field has if it is absent; UNSET: see `fresh_default`."""
        if self._default is not UNSET or self.is_array:
            return self._default
        if isinstance(self.kind, type):
            # None costs less: a tagged struct is mostly absent, and a response may have
            # thousands of them.
            return None if self.tag is not None else UNSET
        return self.kind.default

    @property
    def fresh_default(self) -> str | None:
        """The type of a default that is made anew for each message: "list" or "struct".

        None: the default is an immutable value, which is shared.
        """
        if self.default is not UNSET:
            return None
        return "list" if self.is_array else "struct"


def _includes(versions: str, version: int) -> bool:
    first, last = parse_versions(versions)
    return first <= version <= last


def parse_versions(text: str) -> tuple[int, int]:
    """Return the first and the last version in a text such as "3+", "0-12" or "4"."""
    if text.endswith("+"):
        return int(text[:-1]), FOREVER
    first, dash, last = text.partition("-")
    return int(first), int(last if dash else first)


# Type checkers learn the types of attributes from the return types of these two
# functions. At run time they return rows instead, which `MessageMeta` removes from the
# class body.
@overload
def field(
    kind: Kind[T] | type[T],
    versions: str = ...,
    *,
    default: T = ...,
    tag: int | None = ...,
    ignorable: bool = ...,
) -> T: ...
@overload
def field(
    kind: Kind[T] | type[T],
    versions: str = ...,
    *,
    nullable: str,
    default: T | None = ...,
    tag: int | None = ...,
    ignorable: bool = ...,
) -> T | None: ...
def field(
    kind: Any,
    versions: str = "0+",
    *,
    nullable: str | None = None,
    default: Any = UNSET,
    tag: int | None = None,
    ignorable: bool = False,
) -> Any:
    """Declare a field that holds one value.

    Args:
        kind: a `Kind`, or a `Struct` class.
        versions: the versions that have the field: "3+", "0-12" or "4".
        nullable: the versions in which it may be null, which is None in Python.
        default: its value if it is absent; by default the kind's zero. A tagged struct
            is None if it is absent.
        tag: the number of a tagged field.
        ignorable: if a version does not have the field, its value is dropped; by
            default a value other than the default is refused.
    """
    return Field(kind, False, versions, nullable, default, tag, ignorable)


@overload
def array(
    kind: Kind[T] | type[T],
    versions: str = ...,
    *,
    tag: int | None = ...,
    ignorable: bool = ...,
) -> list[T]: ...
@overload
def array(
    kind: Kind[T] | type[T],
    versions: str = ...,
    *,
    nullable: str,
    default: None = ...,
    tag: int | None = ...,
    ignorable: bool = ...,
) -> list[T] | None: ...
def array(
    kind: Any,
    versions: str = "0+",
    *,
    nullable: str | None = None,
    default: Any = UNSET,
    tag: int | None = None,
    ignorable: bool = False,
) -> Any:
    """Declare a field that holds a list; empty by default. See `field`."""
    return Field(kind, True, versions, nullable, default, tag, ignorable)


class MessageMeta(type):
    """Metaclass of Struct: makes slots and `__fields__` of the rows in a class body."""

    def __new__(
        mcls, name: str, bases: tuple[type, ...], body: dict[str, Any], **kwargs: Any
    ) -> MessageMeta:
        fields = []
        for attribute, value in list(body.items()):
            if type(value) is Field:
                value.name = attribute
                fields.append(value)
                del body[attribute]
        body["__fields__"] = tuple(fields)
        body["__slots__"] = tuple([row.name for row in fields])
        return super().__new__(mcls, name, bases, body, **kwargs)


@dataclass_transform(kw_only_default=True, eq_default=True)
class Struct(metaclass=MessageMeta):
    """A group of fields: an element of an array, or a whole message.

    Its attributes have the protocol's field names. The constructor takes them by
    keyword; the others get the protocol's defaults.
    """

    __fields__: ClassVar[tuple[Field, ...]]

    if not TYPE_CHECKING:

        def __init__(self, **values: Any) -> None:
            cls = type(self)
            cls.__init__ = compile_constructor(cls)
            self.__init__(**values)

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return all(
            getattr(self, row.name) == getattr(other, row.name)
            for row in self.__fields__
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        values = ", ".join(
            f"{row.name}={_shown(getattr(self, row.name))}" for row in self.__fields__
        )
        return f"{type(self).__name__}({values})"


def _shown(value: Any) -> str:
    if isinstance(value, memoryview):
        return f"<{len(value)} bytes>"
    return repr(value)


def compile_constructor(cls: type[Struct]) -> Callable[..., None]:
    """Return an `__init__` with a keyword argument and a default for every field."""
    source = SourceWriter()
    source.use("UNSET", UNSET)
    arguments = []
    values = []
    for row in cls.__fields__:
        value = row.name
        fresh = row.fresh_default
        if fresh is None:
            arguments.append(f"{row.name}={row.default!r}")
        else:
            arguments.append(f"{row.name}=UNSET")
            made = "[]" if fresh == "list" else f"{_class_of(source, row.struct)}()"
            value = f"{made} if {row.name} is UNSET else {row.name}"
        values.append(f"self.{row.name} = {value}")
    keywords = f", *, {', '.join(arguments)}" if arguments else ""
    source.line(f"def __init__(self{keywords}):")
    with source.indented():
        for text in values or ["pass"]:
            source.line(text)
    return source.compile(f"{cls.__name__} constructor", "__init__")


def _class_of(source: SourceWriter, cls: type[Struct] | None) -> str:
    assert cls is not None  # a fresh default is a list or a struct
    return source.use_class(cls)
