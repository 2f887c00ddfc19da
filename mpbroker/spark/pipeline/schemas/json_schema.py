"""Check values by a JSON Schema, and derive columns from such a schema."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import orjson

from mpbroker.spark.pipeline.errors import PipelineError

_TYPES: Final[Mapping[str, str]] = {
    "string": "string",
    "integer": "bigint",
    "number": "double",
    "boolean": "boolean",
}
_FORMATS: Final[Mapping[str, str]] = {"date-time": "timestamp", "date": "date"}
_ANY: Final = "json"  # the type of a column for values of several types: JSON as text


def fields_of(
    schema: str, references: Iterable[tuple[str, str]] = ()
) -> dict[str, str]:
    """Return the column types of a schema's properties, by name.

    Args:
        references: the documents that it refers to: name and text.

    Raises:
        PipelineError: the schema is not one of objects with properties.
    """
    columns = _Columns(schema, references)
    found = columns.properties()
    if not found:
        raise PipelineError("a JSON Schema must be of an object with properties")
    return found


class _Columns:
    def __init__(self, schema: str, references: Iterable[tuple[str, str]]) -> None:
        self._main = _loads(schema)
        self._others = {name: _loads(text) for name, text in references}

    def properties(self) -> dict[str, str]:
        document, root = self._resolve(self._main, self._main, ())[:2]
        properties = document.get("properties") if isinstance(document, dict) else None
        return {
            name: self._type(each, root, ())
            for name, each in (properties or {}).items()
        }

    def _resolve(
        self, schema: Any, root: Any, inside: tuple[str, ...]
    ) -> tuple[Any, Any, tuple[str, ...]]:
        """Follow a schema's "$ref".

        Returns:
            The schema found, or {} (any value) if it contains itself; the document that
            it is in; and the references followed, those of ``inside`` first.
        """
        while isinstance(schema, dict) and "$ref" in schema:
            reference = str(schema["$ref"])
            document, _, pointer = reference.partition("#")
            if document:
                root = self._document(document)
            way = f"{document}#{pointer}"
            if way in inside:
                return {}, root, inside  # it contains itself: any value
            inside = (*inside, way)
            schema = _at(root, pointer, reference)
        return schema, root, inside

    def _document(self, name: str) -> Any:
        for known, document in self._others.items():
            if name == known or name.endswith(f"/{known}"):
                return document
        raise PipelineError(f"a JSON Schema refers to {name!r}, which is not there")

    def _type(self, schema: Any, root: Any, inside: tuple[str, ...]) -> str:
        schema, root, inside = self._resolve(schema, root, inside)
        if not isinstance(schema, dict):
            return _ANY
        for word in ("oneOf", "anyOf"):
            if word in schema:
                others = [each for each in schema[word] if each != {"type": "null"}]
                one = len(others) == 1
                return self._type(others[0], root, inside) if one else _ANY
        kinds = schema.get("type")
        kinds = (
            [each for each in kinds if each != "null"]
            if isinstance(kinds, list)
            else [kinds]
        )
        kind = kinds[0] if len(kinds) == 1 else None
        if set(kinds) == {"integer", "number"}:
            kind = "number"
        if kind == "string":
            return _FORMATS.get(schema.get("format", ""), "string")
        if kind == "array" and isinstance(schema.get("items"), dict):
            return f"array<{self._type(schema['items'], root, inside)}>"
        if kind == "object" and schema.get("properties"):
            fields = (
                f"`{name.replace('`', '``')}`: {self._type(each, root, inside)}"
                for name, each in schema["properties"].items()
            )
            return f"struct<{', '.join(fields)}>"
        if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
            value = self._type(schema["additionalProperties"], root, inside)
            return f"map<string, {value}>"
        return _TYPES.get(str(kind), _ANY)


def _at(root: Any, pointer: str, reference: str) -> Any:
    found = root
    for part in pointer.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, dict) or name not in found:
            raise PipelineError(f"a JSON Schema refers to {reference!r}: not there")
        found = found[name]
    return found


def _loads(text: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise PipelineError(f"a JSON Schema is not JSON: {error}") from None


def reader(
    schema: str,
    references: Iterable[tuple[str, str]],
    loads: Callable[[bytes], Any],
) -> Callable[[bytes], Any]:
    """Return a function that parses and checks a value, or raises ValueError.

    Args:
        loads: parses JSON.

    Raises:
        PipelineError: the schema cannot be used.
    """
    import jsonschema_rs

    others = {name: _loads(text) for name, text in references}

    def retrieve(uri: str) -> Any:
        for name, document in others.items():
            if uri == name or uri.endswith(f"/{name}"):
                return document
        raise ValueError(f"{uri} is not there")

    try:
        validator = jsonschema_rs.validator_for(_loads(schema), retriever=retrieve)
    except (ValueError, jsonschema_rs.ReferencingError) as error:
        raise PipelineError(f"a JSON Schema cannot be used: {error}") from None

    def read(value: bytes) -> Any:
        # Validate the value as parsed without decimals: the validator knows none.
        plain = orjson.loads(value)
        try:
            validator.validate(plain)
        except jsonschema_rs.ValidationError as error:
            place = "".join(f"[{each!r}]" for each in error.instance_path)
            raise ValueError(f"{place} {error.message}".strip()) from None
        return plain if loads is orjson.loads else loads(value)

    return read
