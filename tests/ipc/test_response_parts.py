"""Lists of parts: what a handler writes, the processor reads."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpbroker.ipc.errors import DamagedSegmentError
from mpbroker.ipc.response_parts import (
    BytesPart,
    FilePart,
    parts_size_bytes,
    read_parts,
    write_parts,
)
from mpbroker.ipc.segment import Segment

part = st.one_of(
    st.binary(min_size=1, max_size=50),
    st.builds(
        FilePart,
        path=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30),
        file_id=st.integers(1, 2**62),
        position=st.integers(0, 2**40),
        length=st.integers(1, 2**31),
    ),
)


@pytest.fixture(scope="module")
def arena():
    made = Segment.create("parts-test", 1 << 16)
    yield made
    os.close(made.fd)


@given(parts=st.lists(part, max_size=12), page=st.integers(0, 7))
def test_parts_come_back_as_they_were_written(arena, parts, page):
    offset = page * 4096
    size = parts_size_bytes(parts)
    end = offset + size
    arena.view[end : end + 16] = b"z" * 16
    table, total = write_parts(arena, offset, parts)
    read = read_parts(arena, table)
    assert total == sum(p.length if isinstance(p, FilePart) else len(p) for p in parts)
    assert [
        bytes(arena.view[p.offset : p.offset + p.length])
        if isinstance(p, BytesPart)
        else p
        for p in read
    ] == parts
    # Not a byte more than was asked for.
    assert bytes(arena.view[end : end + 16]) == b"z" * 16


@pytest.mark.parametrize("count", [-1, 1 << 20, 1 << 62])
def test_a_count_that_cannot_be_true_is_an_error_before_it_is_believed(arena, count):
    arena.words[0] = count
    with pytest.raises(DamagedSegmentError, match=str(count)):
        read_parts(arena, 0)
