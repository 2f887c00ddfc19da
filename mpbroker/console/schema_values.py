"""Decode one value by a schema of a registry: Avro, Protobuf or JSON Schema.

Values are anybody's who may write to a topic, and schemas anybody's who may register
one. So no value may take more memory or stack than its length explains.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from mpbroker.base.named_tuple import NamedTuple
from mpbroker.console.plain_values import plain
from mpbroker.spark.pipeline.errors import PipelineError
from mpbroker.spark.pipeline.schemas import avro
from mpbroker.spark.pipeline.schemas.registry import Registered

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor, EnumDescriptor, FileDescriptor
    from google.protobuf.message import Message

# Names have some 20 characters; Protobuf's style guides wish for less than 60.
_MOST_NAME_CHARS: Final = 32 * 1024 * 1024  # of all names in a Protobuf value
_MOST_DEFAULT_BYTES: Final = 16 * 1024 * 1024  # of all fields with their default
_MOST_MESSAGE_BYTES: Final = 256 * 1024 * 1024  # of all messages before they are JSON
_FIELD_BYTES: Final = 100  # of a field in memory, without its name
_EXTRA: Final = "pip install 'mpbroker-server[registry]'"


class Misread(ValueError):
    """Bytes that their schema does not explain; the text is for the user."""


class Value(NamedTuple):
    """A decoded value.

    Attributes:
        kind: avro, protobuf or json.
        content: of types that JSON has.
        note: how it breaks its JSON Schema, or what of it is left out; "": neither.
    """

    kind: str
    content: Any
    note: str = ""


Reader = Callable[[bytes], Value]


def reader_of(schema: Registered) -> Reader:
    """Return a function that decodes the bytes behind the schema id.

    It raises Misread. Any thread may call it.

    Raises:
        PipelineError: the schema cannot be used, or a library for it is missing.
    """
    make = _MAKERS.get(schema.kind)
    if make is None:
        raise PipelineError(f"it is {schema.kind}, none of {', '.join(_MAKERS)}")
    try:
        return make(schema)
    except ImportError as error:
        raise PipelineError(
            f"it is {schema.kind}, which needs {error.name}: {_EXTRA}"
        ) from None


# -- Avro ------------------------------------------------------------------------------


def _avro(schema: Registered) -> Reader:
    read = avro.value_reader(schema.text, [text for _, text in schema.references])

    def decode(data: bytes) -> Value:
        stream = io.BytesIO(data)
        try:
            found = plain(read(stream))
        except (*avro.AVRO_ERRORS, RecursionError) as error:
            raise Misread(f"{type(error).__name__}: {error}"[:300]) from None
        if stream.tell() != len(data):
            left = len(data) - stream.tell()
            raise Misread(f"{left} bytes follow the last field")
        return Value("avro", found)

    return decode


# -- Protobuf --------------------------------------------------------------------------


def _protobuf(schema: Registered) -> Reader:
    from google.protobuf import json_format, message_factory
    from google.protobuf.message import DecodeError

    from mpbroker.spark.pipeline.schemas import protobuf

    file = protobuf.file_of(schema.text, schema.references)
    limits = _Limits.of(file)

    def as_dict(message: Message, *, defaults: bool) -> Any:
        return json_format.MessageToDict(
            message,
            always_print_fields_with_no_presence=defaults,
            preserving_proto_field_name=True,
            descriptor_pool=file.pool,
        )

    def decode(data: bytes) -> Value:
        limits.check(len(data))
        note = ""
        try:
            indexes, place = protobuf.read_indexes(data, 0)
            kind = protobuf.message_at(file, indexes)
            message = message_factory.GetMessageClass(kind)()
            message.ParseFromString(data[place:])
            content = None
            if not limits.has_room(1 + len(data) // 2):
                content = as_dict(message, defaults=False)
            if content is None or limits.has_room(_messages_in(content)):
                content = as_dict(message, defaults=True)
            else:
                note = "fields with their default are left out: they are too many"
        except DecodeError as error:
            raise Misread(f"it is no {kind.full_name}: {error}"[:300]) from None
        except (json_format.Error, ValueError, TypeError, RecursionError) as error:
            raise Misread(f"{error}"[:300]) from None
        return Value("protobuf", content, note)

    return decode


class _Limits(NamedTuple):
    """What the schema of a Protobuf message adds to a value of it.

    Attributes:
        longest_name: the characters of the longest name of a field or enum's value.
        most_fields: of a message type, those that have a default; at least 1.
        most_bytes: in memory, of a message within another, of 8 bytes for each field.
    """

    longest_name: int
    most_fields: int
    most_bytes: int

    @classmethod
    def of(cls, file: FileDescriptor) -> _Limits:
        """Return the limits of a file and all files that it imports."""
        files, names, most_fields, most_bytes = {file.name: file}, [0], 1, 0
        waiting = [file]
        kinds: list[Descriptor] = []
        while waiting:
            each = waiting.pop()
            new = [one for one in each.dependencies if one.name not in files]
            files.update((one.name, one) for one in new)
            waiting += new
            kinds += each.message_types_by_name.values()
            names += map(len, _symbols(each.enum_types_by_name))
            names += [len(one.full_name) for one in each.extensions_by_name.values()]
        while kinds:
            kind = kinds.pop()
            kinds += kind.nested_types
            names += map(len, _symbols(kind.enum_types_by_name))
            names += map(len, kind.fields_by_name)
            names += [len(one.full_name) for one in kind.extensions]
            most_fields = max(most_fields, sum(not f.has_presence for f in kind.fields))
            inner = [f.message_type for f in kind.fields if f.message_type is not None]
            most_bytes = max((most_bytes, *(8 * len(each.fields) for each in inner)))
        return cls(max(names), most_fields, most_bytes)

    def check(self, length: int) -> None:
        """Raise Misread if a value of some bytes may take too much memory.

        Each name is copied for each field and each symbol, which may take a byte. Each
        message within another, which may take two bytes, has room for all its fields.
        """
        if length * self.longest_name > _MOST_NAME_CHARS:
            raise Misread(
                f"the schema has names of {self.longest_name} characters, too many for"
                f" a value of {length} bytes"
            )
        if length // 2 * self.most_bytes > _MOST_MESSAGE_BYTES:
            raise Misread(
                f"the schema has a message of {self.most_bytes // 8} fields in another,"
                f" too many for a value of {length} bytes"
            )

    def has_room(self, messages: int) -> bool:
        """Return whether so many messages may be shown with their default fields."""
        size = _FIELD_BYTES + self.longest_name
        return messages * self.most_fields * size <= _MOST_DEFAULT_BYTES


def _symbols(enums: Mapping[str, EnumDescriptor]) -> Iterator[str]:
    for each in enums.values():
        yield from each.values_by_name


def _messages_in(content: Any) -> int:
    """Return the number of messages, and maps, that JSON objects were made of."""
    found, waiting = 0, [content]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            found += 1
            waiting += each.values()
        elif isinstance(each, list):
            waiting += each
    return found


# -- JSON Schema -----------------------------------------------------------------------


def _json(schema: Registered) -> Reader:
    from mpbroker.spark.pipeline.schemas import json_schema

    check = json_schema.reader(schema.text, schema.references, json.loads)

    def decode(data: bytes) -> Value:
        try:
            found = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise Misread(f"it is not JSON: {error}"[:300]) from None
        try:
            check(data)
        except (ValueError, RecursionError) as error:
            return Value("json", found, f"it does not fit its schema: {error}"[:300])
        return Value("json", found)

    return decode


_MAKERS: Final[Mapping[str, Callable[[Registered], Reader]]] = {
    "AVRO": _avro,
    "PROTOBUF": _protobuf,
    "JSON": _json,
}
