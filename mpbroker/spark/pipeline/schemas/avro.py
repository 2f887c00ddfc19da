"""Read Avro values with fastavro, and derive columns from an Avro schema."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple

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
    "fixed": "binary",
    "enum": "string",
}
_LOGICAL: Final[Mapping[str, str]] = {
    "timestamp-millis": "timestamp",
    "timestamp-micros": "timestamp",
    "local-timestamp-millis": "timestamp_ntz",
    "local-timestamp-micros": "timestamp_ntz",
    "date": "date",
}
# Logical types that are read as the type below them: no column has a type for them.
_IGNORED: Final = ("uuid", "time-millis", "time-micros", "duration")
# Unions that fit into one column.
_UNIONS: Final[Mapping[frozenset[str], str]] = {
    frozenset({"int", "bigint"}): "bigint",
    frozenset({"float", "double"}): "double",
    frozenset({"int", "double"}): "double",
    frozenset({"int", "float"}): "double",
}
# The type of a column for values of any type: JSON as text.
_ANY: Final = "json"
_CONFLUENT_HEADER_BYTES: Final = 5
# A value may become so many values, such as fields, and so many for each of its bytes.
# Those of usual schemas have one or two for a byte; 100,000 take some 20 MB.
_MOST_NODES: Final = 100_000
_MOST_NODES_PER_BYTE: Final = 4
# Types that do not take at least one byte, or take more.
_FEWEST_BYTES: Final[Mapping[str, int]] = {"null": 0, "float": 4, "double": 8}
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


def fields_of(schema: str, references: Iterable[str] = ()) -> dict[str, str]:
    """Return the column types of a record schema's fields, by name.

    Args:
        schema: the Avro schema as JSON.
        references: the schemas that it names; a schema comes before those that name it.

    Raises:
        PipelineError: the text is not an Avro record schema.
    """
    parsed, named = parsed_schema(schema, references)
    if not isinstance(parsed, dict) or parsed.get("type") != "record":
        raise PipelineError("value.schema must be an Avro record")
    return {
        str(field["name"]): _column_type(field["type"], named, (parsed["name"],))
        for field in parsed.get("fields", [])
    }


def parsed_schema(
    schema: str, references: Iterable[str] = ()
) -> tuple[Any, dict[str, Any]]:
    """Return a schema as fastavro parses it, and the named types in it.

    Args: see `fields_of`.

    Raises:
        PipelineError: the text is not an Avro schema.
    """
    from fastavro import parse_schema
    from fastavro.schema import SchemaParseException, UnknownType

    named: dict[str, Any] = {}
    parsed = None
    for text in (*references, schema):
        try:
            content = orjson.loads(text)
        except orjson.JSONDecodeError as error:
            raise PipelineError(f"value.schema is not JSON: {error}") from None
        try:
            parsed = parse_schema(_plain(content), named_schemas=named)
        except (
            *(SchemaParseException, UnknownType, AttributeError, RecursionError),
            *AVRO_ERRORS,
        ) as error:
            raise PipelineError(
                f"value.schema is no Avro schema: {type(error).__name__}: {error}"
            ) from None
    return parsed, named


def _plain(schema: Any) -> Any:
    """Return an Avro schema without logical types for which there is no column type."""
    if isinstance(schema, list):
        return [_plain(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {
        name: _plain(each) if name in ("type", "items", "values", "fields") else each
        for name, each in schema.items()
    }
    if found.get("logicalType") in _IGNORED:
        del found["logicalType"]
    return found


def _column_type(kind: Any, named: Mapping[str, Any], inside: tuple[str, ...]) -> str:
    """Return the column type of an Avro type.

    Args:
        inside: the names of the records that contain it. A record that contains itself
            becomes JSON text.
    """
    if isinstance(kind, list):
        others = [each for each in kind if each != "null"]
        found = [_column_type(each, named, inside) for each in others]
        return found[0] if len(found) == 1 else _UNIONS.get(frozenset(found), _ANY)
    if isinstance(kind, str):
        if kind in _TYPES:
            return _TYPES[kind]
        if kind in inside or kind not in named:
            return _ANY
        return _column_type(named[kind], named, inside)
    logical, base = kind.get("logicalType", ""), kind["type"]
    if logical in _LOGICAL:
        return _LOGICAL[logical]
    if logical == "decimal" and kind.get("precision", 99) <= 38:
        return f"decimal({kind['precision']}, {kind.get('scale', 0)})"
    if base == "record":
        if kind["name"] in inside or not kind["fields"]:
            return _ANY
        inside = (*inside, kind["name"])
        fields = ", ".join(
            f"`{each['name']}`: {_column_type(each['type'], named, inside)}"
            for each in kind["fields"]
        )
        return f"struct<{fields}>"
    if base == "array":
        return f"array<{_column_type(kind['items'], named, inside)}>"
    if base == "map":
        return f"map<string, {_column_type(kind['values'], named, inside)}>"
    return _TYPES[base] if base in _TYPES else _column_type(base, named, inside)


def reader(
    schema: str, schema_id: int | None = None, references: Iterable[str] = ()
) -> Callable[[bytes], Any]:
    """Return a function that decodes a value.

    It raises RecursionError, or one of AVRO_ERRORS, if the value does not fit.

    Args:
        schema_id: the schema's id in a registry. Before each value there are five
            bytes with the id, and another id does not fit. None: there are none.
        references: see `fields_of`.

    Raises:
        PipelineError: see `value_reader`.
    """
    read_value = value_reader(schema, references)

    def read(value: bytes) -> Any:
        if schema_id is not None:
            if len(value) < _CONFLUENT_HEADER_BYTES or value[0]:
                raise ValueError(
                    "it does not begin with a schema id (confluent_header)"
                )
            found_id = int.from_bytes(value[1:_CONFLUENT_HEADER_BYTES], "big")
            if found_id != schema_id:
                raise ValueError(
                    f"its schema id is {found_id}, not {schema_id} (value.schema_id);"
                    " format='registry' reads several"
                )
            value = value[_CONFLUENT_HEADER_BYTES:]
        stream = io.BytesIO(value)
        found = read_value(stream)
        if stream.tell() != len(value):
            raise ValueError(
                f"{len(value) - stream.tell()} bytes follow its last field"
            )
        return found

    return read


def value_reader(
    schema: str, references: Iterable[str] = ()
) -> Callable[[io.BytesIO], Any]:
    """Return a function that decodes the next value of a stream.

    It raises RecursionError, or one of AVRO_ERRORS, if the value does not fit, or if a
    value of its length can take more memory or stack than the length explains.

    Args: see `fields_of`.

    Raises:
        PipelineError: the text is not an Avro schema, or no value can have it, or it
            has an array whose items take no bytes, so that a few bytes can stand for
            any number of them.
    """
    from fastavro import schemaless_reader
    from fastavro._read_py import schemaless_reader as reader_in_python

    parsed, named = parsed_schema(schema, references)
    try:
        shape = _Shape(parsed, named)
    except RecursionError:
        raise PipelineError("its types are nested too deeply") from None
    # The compiled reader of a type within itself ends the process (a full stack) at
    # some thousand levels, a byte each; the one in Python raises RecursionError.
    read = reader_in_python if shape.is_recursive else schemaless_reader

    def read_value(stream: io.BytesIO) -> Any:
        length = stream.getbuffer().nbytes - stream.tell()
        allowed = _MOST_NODES + _MOST_NODES_PER_BYTE * length
        if shape.most_nodes(length) > allowed:
            raise ValueError(
                f"by its schema {length} bytes can be more than {allowed} values"
            )
        return read(stream, parsed, None)

    return read_value


class _Size(NamedTuple):
    """The size of a part of a value; see `_Shape`.

    Attributes:
        bytes: the fewest bytes that it takes.
        nodes: the number of values in it: itself, its fields, their fields, and so on.
    """

    bytes: int
    nodes: int


class _Shape:
    """Tells how large a value can become by an Avro schema.

    A value has parts: its own is the value with its fields, their fields, and so on.
    This ends at arrays, maps and unions, each of which takes a byte. Each item, and the
    branch of a union that was chosen, begins a part of its own. So the fields of the
    schema, and not the value, give the size of a part, and each part but the first has
    a byte of the value to itself.

    Attributes:
        is_recursive: whether a type contains itself.

    Raises:
        PipelineError: see `value_reader`.
        RecursionError: the types are nested too deeply.
    """

    def __init__(self, schema: Any, named: Mapping[str, Any]) -> None:
        self.is_recursive = False
        self._named = named
        self._seen: set[str] = set()  # records
        self._items: list[Any] = []  # types of arrays' items
        self._parts: list[Any] = []  # types of maps' values and of unions' branches
        self._sizes: dict[str, _Size | None] = {}  # None: it is being computed
        self._visit(schema, ())
        items = [self._size(each) for each in self._items]
        if not all(each.bytes for each in items):
            raise PipelineError("it has an array of items that take no bytes")
        self._first = self._size(schema).nodes
        parts = items + [self._size(each) for each in self._parts]
        # A part without bytes has the byte of its union, or that of its key in a map.
        self._per_byte = max((-(-n // max(1, size)) for size, n in parts), default=0)

    def most_nodes(self, length: int) -> int:
        """Return how many nodes a value of some bytes may have, within a factor of 2.

        It is 2 because the byte that begins an empty part is a part's own, too.
        """
        return self._first + self._per_byte * length

    def _visit(self, kind: Any, inside: tuple[str, ...]) -> None:
        """Find the parts of a type, and whether it contains itself.

        Args:
            kind: the type, as fastavro parses it.
            inside: the names of the records that contain it.
        """
        if isinstance(kind, list):
            self._parts += kind
            for each in kind:
                self._visit(each, inside)
            return
        if isinstance(kind, str):
            if kind in inside:
                self.is_recursive = True
            if kind in self._seen:
                return
            kind = self._named.get(kind, kind)
        if isinstance(kind, str):
            return
        base = kind["type"]
        if base in ("record", "error"):
            self._seen.add(kind["name"])
            for each in kind["fields"]:
                self._visit(each["type"], (*inside, kind["name"]))
        elif base == "array":
            self._items.append(kind["items"])
            self._visit(kind["items"], inside)
        elif base == "map":
            self._parts.append(kind["values"])
            self._visit(kind["values"], inside)

    def _size(self, kind: Any) -> _Size:
        """Return the size of a part that begins with a type."""
        if isinstance(kind, list):
            return _Size(1, 1)
        if isinstance(kind, str):
            found = self._named.get(kind, kind)
            if isinstance(found, str):
                return _Size(_FEWEST_BYTES.get(kind, 1), 1)
            kind = found
        base = kind["type"]
        if base in ("record", "error"):
            return self._size_of_record(kind)
        if base == "fixed":
            size = kind["size"]
            if not isinstance(size, int) or size < 0:
                raise PipelineError(f"it has a fixed type of {size!r} bytes")
            return _Size(size, 1)
        return _Size(_FEWEST_BYTES.get(base, 1), 1)

    def _size_of_record(self, kind: Mapping[str, Any]) -> _Size:
        name = kind["name"]
        if name not in self._sizes:
            self._sizes[name] = None
            parts = [self._size(each["type"]) for each in kind["fields"]]
            self._sizes[name] = _Size(
                sum(each.bytes for each in parts), 1 + sum(n for _, n in parts)
            )
        found = self._sizes[name]
        if found is None:
            raise PipelineError(f"a value of {name} has no end: it contains itself")
        return found
