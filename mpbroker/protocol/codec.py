"""Generate decoding and encoding functions from the tables of fields in messages.

Each function is Python source that is written and compiled when it is first used.
Nested structs are written out in place, neighbouring fields of fixed size become one
`struct` call, and fields that a version does not have cost nothing. An error names the
field that was wrong: see `source_writer`.

Source: Kafka protocol guide, "Protocol Primitive Types"; KIP-482 for compact lengths
and tagged fields.
"""

from __future__ import annotations

from struct import Struct as Layout
from struct import error as LayoutError
from types import TracebackType
from typing import Any

from mpbroker.protocol.errors import ProtocolError, TooManyElementsError
from mpbroker.protocol.fields import Decoder, Encoder, Struct
from mpbroker.protocol.source_writer import Handled


def compile_decoder(
    message: type[Struct],
    version: int,
    *,
    flexible: bool,
    ignores_rest: bool,
    max_elements: int | None = None,
) -> Decoder[Any]:
    """Return a function that decodes one version of a message.

    The function is `decode(buffer, offset) -> message`.

    Args:
        message: the class of the message, with its table of fields.
        version: the version of the API.
        flexible: whether the version has compact lengths and tagged fields.
        ignores_rest: ignore bytes behind the message instead of refusing them.
        max_elements: the most elements that all arrays of a message may have together,
            and tagged fields with them; None: as many as the bytes hold, and strings of
            any length.
    """
    from mpbroker.protocol.codec_decode import write_decoder

    source = write_decoder(message, version, flexible, ignores_rest, max_elements)
    title = f"{message.__name__} v{version}"

    def explain(error: Exception, position: int, end: int) -> ProtocolError:
        handled = source.handled_by(_raising_line(error.__traceback__))
        path = handled[0].path
        reason = str(error)
        if isinstance(error, LayoutError):
            path, reason = _first_field_cut_off(handled, position, end)
        elif isinstance(error, IndexError):
            reason = "the bytes end here"
        reason = f"{title}: {path} at byte {position} of {end}: {reason}"
        if isinstance(error, TooManyElementsError):
            return TooManyElementsError(reason, error.partial)
        return ProtocolError(reason)

    source.use("explain", explain)
    return source.compile(f"{title} decode", "decode")


def compile_encoder(
    message: type[Struct], version: int, *, flexible: bool
) -> Encoder[Any]:
    """Return a function that encodes one version of a message; see compile_decoder().

    The function is `encode(message) -> parts`. The parts are a list of bytes to be
    joined; records may be objects other than bytes.
    """
    from mpbroker.protocol.codec_encode import write_encoder

    source = write_encoder(message, version, flexible)
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
    # The first entry is a line of the generated function; functions that it called are
    # further down.
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
