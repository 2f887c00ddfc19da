"""The Arrow types of a pipeline's columns, and the columns that all records have.

Those are the key, topic, partition, offset and other data of a Kafka record.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import pyarrow as pa

# By the name that a description uses, which is Spark's.
TYPES: Final[Mapping[str, pa.DataType]] = {
    "string": pa.string(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "boolean": pa.bool_(),
    "binary": pa.binary(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "date": pa.date32(),
}
# The record's own columns, which stand beside the value's fields, and their types.
# A column's name in format("mpbroker") is the same without "_".
RECORD_COLUMNS: Final[Mapping[str, str]] = {
    "_key": "binary",
    "_topic": "string",
    "_partition": "int",
    "_offset": "bigint",
    "_timestamp": "timestamp",
}
# A further record column where the source has includeHeaders. A description cannot
# name it: it has no type there.
HEADERS: Final = pa.field(
    "_headers", pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
)


def record_fields(*, with_headers: bool = False) -> list[pa.Field]:
    """Return the columns for a Kafka record's key, topic, offset..., in table order."""
    fields = [pa.field(name, TYPES[kind]) for name, kind in RECORD_COLUMNS.items()]
    return fields + [HEADERS] * with_headers
