"""Generate the Python source of functions that decode messages.

The generated functions read bytes of a peer, which may be hostile. So they have these
rules:

- A count or length is compared with the number of bytes left before an object is made
  or a loop begins. A count is multiplied by the smallest size of an element first.
- A position only grows. The end of a slice is compared with the end of the buffer
  first, because Python would silently return a shorter slice.
- What Kafka ignores is ignored, as long as no byte is read in two ways by it: bytes
  behind a request, tags that are not ascending or come twice (the last one counts),
  and any negative length for null where null is allowed. A known tagged field whose
  size is not its own is refused: Kafka goes on behind the field, and the next reader
  might go on behind its size.
- A read beyond the end raises `struct.error` or `IndexError`, and the function raises
  `ProtocolError` instead.

Source: Kafka protocol guide, "Protocol Primitive Types"; KIP-482 for compact lengths
and tagged fields.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from struct import Struct as Layout
from struct import calcsize, unpack_from
from struct import error as LayoutError
from typing import Final

from mpbroker.protocol.errors import ProtocolError, TooManyElementsError
from mpbroker.protocol.fields import BYTES, RECORDS, STRING, Field, Struct
from mpbroker.protocol.primitives import (
    AS_JAVA,
    MAX_TAGGED_FIELDS,
    SHORT_TEXT,
    Buffer,
    read_unsigned_varint,
    skip_tagged_fields,
)
from mpbroker.protocol.source_writer import Handled, SourceWriter

# For short loops: to make a range() and its iterator takes 0.1 us, to look up one of
# these tuples takes less.
_ROUNDS: Final = tuple((None,) * count for count in range(9))
# Arrays of fewer numbers than this have a prepared `struct` format for their length.
_SHORT_ARRAY: Final = 16
_MAX_STRING: Final = 0x7FFF
# Kafka closes a connection whose request has an array of more elements. Source: the
# code that Kafka 4.4's MessageDataGenerator makes.
MAX_ARRAY_ELEMENTS: Final = 1_000_000


def read_long_varint(buffer: Buffer, position: int, first: int) -> tuple[int, int]:
    """Read the rest of an unsigned varint of two bytes or more.

    Args:
        buffer: the bytes.
        position: the position of the varint's second byte.
        first: its first byte, 0x80 or above.

    Returns:
        The value, and the position behind the varint.
    """
    second = buffer[position]
    if second < 0x80:
        return first - 0x80 + (second << 7), position + 1
    third = buffer[position + 1]
    if third < 0x80:
        return first - 0x4080 + (second << 7) + (third << 14), position + 2
    return read_unsigned_varint(buffer, position - 1)


def skip_tags(buffer: Buffer, position: int) -> tuple[int, int]:
    """Skip a section of tagged fields in a message.

    Args:
        buffer: the bytes.
        position: the position behind the section's first byte, which is already read.

    Returns:
        The number of fields, and the position behind the section.
    """
    count, _ = read_unsigned_varint(buffer, position - 1)
    return count, skip_tagged_fields(buffer, position - 1)


def too_many(count: int, most: int, partial: object) -> ProtocolError:
    """Return the error for an array by which a request has too many elements.

    Args:
        count: the elements of this array.
        most: how many all arrays of the request may have.
        partial: the request, as far as it was decoded.
    """
    if count > MAX_ARRAY_ELEMENTS:
        return ProtocolError(f"an array of {count} elements")
    return TooManyElementsError(f"more than {most} elements in its arrays", partial)


def write_decoder(
    message: type[Struct],
    version: int,
    flexible: bool,
    ignores_rest: bool,
    max_elements: int | None = None,
) -> SourceWriter:
    """Write the source of `decode(b, p)`, which reads a message from p to the end of b.

    The arguments are those of compile_decoder().
    """
    return _DecodeWriter(message, version, flexible, ignores_rest, max_elements).write()


class _DecodeWriter:
    """Generates the Python source of one decoding function.

    The variables in the source are: b, the buffer; v, a memoryview of it; p, the
    position; end, the length of the buffer; n, a count or length; q, the end of a
    slice; t, the number of tagged fields; left, the elements that arrays may still
    have; o1, o2, ..., structs; a1, a2, ..., arrays.
    """

    def __init__(
        self,
        message: type[Struct],
        version: int,
        flexible: bool,
        ignores_rest: bool,
        max_elements: int | None,
    ) -> None:
        self._max_elements = max_elements
        self._message = message
        self._version = version
        self._flexible = flexible
        self._ignores_rest = ignores_rest
        self._viewed = self._has_views(message)
        self._source = SourceWriter()
        self._line = self._source.line
        # Fixed-size reads not yet written: code, target, path.
        self._run: list[tuple[str, str, str]] = []

    def write(self) -> SourceWriter:
        source = self._source
        # In flexible versions lengths are compact: n is one more than the length.
        rounds = ((), *_ROUNDS) if self._flexible else _ROUNDS
        text = (None, *SHORT_TEXT) if self._flexible else SHORT_TEXT
        names = {
            "ROUNDS": rounds,
            "TEXT": text,
            "new": object.__new__,
            "ProtocolError": ProtocolError,
            "FAULTS": (LayoutError, IndexError, UnicodeDecodeError, ProtocolError),
            "read_long_varint": read_long_varint,
            "read_unsigned_varint": read_unsigned_varint,
            "skip_tags": skip_tags,
            "too_many": too_many,
            "unpack_from": unpack_from,
        }
        source.names.update(names)
        self._line("def decode(b, p):")
        with source.indented():
            self._line("end = len(b)")
            if self._max_elements is not None:
                self._line(f"left = {self._max_elements}")
            if self._viewed:
                self._line("v = b if type(b) is memoryview else memoryview(b)")
            else:  # one copy as bytes makes every slice for a string cheaper
                self._line("if type(b) is not bytes:")
                self._line(" b = b.tobytes() if type(b) is memoryview else bytes(b)")
            self._line("try:")
            with source.indented():
                self._struct(self._message, "o", "")
                self._flush()
                if not self._ignores_rest:
                    self._line("if p != end:")
                    self._line(
                        ' raise ProtocolError(f"{end - p} bytes too many")',
                        Handled("(end)"),
                    )
                self._line("return o")
            self._line("except FAULTS as error:")
            self._line(" raise explain(error, p, end) from None")
        return source

    def _has_views(self, cls: type[Struct]) -> bool:
        return any(
            row.kind in (BYTES, RECORDS)
            or (row.struct is not None and self._has_views(row.struct))
            for row in cls.__fields__
        )

    # -- runs of fixed size ------------------------------------------------------

    def _flush(self) -> None:
        """Generate the line that reads all pending fields of fixed size.

        They are neighbours, so one `struct` call reads them.
        """
        if not self._run:
            return
        run, self._run = self._run, []
        codes = "".join(code for code, _, _ in run)
        handled = [Handled(path, code=code) for code, _, path in run]
        if codes == "B":
            self._line(f"{run[0][1]} = b[p]", *handled)
        else:
            layout = Layout(">" + codes)
            unpack = "unpack_" + codes.replace("?", "_")
            self._source.use(unpack, layout.unpack_from)
            targets = "".join(f"{target}, " for _, target, _ in run)
            self._line(f"{targets}= {unpack}(b, p)", *handled)
        self._line(f"p += {calcsize('>' + codes)}")

    # -- structs -----------------------------------------------------------------

    def _struct(self, cls: type[Struct], var: str, path: str) -> None:
        self._line(f"{var} = new({self._source.use_class(cls)})")
        present = [row for row in cls.__fields__ if row.present_in(self._version)]
        tagged = [row for row in present if row.tag is not None]
        for row in cls.__fields__:
            if row not in present or row in tagged:
                self._default(row, f"{var}.{row.name}")
        for row in present:
            if row.tag is None:
                self._field(row, f"{var}.{row.name}", path + row.name)
        if self._flexible:
            self._tags(tagged, var, path)

    def _default(self, row: Field, target: str) -> None:
        fresh = row.fresh_default
        if fresh is None:
            self._line(f"{target} = {row.default!r}")
        elif fresh == "list":
            self._line(f"{target} = []")
        else:
            assert row.struct is not None
            self._line(f"{target} = {self._source.use_class(row.struct)}()")

    def _tags(self, tagged: list[Field], var: str, path: str) -> None:
        where = Handled(path + "(tagged fields)")
        self._run.append(("B", "t", where.path))
        self._flush()
        self._line("if t:")
        if not tagged:
            self._line(" t, p = skip_tags(b, p)", where)
            self._count_tags(where)
            return
        variable = self._source.variable
        stop, tag = variable("stop"), variable("tag")
        with self._source.indented():
            self._line("if t > 127:")
            self._line(" t, p = read_long_varint(b, p, t)", where)
            self._line(f"if t > {MAX_TAGGED_FIELDS}:")
            self._line(' raise ProtocolError(f"{t} tagged fields")', where)
        self._count_tags(where)
        with self._source.indented():
            self._line("for _ in range(t):")
            with self._source.indented():
                self._line(f"{tag}, p = read_unsigned_varint(b, p)", where)
                self._line("n, p = read_unsigned_varint(b, p)", where)
                self._line("if n > end - p:")
                self._line(
                    f' raise ProtocolError(f"tag {{{tag}}} of {{n}} bytes with '
                    '{end - p} left")'
                )
                self._line(f"{stop} = p + n")
                for row in tagged:
                    self._line(f"if {tag} == {row.tag}:")
                    with self._source.indented():
                        self._field(row, f"{var}.{row.name}", path + row.name)
                        self._flush()
                        self._line(f"if p != {stop}:")
                        self._line(
                            f' raise ProtocolError(f"tagged field ends at byte {{p}}, '
                            f'its size says {{{stop}}}")',
                            Handled(path + row.name),
                        )
                self._line(f"p = {stop}")

    def _count_tags(self, where: Handled) -> None:
        if self._max_elements is not None:
            self._line(" left -= t")
            self._line(" if left < 0:")
            self._line(f"  raise too_many(t, {self._max_elements}, o)", where)

    # -- fields ------------------------------------------------------------------

    def _field(self, row: Field, target: str, path: str) -> None:
        nullable = row.nullable_in(self._version)
        if row.is_array:
            self._array(row, target, path, nullable)
        elif row.struct is not None:
            self._nested(row.struct, target, path, nullable)
        elif not row.code:
            self._sized(row, target, path, nullable)
        else:
            self._run.append((row.code, target, path))

    def _nested(
        self, cls: type[Struct], target: str, path: str, nullable: bool
    ) -> None:
        inner = self._source.variable("o")
        if not nullable:
            self._struct(cls, inner, path + ".")
            self._flush()
            self._line(f"{target} = {inner}")
            return
        # An int8 precedes a nullable struct: -1 if it is null, 1 if it is present.
        self._run.append(("b", "n", path))
        self._flush()
        self._line("if n < 0:")
        self._line(f" {target} = None")
        self._line("else:")
        with self._source.indented():
            self._struct(cls, inner, path + ".")
            self._flush()
            self._line(f"{target} = {inner}")

    def _length(self, code: str, path: str) -> None:
        """Generate the lines of a decoder that read a length or count into ``n``.

        In flexible versions n is one more than the length, and 0 stands for null. In a
        request a string of more than 32,767 bytes is refused, as in Kafka: other
        versions and logs have an int16 for its length.
        """
        if not self._flexible:
            self._run.append((code, "n", path))
            self._flush()
            return
        self._run.append(("B", "n", path))
        self._flush()
        self._line("if n > 127:")
        self._line(" n, p = read_long_varint(b, p, n)", Handled(path))
        if code == "h" and self._max_elements is not None:
            self._line(f" if n > {_MAX_STRING + 1}:")
            self._line(
                '  raise ProtocolError(f"a string of {n - 1} bytes")', Handled(path)
            )

    @contextmanager
    def _unless_null(self, target: str, nullable: bool) -> Iterator[None]:
        if not nullable:
            yield
            return
        self._line("if not n:" if self._flexible else "if n < 0:")
        self._line(f" {target} = None")
        self._line("else:")
        with self._source.indented():
            yield

    def _sized(self, row: Field, target: str, path: str, nullable: bool) -> None:
        self._length("h" if row.kind is STRING else "i", path)
        length = "n - 1" if self._flexible else "n"
        if row.kind is not STRING:
            take = "v[p:q]"
        elif not self._viewed:
            take = f'b[p:q].decode("utf-8", "{AS_JAVA}")'
        else:
            take = (
                f'TEXT[n](b, p)[0].decode("utf-8", "{AS_JAVA}") '
                f'if n < {len(SHORT_TEXT)} else str(b[p:q], "utf-8", "{AS_JAVA}")'
            )
        with self._unless_null(target, nullable):
            self._line(f"q = p + {length}")
            self._line("if not p <= q <= end:")
            self._line(
                f' raise ProtocolError(f"length {{{length}}} with '
                '{end - p} bytes left")',
                Handled(path),
            )
            self._line(f"{target} = {take}", Handled(path))
            self._line("p = q")

    def _array(self, row: Field, target: str, path: str, nullable: bool) -> None:
        self._length("i", path)
        count = "(n - 1)" if self._flexible else "n"
        least = self._least_size(row)
        with self._unless_null(target, nullable):
            self._line(f"if not 0 <= {count} * {least} <= end - p:")
            self._line(
                f' raise ProtocolError(f"count {{{count}}} with '
                '{end - p} bytes left")',
                Handled(path),
            )
            if self._max_elements is not None:
                self._line(f"left -= {count}")
                self._line("if left < 0:")
                self._line(
                    f" raise too_many({count}, {self._max_elements}, o)", Handled(path)
                )
            if row.code:
                self._numbers(row, target, count)
                return
            items = self._source.variable("a")
            self._line(f"{target} = {items} = []")
            self._line(
                f"for _ in ROUNDS[n] if n < {len(_ROUNDS)} "
                f"else range({'1, ' if self._flexible else ''}n):"
            )
            with self._source.indented():
                if row.struct is not None:
                    inner = self._source.variable("o")
                    self._struct(row.struct, inner, path + ".")
                else:
                    inner = "x"
                    self._sized(row, inner, path, nullable=False)
                self._flush()
                self._line(f"{items}.append({inner})")

    def _numbers(self, row: Field, target: str, count: str) -> None:
        size = calcsize(">" + row.code)
        self._line(f"q = p + {count} * {size}")
        if row.code == "16s":
            self._line(f"{target} = [bytes(b[at:at + 16]) for at in range(p, q, 16)]")
        else:
            short = tuple(
                Layout(f">{length}{row.code}").unpack_from
                for length in range(_SHORT_ARRAY)
            )
            name = "numbers_" + row.code.replace("?", "_")
            self._source.use(name, (None, *short) if self._flexible else short)
            self._line(
                f"{target} = list({name}[n](b, p) if n < {_SHORT_ARRAY} "
                f'else unpack_from(f">{{{count}}}{row.code}", b, p))'
            )
        self._line("p = q")

    def _least_size(self, row: Field) -> int:
        """Return the smallest number of bytes that an element of an array can take."""
        if row.struct is None:
            code = row.code
            return calcsize(">" + code) if code else self._least_length(row)
        size = 1 if self._flexible else 0
        for inner in row.struct.__fields__:
            if not inner.present_in(self._version) or inner.tag is not None:
                continue
            if inner.is_array:
                size += 1 if self._flexible else 4
            elif inner.struct is not None:
                size += 1
            else:
                code = inner.code
                size += calcsize(">" + code) if code else self._least_length(inner)
        return max(1, size)

    def _least_length(self, row: Field) -> int:
        if self._flexible:
            return 1
        return 2 if row.kind is STRING else 4
