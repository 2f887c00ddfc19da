"""Read columns straight from the text of JSON values, with Arrow's parser in C++.

The parser builds columns four times as fast as `column_types` does from Python's
objects, and reads values that fit to the same columns: tests compare the two. It knows
fewer types, and does not say which value does not fit. In any doubt this module returns
None, and the caller uses `column_types`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from mpbroker.spark.pipeline.schemas.column_types import (
    Array,
    ColumnType,
    Leaf,
    Struct,
)

# Arrow converts these from JSON's own types, and refuses all others.
_AS_THEY_ARE: Final = frozenset({"string", "int", "bigint", "double", "boolean"})
# From here on, a double may stand for a whole number that has lost digits.
_INEXACT: Final = 2.0**53
# The parser's length of a block is an int32; values are as long in a few batches only.
_LARGEST_BYTES: Final = 1 << 30


class JsonColumns:
    """Reads columns from JSON objects with Arrow's parser; make one by `reader_of`."""

    def __init__(self, fields: Mapping[str, ColumnType], schema: pa.Schema) -> None:
        """Create a reader of fields whose types `_type_of` knows.

        Args:
            schema: the types that Arrow's parser gives.
        """
        from pyarrow import json

        self._fields, self._json = fields, json
        self._options = json.ParseOptions(
            explicit_schema=schema, unexpected_field_behavior="ignore"
        )

    def columns(self, objects: Sequence[bytes]) -> list[pa.Array] | None:
        """Return a column for each field; None if a value may not fit its type.

        The caller then uses `column_types`.

        Args:
            objects: texts of one JSON object each. The caller must have checked that:
                a text with half an object, or with two, would shift the next rows.
        """
        text = b"\n".join(objects)
        # There must be one line for each object: no object may contain a line feed.
        if len(text) >= _LARGEST_BYTES or text.count(b"\n") != len(objects) - 1:
            return None
        try:
            found = self._json.read_json(
                pa.BufferReader(text),
                read_options=self._json.ReadOptions(
                    use_threads=False, block_size=len(text) + 1
                ),
                parse_options=self._options,
            )
        except pa.ArrowInvalid:
            return None
        if found.num_rows != len(objects):
            return None
        columns = []
        for name, kind in self._fields.items():
            column = _finished(kind, found.column(name).combine_chunks())
            if column is None:
                return None
            columns.append(column)
        return columns


def reader_of(whole: Struct) -> JsonColumns | None:
    """Return a reader of JSON values of a type; None if Arrow cannot read parts of it.

    Args:
        whole: the type of a whole value.
    """
    kind = _type_of(whole)
    if kind is None or not whole.fields:
        return None
    return JsonColumns(whole.fields, pa.schema(list(kind)))


def _type_of(kind: ColumnType) -> pa.DataType | None:
    """Return the type that Arrow's parser is to read for ``kind``; None if it cannot.

    It is text if `_finished` converts the values afterwards.
    """
    if kind.required:
        return None
    if isinstance(kind, Struct) and not kind.closed:
        parts = {name: _type_of(each) for name, each in kind.fields.items()}
        return None if None in parts.values() else pa.struct(list(parts.items()))
    if isinstance(kind, Array):
        element = _type_of(kind.element)
        return None if element is None else pa.list_(element)
    if isinstance(kind, Leaf):
        if kind.text in _AS_THEY_ARE:
            return kind.arrow
        return pa.string() if kind.parsed else None
    return None


def _finished(kind: ColumnType, column: pa.Array) -> pa.Array | None:
    """Convert a column that Arrow has read to ``kind``; None if a value may not fit."""
    if isinstance(kind, Struct):
        parts = [
            _finished(each, part)
            for each, part in zip(kind.fields.values(), column.flatten(), strict=True)
        ]
        if any(part is None for part in parts):
            return None
        return pa.StructArray.from_arrays(
            parts, fields=list(kind.arrow), mask=column.is_null()
        )
    if isinstance(kind, Array):
        elements = _finished(kind.element, column.values)
        if elements is None:
            return None
        return pa.ListArray.from_arrays(
            column.offsets, elements, type=kind.arrow, mask=column.is_null()
        )
    assert isinstance(kind, Leaf)
    if kind.parsed:
        return kind.parse(column)
    if (
        kind.text == "double"
        and pc.any(pc.greater_equal(pc.abs(column), _INEXACT)).as_py()
    ):
        return None
    return column
