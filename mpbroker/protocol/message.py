"""Messages as tables: every API's module lists fields, types and versions as data.

    class DeleteRecordsTopic(Struct):
        name: str = field(STRING)
        partitions: list[DeleteRecordsPartition] = array(DeleteRecordsPartition)

    class DeleteRecordsRequest(
        Message, api_key=ApiKey.DELETE_RECORDS, versions=(0, 2), flexible_from=2
    ):
        topics: list[DeleteRecordsTopic] = array(DeleteRecordsTopic)
        timeout_ms: int = field(INT32)

From a table one decoding and one encoding function are generated per version, when
that version is first seen (`codec_decode`, `codec_encode`), and one constructor per
class, when it is first called. A function takes 1-3 ms to write and compile; importing
a message module compiles nothing and takes less than 1 ms.

Source: Kafka protocol guide; Kafka's message definition format for the words
"versions", "nullable", "tag", "ignorable" and "default".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Final,
    Generic,
    Protocol,
    Self,
    TypeVar,
    cast,
    dataclass_transform,
    overload,
)

from mpbroker.protocol.errors import ProtocolError
from mpbroker.protocol.primitives import ZERO_UUID, Buffer

if TYPE_CHECKING:
    from mpbroker.protocol.api_key import ApiKey

T = TypeVar("T")
S = TypeVar("S", bound="Struct")
MessageT = TypeVar("MessageT", bound="Message")

Decoder = Callable[[Buffer, int], T]
Encoder = Callable[[T], list[Any]]

FOREVER: Final = 0x7FFF  # the end of "9+"
UNSET: Final = object()  # an argument that was not given, where None means null


class SizedRegion(Protocol):
    """Bytes that are elsewhere, such as in a log file; see `Message.encode_parts`."""

    @property
    def size_in_bytes(self) -> int: ...


class Kind(Generic[T]):
    """A primitive type of the protocol; T is what it is in Python."""

    __slots__ = ("code", "default", "name")

    def __init__(self, name: str, code: str, default: T) -> None:
        self.name = name
        self.code = code  # of `struct`, if the size is fixed; else ""
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
    """One row of a table."""

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
        return _includes(self._versions, version)

    def nullable_in(self, version: int) -> bool:
        return self._nullable is not None and _includes(self._nullable, version)

    @property
    def is_nullable(self) -> bool:
        """Whether any version may say null."""
        return self._nullable is not None

    @property
    def struct(self) -> type[Struct] | None:
        """The class of the value, or of its elements, if it is a struct."""
        return self.kind if isinstance(self.kind, type) else None

    @property
    def code(self) -> str:
        """The code of `struct`, or "" if the size of a value is not fixed."""
        return "" if isinstance(self.kind, type) else self.kind.code

    @property
    def default(self) -> Any:
        """The value of an absent field; for arrays and structs see `fresh_default`."""
        if self._default is not UNSET or self.is_array:
            return self._default
        if isinstance(self.kind, type):
            # A tagged struct is mostly absent, and a response may hold thousands.
            return None if self.tag is not None else UNSET
        return self.kind.default

    @property
    def fresh_default(self) -> str | None:
        """What makes a default that must not be shared: "list", "struct" or None."""
        if self.default is not UNSET:
            return None
        return "list" if self.is_array else "struct"


def _includes(versions: str, version: int) -> bool:
    first, last = parse_versions(versions)
    return first <= version <= last


def parse_versions(text: str) -> tuple[int, int]:
    """Return the first and last version of "3+", "0-12" or "4"."""
    if text.endswith("+"):
        return int(text[:-1]), FOREVER
    first, dash, last = text.partition("-")
    return int(first), int(last if dash else first)


# The return types of these two are what a field holds in a message, not what they
# return; that is how type checkers come to know the attributes. `MessageMeta` takes
# the returned rows out of the class body again.
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
        versions: those that have the field: "3+", "0-12" or "4".
        nullable: the versions that may say null, which is None.
        default: the value when absent; by default the kind's zero. A tagged struct is
            None when absent.
        tag: the number of a tagged field.
        ignorable: a value that a version cannot carry is dropped, not refused.
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
    """Turns the rows of a class body into slots and `__fields__`."""

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

    Attributes are the protocol's field names. The constructor takes them by keyword;
    what is not given has the protocol's default.
    """

    __fields__: ClassVar[tuple[Field, ...]]

    if not TYPE_CHECKING:

        def __init__(self, **values: Any) -> None:
            from mpbroker.protocol.codec import compile_constructor

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


class _Compiled(dict[int, T]):
    """The functions of one class by version, compiled when first asked for."""

    def __init__(self, message: type[Message], compile_name: str) -> None:
        super().__init__()
        self._message = message
        self._compile_name = compile_name

    def __missing__(self, version: int) -> T:
        from mpbroker.protocol import codec

        message = self._message
        if version not in message.valid_versions:
            raise ProtocolError(
                f"{message.__name__} has no version {version}, only "
                f"{message.valid_versions.start}-{message.valid_versions.stop - 1}"
            )
        function = cast(T, getattr(codec, self._compile_name)(message, version))
        self[version] = function
        return function


class Message(Struct):
    """A request or a response, header not included."""

    api_key: ClassVar[ApiKey]
    valid_versions: ClassVar[range]
    """The versions that can be decoded and encoded."""
    flexible_from: ClassVar[int]
    """The first version with compact lengths and tagged fields."""
    ignores_rest: ClassVar[bool]
    """Whether bytes after the message are passed over, as Kafka does for every one."""
    decoders: ClassVar[_Compiled[Decoder[Any]]]
    encoders: ClassVar[_Compiled[Encoder[Any]]]

    def __init_subclass__(
        cls,
        *,
        api_key: ApiKey,
        versions: tuple[int, int],
        flexible_from: int | None,
        ignores_rest: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init_subclass__(**kwargs)
        cls.api_key = api_key
        cls.ignores_rest = ignores_rest
        cls.valid_versions = range(versions[0], versions[1] + 1)
        cls.flexible_from = FOREVER if flexible_from is None else flexible_from
        cls.decoders = _Compiled(cls, "compile_decoder")
        cls.encoders = _Compiled(cls, "compile_encoder")

    @classmethod
    def decode(cls, version: int, buffer: Buffer, offset: int = 0) -> Self:
        """Read the message that fills a buffer from an offset to its end.

        Strings are copied; bytes and records are views of the buffer, which must live
        as long as they do. Fields that the version lacks have their defaults.

        Raises:
            ProtocolError: the bytes are not that message, the version has no codec, or
                bytes are left over (unless the message `ignores_rest`).
        """
        return cls.decoders[version](buffer, offset)  # type: ignore[no-any-return]

    @classmethod
    def decoder(cls, version: int) -> Decoder[Self]:
        """Return the function behind `decode`, to be kept where calls are many."""
        return cls.decoders[version]

    def encode(self, version: int) -> bytes:
        """Return the message as bytes.

        Raises:
            ProtocolError: the version has no codec; a value does not fit its field; or
                the version lacks a field that is set and must not be ignored.
        """
        parts = self.encoders[version](self)
        try:
            return b"".join(parts)
        except TypeError:
            raise ProtocolError(
                f"{type(self).__name__} v{version} holds records that are not bytes: "
                "use encode_parts"
            ) from None

    def encode_parts(self, version: int) -> list[bytes | SizedRegion]:
        """Return the message as bytes and, between them, regions kept elsewhere.

        Records may be any object with a `size_in_bytes`; such an object comes back in
        its place in the list, and the length before it is its size.

        Raises:
            ProtocolError: as `encode`.
        """
        parts = self.encoders[version](self)
        try:
            return [b"".join(parts)]
        except TypeError:
            return _join_between_regions(parts)


def _join_between_regions(parts: list[Any]) -> list[bytes | SizedRegion]:
    joined: list[bytes | SizedRegion] = []
    start = 0
    for index, part in enumerate(parts):
        if not isinstance(part, (bytes, bytearray, memoryview)):
            if start < index:
                joined.append(b"".join(parts[start:index]))
            joined.append(part)
            start = index + 1
    if start < len(parts):
        joined.append(b"".join(parts[start:]))
    return joined
