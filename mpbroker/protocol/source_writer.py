"""SourceWriter: the source of one generated function, line by line.

The functions decode or encode messages. Every line has a note of the message fields
that it handles. A function has one ``except``, which finds the field that was wrong by
the number of the line that raised the error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mpbroker.base.named_tuple import NamedTuple


class Handled(NamedTuple):
    """A field of a message that a line of generated source handles.

    Attributes:
        path: the names of the field and its parents: "topics.partitions.index".
        expression: an expression for its value, with the function's variables.
        code: its code in the module `struct`, if its size is fixed.
    """

    path: str
    expression: str = ""
    code: str = ""


class SourceWriter:
    """The source of a function that is generated line by line, and then compiled.

    Attributes:
        names: the values that the function uses, by name.
    """

    def __init__(self) -> None:
        self.names: dict[str, Any] = {}
        self._lines: list[str] = []
        self._handled: list[tuple[Handled, ...]] = []
        self._indent = ""
        self._variables = 0

    def line(self, text: str, *handled: Handled) -> None:
        """Append a line to the source, and note the message fields that it handles."""
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
        """Return a name for a variable that the function does not have yet."""
        self._variables += 1
        return f"{prefix}{self._variables}"

    def use(self, name: str, value: Any) -> str:
        """Make a value a global of the generated function; return its name."""
        self.names[name] = value
        return name

    def use_class(self, cls: type) -> str:
        """Make a class a global of the generated function; return its name."""
        return self.use(cls.__name__, cls)

    @property
    def text(self) -> str:
        """Return the source of the function."""
        return "\n".join(self._lines)

    def handled_by(self, line_number: int) -> tuple[Handled, ...]:
        """Return the message fields that a line of the source handles.

        If it handles none, they are those of the nearest line above that handles some.
        """
        for handled in reversed(self._handled[:line_number]):
            if handled:
                return handled
        return (Handled("(start)"),)

    def compile(self, title: str, function: str) -> Callable[..., Any]:
        """Compile the source and return its function.

        Args:
            title: the name of the source in tracebacks.
            function: the name of the function.
        """
        exec(compile(self.text, f"<{title}>", "exec"), self.names)
        compiled: Callable[..., Any] = self.names[function]
        return compiled
