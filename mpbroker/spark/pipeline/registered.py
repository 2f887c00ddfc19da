"""Decode values that Confluent's serializers wrote, by the schemas of a registry.

A zero byte and four bytes of a schema id stand before each value; in Protobuf, the
place of the message in its file follows. A value is read by the schema that it names.

A pipeline's columns are the fields of all versions of its subjects (names of schemas in
the registry): those of the first version, then those that later ones add. If versions
differ in a field's type, the first type stays, since tables are full of it; a value
that does not fit is a dead letter.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, Final

import orjson
from msgspec.structs import replace

from mpbroker.spark.pipeline.description import (
    Description,
    ValueFormat,
    with_value,
)
from mpbroker.spark.pipeline.errors import PipelineError
from mpbroker.spark.pipeline.schemas import avro, column_types
from mpbroker.spark.pipeline.schemas.registry import (
    Registered,
    Registry,
    UnknownSchemaError,
    shared,
)

_HEADER: Final = struct.Struct(">bI")
_MANY_IDS: Final = 10_000  # of schemas that are not there


class Columns:
    """The columns of a pipeline, as a schema registry describes its values."""

    def __init__(
        self, value: ValueFormat, subjects: tuple[str, ...], registry: Registry
    ) -> None:
        self._registry = registry
        self._own = value
        self._subjects = subjects
        self._described: dict[tuple[str, int], dict[str, str]] = {}

    def value(self) -> ValueFormat:
        """Return the value format with the fields of the schema registry's schemas now.

        Raises:
            PipelineError: the registry has no such subject, or a schema cannot be used.
        """
        fields: dict[str, column_types.ColumnType] = {}
        for subject in self._subjects:
            try:
                versions = self._registry.versions(subject)
                found = [self._fields(subject, version) for version in versions]
            except UnknownSchemaError as error:
                raise PipelineError(
                    f"the schema registry has no subject {subject!r} ({error}): send"
                    " records first, or name the right one as value.subject"
                ) from None
            for each in found:
                for name, text in each.items():
                    kind = column_types.parse(text)
                    if name in fields:
                        kind = column_types.merged(fields[name], kind)
                    fields[name] = kind
        spelled = {name: column_types.spelled(each) for name, each in fields.items()}
        # A description may say otherwise: "timestamp(us)" for a long, a wider type.
        return replace(self._own, fields=spelled | dict(self._own.fields))

    def _fields(self, subject: str, version: int) -> dict[str, str]:
        key = subject, version
        if key not in self._described:
            schema = self._registry.version(subject, version)

            def serialized() -> Registered:
                return self._registry.version(subject, version, serialized=True)

            try:
                self._described[key] = fields_of(
                    _complete(schema, serialized), self._own.message
                )
            except PipelineError as error:
                raise PipelineError(f"{subject}, version {version}: {error}") from None
        return self._described[key]


def subjects_of(description: Description) -> tuple[str, ...]:
    """Return the subjects of a schema registry that a pipeline's values have.

    Without value.subject they are those of the topics: TOPIC-value.

    Raises:
        PipelineError: the pipeline's TOML file names neither subjects nor topics.
    """
    if description.value.subject:
        return description.value.subject
    options = {name.lower(): value for name, value in description.source.items()}
    topics = [each.strip() for each in options.get("subscribe", "").split(",")]
    if not any(topics) and "assign" in options:
        topics = sorted(orjson.loads(options["assign"]))
    if not any(topics):
        raise PipelineError(
            'value.subject is not set; give a list: ["flights-value"]. Only the'
            " subjects of source.subscribe and source.assign are known without it"
        )
    return tuple(f"{topic}-value" for topic in topics if topic)


def resolved(
    description: Description, say: Callable[[str], None], *, waits: bool = True
) -> Description:
    """Return a pipeline's description with the columns that a schema registry gives.

    A description whose values have another format is returned unchanged.

    Args:
        description: the checked content of the pipeline's TOML file.
        say: prints a line if the registry does not answer.
        waits: whether to wait then until it answers.

    Raises:
        PipelineError: the registry has no such subject, or does not answer.
    """
    if description.value.format != "registry":
        return description
    columns = columns_of(description, say, waits=waits)
    return with_value(description, columns.value())


def columns_of(
    description: Description, say: Callable[[str], None], *, waits: bool = True
) -> Columns:
    """Return an object that makes Spark columns of records' values.

    The pipeline's description file has "registry" as the format of its values: their
    schemas come from a schema registry.

    Raises:
        PipelineError: the description names neither subjects nor topics.
    """
    value = description.value
    registry = Registry(
        value.registry_urls, value.registry_auth_env, value.registry_ca, say, waits
    )
    return Columns(value, subjects_of(description), registry)


def fields_of(schema: Registered, message: str = "") -> dict[str, str]:
    """Return the column types of a schema's fields, by name.

    Args:
        message: the message type's name in a Protobuf schema; empty: the first.

    Raises:
        PipelineError: the schema is not one of records.
    """
    if schema.kind == "AVRO":
        return avro.fields_of(schema.text, [text for _, text in schema.references])
    if schema.kind == "JSON":
        from mpbroker.spark.pipeline.schemas import json_schema

        return json_schema.fields_of(schema.text, schema.references)
    protobuf = _protobuf(schema.kind)
    file = protobuf.file_of(schema.text, schema.references)
    found: dict[str, str] = protobuf.fields_of(protobuf.message_named(file, message))
    return found


def _protobuf(kind: str) -> Any:
    if kind != "PROTOBUF":
        raise PipelineError(
            f"a schema is {kind}, which is none of AVRO, PROTOBUF, JSON"
        )
    try:
        from mpbroker.spark.pipeline.schemas import protobuf
    except ImportError as error:
        raise PipelineError(
            f"Protobuf values need {error.name}: pip install"
            " 'mpbroker-server[registry]'"
        ) from None
    return protobuf


def _complete(schema: Registered, serialized: Callable[[], Registered]) -> Registered:
    """Return a Protobuf schema as the descriptor that a schema registry has of it.

    Args:
        schema: the schema as it was registered.
        serialized: a function that asks the registry for the descriptor.

    Returns:
        The given schema if it is of another kind, or if the registry has text only.
    """
    if schema.kind != "PROTOBUF":
        return schema
    try:
        return serialized()
    except PipelineError:
        return schema  # this registry has text only


class Reader:
    """Decodes a value by a schema registry's schema, whose id begins the value.

    Each task of Spark has a reader of its own.
    """

    def __init__(self, value: ValueFormat, *, exact: bool) -> None:
        self._registry = shared(
            value.registry_urls, value.registry_auth_env, value.registry_ca
        )
        self._loads = column_types.EXACT_JSON.decode if exact else orjson.loads
        self._message = value.message
        self._readers: dict[int, Callable[[bytes, int], Any]] = {}
        self._unknown: dict[int, str] = {}

    def __call__(self, value: bytes) -> Any:
        """Return a value's fields by name; wait while the schema registry is away.

        Raises:
            ValueError, or another of avro.AVRO_ERRORS: the registry does not know the
                value's schema, or the value does not fit it.
            PipelineError: the registry refuses to answer.
        """
        if len(value) < _HEADER.size or value[0]:
            raise ValueError("it does not begin with a zero byte and a schema id")
        schema_id = _HEADER.unpack_from(value)[1]
        read = self._readers.get(schema_id)
        if read is None:
            if schema_id in self._unknown:
                raise ValueError(self._unknown[schema_id])
            try:
                read = self._reader(schema_id)
            except ValueError as error:
                if len(self._unknown) < _MANY_IDS:
                    self._unknown[schema_id] = str(error)
                raise
            self._readers[schema_id] = read
        return read(value, _HEADER.size)

    def _reader(self, schema_id: int) -> Callable[[bytes, int], Any]:
        registry = self._registry
        try:
            schema = _complete(
                registry.by_id(schema_id),
                lambda: registry.by_id(schema_id, serialized=True),
            )
        except UnknownSchemaError:
            raise ValueError(f"the registry has no schema {schema_id}") from None
        try:
            return self._of(schema)
        except PipelineError as error:
            raise ValueError(f"schema {schema_id}: {error}") from None

    def _of(self, schema: Registered) -> Callable[[bytes, int], Any]:
        if schema.kind == "AVRO":
            texts = [text for _, text in schema.references]
            from_avro = avro.reader(schema.text, references=texts)
            return lambda value, place: from_avro(value[place:])
        if schema.kind == "JSON":
            from mpbroker.spark.pipeline.schemas import json_schema

            from_json = json_schema.reader(schema.text, schema.references, self._loads)
            return lambda value, place: from_json(value[place:])
        return self._of_protobuf(schema)

    def _of_protobuf(self, schema: Registered) -> Callable[[bytes, int], Any]:
        protobuf = _protobuf(schema.kind)
        file = protobuf.file_of(schema.text, schema.references)
        expected = protobuf.message_named(file, self._message).full_name
        messages: dict[tuple[int, ...], Callable[[bytes], Any]] = {}

        def read(value: bytes, place: int) -> Any:
            indexes, place = protobuf.read_indexes(value, place)
            found = messages.get(tuple(indexes))
            if found is None:
                message = protobuf.message_at(file, indexes)
                if message.full_name != expected:
                    raise ValueError(f"it is a {message.full_name}, no {expected}")
                found = protobuf.reader(message)
                messages[tuple(indexes)] = found
            return found(value[place:])

        return read
