"""Extents against the simplest thing that could be right: a list of taken pages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpbroker.ipc.arena import (
    ANSWER_AT,
    ANSWER_BYTES,
    BLOCK_BYTES,
    HANDLER_REGION_BYTES,
    PROGRESS_WORDS,
    REQUEST_PART_BYTES,
    ArenaLayout,
    ExtentAllocator,
    extent_bytes,
    progress_offset,
)
from mpbroker.ipc.layout import HANDLER_IDS, MAX_PROCESSORS, SLOTS_PER_PROCESSOR

START, PAGE, PAGES = 3 * 4096, 4096, 24

steps = st.lists(
    st.one_of(
        st.tuples(st.just("allocate"), st.integers(1, 9 * PAGE)),
        st.tuples(st.just("free"), st.integers(0, 20)),
        st.tuples(st.just("rebuild"), st.just(0)),
    ),
    max_size=60,
)


class Model:
    """Which pages are taken, by whom."""

    def __init__(self):
        self.taken = {}  # start -> length asked for

    def pages(self):
        used = [False] * PAGES
        for start, length in self.taken.items():
            first = (start - START) // PAGE
            for page in range(first, first + -(-length // PAGE)):
                assert not used[page], "two extents share a page"
                used[page] = True
        return used

    def largest_gap(self):
        longest = run = 0
        for used in self.pages():
            run = 0 if used else run + 1
            longest = max(longest, run)
        return longest * PAGE


@given(steps)
def test_extents_are_disjoint_inside_the_region_and_never_refused_without_need(steps):
    extents, model = ExtentAllocator(START, PAGES * PAGE, PAGE), Model()
    for step, number in steps:
        if step == "allocate":
            gap = model.largest_gap()
            start = extents.allocate(number)
            assert (start is not None) == (number <= gap)
            if start is not None:
                assert start >= START and start + number <= START + PAGES * PAGE
                assert (start - START) % PAGE == 0
                model.taken[start] = number
        elif step == "free" and model.taken:
            start = sorted(model.taken)[number % len(model.taken)]
            extents.free(start, model.taken.pop(start))
        elif step == "rebuild":
            extents = ExtentAllocator(START, PAGES * PAGE, PAGE)
            extents.reserve(model.taken.items())
        longest = model.largest_gap()
        assert extents.allocate(longest + 1) is None
        if longest:
            start = extents.allocate(longest)
            assert start is not None
            extents.free(start, longest)
        assert extents.is_unused == (not model.taken)


def test_the_first_gap_that_is_long_enough_is_taken():
    extents = ExtentAllocator(0, 10 * PAGE, PAGE)
    a, b, c = (extents.allocate(2 * PAGE) for _ in range(3))
    assert (a, b, c) == (0, 2 * PAGE, 4 * PAGE)
    extents.free(a, 2 * PAGE)
    assert extents.allocate(3 * PAGE) == 6 * PAGE
    assert extents.allocate(1) == 0


def test_a_full_region_says_so():
    extents = ExtentAllocator(0, 2 * PAGE, PAGE)
    assert extents.allocate(2 * PAGE) == 0
    assert extents.allocate(1) is None


# -- the layout ---------------------------------------------------------------------


@pytest.mark.parametrize("max_request_bytes", [1024, 100 * 1024 * 1024])
def test_no_two_parts_of_the_arena_overlap(max_request_bytes):
    layout = ArenaLayout(max_request_bytes)
    parts = []
    for processor in range(MAX_PROCESSORS):
        first = processor * SLOTS_PER_PROCESSOR
        blocks = SLOTS_PER_PROCESSOR * BLOCK_BYTES
        assert layout.block(first + SLOTS_PER_PROCESSOR - 1) == (
            layout.block(first) + blocks - BLOCK_BYTES
        )
        parts.append((layout.block(first), blocks))
        extents = layout.request_extents(processor)
        parts.append((extents.start, extents.size_bytes))
    for handler in range(HANDLER_IDS):
        extents = layout.response_extents(handler)
        parts.append((extents.start, extents.size_bytes))
    end = 0
    for start, length in sorted(parts):
        assert start == end
        end = start + length
    assert end == layout.size_bytes


@pytest.mark.parametrize("max_request_bytes", [1024, 1 << 20, 100 << 20])
def test_two_of_the_largest_requests_fit_at_a_time(max_request_bytes):
    extents = ArenaLayout(max_request_bytes).request_extents(3)
    for _ in range(2):
        assert extents.allocate(extent_bytes(max_request_bytes + 4)) is not None


def test_the_parts_of_a_block_do_not_overlap():
    assert REQUEST_PART_BYTES + 8 * PROGRESS_WORDS == ANSWER_AT
    assert ANSWER_AT + ANSWER_BYTES == BLOCK_BYTES
    assert REQUEST_PART_BYTES % 8 == 0 and ANSWER_AT % 8 == 0


@given(st.integers(4, 200_000), st.integers(0, 1 << 20))
def test_progress_words_lie_behind_the_frame_and_within_its_extent(frame, page):
    extent = page * 65536
    words_at = progress_offset(extent, frame)
    assert words_at % 8 == 0
    assert words_at >= extent + frame
    # A partition that has a batch takes 67 bytes of a request at least.
    assert words_at + 8 * (frame // 67) <= extent + extent_bytes(frame)


def test_a_handlers_region_holds_the_largest_answer_of_the_default_settings():
    assert HANDLER_REGION_BYTES >= 55 * 1024 * 1024  # fetch.max.bytes
