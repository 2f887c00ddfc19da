"""Write the reference of the Python API, made of the docstrings of what is public.

The names are those of `mpbroker` and `mpbroker.extensions`. The site (deploy/site.py)
has the page.

Source: Google's Python style guide, "Comments and Docstrings", for the sections.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from enum import Enum
from typing import Any, Final

import mpbroker
from deploy.manuals import escaped
from mpbroker import extensions

CLIENTS: Final = (
    "Producer",
    "Consumer",
    "ShareConsumer",
    "AdminClient",
    "AsyncProducer",
    "AsyncConsumer",
    "AsyncAdminClient",
)
_SECTION: Final = re.compile(r"(Args|Attributes|Raises|Returns|Yields|Source):$")
_ITEM: Final = re.compile(r"    ([\w., *]+): (.*)$")


def python_reference() -> str:
    """Return all public names with their signatures and docstrings."""
    names = [name for name in mpbroker.__all__ if name != "__version__"]
    found = {name: getattr(mpbroker, name) for name in names}
    rest = sorted(found.keys() - set(CLIENTS))
    errors = [name for name in rest if _is_error(found[name])]
    others = [name for name in rest if name not in errors]
    lines = ["# Python API", ""]
    lines += ["Made from the docstrings of what `mpbroker` exports.", ""]
    for title, part in (("Clients", CLIENTS), ("Data", others), ("Errors", errors)):
        lines += [f"## {title}", ""]
        for name in part:
            lines += _name(name, found[name])
    lines += ["## Plug-ins of a broker", "", *_docstring(extensions)]
    for name in sorted(set(extensions.__all__) - set(names)):
        lines += _name(name, getattr(extensions, name))
    return "\n".join(lines)


def public_methods(one: type) -> Iterator[tuple[str, Any]]:
    """Yield the name of each public method and property of a class, and itself."""
    for name in dir(one):
        if name.startswith("_"):
            continue
        # Those of tuple and Exception are Python's.
        home = next(each for each in one.__mro__ if name in vars(each))
        method = inspect.getattr_static(one, name)
        is_method = inspect.isfunction(getattr(one, name, None))
        if _is_ours(home) and (is_method or isinstance(method, property)):
            yield name, method


def _is_error(one: object) -> bool:
    return isinstance(one, type) and issubclass(one, Exception)


def _name(name: str, one: Any) -> Iterator[str]:
    yield from (f"### {name}", "")
    if not isinstance(one, type):
        if inspect.isfunction(one):
            yield from (*_signature(name, one), *_docstring(one))
        else:
            yield from (f"`{name} = {one!r}`", "")
        return
    if issubclass(one, Enum):
        yield from _docstring(one)
        values = ", ".join(f"`{each.name}`" for each in one)
        yield from (f"Values: {values}", "")
    elif _is_error(one):
        yield from _docstring(one)
        yield from (f"A kind of `{one.__mro__[1].__name__}`.", "")
    else:
        yield from (*_signature(name, one), *_docstring(one))
        if _is_ours(one.__init__) and one.__init__.__doc__:
            yield from _docstring(one.__init__)
    for below, method in public_methods(one):
        yield from (f"#### {name}.{below}", "")
        if isinstance(method, property):
            yield from _docstring(method)
        else:
            called = getattr(one, below)
            yield from (*_signature(f"{name}.{below}", called), *_docstring(called))


def _is_ours(one: object) -> bool:
    return getattr(one, "__module__", "").startswith("mpbroker")


class _Text:
    """An annotation that is shown as it is written."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def _signature(name: str, one: Any) -> Iterator[str]:
    try:
        signature = inspect.signature(one)
    except ValueError:  # a class that nobody but mpbroker makes
        return

    def shown(annotation: Any) -> Any:
        return _Text(annotation) if isinstance(annotation, str) else annotation

    parameters = [
        each.replace(annotation=shown(each.annotation))
        for each in signature.parameters.values()
        if each.name != "self"
    ]
    returned = shown(signature.return_annotation)
    if isinstance(one, type):
        returned = inspect.Signature.empty
    text = str(signature.replace(parameters=parameters, return_annotation=returned))
    prefix = "await " if inspect.iscoroutinefunction(one) else ""
    yield from ("```python", f"{prefix}{name}{text}", "```", "")


def _docstring(one: object) -> Iterator[str]:
    """Yield a docstring as Markdown: its sections as lists, its examples as code."""
    text = re.sub(r"``(.+?)``", r"`\1`", inspect.getdoc(one) or "")
    is_item = False
    for block in re.split(r"\n\s*\n", text):
        lines = block.splitlines()
        if lines and _SECTION.match(lines[0]):
            yield from (f"**{lines[0]}**", "")
            yield from _items(lines[1:])
            is_item = True
        elif lines and all(line.startswith("    ") for line in lines) and not is_item:
            yield from ("```python", *(line[4:] for line in lines), "```")
        elif lines:
            yield escaped(" ".join(line.strip() for line in lines))
        yield ""


def _items(lines: list[str]) -> Iterator[str]:
    """Yield the items of a section, each in one line."""
    items: list[str] = []
    for line in lines:
        found = _ITEM.match(line)
        if found:
            items.append(f"- `{found[1]}`: {escaped(found[2])}")
        elif items:
            items[-1] += f" {escaped(line.strip())}"
        else:
            items.append(escaped(line.strip()))
    yield from items
