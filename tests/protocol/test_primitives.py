"""Varints and tagged-field sections."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpbroker.protocol.codec_decode import read_long_varint
from mpbroker.protocol.codec_encode import varint
from mpbroker.protocol.errors import ProtocolError
from mpbroker.protocol.primitives import (
    AS_JAVA,
    read_unsigned_varint,
    read_varint,
    skip_tagged_fields,
    write_unsigned_varint,
    write_varint,
)


@pytest.mark.parametrize(
    ("value", "encoded"),
    [
        (0, b"\0"),
        (1, b"\1"),
        (127, b"\x7f"),
        (128, b"\x80\x01"),
        (300, b"\xac\x02"),
        (16_383, b"\xff\x7f"),
        (16_384, b"\x80\x80\x01"),
        (2_097_151, b"\xff\xff\x7f"),
        (2_097_152, b"\x80\x80\x80\x01"),
        (0xFFFF_FFFF, b"\xff\xff\xff\xff\x0f"),
    ],
)
def test_unsigned_varints_have_known_bytes(value: int, encoded: bytes) -> None:
    assert write_unsigned_varint(value) == varint(value) == encoded
    assert read_unsigned_varint(b"?" + encoded, 1) == (value, 1 + len(encoded))
    if len(encoded) > 1:
        assert read_long_varint(encoded, 1, encoded[0]) == (value, len(encoded))


@pytest.mark.parametrize(
    ("value", "encoded"),
    [(0, b"\0"), (-1, b"\1"), (1, b"\2"), (-64, b"\x7f"), (64, b"\x80\x01")],
)
def test_signed_varints_zig_zag(value: int, encoded: bytes) -> None:
    assert zig_zag(value) == encoded
    assert read_varint(encoded, 0) == (value, len(encoded))


def zig_zag(value: int) -> bytes:
    out = bytearray()
    write_varint(out, value)
    return bytes(out)


@given(st.integers(0, 0xFFFF_FFFF))
def test_unsigned_varints_come_back(value: int) -> None:
    encoded = write_unsigned_varint(value)
    assert varint(value) == encoded
    assert read_unsigned_varint(memoryview(encoded), 0) == (value, len(encoded))


@given(st.integers(-(2**31), 2**31 - 1), st.integers(-(2**63), 2**63 - 1))
def test_signed_varints_come_back(small: int, large: int) -> None:
    assert read_varint(zig_zag(small), 0)[0] == small
    assert read_varint(zig_zag(large), 0, 64)[0] == large


@pytest.mark.parametrize("value", [-1, 2**32])
def test_values_that_do_not_fit_are_refused(value: int) -> None:
    with pytest.raises(ProtocolError, match=str(value)):
        write_unsigned_varint(value)


def test_a_varint_of_more_than_32_bits_is_refused() -> None:
    for encoded in (b"\xff\xff\xff\xff\x10", b"\x80" * 5 + b"\1", b"\x80" * 500):
        with pytest.raises(ProtocolError, match="32 bits"):
            read_unsigned_varint(encoded, 0)


def test_a_varint_cut_off_by_the_end_is_refused() -> None:
    with pytest.raises(ProtocolError, match="cut off"):
        read_unsigned_varint(b"\x80\x80", 0)
    with pytest.raises(ProtocolError, match="cut off"):
        read_unsigned_varint(b"", 0)


@given(st.binary(max_size=40), st.integers(0, 45))
def test_any_bytes_are_a_value_or_a_protocol_error(data: bytes, position: int) -> None:
    with suppress(ProtocolError):
        assert read_unsigned_varint(data, position)[1] <= len(data)
    with suppress(ProtocolError):
        assert position < skip_tagged_fields(data, position) <= len(data)


@given(
    st.lists(
        st.tuples(st.integers(0, 0xFFFF_FFFF), st.binary(max_size=200)),
        max_size=5,
    )
)
def test_tagged_fields_are_skipped_to_their_end(
    fields: list[tuple[int, bytes]],
) -> None:
    section = write_unsigned_varint(len(fields))
    for tag, data in fields:  # in any order, and twice, too
        section += write_unsigned_varint(tag) + write_unsigned_varint(len(data)) + data
    assert skip_tagged_fields(b"??" + section + b"!!", 2) == 2 + len(section)


@pytest.mark.parametrize(
    "section",
    [
        b"",
        b"\1",
        b"\1\0",
        b"\1\0\1",  # one byte announced, none there
        b"\xff\xff\xff\xff\x0f\0\0",
        b"\1\0\xff\xff\xff\xff\x0f",
    ],
)
def test_malformed_tagged_fields_are_refused(section: bytes) -> None:
    with pytest.raises(ProtocolError):
        skip_tagged_fields(section, 0)


# As new String(bytes, UTF_8) of Java 17 has them.
JAVA_TEXTS = [
    ("66fc72", "f\ufffdr"),
    ("eda080", "\ufffd"),
    ("eda0", "\ufffd"),
    ("eda08061", "\ufffda"),
    ("edbfbfedbfbf", "\ufffd\ufffd"),
    ("ede1", "\ufffd\ufffd"),
    ("ed9f", "\ufffd"),
    ("61ed", "a\ufffd"),
    ("c080", "\ufffd\ufffd"),
    ("e08080", "\ufffd\ufffd\ufffd"),
    ("e28241", "\ufffdA"),
    ("f09f98", "\ufffd"),
    ("f09f9841", "\ufffdA"),
    ("f4908080", "\ufffd\ufffd\ufffd\ufffd"),
    ("ff61fe", "\ufffda\ufffd"),
]


@pytest.mark.parametrize(("sent", "read"), JAVA_TEXTS)
def test_bytes_that_are_not_utf_8_are_replaced_as_by_java(sent: str, read: str) -> None:
    assert bytes.fromhex(sent).decode("utf-8", AS_JAVA) == read


@given(st.binary(max_size=40))
def test_any_bytes_are_a_string(data: bytes) -> None:
    text = data.decode("utf-8", AS_JAVA)
    assert len(text.encode()) <= 3 * len(data)
    if b"\xed" not in data:
        assert text == data.decode("utf-8", "replace")
