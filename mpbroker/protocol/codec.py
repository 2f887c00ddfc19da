"""From tables to functions: writes Python source and compiles it, on first use.

The source is straight-line: nested structs are written out in place, runs of
fixed-size fields become one `struct` call, and what a version lacks costs nothing.
Every line is annotated with the fields that it handles, so the one ``except`` of a
function can say which field was wrong from the number of the line that raised.

Source: Kafka protocol guide, "Protocol Primitive Types"; KIP-482 for compact lengths
and tagged fields.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from struct import Struct as Layout
from struct import error as LayoutError
from types import TracebackType
from typing import Any, NamedTuple

from mpbroker.protocol.errors import ProtocolError
from mpbroker.protocol.message import UNSET, Decoder, Encoder, Message, Struct


class Handled(NamedTuple):
    """A field that a line of generated source handles."""

    path: str  # "topics.partitions.index"
    expression: str = ""  # its value, in terms of the function's variables
    code: str = ""  # of `struct`


class SourceWriter:
    """Lines of a function, what they handle, and the names they use."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {}
        self._lines: list[str] = []
        self._handled: list[tuple[Handled, ...]] = []
        self._indent = ""
        self._variables = 0

    def line(self, text: str, *handled: Handled) -> None:
        self._lines.append(self._indent + text)
        self._handled.append(handled)

    @contextmanager
    def indented(self) -> Iterator[None]:
        outer = self._indent
        self._indent += " "
        yield
        self._indent = outer

    def variable(self, prefix: str) -> str:
        """Return a name that nothing else in the function has."""
        self._variables += 1
        return f"{prefix}{self._variables}"

    def use(self, name: str, value: Any) -> str:
        """Make a value known to the function under a name, and return the name."""
        self.names[name] = value
        return name

    def use_class(self, cls: type[Struct]) -> str:
        return self.use(cls.__name__, cls)

    @property
    def text(self) -> str:
        return "\n".join(self._lines)

    def handled_by(self, line_number: int) -> tuple[Handled, ...]:
        """Return the fields of a line, or of the nearest annotated one above it."""
        for handled in reversed(self._handled[:line_number]):
            if handled:
                return handled
        return (Handled("(start)"),)

    def compile(self, title: str, function: str) -> Callable[..., Any]:
        exec(compile(self.text, f"<{title}>", "exec"), self.names)
        compiled: Callable[..., Any] = self.names[function]
        return compiled


def compile_decoder(message: type[Message], version: int) -> Decoder[Any]:
    """Return `decode(buffer, offset) -> message` for one version."""
    from mpbroker.protocol.codec_decode import write_decoder

    source = write_decoder(message, version)
    title = f"{message.__name__} v{version}"

    def explain(error: Exception, position: int, end: int) -> ProtocolError:
        handled = source.handled_by(_raising_line(error.__traceback__))
        path = handled[0].path
        reason = str(error)
        if isinstance(error, LayoutError):
            path, reason = _first_field_cut_off(handled, position, end)
        elif isinstance(error, IndexError):
            reason = "the bytes end here"
        return ProtocolError(f"{title}: {path} at byte {position} of {end}: {reason}")

    source.use("explain", explain)
    return source.compile(f"{title} decode", "decode")


def compile_encoder(message: type[Message], version: int) -> Encoder[Any]:
    """Return `encode(message) -> parts` for one version."""
    from mpbroker.protocol.codec_encode import write_encoder

    source = write_encoder(message, version)
    title = f"{message.__name__} v{version}"

    def explain(error: Exception, variables: dict[str, Any]) -> ProtocolError:
        handled = source.handled_by(_raising_line(error.__traceback__))
        path, reason = handled[0].path, str(error)
        if isinstance(error, LayoutError):
            path, reason = _first_unfit_value(handled, variables, reason)
        return ProtocolError(f"{title}: cannot encode {path}: {reason}")

    source.use("explain", explain)
    return source.compile(f"{title} encode", "encode")


def _raising_line(traceback: TracebackType | None) -> int:
    # The first entry is the generated function itself, whatever it called.
    return traceback.tb_lineno if traceback else 0


def _first_field_cut_off(
    handled: tuple[Handled, ...], position: int, end: int
) -> tuple[str, str]:
    for row in handled:
        size = Layout(">" + row.code).size
        if size > end - position:
            return row.path, f"needs {size} bytes, {max(0, end - position)} left"
        position += size
    return handled[0].path, "the bytes end here"


def _first_unfit_value(
    handled: tuple[Handled, ...], variables: dict[str, Any], reason: str
) -> tuple[str, str]:
    for row in handled:
        value = eval(row.expression, {}, variables) if row.expression else 0
        try:
            Layout(">" + row.code).pack(value)
        except LayoutError as error:
            return row.path, f"{value!r}: {error}"
    return handled[0].path, reason


def compile_constructor(cls: type[Struct]) -> Callable[..., None]:
    """Return an `__init__` with a keyword argument and a default for every field."""
    source = SourceWriter()
    source.use("UNSET", UNSET)
    arguments = []
    values = []
    for row in cls.__fields__:
        value = row.name
        fresh = row.fresh_default
        if fresh is None:
            arguments.append(f"{row.name}={row.default!r}")
        else:
            arguments.append(f"{row.name}=UNSET")
            made = "[]" if fresh == "list" else f"{_class_of(source, row.struct)}()"
            value = f"{made} if {row.name} is UNSET else {row.name}"
        values.append(f"self.{row.name} = {value}")
    keywords = f", *, {', '.join(arguments)}" if arguments else ""
    source.line(f"def __init__(self{keywords}):")
    with source.indented():
        for text in values or ["pass"]:
            source.line(text)
    return source.compile(f"{cls.__name__} constructor", "__init__")


def _class_of(source: SourceWriter, cls: type[Struct] | None) -> str:
    assert cls is not None  # only structs have a fresh default besides lists
    return source.use_class(cls)
