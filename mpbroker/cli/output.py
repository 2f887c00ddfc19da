"""Text tables and JSON on stdout."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import orjson


def write_bytes(data: bytes) -> None:
    """Write bytes to stdout, after all text that was printed before."""
    sys.stdout.flush()
    sys.stdout.buffer.write(data)


def print_json(value: Any) -> None:
    """Write a value to stdout as an indented JSON document."""
    write_bytes(orjson.dumps(value, option=orjson.OPT_INDENT_2) + b"\n")


def print_json_line(value: Any) -> None:
    """Write a value to stdout as one line of JSON."""
    sys.stdout.buffer.write(orjson.dumps(value) + b"\n")


def print_table(heading: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write a table to stdout, in aligned columns; None is shown as a dash."""
    cells = [list(heading)]
    cells += [["-" if cell is None else str(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(heading))]
    for row in cells:
        line = "  ".join(
            cell.ljust(width) for cell, width in zip(row, widths, strict=True)
        )
        print(line.rstrip())
