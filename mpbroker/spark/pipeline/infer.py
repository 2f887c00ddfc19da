"""Infer a pipeline's TOML file from a sample of a topic, and show what was found.

A type is chosen only if nearly all values fit it, and no digit would be lost: whole
numbers are bigint, and a text is a timestamp or a date only in a spelling that all
values of the field have. A field with values of several types becomes JSON text.
"""

from __future__ import annotations

import datetime
import decimal
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgpack
import orjson

from mpbroker.spark.pipeline.decode import Decoder
from mpbroker.spark.pipeline.description import ValueFormat
from mpbroker.spark.pipeline.registered import Columns
from mpbroker.spark.pipeline.schemas import column_types, spellings
from mpbroker.spark.pipeline.schemas.registry import Registry
from mpbroker.spark.pipeline.schemas.sample import Sample

# The share of a field's values that must be of a type; others become dead letters.
_MOST: Final = 0.95
_MANY_KEYS: Final = 64  # an object with more different ones is a map
_DOUBLE_DIGITS: Final = 15  # that every double keeps
_SHOWN: Final = 3  # examples
_BAR: Final = 10
# Whole numbers since 1970, by unit: from 2000 to 2100.
_SINCE_S: Final = (946_684_800, 4_102_444_800)
_TIME_NAME: Final = re.compile(
    r"(^|_)(at|ts|time|timestamp|date|when|created|updated|modified|seen|millis|ms)$"
    r"|[a-z](At|Time|Timestamp|Ts|Date|Millis|Ms)$|^(time|timestamp|created|updated)",
)
_PATTERNS: Final = tuple(
    f"{day}{clock}"
    for day in ("%d/%m/%Y", "%m/%d/%Y", "%d.%m.%Y", "%d-%m-%Y", "%m-%d-%Y")
    for clock in ("", " %H:%M", " %H:%M:%S")
)
_PATTERN_TEXT: Final = re.compile(r"\d{1,2}[/.-]\d{1,2}[/.-]\d{4}")


@dataclass
class Shape:
    """The statistics of a field over all values of a sample.

    Attributes:
        seen: the number of values, null or not.
        parents: the number of parent objects, with or without the field.
        kinds: the number of values of each Python type.
        values: the values that are neither objects nor arrays.
        fields: the shapes of the fields inside, where the value is an object.
        element: the shape of the elements, where the value is an array.
    """

    seen: int = 0
    parents: int = 0
    kinds: Counter[type] = field(default_factory=Counter)
    values: list[Any] = field(default_factory=list)
    fields: dict[str, Shape] = field(default_factory=dict)
    element: Shape | None = None

    def add(self, value: Any) -> None:
        """Count one more value of the field, and the values inside it."""
        self.seen += 1
        self.kinds[type(value)] += 1
        if isinstance(value, dict):
            for name, each in value.items():
                self.fields.setdefault(str(name), Shape()).add(each)
        elif isinstance(value, list):
            if self.element is None:
                self.element = Shape()
            for each in value:
                self.element.add(each)
        elif value is not None:
            self.values.append(value)

    def close(self, parents: int) -> None:
        """Set ``parents``, the number of parent objects, here and in all fields inside.

        Call it after the last value of the sample.

        Args:
            parents: the number of objects that could have this field.
        """
        self.parents = parents
        for each in self.fields.values():
            each.close(self.kinds[dict])
        if self.element is not None:
            self.element.close(self.element.seen)

    @property
    def nulls(self) -> int:
        """The number of parent objects in which the field is null or missing."""
        return self.parents - self.seen + self.kinds[type(None)]


@dataclass
class Inferred:
    """The value format inferred from a sample, and how well the sample fits it.

    Attributes:
        value: the format and the fields of values.
        whole: the statistics of all values.
        bad: the number of values in the sample that do not fit.
        left_out: the reason, by field, for each field that cannot be a column.
    """

    sample: Sample
    value: ValueFormat
    whole: Shape
    bad: int = 0
    left_out: dict[str, str] = field(default_factory=dict)


def infer(sample: Sample, *, own: str = "_") -> Inferred:
    """Return the format and the fields that most values of a sample have.

    Args:
        own: a prefix. Fields whose names begin with it are left out, because the
            record's own columns have such names; "": no field is.
    """
    values = [each for each in sample.values if each is not None]
    best = "raw"
    documents: list[dict[Any, Any]] = []
    for name, parse in (("json", column_types.EXACT_JSON.decode), ("msgpack", _unpack)):
        found = [each for each in map(_tried(parse), values) if isinstance(each, dict)]
        if len(found) > len(documents) and len(found) >= len(values) / 2:
            best, documents = name, found
    whole = Shape()
    for each in documents:
        whole.add(each)
    whole.close(len(documents))
    inferred = Inferred(sample, ValueFormat(best), whole)  # type: ignore[arg-type]
    if best == "raw":
        return inferred
    fields, lower = {}, set()
    for name, shape in whole.fields.items():
        if not name or (own and name.startswith(own)):
            inferred.left_out[name] = "such names are the record's own columns'"
        elif name.lower() in lower:
            inferred.left_out[name] = "Spark takes it for the name of another field"
        else:
            lower.add(name.lower())
            fields[name] = column_types.spelled(_type(shape, name))
    if not fields:  # of objects without a usable field
        inferred.value = ValueFormat("raw")
        return inferred
    inferred.value = ValueFormat(best, fields)  # type: ignore[arg-type]
    inferred.bad = _count_bad(inferred)
    return inferred


def infer_registered(sample: Sample, url: str) -> Inferred:
    """Return a topic's columns from its schema in a registry, tried on a sample.

    Raises:
        PipelineError: the registry does not answer, or does not know the topic.
    """
    own = ValueFormat("registry", registry=url)
    registry = Registry(own.registry_urls, waits=False)
    value = Columns(own, (f"{sample.topic}-value",), registry).value()
    found = Inferred(sample, value, Shape())
    found.bad = _count_bad(found)
    return found


def _unpack(value: bytes) -> Any:
    return msgpack.unpackb(value, timestamp=3)


def _tried(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def tried(value: bytes) -> Any:
        try:
            return parse(value)
        except (ValueError, TypeError, RecursionError, OverflowError):
            return None

    return tried


def _count_bad(inferred: Inferred) -> int:
    """Return how many values of the sample a pipeline could not decode."""
    import pyarrow as pa

    from mpbroker.spark.pipeline.schemas.columns import TYPES

    values = inferred.sample.values
    count = len(values)
    batch = pa.RecordBatch.from_pydict(
        {
            "key": pa.nulls(count, pa.binary()),
            "value": pa.array(values, pa.binary()),
            "topic": pa.nulls(count, pa.string()),
            "partition": pa.nulls(count, pa.int32()),
            "offset": pa.nulls(count, pa.int64()),
            "timestamp": pa.nulls(count, TYPES["timestamp"]),
        }
    )
    decoder = Decoder(inferred.value, with_headers=False)
    return int(decoder.decode(batch).bad.num_rows)


# -- types -----------------------------------------------------------------------------


def _type(shape: Shape, name: str) -> column_types.ColumnType:
    kinds = Counter(shape.kinds)
    del kinds[type(None)]
    total = kinds.total()
    if not total:
        return column_types.parse("json")
    if kinds.keys() <= {int, float, decimal.Decimal}:
        return _number(shape, name)
    kind, count = kinds.most_common(1)[0]
    if count < _MOST * total:
        return column_types.parse("json")
    if kind is dict:
        return _object(shape)
    if kind is list:
        assert shape.element is not None
        return column_types.array(_type(shape.element, name))
    if kind is str:
        return _text([each for each in shape.values if type(each) is str])
    if kind in (int, float, decimal.Decimal):
        return _number(shape, name)
    plain = {bool: "boolean", bytes: "binary", datetime.datetime: "timestamp"}
    return column_types.parse(plain.get(kind, "json"))


def _object(shape: Shape) -> column_types.ColumnType:
    if len({name.lower() for name in shape.fields if name}) < len(shape.fields) or (
        not shape.fields
    ):
        return column_types.parse("json")  # Spark's names differ by more than case
    if len(shape.fields) > _MANY_KEYS:
        values = Shape()
        for each in shape.fields.values():
            values = _joined(values, each)
        return column_types.mapping(column_types.parse("string"), _type(values, ""))
    spelled = ", ".join(
        f"`{name.replace('`', '``')}`: {column_types.spelled(_type(each, name))}"
        for name, each in shape.fields.items()
    )
    return column_types.parse(f"struct<{spelled}>")


def _joined(one: Shape, other: Shape) -> Shape:
    fields = dict(one.fields)
    for name, each in other.fields.items():
        fields[name] = _joined(fields[name], each) if name in fields else each
    element = one.element or other.element
    if one.element is not None and other.element is not None:
        element = _joined(one.element, other.element)
    return Shape(
        one.seen + other.seen,
        one.parents + other.parents,
        one.kinds + other.kinds,
        one.values + other.values,
        fields,
        element,
    )


def _number(shape: Shape, name: str) -> column_types.ColumnType:
    numbers = [
        each for each in shape.values if type(each) in (int, float, decimal.Decimal)
    ]
    if all(type(each) is int for each in numbers):
        low, high = min(numbers), max(numbers)
        for unit, factor in (("s", 1), ("ms", 10**3), ("us", 10**6), ("ns", 10**9)):
            first, last = (each * factor for each in _SINCE_S)
            if first <= low and high <= last and _TIME_NAME.search(name):
                return column_types.parse(f"timestamp({unit})")
        if low >= -(2**63) and high < 2**63:
            return column_types.parse("bigint")
        return column_types.parse("decimal(38, 0)")
    exact = [each for each in numbers if isinstance(each, decimal.Decimal)]
    if any(len(each.as_tuple().digits) > _DOUBLE_DIGITS for each in exact):
        scale = max(max(0, -int(each.as_tuple().exponent)) for each in exact)
        if scale <= 18:
            return column_types.decimal_type(38, scale)
    return column_types.parse("double")


def _text(texts: Sequence[str]) -> column_types.ColumnType:
    first = texts[0].strip()
    if first[:1] in ("{", "[") and all(
        each.strip()[:1] in ("{", "[") for each in texts
    ):
        inner = [
            _tried(column_types.EXACT_JSON.decode)(each.encode()) for each in texts
        ]
        if None not in inner:
            shape = Shape()
            for each in inner:
                shape.add(each)
            shape.close(len(inner))
            text = column_types.spelled(_type(shape, ""))
            return column_types.parse(f"json<{text}>")
    if not any(each.isdecimal() for each in texts):
        if _all(spellings.date, texts):
            return column_types.parse("date")
        if _all(spellings.timestamp, texts):
            return column_types.parse("timestamp")
    if all(map(_PATTERN_TEXT.match, texts)):
        fitting = [
            pattern
            for pattern in _PATTERNS
            if _all(lambda text, p=pattern: datetime.datetime.strptime(text, p), texts)
        ]
        # Day or month first? Two that fit are no answer.
        if len(fitting) == 1:
            kind = "timestamp" if "%H" in fitting[0] else "date"
            return column_types.parse(f"{kind}('{fitting[0]}')")
    return column_types.parse("string")


def _all(convert: Callable[..., Any], texts: Sequence[str]) -> bool:
    try:
        for each in texts:
            convert(each)
    except (ValueError, OverflowError):
        return False
    return True


# -- what is printed -------------------------------------------------------------------


def toml(inferred: Inferred, source: Mapping[str, object], lake: str) -> str:
    """Return a pipeline's description as TOML, which runs without a change.

    Args:
        source: options of [source], without the topic.
        lake: the directory of tables and checkpoints.
    """
    topic, value = inferred.sample.topic, inferred.value
    name = re.sub(r"[^A-Za-z0-9.-]|^\.", "-", topic)[:100]
    count, offsets = len(inferred.sample.values), inferred.sample.offsets
    lines = [
        f"# Inferred from {count:,} of {offsets:,} records of topic {topic}.",
        "[pipeline]",
        'job = "ingest"',
        f"name = {_quoted(name)}",
        f"checkpoint = {_quoted(f'{lake}/checkpoints/{name}')}",
        "",
        "[source]",
        *(f"{_key(each)} = {_quoted(str(text))}" for each, text in source.items()),
        f"subscribe = {_quoted(topic)}",
        "",
        "[value]",
        f"format = {_quoted(value.format)}",
    ]
    if value.registry:
        lines.append(f"registry = {_quoted(value.registry)}")
    elif value.fields:
        lines += ["", "[value.fields]"]
        lines += [
            f"{_key(each)} = {_quoted(text)}" for each, text in value.fields.items()
        ]
    lines += [
        f"# {each!r} is left out: {why}" for each, why in inferred.left_out.items()
    ]
    lines += [
        "",
        "[table]",
        f"path = {_quoted(f'{lake}/{name}')}",
        'format = "delta"',
        'partition_by = ["date"]',
    ]
    times = _event_times(inferred)
    if len(times) == 1:
        lines.append(f"event_time = {_quoted(times[0])}")
    elif times:
        lines.append(f"# event_time = {_quoted(times[0])}  # or {', '.join(times[1:])}")
    if value.format != "raw":
        lines += ["", "[dead_letter]", f"path = {_quoted(f'{lake}/{name}-bad')}"]
        lines.append('format = "delta"')
    return "\n".join(lines) + "\n"


def _event_times(inferred: Inferred) -> list[str]:
    """Return the names of the timestamp fields that are null in no record."""
    return [
        name
        for name, text in inferred.value.fields.items()
        if column_types.parse(text).name == "timestamp"
        and name in inferred.whole.fields
        and not inferred.whole.fields[name].nulls
    ]


def _quoted(text: str) -> str:
    # TOML's basic strings are JSON's, but for a control character.
    return orjson.dumps(text).decode().replace("\x7f", "\\u007f")


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _quoted(name)


def picture(inferred: Inferred) -> Iterator[str]:
    """Yield lines of text that show the fields: types, shares, nulls and examples."""
    sample, value = inferred.sample, inferred.value
    tombstones = sum(each is None for each in sample.values)
    said = [f"{sample.topic}: {len(sample.values):,} of {sample.offsets:,} records"]
    said.append(value.format)
    said += [f"{tombstones:,} tombstones"] * bool(tombstones)
    said += [f"{inferred.bad:,} would be dead letters"] * bool(inferred.bad)
    yield ", ".join(said)
    if not value.fields:
        return
    rows = [("field", "type", "in records", "null", "values")]
    for name, text in value.fields.items():
        shape = inferred.whole.fields.get(name)
        rows += _rows(name, column_types.parse(text), shape)
    widths = [min(40, max(len(row[place]) for row in rows)) for place in range(4)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=False))
        yield "  ".join((*cells, row[4])).rstrip()[:120]


def _rows(
    path: str, kind: column_types.ColumnType, shape: Shape | None
) -> Iterator[tuple[str, str, str, str, str]]:
    """Yield a field's line for `picture`, and the lines of the fields inside it."""
    if shape is None:
        yield path, kind.text, "", "", ""
        return
    inner = _inside(path, kind, shape)
    text = f"{kind.name}" if inner else kind.text
    if isinstance(kind, column_types.JsonText):
        text = "json text"
    share = (shape.seen - shape.kinds[type(None)]) / max(1, shape.parents)
    bar = ("\u2588" * round(share * _BAR)).ljust(_BAR, "\u2591")
    common = Counter(map(str, shape.values)).most_common(_SHOWN)
    examples = ", ".join(each[:30] for each, _ in common)
    nulls = f"{1 - share:.0%}" if shape.nulls else ""
    yield path, text, f"{bar} {share:>4.0%}", nulls, examples
    for name, kind_inside, shape_inside in inner:
        yield from _rows(name, kind_inside, shape_inside)


def _inside(
    path: str, kind: column_types.ColumnType, shape: Shape
) -> list[tuple[str, column_types.ColumnType, Shape]]:
    """Return the fields inside a nested field: path, type and statistics of each."""
    if isinstance(kind, column_types.Array) and shape.element is not None:
        inside = _inside(f"{path}[]", kind.element, shape.element)
        return inside or [(f"{path}[]", kind.element, shape.element)]
    if isinstance(kind, column_types.Struct):
        return [
            (f"{path}.{name}", each, shape.fields[name])
            for name, each in kind.fields.items()
            if name in shape.fields
        ]
    return []
