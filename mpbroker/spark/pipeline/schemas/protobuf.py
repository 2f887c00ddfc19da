"""Read Protobuf messages by the schemas of a registry, without generated code.

A registry gives a file's descriptor, or the text of a `.proto` file, which grpcio-tools
compiles.
"""

from __future__ import annotations

import base64
import binascii
import datetime
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from google.protobuf import (
    any_pb2,
    api_pb2,
    descriptor_pb2,
    descriptor_pool,
    duration_pb2,
    empty_pb2,
    field_mask_pb2,
    json_format,
    message_factory,
    source_context_pb2,
    struct_pb2,
    timestamp_pb2,
    type_pb2,
    wrappers_pb2,
)
from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor
from google.protobuf.message import DecodeError

from mpbroker.spark.pipeline.errors import PipelineError

_KNOWN: Final = (
    *(source_context_pb2, any_pb2, type_pb2, api_pb2, duration_pb2, empty_pb2),
    *(field_mask_pb2, struct_pb2, timestamp_pb2, wrappers_pb2, descriptor_pb2),
)
_MAIN: Final = "mpbroker-value.proto"
_F: Final = FieldDescriptor
_TYPES: Final = {
    _F.TYPE_DOUBLE: "double",
    _F.TYPE_FLOAT: "float",
    _F.TYPE_INT32: "int",
    _F.TYPE_SINT32: "int",
    _F.TYPE_SFIXED32: "int",
    _F.TYPE_UINT32: "bigint",
    _F.TYPE_FIXED32: "bigint",
    _F.TYPE_INT64: "bigint",
    _F.TYPE_SINT64: "bigint",
    _F.TYPE_SFIXED64: "bigint",
    _F.TYPE_UINT64: "decimal(20, 0)",
    _F.TYPE_FIXED64: "decimal(20, 0)",
    _F.TYPE_BOOL: "boolean",
    _F.TYPE_STRING: "string",
    _F.TYPE_BYTES: "binary",
    _F.TYPE_ENUM: "string",
}
_ANY_VALUE: Final = frozenset(
    f"google.protobuf.{name}" for name in ("Struct", "Value", "ListValue")
)
_WRAPPERS: Final = frozenset(
    f"google.protobuf.{name}Value"
    for name in ("Double", "Float", "Int64", "UInt64", "Int32", "UInt32", "Bool")
) | {"google.protobuf.StringValue", "google.protobuf.BytesValue"}
_TIMESTAMP: Final = "google.protobuf.Timestamp"


def file_of(schema: str, references: Iterable[tuple[str, str]] = ()) -> FileDescriptor:
    """Return the descriptor of a Protobuf schema.

    Args:
        schema: the text of a `.proto` file, or a FileDescriptorProto in Base64.
        references: the files that it imports: the name in the import, and the schema.
            A file comes after the files that it imports itself.

    Raises:
        PipelineError: the schema is wrong, or imports a file that is not there.
    """
    named = [*references, (_MAIN, schema)]
    files = [_serialized(name, text) for name, text in named]
    if not all(files):
        files = _compiled(named)
    pool = descriptor_pool.DescriptorPool()
    for known in _KNOWN:
        pool.AddSerializedFile(known.DESCRIPTOR.serialized_pb)
    known_names = {known.DESCRIPTOR.name for known in _KNOWN}
    try:
        for each in files:
            assert each is not None
            # protoc lists these, too. Ours stay, since they depend on each other.
            if each.name not in known_names:
                pool.Add(each)
        return pool.FindFileByName(_MAIN)
    except (TypeError, KeyError) as error:
        raise PipelineError(f"a Protobuf schema cannot be used: {error}") from None


def _serialized(name: str, text: str) -> descriptor_pb2.FileDescriptorProto | None:
    try:
        content = base64.b64decode(text, validate=True)
        found = descriptor_pb2.FileDescriptorProto.FromString(content)
    except (binascii.Error, ValueError, DecodeError):
        return None
    found.name = name
    return found


def _compiled(
    named: Sequence[tuple[str, str]],
) -> list[descriptor_pb2.FileDescriptorProto | None]:
    try:
        import grpc_tools
        from grpc_tools import protoc
    except ImportError as error:
        raise PipelineError(
            f"the registry gives Protobuf schemas as text, which needs {error.name}:"
            " pip install 'mpbroker-server[registry]'"
        ) from None
    with tempfile.TemporaryDirectory() as scratch:
        for name, text in named:
            path = (Path(scratch) / name).resolve()
            if not path.is_relative_to(Path(scratch).resolve()):
                raise PipelineError(f"a Protobuf schema imports {name!r}")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        out = Path(scratch) / "out"
        includes = [scratch, str(Path(grpc_tools.__file__).parent / "_proto")]
        arguments = ["protoc", *(f"-I{each}" for each in includes)]
        arguments += ["--include_imports", f"--descriptor_set_out={out}", _MAIN]
        # The compiler prints its errors to stderr.
        if protoc.main(arguments) != 0:
            raise PipelineError("a Protobuf schema of the registry does not compile")
        found = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes())
    return list(found.file)


def message_at(file: FileDescriptor, indexes: Sequence[int]) -> Descriptor:
    """Return the message type that the indexes in front of a Protobuf value name.

    The first is the index among the file's types; each further one is the index among
    the types nested in the one before.

    Raises:
        ValueError: the schema has no such message type.
    """
    types: Any = list(file.message_types_by_name.values())
    found = None
    for index in indexes:
        if not 0 <= index < len(types):
            raise ValueError(f"the schema has no message {list(indexes)}")
        found = types[index]
        types = found.nested_types
    if found is None:
        raise ValueError("no message is named")
    return found


def message_named(file: FileDescriptor, name: str) -> Descriptor:
    """Return a message type of a file, by its full name or without the package.

    Args:
        name: the name; empty: the first message type of the file.

    Raises:
        PipelineError: the file has no such message type.
    """
    if not name and file.message_types_by_name:
        return next(iter(file.message_types_by_name.values()))
    waiting = list(file.message_types_by_name.values())
    while waiting:
        found = waiting.pop()
        if name in (found.full_name, found.full_name.removeprefix(f"{file.package}.")):
            return found
        waiting += found.nested_types
    raise PipelineError(
        f"value.message={name!r} is none of the schema's:"
        f" {', '.join(file.message_types_by_name) or 'it has none'}"
    )


def read_indexes(value: bytes, place: int) -> tuple[list[int], int]:
    """Return the message indexes in a value of Confluent's format, and their end.

    Args:
        place: the byte at which they begin.

    Returns:
        The indexes, and the position of the byte after them.

    Raises:
        ValueError: there are no indexes at this place.
    """
    count, place = _zigzag(value, place)
    if not count:
        return [0], place  # the short form of the first message
    if not 0 < count < 100:
        raise ValueError(f"{count} message indexes")
    found = []
    for _ in range(count):
        index, place = _zigzag(value, place)
        found.append(index)
    return found, place


def _zigzag(value: bytes, place: int) -> tuple[int, int]:
    number = shift = 0
    while place < len(value) and shift < 35:
        byte = value[place]
        place += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return (number >> 1) ^ -(number & 1), place
        shift += 7
    raise ValueError("the message indexes do not end")


# -- columns ---------------------------------------------------------------------------


def fields_of(message: Descriptor) -> dict[str, str]:
    """Return the column types of a message's fields, by name."""
    return _fields(message, (message.full_name,))


def _fields(message: Descriptor, inside: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for each in message.fields:
        kind = _entry(each)
        if kind is not None:
            key, value = kind
            # Columns have keys of text, int or bigint: booleans and unsigned 64-bit
            # numbers become text.
            key_type = _TYPES[key.type]
            key_type = key_type if key_type in ("int", "bigint") else "string"
            found[each.name] = f"map<{key_type}, {_type(value, inside)}>"
        elif each.is_repeated:
            found[each.name] = f"array<{_type(each, inside)}>"
        else:
            found[each.name] = _type(each, inside)
    return found


def _type(each: FieldDescriptor, inside: tuple[str, ...]) -> str:
    if each.message_type is None:
        return _TYPES[each.type]
    name = each.message_type.full_name
    if name == _TIMESTAMP:
        return "timestamp"
    if name in _WRAPPERS:
        return _TYPES[each.message_type.fields_by_name["value"].type]
    if _is_json(each.message_type, inside):
        return "json"
    fields = _fields(each.message_type, (*inside, name))
    return f"struct<{', '.join(f'{key}: {value}' for key, value in fields.items())}>"


def _is_json(message: Descriptor, inside: tuple[str, ...]) -> bool:
    """Return whether a message becomes JSON text instead of a struct.

    It does so if it may hold any value (Struct, Value, ListValue), if it has no fields,
    and if it is inside a message of its own type.

    Args:
        message: the type of the message.
        inside: the names of the types that contain it.
    """
    name = message.full_name
    return name in _ANY_VALUE or name in inside or not message.fields


def _entry(each: FieldDescriptor) -> tuple[FieldDescriptor, FieldDescriptor] | None:
    """Return the descriptors of a map's key and value; None if a field is no map."""
    kind = each.message_type
    if kind is None or not kind.GetOptions().map_entry:
        return None
    return kind.fields_by_name["key"], kind.fields_by_name["value"]


# -- values ----------------------------------------------------------------------------


def reader(message: Descriptor) -> Callable[[bytes], dict[str, Any]]:
    """Return a function that decodes a message to a dict, or raises ValueError."""
    kind = message_factory.GetMessageClass(message)
    convert = _converter(message, (message.full_name,))

    def read(value: bytes) -> dict[str, Any]:
        found = kind()
        try:
            found.ParseFromString(value)
        except DecodeError as error:
            raise ValueError(f"it is no {message.full_name}: {error}") from None
        return convert(found)

    return read


def _converter(
    message: Descriptor, inside: tuple[str, ...]
) -> Callable[[Any], dict[str, Any]]:
    plan = [(each.name, _getter(each, inside)) for each in message.fields]

    def convert(found: Any) -> dict[str, Any]:
        return {name: get(found) for name, get in plan}

    return convert


def _getter(each: FieldDescriptor, inside: tuple[str, ...]) -> Callable[[Any], Any]:
    name = each.name
    entry = _entry(each)
    if entry is not None:
        key, item = entry[0], _value(entry[1], inside)
        text = key.type == _F.TYPE_BOOL or _TYPES[key.type].startswith("decimal")

        def pairs(message: Any) -> dict[Any, Any]:
            found = getattr(message, name).items()
            if text:
                return {str(index).lower(): item(value) for index, value in found}
            return {index: item(value) for index, value in found}

        return pairs
    convert = _value(each, inside)
    if each.is_repeated:
        return lambda message: [convert(value) for value in getattr(message, name)]
    if each.has_presence:
        return lambda message: (
            convert(getattr(message, name)) if message.HasField(name) else None
        )
    return lambda message: convert(getattr(message, name))


def _value(each: FieldDescriptor, inside: tuple[str, ...]) -> Callable[[Any], Any]:
    """Return a function that converts a field's value, or an element of it.

    Args:
        each: the field.
        inside: the names of the message types that contain the field.
    """
    if each.enum_type is not None:
        names = {
            number: value.name
            for number, value in each.enum_type.values_by_number.items()
        }

        def symbol(number: int) -> Any:
            if number not in names:
                raise ValueError(
                    f"{each.name}={number} is no {each.enum_type.full_name}"
                )
            return names[number]

        return symbol
    if each.message_type is None:
        return lambda value: value
    full_name = each.message_type.full_name
    if full_name == _TIMESTAMP:
        return lambda value: value.ToDatetime(tzinfo=datetime.UTC)
    if full_name in _WRAPPERS:
        return lambda value: value.value
    if _is_json(each.message_type, inside):
        return _to_json
    return _converter(each.message_type, (*inside, full_name))


def _to_json(value: Any) -> Any:
    try:
        return json_format.MessageToDict(value, preserving_proto_field_name=True)
    except RecursionError:
        raise ValueError("a message is nested too deeply") from None
    except json_format.Error as error:  # no ValueError
        raise ValueError(f"a message cannot be JSON: {error}") from None
