"""Generate the Python source of encoding functions; they return bytes to be joined.

Neighbouring fields of fixed size become one `struct` call; an empty section of tagged
fields is a pad byte in it. Neighbouring pieces are added to the list in one step.

Source: Kafka protocol guide, "Protocol Primitive Types"; KIP-482 for compact lengths
and tagged fields.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from struct import Struct as Layout
from struct import error as LayoutError
from struct import pack
from typing import Any, Final

from mpbroker.protocol.errors import ProtocolError
from mpbroker.protocol.fields import RECORDS, STRING, Field, Struct
from mpbroker.protocol.primitives import write_unsigned_varint
from mpbroker.protocol.source_writer import Handled, SourceWriter

# Arrays of fewer numbers than this have a prepared `struct` format for their length.
_SHORT_ARRAY: Final = 16
_ONE_BYTE: Final = tuple(bytes((value,)) for value in range(0x80))
_pack_two = Layout(">BB").pack
_pack_three = Layout(">BBB").pack


def varint(value: int) -> bytes:
    """Return a value as an unsigned varint; fastest for varints of up to 3 bytes."""
    if value < 0x80:
        return _ONE_BYTE[value]
    if value < 0x4000:
        return _pack_two(value & 0x7F | 0x80, value >> 7)
    if value < 0x20_0000:
        return _pack_three(value & 0x7F | 0x80, value >> 7 & 0x7F | 0x80, value >> 14)
    return write_unsigned_varint(value)


def size_of_region(value: Any) -> int:
    """Return the size of a records field in bytes.

    Args:
        value: the records: bytes, or an object with the attribute size_in_bytes.
    """
    if isinstance(value, (bytes, bytearray, memoryview)):
        return len(value)
    size: int = value.size_in_bytes
    return size


def write_encoder(message: type[Struct], version: int, flexible: bool) -> SourceWriter:
    """Generate the source of `encode(o)`, which returns the parts of the message.

    The arguments are those of compile_encoder().
    """
    return _EncodeWriter(message, version, flexible).write()


class _EncodeWriter:
    """Generates the Python source of one encoding function.

    A value passes three stages: pending values of fixed size, which become one `struct`
    call; pending expressions, which are added to the list in one step; and lines of
    source.
    """

    def __init__(self, message: type[Struct], version: int, flexible: bool) -> None:
        self._message = message
        self._version = version
        self._flexible = flexible
        self._source = SourceWriter()
        self._line = self._source.line
        # Code and value of fields of fixed size that are in no expression yet.
        self._run: list[tuple[str, Handled]] = []
        # Expressions that are in no line of source yet.
        self._pieces: list[str] = []
        self._handled: list[Handled] = []

    def write(self) -> SourceWriter:
        names = {
            "ProtocolError": ProtocolError,
            "FAULTS": (
                LayoutError,
                AttributeError,
                TypeError,
                UnicodeEncodeError,
                ProtocolError,
            ),
            "ONE_BYTE": _ONE_BYTE,
            "size_of_region": size_of_region,
            "pack": pack,
            "varint": varint,
        }
        self._source.names.update(names)
        self._line("def encode(o):")
        with self._source.indented():
            self._line("try:")
            with self._source.indented():
                self._line("parts = []")
                self._struct(self._message, "o", "")
                self._flush()
                self._line("return parts")
            self._line("except FAULTS as error:")
            self._line(" raise explain(error, locals()) from None")
        return self._source

    # -- stages ------------------------------------------------------------------

    def _fixed(self, code: str, value: str, path: str) -> None:
        self._run.append((code, Handled(path, value, code)))

    def _end_run(self, varint: str = "") -> None:
        """Turn the pending values of fixed size into one expression for the encoder.

        Most varints are below 128: then they are one more byte of the same call.

        Args:
            varint: the source of an expression for a varint that follows the values;
                "": none.
        """
        run, self._run = self._run, []
        self._handled += [handled for code, handled in run if code != "x"]
        codes = "".join(code for code, _ in run)
        values = ", ".join(handled.expression for code, handled in run if code != "x")
        if not varint:
            if values:
                self._pieces.append(f"{self._packer(codes)}({values})")
            elif codes:
                self._pieces.append(repr(bytes(len(codes))))
            return
        if not values:
            lead = f"{bytes(len(codes))!r} + " if codes else ""
            self._pieces.append(
                f"{lead}(ONE_BYTE[{varint}] if {varint} < 128 else varint({varint}))"
            )
            return
        short = f"{self._packer(codes + 'B')}({values}, {varint})"
        long = f"{self._packer(codes)}({values}) + varint({varint})"
        self._pieces.append(f"({short} if {varint} < 128 else {long})")

    def _packer(self, codes: str) -> str:
        name = "pack_" + codes.replace("?", "_")
        return self._source.use(name, Layout(">" + codes).pack)

    def _piece(self, expression: str, handled: Handled) -> None:
        self._pieces.append(expression)
        self._handled.append(handled)

    def _flush(self) -> None:
        """Generate the line of the encoder that adds everything pending to ``parts``.

        Pending are values and expressions that were not written to the source yet.
        """
        if self._run:
            self._end_run()
        pieces, self._pieces = self._pieces, []
        handled, self._handled = self._handled, []
        if len(pieces) == 1:
            self._line(f"parts.append({pieces[0]})", *handled)
        elif pieces:
            self._line(f"parts += ({', '.join(pieces)})", *handled)

    # -- structs -----------------------------------------------------------------

    def _struct(self, cls: type[Struct], var: str, path: str) -> None:
        tagged = []
        for row in cls.__fields__:
            value = f"{var}.{row.name}"
            if not row.present_in(self._version):
                if not row.ignorable:
                    self._refuse_unless_default(row, value, path + row.name)
            elif row.tag is not None:
                tagged.append(row)
            else:
                self._field(row, value, path + row.name)
        if self._flexible:
            if tagged:
                self._tags(tagged, var, path)
            else:
                self._run.append(("x", Handled(path)))

    def _refuse_unless_default(self, row: Field, value: str, path: str) -> None:
        self._line(f"if {self._differs(row, value)}:")
        self._line(
            f' raise ProtocolError(f"{{{value}!r}}, which this version cannot carry")',
            Handled(path),
        )

    def _differs(self, row: Field, value: str) -> str:
        """Return the source of a test whether a value differs from the default.

        The generated encoder leaves out tagged fields with their default, and refuses
        other values of a field that the version does not have.
        """
        if row.fresh_default == "list":
            return f"{value} != []" if row.is_nullable else value
        if row.struct is not None and not row.is_array:
            default = self._source.use(f"default_{row.struct.__name__}", row.struct())
            return f"{value} is not None and {value} != {default}"
        if row.default is None:
            return f"{value} is not None"
        if isinstance(row.default, bool):
            return f"not {value}" if row.default else value
        return f"{value} != {row.default!r}"

    def _tags(self, tagged: list[Field], var: str, path: str) -> None:
        variable = self._source.variable
        section, count, body = variable("t"), variable("c"), variable("b")
        conditions = [self._differs(row, f"{var}.{row.name}") for row in tagged]
        self._line(f"{section} = b'\\0'")
        self._line("if " + " or ".join(f"({text})" for text in conditions) + ":")
        with self._source.indented(), self._apart():
            self._line(f"{section} = []")
            self._line(f"{count} = 0")
            for row, condition in zip(tagged, conditions, strict=True):
                self._line(f"if {condition}:")
                with self._source.indented():
                    self._line("parts = []")
                    self._field(row, f"{var}.{row.name}", path + row.name)
                    self._flush()
                    self._line(f"{body} = b''.join(parts)", Handled(path + row.name))
                    self._line(f"{count} += 1")
                    self._line(
                        f"{section} += (varint({row.tag}), varint(len({body})), {body})"
                    )
            self._line(f"{section} = varint({count}) + b''.join({section})")
        self._end_run()
        self._pieces.append(section)

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """Let the lines generated in this context fill a ``parts`` list of their own.

        Values and expressions that are pending at the start stay pending for the outer
        list.
        """
        waiting = self._run, self._pieces, self._handled
        self._run, self._pieces, self._handled = [], [], []
        outer = self._source.variable("parts")
        self._line(f"{outer} = parts")
        yield
        self._line(f"parts = {outer}")
        self._run, self._pieces, self._handled = waiting

    # -- fields ------------------------------------------------------------------

    def _field(self, row: Field, value: str, path: str) -> None:
        nullable = row.nullable_in(self._version)
        if row.is_array:
            self._array(row, value, path, nullable)
        elif row.struct is not None:
            self._nested(row.struct, value, path, nullable)
        elif not row.code:
            self._sized(row, value, path, nullable)
        else:
            if row.code == "16s":  # `struct` would pad or cut it silently
                self._line(f"if len({value}) != 16:", Handled(path))
                self._line(
                    f' raise ProtocolError(f"a uuid of {{len({value})}} bytes")',
                    Handled(path),
                )
            self._fixed(row.code, value, path)

    def _nested(self, cls: type[Struct], value: str, path: str, nullable: bool) -> None:
        inner = self._source.variable("o")
        if not nullable:
            self._line(f"{inner} = {value}")
            self._struct(cls, inner, path + ".")
            return
        # An int8 precedes a nullable struct: -1 if it is null, 1 if it is present.
        self._flush()
        self._line(f"{inner} = {value}")
        self._line(f"if {inner} is None:")
        self._line(" parts.append(b'\\xff')")
        self._line("else:")
        with self._source.indented():
            self._pieces.append(repr(b"\1"))
            self._struct(cls, inner, path + ".")
            self._flush()

    def _length(self, code: str, length: str, path: str) -> None:
        if self._flexible:
            self._end_run(varint=length)
        else:
            self._fixed(code, length, path)

    def _sized(self, row: Field, value: str, path: str, nullable: bool) -> None:
        taken, length = self._source.variable("s"), self._source.variable("n")
        plus = " + 1" if self._flexible else ""
        handled = Handled(path, taken)
        indent = ""
        if nullable:
            self._line(f"{taken} = {value}", handled)
            self._line(f"if {taken} is None:")
            self._line(f" {taken} = b''")
            self._line(f" {length} = {0 if self._flexible else -1}")
            self._line("else:")
            indent = " "
            value = taken
        if row.kind is STRING:
            self._line(f"{indent}{taken} = {value}.encode()", handled)
        elif not nullable:
            self._line(f"{taken} = {value}", handled)
        measured = f"len({taken})"
        if row.kind is RECORDS:
            measured = (
                f"({measured} if type({taken}) is memoryview or type({taken}) is bytes "
                f"else size_of_region({taken}))"
            )
        self._line(f"{indent}{length} = {measured}{plus}", handled)
        self._length("h" if row.kind is STRING else "i", length, path)
        if self._run:
            self._end_run()
        self._piece(taken, handled)

    def _array(self, row: Field, value: str, path: str, nullable: bool) -> None:
        items, length = self._source.variable("a"), self._source.variable("n")
        plus = " + 1" if self._flexible else ""
        handled = Handled(path, items)
        indent = ""
        self._line(f"{items} = {value}", handled)
        if nullable:
            self._line(f"if {items} is None:")
            self._line(f" {items} = ()")
            self._line(f" {length} = {0 if self._flexible else -1}")
            self._line("else:")
            indent = " "
        self._line(f"{indent}{length} = len({items}){plus}", handled)
        self._length("i", length, path)
        if row.code == "16s":
            self._line(f"if any(len(x) != 16 for x in {items}):", handled)
            self._line(' raise ProtocolError("a uuid is not 16 bytes")', handled)
            self._flush()
            self._line(f"parts += {items}")
            return
        if row.code:
            self._flush()
            self._line(f"parts.append({self._numbers(row.code, items)})", handled)
            return
        self._flush()
        inner = self._source.variable("o")
        self._line(f"for {inner} in {items}:", handled)
        with self._source.indented():
            if row.struct is not None:
                self._struct(row.struct, inner, path + ".")
            else:
                self._sized(row, inner, path, nullable=False)
            self._flush()

    def _numbers(self, code: str, items: str) -> str:
        name = "numbers_" + code.replace("?", "_")
        short = tuple(Layout(f">{n}{code}").pack for n in range(_SHORT_ARRAY))
        self._source.use(name, short)
        return (
            f"{name}[len({items})](*{items}) if len({items}) < {_SHORT_ARRAY} "
            f"else pack(f'>{{len({items})}}{code}', *{items})"
        )
