"""Decode records' values into columns, on executors.

Each record becomes a row, or an entry of the dead letters with the reason.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import orjson
import pyarrow as pa

from mpbroker.spark.pipeline.description import ValueFormat
from mpbroker.spark.pipeline.schemas import avro, column_types, json_columns
from mpbroker.spark.pipeline.schemas.columns import HEADERS, record_fields
from mpbroker.spark.pipeline.schemas.field_names import UntakenFields, filled, paths

# The names of so many values of a batch are looked at, then those of each eighth value:
# with 20 names a look takes 0.8 us, and to parse the value 2.7 us.
_LOOK_FIRST: Final = 256
_STEP: Final = 8


class Decoded(NamedTuple):
    """The records of a batch, parted by whether their value could be decoded.

    Attributes:
        rows: the decoded records, with the columns of `row_schema`.
        bad: the other records, with the columns of `bad_schema`.
        deleted: for each of the rows, whether its record deletes the row of its key.
    """

    rows: pa.Table
    bad: pa.Table
    deleted: pa.Array


def row_schema(value: ValueFormat, *, with_headers: bool) -> pa.Schema:
    """Return the columns of decoded records.

    They are the fields of the value, then those of any Kafka record, such as offset.
    """
    kinds = column_types.struct(value.fields).fields
    fields = [pa.field(name, kind.arrow) for name, kind in kinds.items()]
    if value.format == "raw":
        fields = [pa.field("value", pa.binary())]
    return pa.schema(fields + record_fields(with_headers=with_headers))


def bad_schema() -> pa.Schema:
    """Return the columns of a dead-letter table: the record, and the error in it."""
    head = [pa.field("value", pa.binary()), pa.field("_error", pa.string())]
    return pa.schema(head + record_fields(with_headers=True))


class _Parsed(NamedTuple):
    """The results of parsing values, in their order.

    Attributes:
        documents: each value's fields by name; None for a tombstone or a bad value.
        errors: the reason for each bad value, by the value's index.
        gone: for each value, whether it deletes the row of its key.
    """

    documents: list[Any]
    errors: dict[int, str]
    gone: list[bool]


class Decoder:
    """Decodes batches that have the columns of format("mpbroker").

    Attributes:
        schema: the columns of decoded rows.
        seen: the ways to the values' fields that were not null in each decoded row.
        untaken: those to the values' fields that no column takes, some of them at
            least. A name that is in few values of a large batch may be missing.
    """

    def __init__(self, value: ValueFormat, *, with_headers: bool) -> None:
        self._value = value
        self.seen: set[str] = set()
        self.schema = row_schema(value, with_headers=with_headers)
        self._record_fields = record_fields(with_headers=with_headers)
        self._struct = column_types.struct(
            value.fields, closed=value.unknown_fields == "dead_letter"
        )
        self._fields = frozenset(paths(self._struct))
        self._names = UntakenFields(self._struct)
        self._parse = _parser(value, exact=self._struct.exact)
        self._json: json_columns.JsonColumns | None = None
        if value.format == "json" and value.envelope != "debezium":
            self._json = json_columns.reader_of(self._struct)

    @property
    def untaken(self) -> set[Any]:
        return self._names.names

    def decode(self, batch: pa.RecordBatch) -> Decoded:
        """Return the batch's decoded rows and its bad records, each in order."""
        own = {
            field.name: batch.column(field.name[1:]).cast(field.type)
            for field in self._record_fields
        }
        if self._value.format == "raw":
            columns = [batch.column("value"), *own.values()]
            rows = pa.Table.from_arrays(columns, schema=self.schema)
            deleted = batch.column("value").is_null()
            return Decoded(rows, bad_schema().empty_table(), deleted)
        values = batch.column("value").to_pylist()
        # Values have no cycles, but the collector would look for cycles again and again
        # as values become more. Without it, a batch of nested JSON is twice as fast.
        with _without_collector():
            parsed, columns, misfits = self._columns(values)
        errors = parsed.errors
        for index, misfit in misfits.items():
            errors.setdefault(index, str(misfit))
        table = pa.Table.from_arrays([*columns, *own.values()], schema=self.schema)
        found = self._parted(
            table, batch, own, errors, pa.array(parsed.gone, pa.bool_())
        )
        if not self._fields <= self.seen:
            self._note_seen(found.rows)
        return found

    def _note_seen(self, rows: pa.Table) -> None:
        for name, kind in self._struct.fields.items():
            for chunk in rows.column(name).chunks:
                if chunk.null_count < len(chunk):
                    self.seen.add(name)
                    self.seen.update(filled(kind, chunk, name))

    def _columns(
        self, values: Sequence[bytes | None]
    ) -> tuple[_Parsed, list[pa.Array], column_types.Misfits]:
        """Return the parsed values, a column for each field, and what does not fit.

        The third result has the reason for each value that does not fit, by its index.

        An entry of a column is null where the value is not an object.
        """
        misfits: column_types.Misfits = {}
        if self._json is not None:
            parsed = self._parsed(values, keep=False)
            texts = [
                value if value is not None and document is not None else b"{}"
                for value, document in zip(values, parsed.documents, strict=True)
            ]
            columns = self._json.columns(texts)
            if columns is not None:
                return parsed, columns, misfits
        parsed = self._parsed(values, keep=True)
        return parsed, self._struct.children(parsed.documents, misfits), misfits

    def _parsed(self, values: Sequence[bytes | None], *, keep: bool) -> _Parsed:
        """Parse records' values by the pipeline's value format.

        Args:
            keep: keep the parsed documents; otherwise put True in the place of each.
        """
        found = _Parsed([], {}, [])
        # A value with an unknown field may be bad; then its error says why.
        looked_at = _LOOK_FIRST if self._value.unknown_fields != "dead_letter" else 0
        for index, value in enumerate(values):
            document = None
            is_gone = value is None
            try:
                document = self._document(value)
                if self._value.envelope == "debezium" and document is not None:
                    document, is_gone = changed_row(document)
            except (*avro.AVRO_ERRORS, RecursionError) as error:
                found.errors[index] = f"{type(error).__name__}: {error}"[:300]
            if looked_at and (index < looked_at or not index % _STEP):
                self._names.look(document)
            found.documents.append(document if keep or document is None else True)
            found.gone.append(is_gone)
        return found

    def _document(self, value: bytes | None) -> Any:
        """Return a value's fields by name; None for a tombstone.

        Raises:
            RecursionError, or one of AVRO_ERRORS: the value has another format.
        """
        if value is None:
            return None  # a tombstone becomes a row whose fields are null
        document = self._parse(value)
        if not isinstance(document, dict):
            raise ValueError(f"{type(document).__name__} where an object is expected")
        return document

    def _parted(
        self,
        table: pa.Table,
        batch: pa.RecordBatch,
        own: Mapping[str, pa.Array],
        errors: Mapping[int, str],
        deleted: pa.Array,
    ) -> Decoded:
        """Move the rows whose value has an error to the table of bad records."""
        if not errors:
            return Decoded(table, bad_schema().empty_table(), deleted)
        schema = bad_schema()
        indexes = pa.array(sorted(errors), pa.int64())
        values = [batch.column("value").take(indexes)]
        reasons = [pa.array([errors[index] for index in sorted(errors)], pa.string())]
        if HEADERS.name not in own:
            # A dead letter has headers if the source reads them.
            headers = (
                batch.column("headers").cast(HEADERS.type)
                if "headers" in batch.schema.names
                else pa.nulls(batch.num_rows, HEADERS.type)
            )
            own = {**own, HEADERS.name: headers}
        rest = [own[name].take(indexes) for name in schema.names[2:]]
        keep = pa.array([index not in errors for index in range(table.num_rows)])
        return Decoded(
            table.filter(keep),
            pa.Table.from_arrays([*values, *reasons, *rest], schema=schema),
            deleted.filter(keep),
        )


@contextmanager
def _without_collector() -> Iterator[None]:
    """Switch Python's garbage collector of reference cycles off in this context."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def changed_row(change: Mapping[str, Any]) -> tuple[Any, bool]:
    """Return the row of a change in Debezium's envelope, and whether it is deleted.

    Raises:
        ValueError: the document is not a change of one row.

    Source: Debezium's documentation, "Change events": op is c, u, d, or r of a
    snapshot; JSON with schemas has the change below "payload".
    """
    found = change.get("payload", change)
    op = found.get("op") if isinstance(found, dict) else None
    if op not in ("c", "r", "u", "d"):
        raise ValueError(f"op={op!r:.100} is no change of a row: c, r, u or d")
    side = "before" if op == "d" else "after"
    row = found.get(side)
    if not isinstance(row, dict):
        raise ValueError(f"op={op!r} without the row in {side!r}")
    return row, op == "d"


def _parser(value: ValueFormat, *, exact: bool) -> Callable[[bytes], Any]:
    """Return a function that parses records' values.

    Args:
        exact: keep all digits of JSON's numbers.
    """
    if value.format == "msgpack":
        import msgpack

        def unpack(content: bytes) -> Any:
            return msgpack.unpackb(content, timestamp=3)

        return unpack
    if value.format == "avro":
        schema_id = value.schema_id if value.confluent_header else None
        return avro.reader(value.schema, schema_id)
    if value.format == "registry":
        # It imports ssl and urllib, which few pipelines need.
        from mpbroker.spark.pipeline.registered import Reader

        return Reader(value, exact=exact)
    return column_types.EXACT_JSON.decode if exact else orjson.loads
