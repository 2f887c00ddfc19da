"""SourceWriter: the source of one generated function, line by line.

Every line is annotated with the fields that it handles, so the one ``except`` of a
function can say which field was wrong from the number of the line that raised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple


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
        """Append a line, and note the fields that it handles."""
        self._lines.append(self._indent + text)
        self._handled.append(handled)

    @contextmanager
    def indented(self) -> Iterator[None]:
        """Indent the lines that are appended within the context."""
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

    def use_class(self, cls: type) -> str:
        """Make a class known to the function, and return its name."""
        return self.use(cls.__name__, cls)

    @property
    def text(self) -> str:
        """Return the source."""
        return "\n".join(self._lines)

    def handled_by(self, line_number: int) -> tuple[Handled, ...]:
        """Return the fields of a line, or of the nearest annotated one above it."""
        for handled in reversed(self._handled[:line_number]):
            if handled:
                return handled
        return (Handled("(start)"),)

    def compile(self, title: str, function: str) -> Callable[..., Any]:
        """Compile the source and return its function; tracebacks show the title."""
        exec(compile(self.text, f"<{title}>", "exec"), self.names)
        compiled: Callable[..., Any] = self.names[function]
        return compiled
