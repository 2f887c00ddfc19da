"""Parse delimiters and other strings as kcat spells them: `\\n`, `\\t`, `\\x1f`."""

from __future__ import annotations

import re
from typing import Final

import click

_ESCAPES: Final = {
    "n": b"\n",
    "r": b"\r",
    "t": b"\t",
    "0": b"\0",
    "\\": b"\\",
}
_TOKEN: Final = re.compile(r"\\x([0-9a-fA-F]{2})|\\(.?)|([^\\]+)", re.DOTALL)


def unescape(text: str) -> bytes:
    """Return the bytes of ``text``, which may hold \\n \\r \\t \\0 \\\\ and \\xNN.

    Raises:
        ValueError: an escape is none of these; the text names it.
    """
    out = bytearray()
    for match in _TOKEN.finditer(text):
        digits, escape, plain = match.groups()
        if digits is not None:
            out.append(int(digits, 16))
        elif plain is not None:
            out += plain.encode("utf-8", "surrogateescape")
        elif escape in _ESCAPES:
            out += _ESCAPES[escape]
        else:
            raise ValueError(
                f"\\{escape} is not an escape; there are \\n \\r \\t \\0 \\\\ \\xNN"
            )
    return bytes(out)


def parse_delimiter(text: str) -> bytes:
    """Return the bytes of a delimiter, which may have escapes; for click's ``type=``.

    Raises:
        click.BadParameter: the delimiter is empty, or has an unknown escape.
    """
    try:
        delimiter = unescape(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    if not delimiter:
        raise click.BadParameter("a delimiter has at least one byte")
    return delimiter
