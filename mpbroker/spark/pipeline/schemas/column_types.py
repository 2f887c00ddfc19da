"""Column types: their spelling in a TOML file, and the way from values to Arrow.

A type is spelled as in Spark, `struct<carrier: string, legs: array<bigint>>`, with a
few more arguments: `timestamp(ms)`, `date('%d.%m.%Y')`, `json<struct<...>>`.

Values are converted a column at a time. A column of a struct is converted field by
field, that of an array with all elements of all rows at once. So a nested value costs
about as much as its leaves. A value that does not fit becomes null in the column, and
the reason is noted in the misfits by the row's index; the caller drops such rows.
"""

from __future__ import annotations

import datetime
import decimal
import re
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from itertools import accumulate, chain
from typing import Any, Final, NamedTuple
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import msgspec
import pyarrow as pa

from mpbroker.spark.pipeline.schemas import spellings
from mpbroker.spark.pipeline.schemas.columns import TYPES

_ERRORS: Final = (
    pa.ArrowInvalid,
    pa.ArrowTypeError,
    OverflowError,
    ValueError,
    TypeError,
    ArithmeticError,
)
_LARGEST_FLOAT: Final = 3.4028235677973366e38  # what still rounds to 32 bits
# Decimals are written as JSON's numbers: all their digits stay.
_JSON: Final = msgspec.json.Encoder(decimal_format="number")
# Keeps the digits of fractions and of large whole numbers; half as fast as orjson.
EXACT_JSON: Final = msgspec.json.Decoder(float_hook=decimal.Decimal)


class Misfit(NamedTuple):
    """The reason why a value does not fit the type of its column.

    Attributes:
        path: the path from the field to the value inside it: ``.legs[2].carrier``.
        text: the reason: ``='x' is no int``.
    """

    path: str
    text: str

    def __str__(self) -> str:
        return (self.path + self.text).lstrip(".: ")


Misfits = dict[int, Misfit]  # by the row's index


class SpellingError(ValueError):
    """A type is spelled wrong; the text says what is right."""


@dataclass(frozen=True)
class ColumnType(ABC):
    """The type of a column, or of a part of its values.

    Attributes:
        text: the type as a pipeline's TOML file spells it, without "not null".
        arrow: the type in tables.
        ddl: the type in Spark.
        required: whether null is a misfit.
    """

    text: str
    arrow: pa.DataType
    ddl: str
    required: bool = field(default=False, kw_only=True)

    @property
    def name(self) -> str:
        """The type's first word, such as ``array``."""
        return re.split(r"\W", self.text, maxsplit=1)[0]

    def column(self, values: Sequence[Any], misfits: Misfits) -> pa.Array:
        """Return values as a column, with null for those that do not fit.

        Args:
            misfits: receives the reason for each value that does not fit, by its index.
        """
        found = self._column(values, misfits)
        if self.required and found.null_count:
            for index, value in enumerate(values):
                if value is None:
                    misfits.setdefault(index, Misfit("", " is missing"))
        return found

    @abstractmethod
    def _column(self, values: Sequence[Any], misfits: Misfits) -> pa.Array: ...

    @property
    def exact(self) -> bool:
        """Whether JSON must be parsed without rounding its numbers."""
        return False

    def plain(self, value: Any) -> Any:
        """Convert a value of a table to one for JSON, which `column` can read again."""
        return value

    def _misfit(self, value: Any) -> Misfit:
        return Misfit("", f"={value!r:.200} is no {self.text}")

    def _only(
        self, values: Sequence[Any], kinds: frozenset[type], misfits: Misfits
    ) -> Sequence[Any]:
        """Return the values; replace those of types other than ``kinds`` by None.

        The reason for each replacement is noted in ``misfits``, by the value's index.
        """
        if kinds.issuperset(map(type, values)):
            return values
        found = list(values)
        for index, value in enumerate(values):
            if type(value) not in kinds:
                misfits.setdefault(index, self._misfit(value))
                found[index] = None
        return found


@dataclass(frozen=True)
class Leaf(ColumnType):
    """A type without parts, such as ``bigint``.

    Attributes:
        convert: turns a value into one that Arrow takes, or raises one of _ERRORS.
        ready: types of values that Arrow takes as they are.
        parsed: types that Arrow parses from text, tried in this order. Arrow knows
            fewer spellings than `convert`, but reads those to the same value, and is
            five times as fast.
        as_json: converts a value of a table, which is not null, for `plain`.
    """

    convert: Callable[[Any], Any]
    ready: frozenset[type] = frozenset()
    parsed: tuple[pa.DataType, ...] = ()
    as_json: Callable[[Any], Any] = lambda value: value

    def _column(self, values: Sequence[Any], misfits: Misfits) -> pa.Array:
        try:
            if self.ready.issuperset(map(type, values)):
                return pa.array(values, self.arrow)
            if self.parsed and _TEXTS.issuperset(map(type, values)):
                found = self.parse(pa.array(values, pa.string()))
                if found is not None:
                    return found
            return pa.array([self.convert(each) for each in values], self.arrow)
        except _ERRORS:
            pass
        # At least one value does not fit: try each.
        fitting: list[Any] = []
        for index, value in enumerate(values):
            try:
                kept = self.convert(value)
                pa.array([kept], self.arrow)
            except _ERRORS:
                kept = None
                misfits.setdefault(index, self._misfit(value))
            fitting.append(kept)
        return pa.array(fitting, self.arrow)

    def parse(self, texts: pa.Array) -> pa.Array | None:
        """Return texts as a column; None if Arrow does not understand all of them."""
        for kind in self.parsed:
            try:
                return texts.cast(kind).cast(self.arrow)
            except pa.ArrowInvalid:
                continue
        return None

    @property
    def exact(self) -> bool:
        return self.name in ("decimal", "json")

    def plain(self, value: Any) -> Any:
        return None if value is None else self.as_json(value)


@dataclass(frozen=True)
class Struct(ColumnType):
    """The type of values with named fields: JSON's objects.

    Attributes:
        closed: whether an unknown field is a misfit.
    """

    fields: Mapping[str, ColumnType]
    closed: bool = False

    def children(self, values: Sequence[Any], misfits: Misfits) -> list[pa.Array]:
        """Return a column for each field; an entry is null where its struct is null."""
        rows = self._only(values, _DICTS, misfits)
        documents = [each if each is not None else _NOTHING for each in rows]
        if self.closed:
            self._find_unknown(documents, misfits)
        found = []
        for name, kind in self.fields.items():
            inner: Misfits = {}
            found.append(kind.column([each.get(name) for each in documents], inner))
            for index, misfit in inner.items():
                if rows[index] is not None:  # or a required field would be missing
                    misfits.setdefault(
                        index, Misfit(f".{name}{misfit.path}", misfit.text)
                    )
        return found

    def _find_unknown(
        self, documents: Sequence[Mapping[str, Any]], misfits: Misfits
    ) -> None:
        known = self.fields.keys()
        for index, document in enumerate(documents):
            strange = sorted(map(str, document.keys() - known))
            if strange:
                misfits.setdefault(
                    index, Misfit("", f": unknown fields: {', '.join(strange[:10])}")
                )

    def _column(self, values: Sequence[Any], misfits: Misfits) -> pa.Array:
        children = self.children(values, misfits)
        nulls = pa.array([type(each) is not dict for each in values], pa.bool_())
        return pa.StructArray.from_arrays(children, fields=list(self.arrow), mask=nulls)

    @property
    def exact(self) -> bool:
        return any(each.exact for each in self.fields.values())

    def plain(self, value: Any) -> Any:
        return value and {
            name: kind.plain(value[name])
            for name, kind in self.fields.items()
            if value[name] is not None
        }


@dataclass(frozen=True)
class Array(ColumnType):
    """The type of lists of values of one type: JSON's arrays."""

    element: ColumnType

    def _column(self, values: Sequence[Any], misfits: Misfits) -> pa.Array:
        rows = self._only(values, _LISTS, misfits)
        ends = [0, *accumulate(len(each) if each else 0 for each in rows)]
        inner: Misfits = {}
        flat = list(chain.from_iterable(each for each in rows if each))
        elements = self.element.column(flat, inner)
        for place, misfit in inner.items():
            index = bisect_right(ends, place) - 1
            path = f"[{place - ends[index]}]{misfit.path}"
            misfits.setdefault(index, Misfit(path, misfit.text))
        nulls = pa.array([each is None for each in rows], pa.bool_())
        return pa.ListArray.from_arrays(
            pa.array(ends, pa.int32()), elements, type=self.arrow, mask=nulls
        )

    @property
    def exact(self) -> bool:
        return self.element.exact

    def plain(self, value: Any) -> Any:
        return value and [self.element.plain(each) for each in value]


@dataclass(frozen=True)
class Map(ColumnType):
    """The type of values by keys that are data, not names: JSON's objects."""

    key: ColumnType
    value: ColumnType

    def _column(self, values: Sequence[Any], misfits: Misfits) -> pa.Array:
        rows = self._only(values, _DICTS, misfits)
        ends = [0, *accumulate(len(each) if each else 0 for each in rows)]
        keys = list(chain.from_iterable(each for each in rows if each))
        flat = list(chain.from_iterable(each.values() for each in rows if each))
        wrong_keys: Misfits = {}
        wrong_values: Misfits = {}
        columns = (
            self.key.column(self._whole(keys), wrong_keys),
            self.value.column(flat, wrong_values),
        )
        if wrong_keys:  # Arrow's maps have no null keys; these rows are dropped
            columns = (columns[0].fill_null(_filler(self.key)), columns[1])
        for place, misfit in chain(wrong_keys.items(), wrong_values.items()):
            index = bisect_right(ends, place) - 1
            path = f"[{keys[place]!r:.50}]{misfit.path}"
            misfits.setdefault(index, Misfit(path, misfit.text))
        starts: list[int | None] = list(ends)
        for index, each in enumerate(rows):
            if each is None:
                starts[index] = None
        return pa.MapArray.from_arrays(
            pa.array(starts, pa.int32()), *columns, type=self.arrow
        )

    def _whole(self, keys: list[Any]) -> list[Any]:
        """Convert keys to numbers if the map's type says so: in JSON they are text."""
        if self.key.name == "string":
            return keys
        return [int(each) if _is_number(each) else each for each in keys]

    @property
    def exact(self) -> bool:
        return self.value.exact

    def plain(self, value: Any) -> Any:
        if value is None:
            return None
        pairs = value.items() if isinstance(value, dict) else value
        return {str(key): self.value.plain(each) for key, each in pairs}


@dataclass(frozen=True)
class JsonText(ColumnType):
    """The type of text that is itself JSON, and is parsed to another type."""

    inner: ColumnType

    def _column(self, values: Sequence[Any], misfits: Misfits) -> pa.Array:
        parsed: list[Any] = []
        for index, value in enumerate(values):
            found = None
            if value is not None:
                try:
                    found = EXACT_JSON.decode(value)
                except (TypeError, ValueError, RecursionError):
                    misfits.setdefault(
                        index, Misfit("", f"={value!r:.200} is no JSON text")
                    )
            parsed.append(found)
        return self.inner.column(parsed, misfits)

    def plain(self, value: Any) -> Any:
        return value if value is None else json_text(self.inner.plain(value))


_NOTHING: Final[dict[str, Any]] = {}
_DICTS: Final[frozenset[type]] = frozenset({dict, type(None)})
_TEXTS: Final[frozenset[type]] = frozenset({str, type(None)})
_LISTS: Final[frozenset[type]] = frozenset({list, tuple, type(None)})


def json_text(value: Any) -> str:
    """Return a value as JSON; bytes as Base64, times as ISO 8601."""
    return _JSON.encode(value).decode()


def _is_number(key: Any) -> bool:
    return isinstance(key, str) and key.removeprefix("-").isdecimal() and key.isascii()


def _filler(key: ColumnType) -> Any:
    return "" if key.name == "string" else 0


# -- converters of leaves --------------------------------------------------------------


def _of(*kinds: type) -> Callable[[Any], Any]:
    """Return a function that returns values of these types, and None, unchanged.

    It raises ValueError for a value of another type. Arrow alone would convert 1.5 to
    1, true to 1, and bytes to text.
    """

    def check(value: Any) -> Any:
        if value is None or type(value) in kinds:
            return value
        raise ValueError(f"{value!r} has another type")

    return check


def _double(value: Any) -> Any:
    if isinstance(value, decimal.Decimal):
        found = float(value)
        if found in (float("inf"), float("-inf")):
            raise OverflowError(f"{value!r} has no double")
        return found
    return _of(float, int)(value)


def _float(value: Any) -> Any:
    found = _double(value)
    # Arrow would convert such a number to infinity.
    if found is not None and _LARGEST_FLOAT <= abs(found) < float("inf"):
        raise OverflowError(f"{value!r} has no float")
    return found


def _decimal(value: Any) -> decimal.Decimal | None:
    if value is None or isinstance(value, decimal.Decimal):
        return value
    if type(value) is float:
        return decimal.Decimal(repr(value))  # the digits that were written
    if type(value) in (int, str):
        return decimal.Decimal(value)
    raise ValueError(f"{value!r} is no decimal")


def _json(value: Any) -> str | None:
    return None if value is None else json_text(value)


_CONVERTERS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "string": _of(str),
    "int": _of(int),
    "bigint": _of(int),
    "float": _float,
    "double": _double,
    "boolean": _of(bool),
    "binary": _of(bytes),
    "timestamp": spellings.timestamp,
    "date": spellings.date,
}
_NULL: Final = type(None)
_READY: Final[Mapping[str, frozenset[type]]] = {
    "string": frozenset({str, _NULL}),
    "int": frozenset({int, _NULL}),
    "bigint": frozenset({int, _NULL}),
    "double": frozenset({float, int, _NULL}),
    "boolean": frozenset({bool, _NULL}),
    "binary": frozenset({bytes, _NULL}),
}
_PARSED: Final[Mapping[str, tuple[pa.DataType, ...]]] = {
    "timestamp": (TYPES["timestamp"], pa.timestamp("us")),
    "date": (TYPES["date"],),
}
_LEAVES: Final[Mapping[str, Leaf]] = {
    name: Leaf(
        name,
        TYPES[name],
        name.upper(),
        _CONVERTERS[name],
        _READY.get(name, frozenset()),
        _PARSED.get(name, ()),
    )
    for name in _CONVERTERS
} | {
    "timestamp_ntz": Leaf(
        "timestamp_ntz", pa.timestamp("us"), "TIMESTAMP_NTZ", spellings.local_timestamp
    ),
    "json": Leaf("json", pa.string(), "STRING", _json, as_json=EXACT_JSON.decode),
}
NAMES: Final = (*_LEAVES, "decimal", "struct", "array", "map")
_KEYS: Final = ("string", "int", "bigint")


# -- from text -------------------------------------------------------------------------


def parse(text: str) -> ColumnType:
    """Return the column type that a text spells.

    Raises:
        SpellingError: the text is not a type.
    """
    parser = _Parser(text)
    found = parser.type()
    parser.end()
    return found


def struct(fields: Mapping[str, str], *, closed: bool = False) -> Struct:
    """Return the type of a whole value, which is a struct.

    Args:
        fields: types as text, by name.
        closed: whether unknown fields are misfits, at every level.
    """
    found = _struct({name: parse(text) for name, text in fields.items()})
    return _closed(found) if closed else found  # type: ignore[return-value]


def _struct(fields: Mapping[str, ColumnType]) -> Struct:
    inside = ", ".join(
        f"{_quoted(name)}: {spelled(each)}" for name, each in fields.items()
    )
    ddl = ", ".join(
        f"`{name.replace('`', '``')}`: {each.ddl}" for name, each in fields.items()
    )
    arrow = pa.struct([(name, each.arrow) for name, each in fields.items()])
    return Struct(f"struct<{inside}>", arrow, f"STRUCT<{ddl}>", fields)


def _closed(kind: ColumnType) -> ColumnType:
    if isinstance(kind, Struct):
        fields = {name: _closed(each) for name, each in kind.fields.items()}
        return replace(kind, fields=fields, closed=True)
    if isinstance(kind, Array):
        return replace(kind, element=_closed(kind.element))
    if isinstance(kind, Map):
        return replace(kind, value=_closed(kind.value))
    if isinstance(kind, JsonText):
        return replace(kind, inner=_closed(kind.inner))
    return kind


def merged(one: ColumnType, other: ColumnType) -> ColumnType:
    """Return a type with the fields of both types; ``one`` counts where they differ."""
    if isinstance(one, Struct) and isinstance(other, Struct):
        fields = dict(one.fields)
        for name, kind in other.fields.items():
            fields[name] = merged(fields[name], kind) if name in fields else kind
        return replace(_struct(fields), required=one.required)
    if isinstance(one, Array) and isinstance(other, Array):
        element = merged(one.element, other.element)
        return replace(array(element), required=one.required)
    if isinstance(one, Map) and isinstance(other, Map):
        value = merged(one.value, other.value)
        return replace(mapping(one.key, value), required=one.required)
    return one


def spelled(kind: ColumnType) -> str:
    """Return a column type's text as `parse` reads it."""
    return kind.text + " not null" * kind.required


def _quoted(name: str) -> str:
    return name if re.fullmatch(r"\w+", name) else f"`{name.replace('`', '``')}`"


_TOKEN: Final = re.compile(
    r"\s*(?:(?P<word>\w+)|(?P<sign>[<>(),:])|'(?P<text>[^']*)'|`(?P<name>(?:[^`]|``)+)`)"
)


class _Parser:
    """Parses the text of a type, from left to right."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = list(self._cut(text))

    def _cut(self, text: str) -> Iterator[tuple[str, str]]:
        place = 0
        while text[place:].strip():
            found = _TOKEN.match(text, place)
            if found is None:
                raise SpellingError(f"{text[place:].strip()[:20]!r} is not understood")
            place = found.end()
            kind = found.lastgroup or ""
            yield kind, found[kind]

    def type(self) -> ColumnType:
        kind, word = self._next("a type")
        name = word.lower()
        if kind != "word" or name not in NAMES:
            near = get_close_matches(name, NAMES, n=1, cutoff=0.6)
            raise SpellingError(
                f"{word!r} is none of {', '.join(NAMES)}"
                + (f" (did you mean {near[0]!r}?)" if near else "")
            )
        found = self._of(name)
        if self._at("not"):
            self._next()
            if not self._at("null"):
                raise SpellingError("'null' is expected after 'not'")
            self._next()
            found = replace(found, required=True)
        return found

    def end(self) -> None:
        if self._tokens:
            raise SpellingError(f"{self._tokens[0][1]!r} is not expected there")

    def _of(self, name: str) -> ColumnType:
        if name == "struct":
            return self._struct()
        if name == "array":
            self._sign("<")
            element = self.type()
            self._sign(">")
            return array(element)
        if name == "map":
            self._sign("<")
            key = self.type()
            self._sign(",")
            value = self.type()
            self._sign(">")
            return mapping(key, value)
        if name == "decimal":
            return self._decimal()
        if name == "json" and self._at("<"):
            self._sign("<")
            inner = self.type()
            self._sign(">")
            return JsonText(f"json<{spelled(inner)}>", inner.arrow, inner.ddl, inner)
        if name in ("timestamp", "date") and self._at("("):
            return _spelled_time(name, self._arguments())
        return _LEAVES[name]

    def _struct(self) -> Struct:
        self._sign("<")
        fields: dict[str, ColumnType] = {}
        while True:
            kind, name = self._next("a field")
            if kind not in ("word", "name"):
                raise SpellingError(f"{name!r} is no field's name")
            name = name.replace("``", "`")
            if name in fields:
                raise SpellingError(f"field {name!r} is there twice")
            if self._at(":"):
                self._next()
            fields[name] = self.type()
            if not self._at(","):
                break
            self._next()
        self._sign(">")
        return _struct(fields)

    def _decimal(self) -> Leaf:
        found = self._arguments() if self._at("(") else ["10"]
        digits, scale = [*found, "0"][:2]
        if not (digits.isdecimal() and scale.isdecimal()) or len(found) > 2:
            raise SpellingError("decimal needs its digits: decimal(10, 2)")
        return decimal_type(int(digits), int(scale))

    def _arguments(self) -> list[str]:
        self._sign("(")
        found = [self._next("an argument")[1]]
        while self._at(","):
            self._next()
            found.append(self._next("an argument")[1])
        self._sign(")")
        return found

    def _at(self, word: str) -> bool:
        return bool(self._tokens) and self._tokens[0][1].lower() == word

    def _sign(self, sign: str) -> None:
        if self._next(repr(sign)) != ("sign", sign):
            raise SpellingError(f"{sign!r} is expected; a type is spelled {_EXAMPLE}")

    def _next(self, what: str = "") -> tuple[str, str]:
        if not self._tokens:
            raise SpellingError(f"it ends where {what} is expected")
        return self._tokens.pop(0)


_EXAMPLE: Final = "array<struct<name: string, price: decimal(10, 2)>>"


def array(element: ColumnType) -> Array:
    """Return the type of arrays that have elements of a given type."""
    arrow = pa.list_(element.arrow)
    return Array(f"array<{spelled(element)}>", arrow, f"ARRAY<{element.ddl}>", element)


def mapping(key: ColumnType, value: ColumnType) -> Map:
    """Return the type of maps with these types of keys and values.

    Raises:
        SpellingError: keys cannot be of this type.
    """
    if key.name not in _KEYS:
        raise SpellingError(f"a map's key is {', '.join(_KEYS)}, not {key.text}")
    text = f"map<{key.text}, {spelled(value)}>"
    arrow = pa.map_(key.arrow, value.arrow)
    return Map(text, arrow, f"MAP<{key.ddl}, {value.ddl}>", key, value)


def decimal_type(digits: int, scale: int) -> Leaf:
    """Return the type of exact decimal numbers.

    Args:
        digits: the number of all digits, 1 to 38.
        scale: the number of digits after the point.

    Raises:
        SpellingError: Arrow has no such decimal.
    """
    if not 1 <= digits <= 38 or scale > digits:
        raise SpellingError(
            f"decimal({digits}, {scale}) must have 1 to 38 digits, and no more of them"
            " after the point"
        )
    text = f"decimal({digits}, {scale})"
    arrow = pa.decimal128(digits, scale)
    return Leaf(text, arrow, text.upper(), _decimal)


def _spelled_time(name: str, arguments: list[str]) -> Leaf:
    first, zone = [*arguments, ""][:2]
    leaf = _LEAVES[name]
    quoted = ", ".join(f"'{each}'" for each in arguments)
    text = f"{name}({quoted if '%' in first else first})"
    if name == "date" and first == "days":
        return replace(
            leaf,
            text=text,
            parsed=(),
            convert=spellings.date_of_days,
            as_json=spellings.days_of,
        )
    if name == "timestamp" and first in spellings.UNITS:
        factor = spellings.UNITS[first]
        return replace(
            leaf,
            text=text,
            parsed=(),
            convert=spellings.timestamp_of_unit(first),
            as_json=lambda value: _since_1970(value, factor),
        )
    if "%" not in first:
        units = ", ".join(spellings.UNITS) if name == "timestamp" else "days"
        raise SpellingError(
            f"{name}({first}) is given neither a unit ({units}) nor a pattern such as"
            " '%d.%m.%Y'"
        )
    if name == "date":
        return replace(
            leaf,
            text=text,
            parsed=(),
            convert=spellings.date_of_pattern(first),
            as_json=lambda value: value.strftime(first),
        )
    try:
        convert = spellings.timestamp_of_pattern(first, zone)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise SpellingError(
            f"{zone!r} is no time zone such as 'Europe/Berlin'"
        ) from None
    home = ZoneInfo(zone) if zone else datetime.UTC
    return replace(
        leaf,
        text=text,
        parsed=(),
        convert=convert,
        as_json=lambda value: value.astimezone(home).strftime(first),
    )


def _since_1970(value: datetime.datetime, factor: float) -> float:
    microseconds = (value - spellings.EPOCH) // datetime.timedelta(microseconds=1)
    found = microseconds / factor
    return int(found) if found == int(found) else found
