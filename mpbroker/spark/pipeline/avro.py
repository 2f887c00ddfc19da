"""Avro: the columns of a record schema, and values read by it (with fastavro)."""

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
# What fastavro makes objects of that no column's type holds.
_NO_COLUMN: Final = (
    "decimal",
    "time-millis",
    "time-micros",
    "local-timestamp-millis",
    "local-timestamp-micros",
    "duration",
)
_CONFLUENT_HEADER_BYTES: Final = 5
# What a value that is none by this schema makes fastavro raise.
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
    """Return the columns' types by name.

    Raises:
        PipelineError: no record schema, or a field of a type with no column's.
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
                f" {field.get('type')!r}; columns are {', '.join(_TYPES)}, timestamps,"
                " dates and UUIDs, each or null"
            )
        found[str(field["name"])] = kind
    return found


def _check(record: Mapping[str, Any]) -> None:
    """Raise PipelineError if this is no schema to read by."""
    from fastavro import parse_schema
    from fastavro.schema import SchemaParseException, UnknownType

    try:
        parse_schema(dict(record))
    except (SchemaParseException, UnknownType, *AVRO_ERRORS, AttributeError) as error:
        raise PipelineError(
            f"value.schema is no Avro schema: {type(error).__name__}: {error}"
        ) from None


def _column_type(kind: Any) -> str | None:
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
    """Return a function that reads a value, or raises one of AVRO_ERRORS."""
    from fastavro import parse_schema, schemaless_reader

    record = orjson.loads(schema)
    uuids = [each["name"] for each in record["fields"] if _is_uuid(each["type"])]
    parsed = parse_schema(record)

    def read(value: bytes) -> Any:
        if confluent_header:
            if len(value) < _CONFLUENT_HEADER_BYTES or value[0]:
                raise ValueError("no schema id before it (confluent_header)")
            value = value[_CONFLUENT_HEADER_BYTES:]
        stream = io.BytesIO(value)
        found: Any = schemaless_reader(stream, parsed, None)
        if stream.tell() != len(value):
            raise ValueError(f"{len(value) - stream.tell()} bytes after its last field")
        for name in uuids:
            found[name] = str(found[name]) if found[name] is not None else None
        return found

    return read
