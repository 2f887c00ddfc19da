"""The table of principals: a number for each text, the same for everybody, for ever."""

from __future__ import annotations

import itertools
import os
import signal
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpbroker.ipc.errors import DamagedSegmentError
from mpbroker.ipc.tables import principals
from mpbroker.ipc.tables.principals import (
    ANONYMOUS,
    MAX_PRINCIPALS,
    MAX_TEXT_BYTES,
    Principals,
    PrincipalsFullError,
)
from tests.support.children import fork, kill_at_line, running, wait_until

FILES = ("mpbroker/ipc/tables/principals.py",)


@pytest.fixture
def segment():
    made = Principals.create_segment()
    yield made
    os.close(made.fd)


def test_nobody_in_particular_is_number_zero(segment):
    table = Principals(segment)
    assert table.number_of(ANONYMOUS) == 0
    assert table.name(0) == ANONYMOUS == "User:ANONYMOUS"
    assert len(table) == 1


SEGMENT = Principals.create_segment()


@given(st.lists(st.tuples(st.booleans(), st.text(max_size=20)), max_size=20))
@settings(max_examples=100, deadline=None)
def test_two_processes_agree_on_every_number(steps):
    tables = Principals(SEGMENT), Principals(SEGMENT)
    for which, text in steps:
        number = tables[which].number_of(text)
        assert tables[not which].name(number) == text
        assert tables[not which].number_of(text) == number


def test_numbers_are_found_by_whoever_comes_later(segment):
    texts = [f"User:{number}" for number in range(3000)]
    first = Principals(segment)
    numbers = [first.number_of(text) for text in texts]
    assert numbers == list(range(1, 3001))
    assert [Principals(segment).number_of(text) for text in texts[:5]] == numbers[:5]
    assert Principals(segment).name(3000) == texts[-1]


def test_writers_at_the_same_time_lose_nothing(segment):
    def write(writer):
        table = Principals(segment)
        for number in range(300):
            # Every other text is also written by the others.
            table.number_of(f"{number}" if number % 2 else f"{writer}-{number}")

    with running(*(lambda writer=writer: write(writer) for writer in range(3))) as all_:
        assert [child.wait() for child in all_] == [0, 0, 0]
    table = Principals(segment)
    names = {table.name(number) for number in range(len(table))}
    assert len(table) == len(names) == 1 + 150 + 3 * 150


def test_a_writer_killed_at_any_line_has_put_its_text_or_nothing(segment):
    seen = set()
    for line in itertools.count(1):
        text = f"User:dies at {line}"
        before = len(Principals(segment))

        def work(line=line, text=text):
            table = Principals(segment)
            table.name(len(table) - 1)  # it has read what there is
            kill_at_line(line, FILES)
            table.number_of(text)

        code = fork(work)
        table = Principals(segment)
        put = len(table) - before
        assert put in (0, 1)
        assert not put or table.name(before) == text
        seen.add(put)
        # Nobody waits for the dead, and what it left half-way is in nobody's way.
        assert table.name(table.number_of(f"User:after {line}")) == f"User:after {line}"
        if code == 0:  # it has outlived its last line
            break
        assert code == -signal.SIGKILL
    assert line > 20
    assert seen == {0, 1}


def test_a_reader_never_waits_for_a_writer_that_was_stopped(segment):
    table = Principals(segment)
    alice = table.number_of("User:alice")

    def hold():
        principals.RobustMutex(segment, 0).acquire()
        os.kill(os.getpid(), signal.SIGSTOP)

    with running(hold) as (child,):
        status = Path(f"/proc/{child.pid}/stat")
        # Behind the name, which may have blanks.
        wait_until(lambda: status.read_text().rpartition(")")[2].split()[0] == "T")
        other = Principals(segment)
        assert other.name(alice) == "User:alice"
        assert table.number_of("User:alice") == alice


def test_a_full_table_says_so_and_goes_on_giving_the_numbers_it_has(
    segment, monkeypatch
):
    monkeypatch.setattr(principals, "MAX_PRINCIPALS", 3)
    table = Principals(segment)
    for number in range(3):
        table.number_of(str(number))
    with pytest.raises(
        PrincipalsFullError, match=r"no room for another principal.* 3 "
    ):
        table.number_of("3")
    assert table.number_of("2") == 3
    assert len(Principals(segment)) == 4


def test_a_full_heap_of_texts_says_so(segment):
    table = Principals(segment)
    long = "x" * (MAX_TEXT_BYTES - 10)

    def fill():
        for number in range(MAX_PRINCIPALS):
            table.number_of(f"{number:09}{long}")

    with pytest.raises(PrincipalsFullError, match="no room for another principal"):
        fill()
    with pytest.raises(PrincipalsFullError, match=f"at most {MAX_TEXT_BYTES}"):
        table.number_of("x" * (MAX_TEXT_BYTES + 1))
    assert table.name(len(table) - 1).endswith(long)


def test_a_number_that_was_never_given_is_damage(segment):
    for number in (1, 500_000, -1):
        with pytest.raises(DamagedSegmentError, match=f"principal {number}"):
            Principals(segment).name(number)
