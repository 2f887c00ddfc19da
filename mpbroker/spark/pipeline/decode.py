"""Decode records' values into columns, on executors.

Each record becomes a row, or an entry of the dead letters with the reason.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import orjson
import pyarrow as pa

from mpbroker.spark.pipeline import avro
from mpbroker.spark.pipeline.columns import TYPES, record_fields
from mpbroker.spark.pipeline.description import ValueFormat

_ERRORS: Final = (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError, ValueError)


class Decoded(NamedTuple):
    """The records of a batch, parted by whether their value could be decoded.

    Attributes:
        rows: decoded, with the columns of `row_schema`.
        bad: not decoded, with the columns of `bad_schema`.
    """

    rows: pa.Table
    bad: pa.Table


def row_schema(value: ValueFormat, *, with_headers: bool) -> pa.Schema:
    """Return the columns of decoded records: the value's fields, then the record's."""
    fields = [pa.field(name, TYPES[kind]) for name, kind in value.fields.items()]
    if value.format == "raw":
        fields = [pa.field("value", pa.binary())]
    return pa.schema(fields + record_fields(with_headers=with_headers))


def bad_schema() -> pa.Schema:
    """Return the columns of a dead-letter table: the record, and the reason."""
    head = [pa.field("value", pa.binary()), pa.field("_error", pa.string())]
    return pa.schema(head + record_fields())


class Decoder:
    """Decodes batches that have the columns of format("mpbroker").

    Attributes:
        schema: of decoded rows.
    """

    def __init__(self, value: ValueFormat, *, with_headers: bool) -> None:
        self._value = value
        self.schema = row_schema(value, with_headers=with_headers)
        self._record_fields = record_fields(with_headers=with_headers)
        self._parse = _parser(value)

    def decode(self, batch: pa.RecordBatch) -> Decoded:
        """Return the batch's decoded rows and its bad records, each in order."""
        own = {
            field.name: batch.column(field.name[1:]).cast(field.type)
            for field in self._record_fields
        }
        if self._value.format == "raw":
            columns = [batch.column("value"), *own.values()]
            rows = pa.Table.from_arrays(columns, schema=self.schema)
            return Decoded(rows, bad_schema().empty_table())
        documents: list[Any] = []
        errors: dict[int, str] = {}
        for index, value in enumerate(batch.column("value").to_pylist()):
            document = None
            try:
                document = self._document(value)
            except (*avro.AVRO_ERRORS, RecursionError) as error:
                errors[index] = f"{type(error).__name__}: {error}"[:300]
            documents.append(document if document is not None else {})
        columns = [
            self._column(name, kind, documents, errors)
            for name, kind in self._value.fields.items()
        ]
        table = pa.Table.from_arrays([*columns, *own.values()], schema=self.schema)
        return self._parted(table, batch, own, errors)

    def _document(self, value: bytes | None) -> Any:
        """Return a value's fields by name; None for a tombstone.

        Raises:
            ValueError: and the other AVRO_ERRORS, or RecursionError: not such a value.
        """
        if value is None:
            return None  # a tombstone becomes a row whose fields are null
        document = self._parse(value)
        if not isinstance(document, dict):
            raise ValueError(f"{type(document).__name__} where an object is expected")
        if self._value.unknown_fields == "dead_letter":
            strange = sorted(set(document) - set(self._value.fields))
            if strange:
                raise ValueError(f"unknown fields: {', '.join(map(str, strange[:10]))}")
        return document

    def _column(
        self, name: str, kind: str, documents: Sequence[Any], errors: dict[int, str]
    ) -> pa.Array:
        values = [document.get(name) for document in documents]
        convert = _CONVERTERS[kind]
        try:
            return pa.array([convert(value) for value in values], TYPES[kind])
        except _ERRORS:
            pass
        # At least one value does not fit: try each, and leave those that do not null.
        fitting: list[Any] = []
        for index, value in enumerate(values):
            try:
                kept = convert(value)
                pa.array([kept], TYPES[kind])
            except _ERRORS:
                kept = None
                errors.setdefault(index, f"{name}={value!r:.200} is no {kind}")
            fitting.append(kept)
        return pa.array(fitting, TYPES[kind])

    def _parted(
        self,
        table: pa.Table,
        batch: pa.RecordBatch,
        own: Mapping[str, pa.Array],
        errors: Mapping[int, str],
    ) -> Decoded:
        """Move the rows at the indexes of errors to the bad records."""
        if not errors:
            return Decoded(table, bad_schema().empty_table())
        schema = bad_schema()
        indexes = pa.array(sorted(errors), pa.int64())
        values = [batch.column("value").take(indexes)]
        reasons = [pa.array([errors[index] for index in sorted(errors)], pa.string())]
        rest = [own[name].take(indexes) for name in schema.names[2:]]
        keep = pa.array([index not in errors for index in range(table.num_rows)])
        return Decoded(
            table.filter(keep),
            pa.Table.from_arrays([*values, *reasons, *rest], schema=schema),
        )


def _parser(value: ValueFormat) -> Callable[[bytes], Any]:
    if value.format == "msgpack":
        import msgpack

        def unpack(content: bytes) -> Any:
            return msgpack.unpackb(content, timestamp=3)

        return unpack
    if value.format == "avro":
        return avro.reader(value.schema, value.confluent_header)
    return orjson.loads


def _timestamp(value: Any) -> datetime.datetime | None:
    """Convert ISO 8601 text (UTC if it has no offset) or milliseconds since 1970."""
    if value is None or isinstance(value, datetime.datetime):
        return value
    if isinstance(value, str):
        found = datetime.datetime.fromisoformat(value)
        return found if found.tzinfo else found.replace(tzinfo=datetime.UTC)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return _EPOCH + datetime.timedelta(milliseconds=value)
    raise ValueError(f"{value!r} is not a timestamp")


def _date(value: Any) -> datetime.date | None:
    if value is None or isinstance(value, datetime.date):
        return value
    if isinstance(value, str):
        return datetime.date.fromisoformat(value)
    raise ValueError(f"{value!r} is not a date")


def _of(*kinds: type) -> Callable[[Any], Any]:
    """Return a function that refuses values of other types.

    Arrow alone would convert 1.5 to 1, true to 1, and bytes to text.
    """

    def check(value: Any) -> Any:
        if value is None or type(value) in kinds:
            return value
        raise ValueError(f"{value!r} has another type")

    return check


_EPOCH: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_CONVERTERS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "timestamp": _timestamp,
    "date": _date,
    "string": _of(str),
    "int": _of(int),
    "bigint": _of(int),
    "float": _of(float, int),
    "double": _of(float, int),
    "boolean": _of(bool),
    "binary": _of(bytes),
}
