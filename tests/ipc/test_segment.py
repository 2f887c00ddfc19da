"""Anonymous segments: sized once, sparse, shared by fork."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator

import pytest

from mpbroker.ipc.segment import Segment
from tests.support.children import fork


@contextlib.contextmanager
def made(size_bytes: int) -> Iterator[Segment]:
    segment = Segment.create("segment-test", size_bytes)
    try:
        yield segment
    finally:
        os.close(segment.fd)


@pytest.mark.parametrize("size_bytes", [0, 4096, 1 << 30])
def test_nobody_can_change_the_size_of_a_segment(size_bytes):
    with made(8192) as segment:
        with pytest.raises(PermissionError):
            os.ftruncate(segment.fd, size_bytes)
        assert os.fstat(segment.fd).st_size == 8192


def test_a_segment_costs_nothing_until_it_is_touched():
    with made(1 << 36) as segment:
        assert os.fstat(segment.fd).st_blocks == 0
        segment.words[12345] = 1
        assert 0 < os.fstat(segment.fd).st_blocks <= 8


def test_what_a_child_stores_its_parent_reads():
    with made(4096) as segment:
        assert fork(lambda: segment.words.__setitem__(7, -5)) == 0
        assert segment.words[7] == -5
        assert segment.view[56:64] == (-5).to_bytes(8, "little", signed=True)


def test_pages_that_were_given_back_read_as_zeros_and_cost_nothing():
    page = mmap.PAGESIZE
    with made(8 * page) as segment:
        segment.view[:] = b"x" * (8 * page)
        segment.give_back(page, 4 * page)
        # Before they are read: reading a hole through a mapping fills it.
        assert os.fstat(segment.fd).st_blocks * 512 == 4 * page
        assert bytes(segment.view[page : 5 * page]) == bytes(4 * page)


def test_bytes_beside_a_range_that_is_given_back_are_kept():
    page = mmap.PAGESIZE
    with made(4 * page) as segment:
        segment.view[:] = b"x" * (4 * page)
        segment.give_back(page - 1, 2 * page + 2)  # whole pages only: 1 and 2
        expected = b"x" * page + bytes(2 * page) + b"x" * page
        assert bytes(segment.view) == expected
        segment.give_back(5, 100)  # no whole page in there
        assert bytes(segment.view) == expected


def test_pages_that_were_given_back_can_be_used_again():
    with made(4 * mmap.PAGESIZE) as segment:
        segment.give_back(0, 4 * mmap.PAGESIZE)
        segment.words[0] = 9
        assert segment.words[0] == 9


def test_a_segment_leaves_no_name_behind():
    before = set(os.listdir("/dev/shm"))
    with made(4096):
        assert not {n for n in os.listdir("/dev/shm") if "segment-test" in n} - before
