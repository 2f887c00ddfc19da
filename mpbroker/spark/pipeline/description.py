"""Read a pipeline's TOML file and check it before Spark is started.

A section is a struct: its fields are the section's keys, and their types say what a key
may hold. Rules that need more than one key are functions, which run after decoding.

See mpbroker/spark/README.md, "Every section and key".
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar, get_args, get_origin

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from mpbroker.spark.file_systems import absolute
from mpbroker.spark.pipeline.errors import DescriptionError, PipelineError
from mpbroker.spark.pipeline.schemas import column_types
from mpbroker.spark.pipeline.schemas.avro import fields_of
from mpbroker.spark.pipeline.schemas.columns import RECORD_COLUMNS, TYPES
from mpbroker.spark.pipeline.schemas.partition_transform import parse_partition

# Types with one spelling for each value: every reader finds the same directory.
_DIRECTORY_TYPES: Final = ("string", "int", "bigint", "boolean", "date")
_DURATION: Final = r"\s*(\d{1,9})\s*(ms|s|m|min|h|d)\s*"
_SECONDS: Final = {"ms": 0.001, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}

# Types of keys. An error quotes the description, which follows "must be" or "give".
Text = Annotated[str, Meta(description="text, in quotes")]
Flag = Annotated[bool, Meta(description="true or false")]
Names = Annotated[tuple[str, ...], Meta(description='a list: ["a", "b"]')]
Number = Annotated[float, Meta(ge=0, lt=1e12, description="a number of 0 or more")]
Directory = Annotated[str, Meta(min_length=1, description="a directory, in quotes")]


class Pipeline(Struct, frozen=True):
    """The TOML section [pipeline]: job, name, checkpoint, and when it reads records."""

    job: Literal["ingest", "aggregate", "replay", "report"]
    # Files are named after it; readers of tables skip names that begin with "." or "_".
    name: Annotated[
        str,
        Meta(
            pattern=r"\A[A-Za-z0-9-][A-Za-z0-9._-]{0,99}\Z",
            description="1 to 100 letters, digits, '.', '_' and '-', and not begin"
            " with '.' or '_'",
        ),
    ]
    checkpoint: Text = ""
    trigger: Annotated[
        str,
        Meta(
            pattern=rf"\A(once|{_DURATION})\Z",
            description="'once', or a duration such as 30s, 5m, 1d",
        ),
    ] = "once"


class ValueFormat(Struct, frozen=True):
    """The TOML section [value]: the format of values, and the columns they become."""

    format: Literal["raw", "json", "msgpack", "avro", "registry"] = "raw"
    # Column types by name; Any, so that `_check_fields` can name the field.
    fields: Annotated[
        Mapping[str, Any], Meta(description="a section: [value.fields]")
    ] = {}
    schema: Text = ""  # Avro's, as JSON
    confluent_header: Flag = False  # five bytes stand before each Avro value
    # The id of ``schema`` in a registry, which stands in these five bytes; -1: not set.
    schema_id: Annotated[
        int, Meta(ge=-1, lt=1 << 31, description="a whole number of 0 or more")
    ] = -1
    unknown_fields: Literal["ignore", "dead_letter"] = "ignore"
    # debezium: values are changes of a database's rows, for a table with table.key
    envelope: Literal["none", "debezium"] = "none"
    # Of a schema registry: its addresses, separated by commas.
    registry: Annotated[
        str,
        Meta(
            pattern=r"\A(https?://[^\s,@]+(\s*,\s*https?://[^\s,@]+)*)?\Z",
            description="addresses such as http://localhost:8081; user and password go"
            " into the variable that registry_auth_env names",
        ),
    ] = ""
    registry_auth_env: Text = ""  # an environment variable with user:password
    registry_ca: Text = ""  # a file of certificates
    message: Text = ""  # Protobuf's; empty: the first of its file
    subject: Names = ()  # empty: those of the topics, "flights-value"

    @property
    def registry_urls(self) -> tuple[str, ...]:
        """The addresses of the schema registry, which the file separates by commas."""
        return tuple(each.strip().rstrip("/") for each in self.registry.split(","))


class DeadLetter(Struct, frozen=True):
    """The TOML section [dead_letter]: the table for values that cannot be decoded."""

    path: Directory
    format: Literal["parquet", "delta", "iceberg"] = "parquet"
    identifier: Text = ""  # Iceberg's name of the table; its catalog is [table]'s


class Late(Struct, frozen=True):
    """The TOML section [late]: the table for rows that come too late.

    It has the columns of [table].
    """

    path: Directory
    format: Literal["parquet", "delta"] = "parquet"


class Table(Struct, frozen=True):
    """The TOML section [table]: the table that a job writes rows to, or reads from."""

    path: Directory
    format: Literal["parquet", "delta", "iceberg"] = "parquet"
    partition_by: Names = ()
    event_time: Text = ""  # a column; empty: the record's timestamp
    compression: Literal["zstd", "snappy", "gzip", "none"] = "zstd"
    compact_mb: Annotated[
        float, Meta(ge=1, lt=1e12, description="a number of 1 or more")
    ] = 128  # MiB; smaller files are merged up to this size
    compact_every: Number = 20  # batches; 0: never
    late_after: Annotated[
        str,
        Meta(
            pattern=rf"\A({_DURATION})?\Z",
            description="a duration such as 30s, 5m, 1d",
        ),
    ] = ""
    # Iceberg's name, "namespace.table"; empty: "default" and the path's last part.
    identifier: Text = ""
    # Iceberg's catalog: PyIceberg's properties, of which "name" is the catalog's.
    catalog: Annotated[
        Mapping[str, Any], Meta(description="a section: [table.catalog]")
    ] = {}
    # Columns that identify a row: a record replaces or deletes the row of its key.
    key: Names = ()

    # aside: to the table of [late].
    late: Literal["keep", "drop", "aside"] = "keep"

    @property
    def late_after_s(self) -> float:
        """The age in seconds above which a row counts as late; 0: no row does."""
        return _seconds(self.late_after)


class Maintain(Struct, frozen=True):
    """The TOML section [maintain]: how long tables keep rows and snapshots.

    `mpbroker pipeline maintain` removes them afterwards.
    """

    # How long readers may go back in a table's history.
    keep_snapshots: Annotated[
        str,
        Meta(
            pattern=rf"\A{_DURATION}\Z",
            description="a duration such as 12h, 7d",
        ),
    ] = "7d"
    keep_rows: Annotated[
        str,
        Meta(
            pattern=rf"\A({_DURATION})?\Z",
            description="a duration such as 12h, 90d",
        ),
    ] = ""  # by event time; empty: for ever

    @property
    def keep_snapshots_s(self) -> float:
        """How long a table's history is kept, in seconds."""
        return _seconds(self.keep_snapshots)

    @property
    def keep_rows_s(self) -> float:
        """The age in seconds above which rows are deleted; 0 if none are."""
        return _seconds(self.keep_rows)


class Aggregate(Struct, frozen=True):
    """The TOML section [aggregate]: windows over event time, with Spark's durations."""

    window: Annotated[
        str,
        Meta(
            min_length=1, description="an interval in quotes, for example '10 minutes'"
        ),
    ]
    measures: Annotated[
        Mapping[str, Any],  # SQL by column
        Meta(min_length=1, description='SQL by name: {flights = "count(*)"}'),
    ]
    slide: Text = ""
    watermark: Text = "10 minutes"
    event_time: Text = ""
    group_by: Names = ()


class Replay(Struct, frozen=True):
    """The TOML section [replay]: which rows are sent as records again, and how fast."""

    where: Text = ""  # an SQL condition over the table's columns
    rate: Number = 0  # records a second, of all tasks together; 0: no limit
    speed: Number = 0  # 1: the pace of the records' timestamps; 0: no limit
    partitions: Literal["original", "key"] = "original"  # key: by the key's hash


class Report(Struct, frozen=True):
    """The TOML section [report]: a broker's request log, and the page made of it."""

    log: Annotated[
        Annotated[str, Meta(min_length=1)]
        | Annotated[tuple[str, ...], Meta(min_length=1)],
        Meta(
            description="the file that the broker's request.log.path names, or a list"
            ' of patterns: ["requests.log", "requests.log.*"]'
        ),
    ]
    out: Annotated[
        str,
        Meta(
            min_length=1, description="a file name in quotes, for example 'report.html'"
        ),
    ]
    table: Text = ""  # a Parquet file; empty: none is written

    @property
    def patterns(self) -> tuple[str, ...]:
        """The patterns of the request log's file names, which ``log`` gives."""
        return (self.log,) if isinstance(self.log, str) else self.log


class Description(Struct, frozen=True, kw_only=True):
    """The checked content of a pipeline's TOML file.

    Paths are absolute, except those of a report, and each option is text.
    """

    job: str
    name: str
    checkpoint: str
    trigger_s: float  # seconds between batches; 0: read what is there, then stop
    source: Mapping[str, str]
    value: ValueFormat
    table: Table | None
    dead_letter: Table | None
    late: Table | None
    topic: Mapping[str, str]
    aggregate: Aggregate | None
    replay: Replay | None
    report: Report | None
    maintain: Maintain
    spark: Mapping[str, str]


STRUCTS: Final[Mapping[str, type[Struct]]] = {
    "pipeline": Pipeline,
    "value": ValueFormat,
    "table": Table,
    "dead_letter": DeadLetter,
    "maintain": Maintain,
    "late": Late,
    "aggregate": Aggregate,
    "replay": Replay,
    "report": Report,
}
# Sections of options, whose names are checked by the code that takes them.
_OPTIONS: Final = ("source", "topic", "spark")
_NEEDED: Final[Mapping[str, tuple[str, ...]]] = {
    "ingest": ("source", "table"),
    "aggregate": ("source", "aggregate"),
    "replay": ("table", "topic"),
    "report": ("report",),
}
_Section = TypeVar("_Section", bound=Struct)


def load(path: str | Path) -> Description:
    """Read and check a pipeline's TOML file.

    Raises:
        DescriptionError: the file cannot be read, is not TOML, or breaks a rule.
    """
    try:
        content = tomllib.loads(Path(path).read_text("utf-8"))
    except OSError as error:
        raise DescriptionError(f"{path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DescriptionError(f"{path} is not TOML: {error}") from None
    try:
        return parse(content, default_name=Path(path).stem)
    except PipelineError as error:
        raise DescriptionError(f"{path}: {error}") from None


def parse(content: Mapping[str, Any], default_name: str = "pipeline") -> Description:
    """Check the content of a pipeline's TOML file.

    Args:
        default_name: the pipeline's name if the content gives none.

    Raises:
        PipelineError: the content breaks a rule.
    """
    _check_names(content)
    head = {"name": default_name, **content.get("pipeline", {})}
    pipeline = _decode("pipeline", head, Pipeline)
    for section in _NEEDED[pipeline.job]:
        if section not in content:
            raise PipelineError(f"job {pipeline.job} needs a section [{section}]")

    def decode(name: str, kind: type[_Section]) -> _Section | None:
        return _decode(name, content[name], kind) if name in content else None

    late = decode("late", Late)
    table = _located(decode("table", Table))
    found = Description(
        job=pipeline.job,
        name=pipeline.name,
        checkpoint=pipeline.checkpoint and absolute(pipeline.checkpoint),
        trigger_s=0 if pipeline.trigger == "once" else _seconds(pipeline.trigger),
        source=_options("source", content.get("source", {})),
        value=_checked_value(decode("value", ValueFormat) or ValueFormat()),
        table=table,
        dead_letter=_dead_letters(decode("dead_letter", DeadLetter), table),
        late=_located(_late_rows(late, table)),
        topic=_options("topic", content.get("topic", {})),
        aggregate=decode("aggregate", Aggregate),
        replay=(decode("replay", Replay) or Replay())
        if pipeline.job == "replay"
        else None,
        report=decode("report", Report) if pipeline.job == "report" else None,
        maintain=decode("maintain", Maintain) or Maintain(),
        spark={key: str(value) for key, value in content.get("spark", {}).items()},
    )
    _check_job(found)
    # A registry's columns are not known yet: `with_value` checks them.
    if found.value.format != "registry":
        _check_columns(found)
    return found


def with_value(description: Description, value: ValueFormat) -> Description:
    """Return a pipeline's description with a value format that a schema registry gave.

    Raises:
        PipelineError: a field cannot be a column, or a setting names a column that does
            not exist.
    """
    _check_fields(value.fields)
    found = replace(description, value=value)
    _check_columns(found)
    return found


# -- one section -----------------------------------------------------------------------


def _check_names(content: Mapping[str, Any]) -> None:
    """Raise PipelineError if a section or key of the TOML file has an unknown name."""
    _check_known(content, (*STRUCTS, *_OPTIONS), "section")
    for name, section in content.items():
        if not isinstance(section, dict):
            raise PipelineError(f"{name} must be a section, [{name}], not {section!r}")
        if name in STRUCTS:
            _check_known(section, STRUCTS[name].__struct_fields__, f"key in [{name}]")


def _check_known(given: Iterable[str], names: tuple[str, ...], what: str) -> None:
    for name in given:
        if name not in names:
            raise PipelineError(
                f"there is no {what} {name!r}{_near(name, names)}; there are"
                f" {', '.join(names)}"
            )


def _decode(name: str, section: Mapping[str, Any], kind: type[_Section]) -> _Section:
    """Convert a section of the TOML file to its msgspec struct, such as `Table`.

    msgspec converts key by key, so that an error can name the key, its value and what
    it may hold: msgspec's own error has only the path and the type.

    Raises:
        PipelineError: a key is missing, or its value is not allowed.
    """
    found = {}
    for field in msgspec.structs.fields(kind):
        key = f"{name}.{field.name}"
        if field.name in section:
            value = section[field.name]
            try:
                found[field.name] = msgspec.convert(value, field.type)
            except msgspec.ValidationError:
                raise _refused(key, value, field.type) from None
        elif field.required:
            raise PipelineError(f"{key} is not set; give {_allowed(field.type)}")
    return kind(**found)


def _allowed(kind: Any) -> str:
    """Return the values that a key's type allows, as text for an error's message."""
    arguments = get_args(kind)
    if get_origin(kind) is Literal:
        return ", ".join(arguments)
    return str(arguments[-1].description)  # a Meta's


def _refused(key: str, value: object, kind: Any) -> PipelineError:
    if get_origin(kind) is Literal:
        return _not_among(key, value, get_args(kind))
    return PipelineError(f"{key}={value!r} must be {_allowed(kind)}")


def _not_among(key: str, value: object, choices: Collection[str]) -> PipelineError:
    return PipelineError(
        f"{key}={value!r} is none of {', '.join(choices)}{_near(str(value), choices)}"
    )


def _near(name: str, names: Iterable[str]) -> str:
    near = get_close_matches(name, list(names), n=1, cutoff=0.6)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _options(name: str, section: Mapping[str, Any]) -> dict[str, str]:
    """Return a section's options for Spark, with all values as text.

    The key "bootstrap" stands for kafka.bootstrap.servers.
    """
    found = {}
    for key, value in section.items():
        if isinstance(value, (dict, list)):
            raise PipelineError(
                f"{name}.{key}={value!r} must be text or a number; put quotes around a"
                " key that has dots"
            )
        text = str(value).lower() if isinstance(value, bool) else str(value)
        found["kafka.bootstrap.servers" if key == "bootstrap" else key] = text
    return found


def _located(table: Table | None) -> Table | None:
    """Make a table's path absolute: executors run in other directories.

    Raises:
        PipelineError: a setting for Iceberg is missing, wrong, or has no effect.
    """
    if table is None:
        return None
    path = absolute(table.path).rstrip("/")
    if table.format != "iceberg":
        if table.catalog or table.identifier:
            raise PipelineError(
                f"table.format={table.format!r} has no catalog; remove"
                ' table.identifier and [table.catalog], or set format = "iceberg"'
            )
        return replace(table, path=path)
    for key, value in table.catalog.items():
        if isinstance(value, (dict, list)):
            raise PipelineError(
                f"table.catalog.{key}={value!r} must be text or a number; put quotes"
                " around a key that has dots"
            )
    name = re.sub(r"\W", "_", path.rpartition("/")[2])
    identifier = table.identifier or f"default.{name}"
    if not re.fullmatch(r"[^\s.]+(\.[^\s.]+)+", identifier):
        raise PipelineError(
            f"table.identifier={identifier!r} must be a namespace and a name, with a"
            " point between them: 'lake.flights'"
        )
    return replace(table, path=path, identifier=identifier)


def _dead_letters(dead: DeadLetter | None, rows: Table | None) -> Table | None:
    """Return the table of values that cannot be decoded; None without [dead_letter].

    If it and the table of rows are both Iceberg tables, they share a catalog.
    """
    if dead is None:
        return None
    catalog = rows.catalog if rows and dead.format == rows.format == "iceberg" else {}
    return _located(
        Table(dead.path, dead.format, identifier=dead.identifier, catalog=catalog)
    )


def _seconds(duration: str) -> float:
    match = re.fullmatch(_DURATION, duration)
    return int(match[1]) * _SECONDS[match[2]] if match else 0


# -- rules of more than one key --------------------------------------------------------


def _checked_value(value: ValueFormat) -> ValueFormat:
    """Return the value format; if it is Avro, with the fields of its schema.

    Raises:
        PipelineError: the format lacks fields or a schema, or may not have them.
    """
    _check_fields(value.fields)
    if (value.format == "registry") != bool(value.registry):
        raise PipelineError(
            "value.format='registry' and value.registry, its address, need each other"
        )
    if value.format in ("json", "msgpack") and not value.fields:
        raise PipelineError(f"value.format={value.format!r} needs [value.fields]")
    if value.format == "raw" and value.fields:
        raise PipelineError("value.format='raw' has no fields; remove [value.fields]")
    if (value.format == "avro" and value.confluent_header) != (value.schema_id >= 0):
        raise PipelineError(
            "value.confluent_header=true of format='avro' and value.schema_id need each"
            " other: a value of another schema must not be read by this one. With"
            " format='registry' values have the schemas of a registry"
        )
    if value.format != "avro":
        return value
    if not value.schema:
        raise PipelineError("value.format='avro' needs value.schema, Avro's JSON")
    if value.fields:
        raise PipelineError("Avro's fields are in its schema; remove [value.fields]")
    return replace(value, fields=fields_of(value.schema))


def _check_fields(fields: Mapping[str, Any]) -> None:
    for name, kind in fields.items():
        if not isinstance(kind, str):
            raise _not_among(f"value.fields.{name}", kind, column_types.NAMES)
        try:
            column_types.parse(kind)
        except column_types.SpellingError as error:
            if kind.isidentifier():
                key = f"value.fields.{name}"
                raise _not_among(key, kind, column_types.NAMES) from None
            raise PipelineError(f"value.fields.{name}={kind!r}: {error}") from None
        if not name or name.startswith("_"):
            raise PipelineError(
                f"value.fields.{name}: names that begin with '_' are the record's own"
                " columns (_topic, _offset...)"
            )


def _check_job(found: Description) -> None:
    """Raise PipelineError if a pipeline's job lacks a setting, or cannot use one."""
    if found.job in ("ingest", "aggregate") and not found.checkpoint:
        raise PipelineError(
            "pipeline.checkpoint is not set; give a directory that no other pipeline"
            " uses: it remembers what was read"
        )
    if found.job == "aggregate" and bool(found.table) == bool(found.topic):
        raise PipelineError("job aggregate writes to either a [table] or a [topic]")
    if found.job != "ingest" and found.dead_letter is not None:
        raise PipelineError(
            f"job {found.job} writes no [dead_letter] table, only ingest does; remove"
            " the section"
        )
    _check_late(found)
    if found.job == "replay" and "exactlyonce" in map(str.lower, found.topic):
        raise PipelineError("topic.exactlyOnce: a replay is at least once; remove it")
    if found.topic and "topic" not in found.topic:
        raise PipelineError("topic.topic is not set; give the name of the topic")
    if found.replay is not None and found.replay.rate and found.replay.speed:
        raise PipelineError("replay.rate and replay.speed exclude each other")


def _late_rows(late: Late | None, table: Table | None) -> Table | None:
    """Return the table of rows that come too late; None without [late] or [table].

    The table has the settings of [table], except those that only Iceberg has.
    """
    if late is None or table is None:
        return None
    by = () if table.format == "iceberg" else table.partition_by
    return Table(
        late.path,
        late.format,
        by,
        table.event_time,
        table.compression,
        table.compact_mb,
        table.compact_every,
    )


def _check_late(found: Description) -> None:
    """Raise PipelineError if the settings for late rows do not fit together."""
    table = found.table
    if table is None or table.late == "keep":
        if found.late is not None:
            raise PipelineError("[late] needs table.late = 'aside'")
        return
    if found.job != "ingest":
        raise PipelineError(
            f"table.late={table.late!r}: job {found.job} cannot do that, only ingest"
        )
    if table.key:
        raise PipelineError(
            f"table.late={table.late!r}: a table with table.key keeps each key's newest"
            " row, however late it comes; remove one of them"
        )
    if not table.late_after_s:
        raise PipelineError(
            f"table.late={table.late!r} needs table.late_after, the age from which rows"
            " are late"
        )
    if (table.late == "aside") != (found.late is not None):
        raise PipelineError(
            "table.late = 'aside' and a section [late], with the path of a table, need"
            " each other"
        )


def _check_columns(found: Description) -> None:
    """Raise PipelineError if a named column does not exist or has an unusable type."""
    columns = {
        name: column_types.parse(kind).name for name, kind in found.value.fields.items()
    }
    if found.value.format == "raw":
        columns["value"] = "binary"
    columns |= RECORD_COLUMNS
    table, wanted = found.table, found.aggregate
    if wanted is not None:
        for name in wanted.group_by:
            _check_column(columns, "aggregate.group_by", name, tuple(TYPES))
        if wanted.event_time:
            _check_column(
                columns, "aggregate.event_time", wanted.event_time, ("timestamp",)
            )
        # From here on, a table's columns are those of the windows.
        columns = {name: columns[name] for name in wanted.group_by}
        columns |= {"window_start": "timestamp", "window_end": "timestamp"}
    if found.job == "replay" or table is None:
        return  # replay learns the columns from the table that it reads
    _check_partitions(columns, table)
    _check_key(columns, found)
    if table.event_time:
        _check_column(
            columns, "table.event_time", table.event_time, ("timestamp", "date")
        )


def _check_key(columns: Mapping[str, str], found: Description) -> None:
    """Raise PipelineError if the job or the table cannot replace rows by key."""
    table = found.table
    if table is None or not table.key:
        if found.value.envelope != "none":
            raise PipelineError(
                f"value.envelope={found.value.envelope!r} needs table.key: the columns"
                " that identify a row, which changes replace or delete"
            )
        return
    if found.job != "ingest" or table.format == "parquet":
        raise PipelineError(
            f"table.key={list(table.key)!r}: only job ingest replaces rows by key, and"
            ' only in tables with table.format = "delta" or "iceberg"'
        )
    for name in table.key:
        usable = (*_DIRECTORY_TYPES, "binary", "timestamp")
        _check_column(columns, "table.key", name, usable)


def _check_partitions(columns: Mapping[str, str], table: Table) -> None:
    for text in table.partition_by:
        if text == "date" and text not in columns:
            continue
        found = parse_partition(text) if table.format == "iceberg" else None
        if found is None and table.format == "iceberg":
            raise PipelineError(
                f"table.partition_by={text!r} is no partition of Iceberg's: give a"
                " column, or year(c), month(c), day(c), hour(c), bucket(16, c),"
                " truncate(2, c)"
            )
        if found is None and "(" in text:
            raise PipelineError(
                f"table.partition_by={text!r}: only Iceberg's tables are partitioned by"
                f' a function; name a column, or set table.format = "iceberg"'
            )
        name, types = (found.column, found.types) if found else (text, ())
        _check_column(columns, "table.partition_by", name, types or _DIRECTORY_TYPES)


def _check_column(
    columns: Mapping[str, str], setting: str, name: str, usable: tuple[str, ...]
) -> None:
    names = sorted(columns)
    if name not in columns:
        raise PipelineError(
            f"{setting} names {name!r}, which is none of the columns:"
            f" {', '.join(names)}{_near(name, names)}"
        )
    if columns[name] not in usable:
        raise PipelineError(
            f"{setting} names {name!r}, which is {columns[name]}; it must be"
            f" {', '.join(usable[:-1])}{' or ' * (len(usable) > 1)}{usable[-1]}"
        )
