"""Read Avro values with fastavro, and derive columns from an Avro schema."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Mapping
from typing import Any, Final

import orjson

from mpbroker.spark.pipeline.errors import PipelineError

_TYPES: Final[Mapping[str, str]] = {
    "string": "string",
    "int": "int",
    "long": "bigint",
    "float": "float",
    "double": "double",
    "boolean": "boolean",
    "bytes": "binary",
    "enum": "string",
}
_LOGICAL: Final[Mapping[str, str]] = {
    "timestamp-millis": "timestamp",
    "timestamp-micros": "timestamp",
    "date": "date",
    "uuid": "string",
}
# Logical types that fastavro decodes to objects of a type that no column has.
_NO_COLUMN: Final = (
    "decimal",
    "time-millis",
    "time-micros",
    "local-timestamp-millis",
    "local-timestamp-micros",
    "duration",
)
_CONFLUENT_HEADER_BYTES: Final = 5
# The exceptions that fastavro raises for bytes that do not match the schema.
AVRO_ERRORS: Final = (
    EOFError,
    ValueError,
    IndexError,
    KeyError,
    TypeError,
    OverflowError,
    struct.error,
)


def fields_of(schema: str) -> dict[str, str]:
    """Return the column types of a record schema's fields, by name.

    Args:
        schema: JSON.

    Raises:
        PipelineError: the text is not an Avro record schema, or there is no column type
            for a field.
    """
    try:
        record = orjson.loads(schema)
    except orjson.JSONDecodeError as error:
        raise PipelineError(f"value.schema is not JSON: {error}") from None
    if not isinstance(record, dict) or record.get("type") != "record":
        raise PipelineError("value.schema must be an Avro record")
    _check(record)
    found = {}
    for field in record.get("fields", []):
        kind = _column_type(field.get("type"))
        if kind is None:
            raise PipelineError(
                f"value.schema: field {field.get('name')!r} is"
                f" {field.get('type')!r}; a column can be {', '.join(_TYPES)}, a"
                " timestamp, date or UUID, or a union of one of these and null"
            )
        found[str(field["name"])] = kind
    return found


def _check(record: Mapping[str, Any]) -> None:
    """Raise PipelineError if fastavro cannot read by this schema."""
    from fastavro import parse_schema
    from fastavro.schema import SchemaParseException, UnknownType

    try:
        parse_schema(dict(record))
    except (SchemaParseException, UnknownType, *AVRO_ERRORS, AttributeError) as error:
        raise PipelineError(
            f"value.schema is no Avro schema: {type(error).__name__}: {error}"
        ) from None


def _column_type(kind: Any) -> str | None:
    """Return the column type of an Avro type, or of its union with null, if any."""
    if isinstance(kind, list):
        others = [each for each in kind if each != "null"]
        return _column_type(others[0]) if len(others) == 1 else None
    if isinstance(kind, dict):
        logical = kind.get("logicalType", "")
        if logical in _NO_COLUMN:
            return None
        return _LOGICAL.get(logical) or _column_type(kind["type"])
    return _TYPES.get(kind) if isinstance(kind, str) else None


def _is_uuid(kind: Any) -> bool:
    if isinstance(kind, list):
        return any(map(_is_uuid, kind))
    return isinstance(kind, dict) and kind.get("logicalType") == "uuid"


def reader(schema: str, confluent_header: bool) -> Callable[[bytes], Any]:
    """Return a function that decodes a value, and raises AVRO_ERRORS if it cannot.

    Args:
        confluent_header: five bytes of a schema registry stand before each value.
    """
    from fastavro import parse_schema, schemaless_reader

    record = orjson.loads(schema)
    uuids = [each["name"] for each in record["fields"] if _is_uuid(each["type"])]
    parsed = parse_schema(record)

    def read(value: bytes) -> Any:
        if confluent_header:
            if len(value) < _CONFLUENT_HEADER_BYTES or value[0]:
                raise ValueError(
                    "it does not begin with a schema id (confluent_header)"
                )
            value = value[_CONFLUENT_HEADER_BYTES:]
        stream = io.BytesIO(value)
        found: Any = schemaless_reader(stream, parsed, None)
        if stream.tell() != len(value):
            raise ValueError(
                f"{len(value) - stream.tell()} bytes follow its last field"
            )
        for name in uuids:
            found[name] = str(found[name]) if found[name] is not None else None
        return found

    return read
