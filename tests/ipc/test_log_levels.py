"""The page of log levels: seen by every process, whole or not at all."""

from __future__ import annotations

import itertools
import os
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpbroker.ipc.log_levels import LogLevels, levels_left_in
from tests.support.children import fork, kill_at_line, running

FILES = ("mpbroker/ipc/log_levels.py",)


@pytest.fixture
def segment():
    made = LogLevels.create_segment()
    yield made
    os.close(made.fd)


def test_what_one_sets_another_reads_and_its_version_grows(segment):
    mine, other = LogLevels(segment), LogLevels(segment)
    assert (other.read(), other.version) == ({}, 0)
    mine.change({"root": 30, "mpbroker.network": 10})
    assert (other.read(), other.version) == ({"root": 30, "mpbroker.network": 10}, 1)
    other.change({"mpbroker.network": None, "mpbroker": 40, "never.set": None})
    assert (mine.read(), mine.version) == ({"root": 30, "mpbroker": 40}, 2)


def test_who_takes_over_reads_what_was_left_and_of_another_kind_nothing(segment):
    assert levels_left_in(segment.fd) == {}
    LogLevels(segment).change({"mpbroker.network": 10, "root": 40})
    assert levels_left_in(segment.fd) == {"mpbroker.network": 10, "root": 40}
    other = os.memfd_create("other", os.MFD_CLOEXEC)
    try:
        os.write(other, b"x" * 5000)
        assert levels_left_in(other) == {}
    finally:
        os.close(other)


NAMES = st.text("abc.", min_size=1, max_size=10)
CHANGES = st.dictionaries(NAMES, st.none() | st.integers(0, 60), max_size=5)
PAGE = LogLevels.create_segment()


@given(st.lists(CHANGES, max_size=8))
def test_any_changes_add_up(changes):
    page = LogLevels(PAGE)
    page.change(dict.fromkeys(page.read()))
    expected: dict[str, int] = {}
    for change in changes:
        page.change(change)
        expected.update({k: v for k, v in change.items() if v is not None})
        expected = {k: v for k, v in expected.items() if change.get(k, v) is not None}
        assert LogLevels(PAGE).read() == expected


def test_what_has_no_room_is_refused_and_changes_nothing(segment):
    page = LogLevels(segment)
    page.change({"root": 20})
    with pytest.raises(ValueError, match="at most 65528"):
        page.change({"x" * 1000 + str(number): 10 for number in range(70)})
    assert (page.read(), page.version) == ({"root": 20}, 1)


def test_whoever_reads_a_damaged_page_gets_what_can_be_read(segment):
    page = LogLevels(segment)
    page.change({"root": 30})
    segment.words[16] += 1  # the other copy, where nothing was ever written
    assert page.read() == {}
    segment.view[:] = b"\xff" * len(segment.view)
    assert page.read() == {}
    segment.view[:] = b"\x7f" * len(segment.view)
    assert page.read() == {}


def test_writers_at_the_same_time_lose_nothing(segment):
    def write(writer):
        page = LogLevels(segment)
        for number in range(30):
            page.change({f"{writer}.{number}": writer})

    with running(*(lambda writer=writer: write(writer) for writer in range(3))) as all_:
        assert [child.wait() for child in all_] == [0, 0, 0]
    page = LogLevels(segment)
    assert len(page.read()) == page.version == 90


def test_a_writer_killed_at_any_line_has_set_its_levels_or_nothing(segment):
    seen = set()
    page = LogLevels(segment)
    for line in itertools.count(1):
        before = page.read()
        put = {f"a{line}": 10, f"b{line}": 20}

        def work(line=line, put=put):
            own = LogLevels(segment)
            kill_at_line(line, FILES)
            own.change(put)

        code = fork(work)
        after = page.read()
        assert after in (before, {**before, **put})
        seen.add(after == before)
        # Nobody waits for the dead, nor reads what it left half-way.
        page.change({"next": line, **dict.fromkeys(put)})
        assert page.read() == {**before, "next": line}
        if code == 0:  # it has outlived its last line
            break
        assert code == -signal.SIGKILL
    assert line > 15
    assert seen == {True, False}
