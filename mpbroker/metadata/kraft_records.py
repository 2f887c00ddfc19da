"""Read and write the values of Kafka's metadata records.

    value := frame version uvarint (1), type uvarint, version uvarint, fields

The fields have the flexible encoding of KIP-482: compact lengths and tagged fields. In
Python a record is a dict: "type" has its name, and the others have the names of Kafka's
fields and the forms that Kafka's tools print. An id is 22 characters of base64, bytes
are base64, and a tagged field that has its default is absent.

The value of a KRaft control record has the same encoding behind an int16 version.

For each type and version a list of functions is made from kraft_schema, when it is
first used.

Source: KIP-631; Kafka's MetadataRecordSerde; KIP-482.
"""

from __future__ import annotations

from base64 import urlsafe_b64decode
from binascii import a2b_base64, b2a_base64
from collections.abc import Callable, Sequence
from functools import cache
from struct import Struct
from struct import error as LayoutError
from typing import Any, Final

from mpbroker.metadata.kraft_schema import (
    CONTROL_ROWS,
    RECORD_NAMES,
    RECORD_ROWS,
    FieldRow,
    RecordRow,
)
from mpbroker.metadata.meta_properties import uuid_to_text
from mpbroker.protocol.errors import ProtocolError
from mpbroker.protocol.primitives import (
    read_unsigned_varint,
    skip_tagged_fields,
    write_unsigned_varint,
)

FRAME_VERSION: Final = 1

_Read = Callable[[bytes, int], tuple[Any, int]]
_Write = Callable[[bytearray, Any], None]

_INT16: Final = Struct(">h")
_FIXED: Final = {
    "bool": Struct(">?"),
    "int8": Struct(">b"),
    "int16": Struct(">h"),
    "uint16": Struct(">H"),
    "int32": Struct(">i"),
    "int64": Struct(">q"),
    "float64": Struct(">d"),
}
_ZEROS: Final = {"bool": False, "float64": 0.0, "string": "", "bytes": ""}
_NO_ID: Final = "A" * 22
_UUID_BYTES: Final = 16


class MetadataRecordError(ProtocolError):
    """Bytes are no metadata record, or a record's fields do not fit its type."""


class UnknownRecordError(MetadataRecordError):
    """A record has a type or version of a newer Kafka."""


def decode_record(value: bytes | None) -> dict[str, Any]:
    """Return the metadata record (a dict) that the value of a log's record encodes.

    Raises:
        UnknownRecordError: the type or the version is not known.
        MetadataRecordError: the bytes are malformed.
    """
    return decode_versioned(value)[0]


def decode_versioned(value: bytes | None) -> tuple[dict[str, Any], int]:
    """Return the metadata record that a value encodes, and the record's version.

    Raises:
        As decode_record().
    """
    value = bytes(value or b"")
    try:
        frame, position = read_unsigned_varint(value, 0)
        if frame != FRAME_VERSION:
            raise UnknownRecordError(f"frame version {frame}, only 1 is known")
        api_key, position = read_unsigned_varint(value, position)
        version, position = read_unsigned_varint(value, position)
        name = RECORD_NAMES.get(api_key)
        if name is None:
            raise UnknownRecordError(f"record type {api_key} (version {version})")
        if version > RECORD_ROWS[name].newest:
            raise UnknownRecordError(f"{name} version {version}")
        record: dict[str, Any] = {"type": name}
        position = _reader(name, version)(value, position, record)
    except MetadataRecordError:
        raise
    except (ProtocolError, LayoutError, IndexError, UnicodeDecodeError) as error:
        raise MetadataRecordError(f"malformed metadata record: {error}") from None
    if position != len(value):
        raise MetadataRecordError(
            f"{name} of {position} bytes has {len(value) - position} more behind it"
        )
    return record, version


def decode_control(control_type: int, value: bytes | None) -> dict[str, Any]:
    """Return the fields of a KRaft control record, its "version" first.

    Args:
        control_type: the type in the record's key; one of CONTROL_ROWS.
        value: the record's value.

    Raises:
        UnknownRecordError: the version is not known.
        MetadataRecordError: the bytes are malformed.
    """
    row = CONTROL_ROWS[control_type]
    try:
        (version,) = _INT16.unpack_from(value or b"")
        if not 0 <= version <= row.newest:
            raise UnknownRecordError(f"{row.name} version {version}")
        fields: dict[str, Any] = {"version": version}
        _control_reader(control_type, version)(bytes(value or b""), 2, fields)
    except MetadataRecordError:
        raise
    except (ProtocolError, LayoutError, IndexError, UnicodeDecodeError) as error:
        raise MetadataRecordError(f"malformed {row.name}: {error}") from None
    return fields


def encode_control(control_type: int, fields: dict[str, Any]) -> bytes:
    """Return the value of a KRaft control record.

    Args:
        control_type: the type in the record's key; one of CONTROL_ROWS.
        fields: the fields by name; without "version" the version is 0.
    """
    version = fields.get("version", 0)
    out = bytearray(_INT16.pack(version))
    _struct_writer(CONTROL_ROWS[control_type].fields, version)(out, fields)
    return bytes(out)


def encode_record(record: dict[str, Any], version: int | None = None) -> bytes:
    """Return the bytes that encode a metadata record.

    Args:
        record: the record; absent fields get zeros and empty values.
        version: the version to write; None: the lowest that has all fields of the
            record.

    Raises:
        MetadataRecordError: the type or a field is not known, or a value does not fit.
    """
    kind = str(record.get("type"))
    if kind not in RECORD_ROWS:
        raise UnknownRecordError(f"record type {kind!r}")
    row = RECORD_ROWS[kind]
    try:
        since = _first_versions(kind)
        lowest = max((since[name] for name in record if name != "type"), default=0)
        version = lowest if version is None else version
        if not lowest <= version <= row.newest:
            raise UnknownRecordError(
                f"{row.name} has no version {version} for {record}"
            )
        out = bytearray(_front(row, version))
        _writer(row.name, version)(out, record)
    except MetadataRecordError:
        raise
    except (LayoutError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise MetadataRecordError(f"cannot encode {record}: {error!r}") from None
    return bytes(out)


@cache
def _first_versions(name: str) -> dict[str, int]:
    """Return, by the name of each field of a record type, the first version with it."""
    return {field.name: field.since for field in RECORD_ROWS[name].fields}


def _front(row: RecordRow, version: int) -> bytes:
    return b"".join(map(write_unsigned_varint, (FRAME_VERSION, row.api_key, version)))


@cache
def _reader(name: str, version: int) -> Callable[[bytes, int, dict[str, Any]], int]:
    return _struct_reader(RECORD_ROWS[name].fields, version)


@cache
def _control_reader(
    control_type: int, version: int
) -> Callable[[bytes, int, dict[str, Any]], int]:
    return _struct_reader(CONTROL_ROWS[control_type].fields, version)


@cache
def _writer(name: str, version: int) -> Callable[[bytearray, dict[str, Any]], None]:
    return _struct_writer(RECORD_ROWS[name].fields, version)


def _present(
    fields: Sequence[FieldRow], version: int
) -> tuple[list[FieldRow], list[FieldRow]]:
    """Return a version's untagged fields, and its tagged fields by ascending tag."""
    present = [field for field in fields if field.since <= version]
    tagged = [field for field in present if field.tag >= 0]
    plain = [field for field in present if field.tag < 0]
    return plain, sorted(tagged, key=lambda field: field.tag)


# -- reading ------------------------------------------------------------------------


def _struct_reader(
    fields: Sequence[FieldRow], version: int
) -> Callable[[bytes, int, dict[str, Any]], int]:
    plain, tagged = _present(fields, version)
    readers = [(field.name, _value_reader(field, version)) for field in plain]
    by_tag = {
        field.tag: (field.name, _value_reader(field, version)) for field in tagged
    }

    def read(buffer: bytes, position: int, into: dict[str, Any]) -> int:
        for name, read_value in readers:
            into[name], position = read_value(buffer, position)
        if buffer[position] == 0:
            return position + 1
        end = skip_tagged_fields(buffer, position)  # checks all sizes and the order
        count, position = read_unsigned_varint(buffer, position)
        for _ in range(count):
            tag, position = read_unsigned_varint(buffer, position)
            size, position = read_unsigned_varint(buffer, position)
            if tag in by_tag:
                name, read_value = by_tag[tag]
                into[name], read_to = read_value(buffer, position)
                if read_to != position + size:
                    raise MetadataRecordError(
                        f"tagged field {name} has {size} bytes, not"
                        f" {read_to - position}"
                    )
            position += size
        return end

    return read


def _value_reader(field: FieldRow, version: int) -> _Read:
    kind = field.kind.removeprefix("?")
    nullable = kind != field.kind
    if kind == "{}":
        return _element_reader(field.fields, version)
    if not kind.startswith("[]"):
        return _scalar_reader(kind, nullable)
    read_element = (
        _scalar_reader(kind[2:], False)
        if kind != "[]"
        else _element_reader(field.fields, version)
    )

    def read(buffer: bytes, position: int) -> tuple[Any, int]:
        count, position = _read_length(buffer, position, nullable)
        if count is None:
            return None, position
        elements = []
        for _ in range(count):
            element, position = read_element(buffer, position)
            elements.append(element)
        return elements, position

    return read


def _element_reader(fields: Sequence[FieldRow], version: int) -> _Read:
    read_struct = _struct_reader(fields, version)

    def read(buffer: bytes, position: int) -> tuple[Any, int]:
        element: dict[str, Any] = {}
        position = read_struct(buffer, position, element)
        return element, position

    return read


def _scalar_reader(kind: str, nullable: bool) -> _Read:
    if kind in _FIXED:
        layout = _FIXED[kind]

        def read_fixed(buffer: bytes, position: int) -> tuple[Any, int]:
            return layout.unpack_from(buffer, position)[0], position + layout.size

        return read_fixed
    if kind == "uuid":
        return _read_uuid
    as_text = kind == "string"

    def read_sized(buffer: bytes, position: int) -> tuple[Any, int]:
        size, position = _read_length(buffer, position, nullable)
        if size is None:
            return None, position
        data = buffer[position : position + size]
        if as_text:
            return data.decode(), position + size
        return b2a_base64(data, newline=False).decode(), position + size

    return read_sized


def _read_uuid(buffer: bytes, position: int) -> tuple[Any, int]:
    end = position + _UUID_BYTES
    if end > len(buffer):
        raise MetadataRecordError("an id is cut off")
    return uuid_to_text(buffer[position:end]), end


def _read_length(
    buffer: bytes, position: int, nullable: bool
) -> tuple[int | None, int]:
    size = buffer[position]
    position += 1
    if size > 0x7F:
        size, position = read_unsigned_varint(buffer, position - 1)
    if size == 0:
        if not nullable:
            raise MetadataRecordError("null in the place of a value")
        return None, position
    # Every element has one byte at least, so this bounds the arrays, too.
    if size - 1 > len(buffer) - position:
        raise MetadataRecordError(
            f"length {size - 1} with {len(buffer) - position} bytes left"
        )
    return size - 1, position


# -- writing ------------------------------------------------------------------------


def _struct_writer(
    fields: Sequence[FieldRow], version: int
) -> Callable[[bytearray, dict[str, Any]], None]:
    plain, tagged = _present(fields, version)
    writers = [
        (field.name, _zero(field.kind), _value_writer(field, version))
        for field in plain
    ]
    tags = [
        (field.name, field.default, field.tag, _value_writer(field, version))
        for field in tagged
    ]

    def write(out: bytearray, record: dict[str, Any]) -> None:
        for name, zero, write_value in writers:
            write_value(out, record.get(name, zero))
        present = [each for each in tags if record.get(each[0], each[1]) != each[1]]
        out += write_unsigned_varint(len(present))
        for name, _, tag, write_value in present:
            value = bytearray()
            write_value(value, record[name])
            out += write_unsigned_varint(tag)
            out += write_unsigned_varint(len(value))
            out += value

    return write


def _zero(kind: str) -> Any:
    if kind.startswith("?"):
        return None
    if kind.startswith("[]"):
        return ()
    if kind == "{}":
        return {}
    return _NO_ID if kind == "uuid" else _ZEROS.get(kind, 0)


def _value_writer(field: FieldRow, version: int) -> _Write:
    kind = field.kind.removeprefix("?")
    nullable = kind != field.kind
    if kind == "{}":
        return _struct_writer(field.fields, version)
    if not kind.startswith("[]"):
        return _scalar_writer(kind, nullable)
    write_element = (
        _scalar_writer(kind[2:], False)
        if kind != "[]"
        else _struct_writer(field.fields, version)
    )

    def write(out: bytearray, values: Any) -> None:
        if values is None and nullable:
            out.append(0)
            return
        out += write_unsigned_varint(len(values) + 1)
        for value in values:
            write_element(out, value)

    return write


def _scalar_writer(kind: str, nullable: bool) -> _Write:
    if kind in _FIXED:
        layout = _FIXED[kind]

        def write_fixed(out: bytearray, value: Any) -> None:
            out += layout.pack(value)

        return write_fixed
    if kind == "uuid":
        return _write_uuid
    as_text = kind == "string"

    def write_sized(out: bytearray, value: Any) -> None:
        if value is None and nullable:
            out.append(0)
            return
        data = value.encode() if as_text else a2b_base64(value, strict_mode=True)
        out += write_unsigned_varint(len(data) + 1)
        out += data

    return write_sized


def _write_uuid(out: bytearray, value: Any) -> None:
    data = urlsafe_b64decode(value + "==")
    if len(data) != _UUID_BYTES:
        raise MetadataRecordError(f"{value!r} is not the text of a 16-byte id")
    out += data
