"""Query topics and lake tables by name, in SQL.

    from mpbroker.spark import sql

    sql("select carrier, avg(dep_delay) from flights group by 1").show()

A name that Spark does not know becomes a view, and the query is tried again: so Spark's
own parser finds the names, in subqueries and common table expressions, too. A name is
looked for among the tables that the caller names, in pipelines' descriptions (TOML
files), as a path (it has a slash, and needs backticks), and at last among the topics.

Executors import this module with its package: what only the driver needs is imported in
functions.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

from mpbroker.base.errors import MpbrokerError

if TYPE_CHECKING:
    import pyarrow as pa
    from pyiceberg.table import Table as IcebergTable
    from pyiceberg.types import IcebergType
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import DataType

    from mpbroker.spark.options import SourceOptions
    from mpbroker.spark.pipeline.description import Description, Table
    from mpbroker.spark.pipeline.schemas.column_types import ColumnType

_NO_TABLE: Final = "TABLE_OR_VIEW_NOT_FOUND"
# Spark's error for a Python process that took more than ten seconds to start, and how
# often a query is tried then.
_NO_PYTHON: Final = "failed to connect back"
_TRIES: Final = 30
_T = TypeVar("_T")
# How many values are looked at to learn a topic's columns, and their size in all.
_SAMPLE: Final = 400
_SAMPLE_BYTES: Final = 1 << 20
_SAMPLE_WAIT_MS: Final = 10_000
# The share of values that must be JSON objects; the fields of others are null.
_MOSTLY: Final = 0.9
# A topic's own columns, after the fields of its values.
_OWN: Final = ("key", "value", "partition", "offset", "timestamp")


class QueryError(MpbrokerError):
    """A query is wrong, or failed; the text is one sentence."""


class UnknownTableError(QueryError):
    """A query names something that is neither a topic nor a table."""


def sql(
    query: str,
    *,
    bootstrap: str = "localhost:9092",
    tables: Mapping[str, str] | None = None,
    pipelines: Iterable[str | os.PathLike[str]] = (),
    options: Mapping[str, str] | None = None,
    spark: SparkSession | None = None,
) -> DataFrame:
    """Return the rows of a query over topics and tables.

    Columns of a topic are the fields of its values, if these are JSON objects, and then
    ``key``, ``value``, ``partition``, ``offset``, ``timestamp``, and ``headers`` if the
    query has that word. If a field has one of these names, the record's own column gets
    the prefix ``_``. Types are learnt from some hundred values at the beginning and end
    of the topic, as by ``mpbroker pipeline infer``; a value that does not fit is null.

    Args:
        query: in Spark's SQL. Put backticks around names with ``.``, ``-``, ``/``.
        tables: paths or URIs of Delta and Iceberg tables and Parquet directories, by
            name.
        pipelines: TOML files that describe pipelines. The topic that a pipeline reads
            has the columns that its file describes. ``NAME_table`` and
            ``NAME_dead_letters`` are the pipeline's tables.
        options: further options of the source, such as ``kafka.security.protocol``.
        spark: None: the running session, or a new one on ``local[*]``.

    Raises:
        UnknownTableError: a name is neither a topic nor a table.
        QueryError: Spark does not understand the query.
        BrokerUnavailableError: no broker answers.
        SparkSetupError: Spark cannot be started.
    """
    if spark is None:
        from mpbroker.spark.session import session

        spark = session("sql")
    source = {"kafka.bootstrap.servers": bootstrap, **(options or {})}
    names = _Names(spark, query, source, tables or {}, pipelines)
    return names.run()


def patiently(ask: Callable[[], _T]) -> _T:
    """Call ``ask`` and return its result; call it again if Spark's Python starts late.

    Spark gives its Python processes ten seconds to start, and no setting changes that.
    """
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]
    from pyspark.errors import PySparkException

    for attempt in range(1, _TRIES + 1):
        try:
            return ask()
        except (PySparkException, Py4JError, QueryError) as error:
            if _NO_PYTHON not in str(error) or attempt == _TRIES:
                raise
    raise AssertionError("the loop above returns or raises")


def reason(error: BaseException) -> str:
    """Return the first sentences of an error of Spark, without its codes and plans."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith("mpbroker.")]
    found = ours[-1] if ours else (lines[0] if lines else type(error).__name__)
    if ours:
        return found.partition(": ")[2] or found
    place = ""
    if found.startswith("["):
        found = found.partition("] ")[2]
        found, _, place = found.partition(" SQLSTATE: ")
        place = place[5:].strip("; ()")
    return found.rstrip(".") + (f" ({place})" if place.startswith("line") else "")


class _Names:
    """Finds the topics and tables that a query names, and runs the query."""

    def __init__(
        self,
        spark: SparkSession,
        query: str,
        source: Mapping[str, str],
        tables: Mapping[str, str],
        pipelines: Iterable[str | os.PathLike[str]],
    ) -> None:
        from mpbroker.spark.pipeline.description import load

        self._spark, self._query, self._source = spark, query, dict(source)
        self._tables: dict[str, str | Table] = dict(tables)
        self._described: dict[str, Description] = {}
        for path in pipelines:
            found = load(os.fspath(path))
            for kind, table in (
                ("table", found.table),
                ("dead_letters", found.dead_letter),
            ):
                if table is not None:
                    self._tables.setdefault(f"{found.name}_{kind}", table)
            if found.source:
                for topic in _topics(found):
                    self._described[topic] = found

    def run(self) -> DataFrame:
        """Return the query's rows.

        Raises:
            See `sql`.
        """
        from pyspark.errors import AnalysisException

        from mpbroker.spark.quiet import errors_not_logged

        views: list[str] = []
        try:
            while True:
                try:
                    with errors_not_logged():
                        return self._spark.sql(self._query)
                except AnalysisException as error:
                    if error.getCondition() != _NO_TABLE:
                        raise QueryError(reason(error)) from error
                    found = error.getMessageParameters() or {}
                quoted = found.get("relationName", "")
                name = _unquoted(quoted)
                if name in views:
                    raise UnknownTableError(f"there is no table {quoted}")
                self._rows(name).createOrReplaceTempView(quoted)
                views.append(name)
        finally:
            # The result no longer needs the views, and the next query is to look at the
            # topics again.
            for name in views:
                self._spark.catalog.dropTempView(name)

    def _rows(self, name: str) -> DataFrame:
        if name in self._tables:
            return table_rows(self._spark, self._tables[name])
        if name in self._described:
            return self._described_topic(name)
        if "/" in name:
            return table_rows(self._spark, name)
        return self._topic(name)

    def _described_topic(self, topic: str) -> DataFrame:
        from mpbroker.spark.pipeline.aggregate import decoded

        description = self._described[topic]
        given = {
            name: value
            for name, value in description.source.items()
            if name.startswith("kafka.") or name.lower() == "subscribepattern"
        }
        if "subscribepattern" not in map(str.lower, given):
            given["subscribe"] = topic
        return decoded(description, self._read(given))

    def _topic(self, topic: str) -> DataFrame:
        from mpbroker.spark.options import parse_source_options

        options = {**self._source, "subscribe": topic}
        values = _Sample(
            parse_source_options(
                {**options, "kafkaConsumer.pollTimeoutMs": str(_SAMPLE_WAIT_MS)},
                streaming=False,
            ),
            topic,
            known=[*self._tables, *self._described],
        )
        with_headers = "headers" in self._query.lower()
        rows = self._read({**options, "includeHeaders": str(with_headers).lower()})
        own = [*_OWN, *(["headers"] if with_headers else [])]
        return _columns(rows, own, values)

    def _read(self, options: Mapping[str, str]) -> DataFrame:
        reader = self._spark.read.format("mpbroker")
        return reader.options(**dict(options)).load()


def _topics(description: Description) -> Sequence[str]:
    """Return the names under which queries can read the topics of a pipeline.

    They are the subscribed topics, or else the pipeline's name.
    """
    given = {name.lower(): text for name, text in description.source.items()}
    topics = [each.strip() for each in given.get("subscribe", "").split(",")]
    return [each for each in topics if each] or [description.name]


def _unquoted(name: str) -> str:
    """Return a name without backticks.

    Raises:
        UnknownTableError: the name has several parts, which no topic has.
    """
    parts = [part.replace("``", "`") for part in name[1:-1].split("`.`")]
    if len(parts) > 1:
        raise UnknownTableError(
            f"there is no table {'.'.join(parts)}; for a topic or path with a dot put"
            f" backticks around the whole name: `{'.'.join(parts)}`"
        )
    return parts[0]


def _columns(rows: DataFrame, own: Sequence[str], values: _Sample) -> DataFrame:
    """Select the fields of JSON values, and the record's own columns.

    Args:
        rows: the records.
        own: the names of the record's columns to select.
        values: the inferred fields.
    """
    from pyspark.sql import functions as sql

    texts = {"key": values.keys_are_text, "value": values.values_are_text}

    def column(name: str) -> Column:
        found = sql.col(name)
        return found.cast("string") if texts.get(name) else found

    if not values.fields:
        return rows.select(*(column(name).alias(name) for name in own))
    from mpbroker.spark.pipeline.schemas import column_types

    kinds = column_types.struct(values.fields).fields
    # Let Spark parse the text: it is fast, and parses only the columns that are used.
    # A column whose type it would read otherwise stays text, which executors convert.
    ddl = ", ".join(
        f"`{name.replace('`', '``')}`: {kind.ddl if _is_sparks(kind) else 'STRING'}"
        for name, kind in kinds.items()
    )
    parsed = rows.select(
        sql.from_json(sql.col("value").cast("string"), f"STRUCT<{ddl}>").alias("_json"),
        *own,
    )
    fields = {name: sql.col("_json").getField(name) for name in kinds}
    for name, kind in kinds.items():
        if not _is_sparks(kind):
            fields[name] = _converted(fields[name], kind.text, kind.ddl)
    taken = {name.lower() for name in kinds}

    def free(name: str) -> str:
        while name in taken:
            name = f"_{name}"
        return name

    return parsed.select(
        *(found.alias(name) for name, found in fields.items()),
        *(column(each).alias(free(each)) for each in own),
    )


def _is_sparks(kind: ColumnType) -> bool:
    """Return whether Spark's JSON parser reads a type exactly as the pipelines do."""
    from mpbroker.spark.pipeline.schemas import column_types

    if isinstance(kind, column_types.Struct):
        return all(map(_is_sparks, kind.fields.values()))
    if isinstance(kind, column_types.Array):
        return _is_sparks(kind.element)
    if isinstance(kind, column_types.Map):
        return _is_sparks(kind.value)
    # The text of an object stays that in a column of text.
    return kind.name in ("string", "bigint", "double", "boolean", "decimal") or (
        kind.text == "json"
    )


def _converted(texts: Column, text: str, ddl: str) -> Column:
    """Convert a column of text to another type; a value that does not fit is null.

    Args:
        text: the type as a pipeline's TOML file spells it.
        ddl: the same type as Spark spells it.
    """
    import pyarrow
    from pyspark.sql.pandas.functions import arrow_udf

    def convert(given: pa.Array) -> pa.Array:
        from mpbroker.spark.pipeline.schemas import column_types

        kind = column_types.parse(text)
        values = given.to_pylist()
        if isinstance(
            kind, (column_types.Struct, column_types.Array, column_types.Map)
        ):
            values = [_json_of(each) for each in values]
        return kind.column(values, {})

    # Spark evaluates the annotations, and this module does not import ``pa`` when it
    # runs.
    convert.__annotations__ = {"given": pyarrow.Array, "return": pyarrow.Array}
    as_column: Any = arrow_udf(convert, ddl)  # type: ignore[call-overload]
    found: Column = as_column(texts)
    return found


def _json_of(text: str | None) -> Any:
    from mpbroker.spark.pipeline.schemas.column_types import EXACT_JSON

    try:
        return None if text is None else EXACT_JSON.decode(text)
    except (ValueError, RecursionError):
        return None


class _Sample:
    """The columns inferred from some records of a topic.

    Attributes:
        fields: the types of the values' fields, as a pipeline's TOML file spells them,
            by name; empty if the values are not JSON objects.
        keys_are_text: whether all keys in the sample are UTF-8.
        values_are_text: whether all values in the sample are UTF-8.
    """

    def __init__(
        self, options: SourceOptions, topic: str, known: Iterable[str]
    ) -> None:
        """Read records at the beginning and the end of the largest partitions.

        Raises:
            UnknownTableError: there is no such topic.
            BrokerUnavailableError: no broker answers.
        """
        from mpbroker.spark.offsets import OffsetReader
        from mpbroker.spark.options import EARLIEST, LATEST

        _check_topic(options, topic, known)
        self._options = options
        self.fields: Mapping[str, str] = {}
        self.keys_are_text = self.values_are_text = True
        reader = OffsetReader(options)
        try:
            leaders = reader.partitions()
            begin = reader.offsets(leaders, EARLIEST)
            end = reader.offsets(leaders, LATEST)
        finally:
            reader.close()
        ranges = [(each, begin[each], end[each]) for each in leaders]
        self._look([each for each in ranges if each[1] < each[2]])

    def _look(self, ranges: Sequence[tuple[Any, int, int]]) -> None:
        from mpbroker.spark.offsets import OffsetRange
        from mpbroker.spark.partition_reader import read_range

        values: list[bytes] = []
        ranges = sorted(ranges, key=lambda each: each[1] - each[2])[:8]
        for partition, begin, end in ranges:
            each = max(1, _SAMPLE // 2 // len(ranges))
            middle = max(min(begin + each, end), end - each)
            for first, last in ((begin, min(begin + each, end)), (middle, end)):
                if first >= last:
                    continue
                found = OffsetRange(partition, first, last)
                for batch in read_range(found, self._options):
                    for key in batch.column("key").to_pylist():
                        self.keys_are_text &= key is None or _is_text(key)
                    values += filter(None, batch.column("value").to_pylist())
        self.values_are_text = all(map(_is_text, values))
        self._take(values)

    def _take(self, values: Sequence[bytes]) -> None:
        import orjson

        from mpbroker.spark.pipeline.infer import infer
        from mpbroker.spark.pipeline.schemas.sample import Sample

        objects: list[bytes | None] = []
        size = 0
        for value in values:
            try:
                found = orjson.loads(value)
            except orjson.JSONDecodeError:
                continue
            if isinstance(found, dict):
                objects.append(value)
        if not objects or len(objects) < _MOSTLY * len(values):
            return
        few: list[bytes | None] = []
        for each in objects:
            size += len(each or b"")
            if few and size > _SAMPLE_BYTES:
                break
            few.append(each)
        self.fields = infer(Sample("", few), own="").value.fields


def _is_text(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def _check_topic(options: SourceOptions, topic: str, known: Iterable[str]) -> None:
    """Raise UnknownTableError, which suggests a similar name, if a topic is missing."""
    from difflib import get_close_matches

    from mpbroker.client.cluster import Cluster

    timeout_s = options.request_timeout_ms / 1000
    with Cluster(options.bootstrap, timeout_s, options.client) as cluster:
        topics = [each.name or "" for each in cluster.metadata(None).topics]
    if topic in topics:
        return
    near = get_close_matches(topic, [*topics, *known], n=1, cutoff=0.6)
    raise UnknownTableError(
        f"{topic} is no topic here"
        + (f" (did you mean {near[0]}?)" if near else "")
        + ", and no table: name tables as NAME=PATH (--table), or write their path in"
        " backticks"
    )


# -- tables ----------------------------------------------------------------------------


def table_rows(spark: SparkSession, table: str | Table) -> DataFrame:
    """Return the rows of a Delta or Iceberg table, or of a directory of Parquet files.

    Args:
        table: a path or URI, or the table that a pipeline's TOML file describes. An
            Iceberg table is read by the newest metadata file at the path; that of a
            TOML file, by its catalog.

    Raises:
        QueryError: there is no table, or it cannot be read.
    """
    from pyspark.errors import AnalysisException

    from mpbroker.spark.file_systems import absolute
    from mpbroker.spark.pipeline.errors import PipelineError
    from mpbroker.spark.pipeline.tables.iceberg import open_by_path, open_in_catalog

    path = absolute(table if isinstance(table, str) else table.path)
    found = _delta_rows(spark, path)
    if found is not None:
        return found
    try:
        if isinstance(table, str) or table.format != "iceberg":
            stored = open_by_path(path)
        else:
            stored = open_in_catalog(table)
    except PipelineError as error:
        raise QueryError(str(error)) from error
    if stored is not None:
        return _iceberg_rows(spark, stored)
    try:
        return spark.read.parquet(path)
    except AnalysisException as error:
        raise UnknownTableError(
            f"there is no table at {path} (looked for Delta's log, Iceberg's metadata,"
            f" then for Parquet files: {reason(error)})"
        ) from error


def _iceberg_rows(spark: SparkSession, stored: IcebergTable) -> DataFrame:
    """Return the rows of an Iceberg table.

    The jar of Iceberg is not needed: Spark finds columns in the files by their field
    ids, even columns that were renamed after a file was written.
    """
    from pyspark.sql.types import StructType

    schema = _sparks_type(stored.schema().as_struct())
    assert isinstance(schema, StructType)
    tasks = list(stored.scan().plan_files())
    if any(each.delete_files for each in tasks):
        raise QueryError(
            f"Iceberg's table at {stored.location()} has delete files of another tool,"
            " which Spark would not see here: have that tool rewrite them"
        )
    if not tasks:
        return spark.createDataFrame([], schema)
    # The setting has an effect only for schemas with field ids.
    spark.conf.set("spark.sql.parquet.fieldId.read.enabled", "true")
    reader = spark.read.schema(schema).option("recursiveFileLookup", "true")
    return reader.parquet(*(each.file.file_path for each in tasks))


def _sparks_type(kind: IcebergType) -> DataType:
    """Return Spark's type of an Iceberg column, with the ids of its fields."""
    from pyiceberg import types as iceberg
    from pyiceberg.io.pyarrow import schema_to_pyarrow
    from pyspark.sql import types
    from pyspark.sql.pandas.types import from_arrow_type

    if isinstance(kind, iceberg.StructType):
        return types.StructType(
            [
                types.StructField(
                    field.name,
                    _sparks_type(field.field_type),
                    metadata={"parquet.field.id": field.field_id},
                )
                for field in kind.fields
            ]
        )
    if isinstance(kind, iceberg.ListType):
        return types.ArrayType(_sparks_type(kind.element_type))
    if isinstance(kind, iceberg.MapType):
        key, value = _sparks_type(kind.key_type), _sparks_type(kind.value_type)
        return types.MapType(key, value)
    return from_arrow_type(schema_to_pyarrow(kind))


def _delta_rows(spark: SparkSession, path: str) -> DataFrame | None:
    """Return the rows of a Delta table; None if there is none at the path.

    The jar of Delta is not needed: the log is read here, and the files by Spark.
    """
    import orjson
    import pyarrow as pa
    from deltalake import DeltaTable
    from deltalake.exceptions import TableNotFoundError
    from pyspark.sql import functions as sql
    from pyspark.sql.types import StringType, StructField, StructType

    try:
        table = DeltaTable(path)
    except TableNotFoundError:
        return None
    schema = StructType.fromJson(orjson.loads(table.schema().to_json()))
    files = table.file_uris()
    if not files:
        return spark.createDataFrame([], schema)
    by = table.metadata().partition_columns
    inside = StructType([each for each in schema.fields if each.name not in by])
    reader = spark.read.schema(inside).option("recursiveFileLookup", "true")
    rows = reader.parquet(*files)
    if not by:
        return rows
    # Take the values from the log: delta-rs spells directories' names differently from
    # Spark.
    known = StructType([StructField("_file", StringType())])
    for name in by:
        known.add(schema[name])
    values = [
        (
            each["path"].rpartition("/")[2],
            *(each[f"partition.{name}"] for name in by),
        )
        for each in pa.table(table.get_add_actions(flatten=True)).to_pylist()
    ]
    parts = spark.createDataFrame(values, known)
    rows = rows.withColumn("_file", sql.col("_metadata.file_name"))
    return rows.join(sql.broadcast(parts), "_file").select(*schema.names)
