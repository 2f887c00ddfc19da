"""Names of fields by their way through a value: ``from.airport``, ``legs[].to``.

A misspelt field is a column of nulls, and nothing fails. So a pipeline names the fields
that no value had, and those of the values that no column takes, at every level.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import pyarrow as pa

from mpbroker.spark.pipeline.schemas.column_types import (
    Array,
    ColumnType,
    JsonText,
    Map,
    Struct,
)

# The largest number of untaken fields to look for: some objects have ids for names.
UNTAKEN_MAX: Final = 21

_Look = Callable[[Any], None]


def paths(kind: ColumnType, path: str = "") -> Iterator[str]:
    """Yield the ways to all fields of a type, those of a struct after the struct's."""
    for name, inner in _inside(kind, path):
        yield name
        yield from paths(inner, name)


def _inside(kind: ColumnType, path: str) -> Iterator[tuple[str, ColumnType]]:
    """Yield the fields of a type's nearest struct, with the ways to them."""
    if isinstance(kind, JsonText):
        yield from _inside(kind.inner, path)
    elif isinstance(kind, Array):
        yield from _inside(kind.element, f"{path}[]")
    elif isinstance(kind, Map):
        yield from _inside(kind.value, f"{path}[]")
    elif isinstance(kind, Struct):
        for name, inner in kind.fields.items():
            yield (f"{path}.{name}" if path else name), inner


def filled(kind: ColumnType, column: pa.Array, path: str) -> Iterator[str]:
    """Yield the ways to the fields in a column that are not null in each of its rows.

    Args:
        kind: the column's type.
        path: the way to the column's field.
    """
    while not isinstance(kind, Struct):
        if isinstance(kind, JsonText):
            kind = kind.inner
        elif isinstance(kind, Array):
            kind, column, path = kind.element, column.flatten(), f"{path}[]"
        elif isinstance(kind, Map):
            kind, column, path = kind.value, column.items, f"{path}[]"
        else:
            return
    # An entry is null where its struct is null.
    parts = column.flatten() if len(column) else ()
    for (name, inner), part in zip(kind.fields.items(), parts, strict=False):
        if part.null_count < len(part):
            way = f"{path}.{name}"
            yield way
            yield from filled(inner, part, way)


class UntakenFields:
    """Finds the fields of values that no column takes.

    Attributes:
        names: the ways to them, `UNTAKEN_MAX` at most. On the first level they are the
            names themselves; MessagePack has some that are no text.
    """

    def __init__(self, whole: Struct) -> None:
        """Look for fields that a type has not.

        Args:
            whole: the type of a whole value.
        """
        self.names: set[Any] = set()
        self._look = self._looker(whole, "")

    def look(self, document: Any) -> None:
        """Note the names of a value's fields that no column takes."""
        if self._look is not None and len(self.names) < UNTAKEN_MAX:
            self._look(document)

    def _looker(self, kind: ColumnType, path: str) -> _Look | None:
        """Return what looks at the values of a type; None if it has no fields."""
        if isinstance(kind, Struct):
            return self._looker_of_fields(kind, path)
        if not isinstance(kind, (Array, Map)):
            return None  # JSON inside of text would have to be parsed once more
        element = kind.element if isinstance(kind, Array) else kind.value
        look = self._looker(element, f"{path}[]")
        if look is None:
            return None

        def look_at_all(values: Any) -> None:
            each: Iterable[Any] = ()
            if isinstance(values, dict):
                each = values.values()
            elif isinstance(values, (list, tuple)):
                each = values
            for value in each:
                look(value)

        return look_at_all

    def _looker_of_fields(self, kind: Struct, path: str) -> _Look:
        known: set[Any] = set(kind.fields)  # the names that tell nothing new
        inside = [
            (name, look)
            for name, inner in kind.fields.items()
            if (look := self._looker(inner, f"{path}.{name}" if path else name))
        ]

        def look_at_fields(document: Any) -> None:
            if not isinstance(document, dict):
                return
            # Most values have the names of the one before: then this is all.
            if not document.keys() <= known:
                new = document.keys() - known
                known.update(new)
                for name in list(new)[: UNTAKEN_MAX - len(self.names)]:
                    self.names.add(f"{path}.{name}" if path else name)
            for name, look in inside:
                if value := document.get(name):
                    look(value)

        return look_at_fields
