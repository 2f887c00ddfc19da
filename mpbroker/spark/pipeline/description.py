"""What a pipeline's TOML file says, read and checked before Spark is started.

    [pipeline]
    job = "ingest"                   # or aggregate, replay, report
    checkpoint = "/lake/checkpoints/flights"
    trigger = "once"                 # all there is, then stop; or "30s": for ever

    [source]                         # any option of format("mpbroker")
    bootstrap = "localhost:9092"
    subscribe = "flights"

    [value]
    format = "json"                  # or raw, msgpack, avro
    [value.fields]
    carrier = "string"
    time_hour = "timestamp"

    [table]
    path = "/lake/flights"
    format = "delta"                 # or parquet
    partition_by = ["date"]          # fields, or date: the day of event_time
    event_time = "time_hour"         # default: the record's timestamp

docs: README, "Pipelines".
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

from mpbroker.spark.file_systems import absolute
from mpbroker.spark.pipeline.avro import fields_of
from mpbroker.spark.pipeline.columns import RECORD_COLUMNS, TYPES
from mpbroker.spark.pipeline.errors import PipelineError

JOBS: Final = ("ingest", "aggregate", "replay", "report")
VALUE_FORMATS: Final = ("raw", "json", "msgpack", "avro")
TABLE_FORMATS: Final = ("parquet", "delta")
# Types whose values name directories, the same ones to everybody who reads them.
_DIRECTORY_TYPES: Final = ("string", "int", "bigint", "boolean", "date")
# Files are named so; readers do not look at those that begin with "." or "_".
_NAME: Final = re.compile(r"[A-Za-z0-9-][A-Za-z0-9._-]{0,99}")
_DURATION: Final = re.compile(r"\s*(\d{1,9})\s*(ms|s|m|min|h|d)\s*")
_SECONDS: Final = {"ms": 0.001, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True)
class ValueFormat:
    """How values are read: into these fields, of TYPES, by name."""

    format: str = "raw"
    fields: Mapping[str, str] = field(default_factory=dict)
    schema: str = ""  # Avro's, as JSON
    confluent_header: bool = False  # five bytes before each Avro value
    unknown_fields: str = "ignore"  # or dead_letter


@dataclass(frozen=True)
class Table:
    """Where rows go, or come from."""

    path: str
    format: str = "parquet"
    partition_by: tuple[str, ...] = ()
    event_time: str = ""  # empty: the record's timestamp
    compression: str = "zstd"
    compact_mb: int = 128
    compact_every: int = 20  # batches; 0: never
    late_after_s: float = 0  # rows older than that are counted; 0: none is late


@dataclass(frozen=True)
class Aggregate:
    """Windows over event time."""

    window: str
    measures: Mapping[str, str]
    slide: str = ""
    watermark: str = "10 minutes"
    event_time: str = ""
    group_by: tuple[str, ...] = ()


@dataclass(frozen=True)
class Replay:
    """Which rows go back, and how fast."""

    where: str = ""  # an SQL condition over the table's columns
    rate: float = 0  # records a second in all; 0: as fast as possible
    speed: float = 0  # 1: as the records' timestamps lie apart; 0: do not care
    partitions: str = "original"  # or key: by the key's hash


@dataclass(frozen=True)
class Report:
    """Which files of a broker's request log, and where the page goes."""

    log: tuple[str, ...]  # patterns of files
    out: str
    table: str = ""  # a file of Parquet; empty: none


@dataclass(frozen=True)
class Description:
    """A whole file."""

    job: str
    name: str
    checkpoint: str = ""
    trigger_s: float = 0  # 0: once, all there is
    source: Mapping[str, str] = field(default_factory=dict)
    value: ValueFormat = ValueFormat()
    table: Table | None = None
    dead_letter: Table | None = None
    topic: Mapping[str, str] = field(default_factory=dict)
    aggregate: Aggregate | None = None
    replay: Replay | None = None
    report: Report | None = None
    spark: Mapping[str, str] = field(default_factory=dict)


_SECTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "pipeline": ("job", "name", "checkpoint", "trigger"),
    "value": ("format", "fields", "schema", "confluent_header", "unknown_fields"),
    "table": (
        "path",
        "format",
        "partition_by",
        "event_time",
        "compression",
        "compact_mb",
        "compact_every",
        "late_after",
    ),
    "dead_letter": ("path", "format"),
    "aggregate": (
        "window",
        "slide",
        "watermark",
        "event_time",
        "group_by",
        "measures",
    ),
    "replay": ("where", "rate", "speed", "partitions"),
    "report": ("log", "out", "table"),
}
_FREE: Final = ("source", "topic", "spark")  # options of others, checked by them
_NEEDED: Final[Mapping[str, tuple[str, ...]]] = {
    "ingest": ("source", "table"),
    "aggregate": ("source", "aggregate"),
    "replay": ("table", "topic"),
    "report": ("report",),
}


def load(path: str | Path) -> Description:
    """Read a pipeline's file.

    Raises:
        PipelineError: no such file, no TOML, or anything in it that cannot be used.
    """
    try:
        text = Path(path).read_text("utf-8")
        content = tomllib.loads(text)
    except OSError as error:
        raise PipelineError(f"{path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PipelineError(f"{path} is not TOML: {error}") from None
    try:
        return parse(content, default_name=Path(path).stem)
    except PipelineError as error:
        raise PipelineError(f"{path}: {error}") from None


def parse(content: Mapping[str, Any], default_name: str = "pipeline") -> Description:
    """Check what a file says; see `load`."""
    _known(content, (*_SECTIONS, *_FREE), "section")
    for name, section in content.items():
        if not isinstance(section, dict):
            raise PipelineError(f"{name} must be a section, [{name}], not {section!r}")
        if name in _SECTIONS:
            _known(section, _SECTIONS[name], f"key in [{name}]")
    head = content.get("pipeline", {})
    job = _choice(head, "pipeline", "job", JOBS, None)
    for section in _NEEDED[job]:
        if section not in content:
            raise PipelineError(f"job {job} needs a section [{section}]")
    description = Description(
        job=job,
        name=_text(head, "pipeline", "name", default_name),
        checkpoint=_checkpoint(head),
        trigger_s=_trigger(head),
        source=_source(content.get("source", {})),
        value=_value(content.get("value", {})),
        table=_table(content.get("table"), "table"),
        dead_letter=_table(content.get("dead_letter"), "dead_letter"),
        topic=_topic(content.get("topic", {})),
        aggregate=_aggregate(content.get("aggregate")),
        replay=_replay(content.get("replay", {})) if job == "replay" else None,
        report=_report(content["report"]) if job == "report" else None,
        spark={key: str(value) for key, value in content.get("spark", {}).items()},
    )
    _check_whole(description)
    return description


def _check_whole(found: Description) -> None:
    if not _NAME.fullmatch(found.name):
        raise PipelineError(
            f"pipeline.name={found.name!r} must be letters, digits, '.', '_' and '-',"
            " and not begin with '.' or '_'"
        )
    if found.job in ("ingest", "aggregate") and not found.checkpoint:
        raise PipelineError(
            "pipeline.checkpoint is not set; give a directory that is this pipeline's"
            " alone: it remembers what was read"
        )
    if found.job == "aggregate" and bool(found.table) == bool(found.topic):
        raise PipelineError("job aggregate writes to either a [table] or a [topic]")
    if found.job != "ingest" and found.dead_letter is not None:
        raise PipelineError(
            f"[dead_letter] is ingest's; job {found.job} keeps no values"
        )
    if found.job == "replay" and "exactlyonce" in map(str.lower, found.topic):
        raise PipelineError("topic.exactlyOnce: a replay is at least once; remove it")
    if found.topic and "topic" not in found.topic:
        raise PipelineError("topic.topic is not set; give the name of the topic")
    _check_columns(found)


def _check_columns(found: Description) -> None:
    """Raise PipelineError if a column that is named is not there, or of no use so."""
    kinds = dict(found.value.fields)
    if found.value.format == "raw":
        kinds["value"] = "binary"
    kinds |= RECORD_COLUMNS
    table, wanted = found.table, found.aggregate
    if wanted is not None:
        for name in wanted.group_by:
            _column(kinds, "aggregate.group_by", name, tuple(TYPES))
        if wanted.event_time:
            _column(kinds, "aggregate.event_time", wanted.event_time, ("timestamp",))
        # What windows have, of which a table is made.
        kinds = {name: kinds[name] for name in wanted.group_by}
        kinds |= {"window_start": "timestamp", "window_end": "timestamp"}
    if found.job == "replay" or table is None:
        return  # a table that is read says itself what it has
    for name in table.partition_by:
        if name != "date" or name in kinds:
            _column(kinds, "table.partition_by", name, _DIRECTORY_TYPES)
    if table.event_time:
        _column(kinds, "table.event_time", table.event_time, ("timestamp", "date"))


def _column(
    kinds: Mapping[str, str], setting: str, name: str, usable: tuple[str, ...]
) -> None:
    names = sorted(kinds)
    if name not in kinds:
        raise PipelineError(
            f"{setting} names {name!r}, which is none of the columns:"
            f" {', '.join(names)}{_near(name, names)}"
        )
    if kinds[name] not in usable:
        raise PipelineError(
            f"{setting} names {name!r}, which is {kinds[name]}; it must be"
            f" {', '.join(usable[:-1])}{' or ' * (len(usable) > 1)}{usable[-1]}"
        )


# -- sections --------------------------------------------------------------------------


def _checkpoint(head: Mapping[str, Any]) -> str:
    path = _text(head, "pipeline", "checkpoint", "")
    return absolute(path) if path else ""


def _source(section: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for key, value in section.items():
        name = "kafka.bootstrap.servers" if key == "bootstrap" else key
        if isinstance(value, bool):
            value = str(value).lower()
        if isinstance(value, (dict, list)):
            raise PipelineError(f"source.{key} must be text or a number")
        found[name] = str(value)
    return found


_topic = _source


def _value(section: Mapping[str, Any]) -> ValueFormat:
    chosen = _choice(section, "value", "format", VALUE_FORMATS, "raw")
    fields = section.get("fields", {})
    if not isinstance(fields, dict):
        raise PipelineError("value.fields must be a section: [value.fields]")
    for name, kind in fields.items():
        if not isinstance(kind, str) or kind not in TYPES:
            raise PipelineError(
                f"value.fields.{name}={kind!r} is none of {', '.join(TYPES)}"
                f"{_near(str(kind), TYPES)}"
            )
        if not name or name.startswith("_"):
            raise PipelineError(
                f"value.fields.{name}: names that begin with '_' are the record's own"
                " (_topic, _offset...)"
            )
    schema = _text(section, "value", "schema", "")
    if chosen in ("json", "msgpack") and not fields:
        raise PipelineError(f"value.format={chosen!r} needs [value.fields]")
    if chosen == "raw" and fields:
        raise PipelineError("value.format='raw' has no fields; remove [value.fields]")
    if chosen == "avro":
        if not schema:
            raise PipelineError("value.format='avro' needs value.schema, Avro's JSON")
        if fields:
            raise PipelineError(
                "Avro's fields are in its schema; remove [value.fields]"
            )
        fields = fields_of(schema)
    return ValueFormat(
        chosen,
        fields,
        schema,
        _boolean(section, "value", "confluent_header", False),
        _choice(
            section, "value", "unknown_fields", ("ignore", "dead_letter"), "ignore"
        ),
    )


def _table(section: Mapping[str, Any] | None, name: str) -> Table | None:
    if section is None:
        return None
    path = _text(section, name, "path", "")
    if not path:
        raise PipelineError(f"{name}.path is not set; give a directory")
    late = _text(section, name, "late_after", "")
    return Table(
        path=absolute(path).rstrip("/"),
        format=_choice(section, name, "format", TABLE_FORMATS, "parquet"),
        partition_by=_names(section, name, "partition_by"),
        event_time=_text(section, name, "event_time", ""),
        compression=_choice(
            section, name, "compression", ("zstd", "snappy", "gzip", "none"), "zstd"
        ),
        compact_mb=int(_number(section, name, "compact_mb", 128, lowest=1)),
        compact_every=int(_number(section, name, "compact_every", 20)),
        late_after_s=_seconds(late, f"{name}.late_after") if late else 0,
    )


def _aggregate(section: Mapping[str, Any] | None) -> Aggregate | None:
    if section is None:
        return None
    measures = section.get("measures", {})
    if not isinstance(measures, dict) or not measures:
        raise PipelineError(
            'aggregate.measures is not set; for example {flights = "count(*)"}'
        )
    window = _text(section, "aggregate", "window", "")
    if not window:
        raise PipelineError("aggregate.window is not set; for example '10 minutes'")
    return Aggregate(
        window=window,
        measures={name: str(value) for name, value in measures.items()},
        slide=_text(section, "aggregate", "slide", ""),
        watermark=_text(section, "aggregate", "watermark", "10 minutes"),
        event_time=_text(section, "aggregate", "event_time", ""),
        group_by=_names(section, "aggregate", "group_by"),
    )


def _replay(section: Mapping[str, Any]) -> Replay:
    rate = _number(section, "replay", "rate", 0)
    speed = _number(section, "replay", "speed", 0)
    if rate and speed:
        raise PipelineError("replay.rate and replay.speed exclude each other")
    return Replay(
        where=_text(section, "replay", "where", ""),
        rate=rate,
        speed=speed,
        partitions=_choice(
            section, "replay", "partitions", ("original", "key"), "original"
        ),
    )


def _report(section: Mapping[str, Any]) -> Report:
    log = section.get("log", "")
    patterns = (
        (log,) if isinstance(log, str) and log else _names(section, "report", "log")
    )
    if not patterns:
        raise PipelineError(
            "report.log is not set; give what the broker's request.log.path names, or"
            ' a list: ["requests.log", "requests.log.*"]'
        )
    out = _text(section, "report", "out", "")
    if not out:
        raise PipelineError("report.out is not set; give a file, as report.html")
    return Report(patterns, out, _text(section, "report", "table", ""))


def _trigger(head: Mapping[str, Any]) -> float:
    text = _text(head, "pipeline", "trigger", "once")
    return 0 if text == "once" else _seconds(text, "pipeline.trigger")


# -- values ----------------------------------------------------------------------------


def _known(given: Mapping[str, Any], names: tuple[str, ...], what: str) -> None:
    for name in given:
        if name not in names:
            raise PipelineError(
                f"there is no {what} {name!r}{_near(name, names)}; there are"
                f" {', '.join(names)}"
            )


def _near(name: str, names: Any) -> str:
    near = get_close_matches(name, list(names), n=1, cutoff=0.6)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _text(section: Mapping[str, Any], where: str, key: str, default: str) -> str:
    value = section.get(key, default)
    if not isinstance(value, str):
        raise PipelineError(f"{where}.{key}={value!r} must be text, in quotes")
    return value


def _choice(
    section: Mapping[str, Any],
    where: str,
    key: str,
    choices: tuple[str, ...],
    default: str | None,
) -> str:
    value = section.get(key, default)
    if value is None:
        raise PipelineError(f"{where}.{key} is not set; give {', '.join(choices)}")
    if value not in choices:
        raise PipelineError(
            f"{where}.{key}={value!r} is none of {', '.join(choices)}"
            f"{_near(str(value), choices)}"
        )
    return str(value)


def _names(section: Mapping[str, Any], where: str, key: str) -> tuple[str, ...]:
    value = section.get(key, [])
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise PipelineError(f'{where}.{key}={value!r} must be a list: ["a", "b"]')
    return tuple(value)


def _boolean(section: Mapping[str, Any], where: str, key: str, default: bool) -> bool:
    value = section.get(key, default)
    if not isinstance(value, bool):
        raise PipelineError(f"{where}.{key}={value!r} is neither true nor false")
    return value


def _number(
    section: Mapping[str, Any],
    where: str,
    key: str,
    default: float,
    lowest: float = 0,
) -> float:
    value = section.get(key, default)
    usable = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not usable or not lowest <= value < 1e12:
        raise PipelineError(
            f"{where}.{key}={value!r} is no number of {lowest:g} or more"
        )
    return float(value)


def _seconds(text: str, setting: str) -> float:
    match = _DURATION.fullmatch(text)
    if match is None:
        raise PipelineError(f"{setting}={text!r} is no duration such as 30s, 5m, 1d")
    return int(match[1]) * _SECONDS[match[2]]
