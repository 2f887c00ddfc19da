"""The table of principals: a number for each text, the same for everybody."""

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


def test_a_new_principal_is_not_read_with_all_others(segment, monkeypatch):
    """All processors wait for the mutex meanwhile."""
    table, other = Principals(segment), Principals(segment)
    for number in range(16_500):
        table.number_of(f"User:{number}")
    assert other.number_of("User:0") == table.number_of("User:0")
    read, reads = Principals._read, []

    def count(self, number):
        reads.append(number)
        return read(self, number)

    monkeypatch.setattr(Principals, "_read", count)
    for number, each in enumerate((table, other, table, other)):
        each.number_of(f"User:new {number}")
    assert len(reads) == 3  # what the one has put is read by the other


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
    assert len(set(numbers)) == 3000
    assert [Principals(segment).number_of(text) for text in texts[:5]] == numbers[:5]
    assert Principals(segment).name(numbers[-1]) == texts[-1]


def test_writers_at_the_same_time_lose_nothing(segment):
    def write(writer):
        table = Principals(segment)
        for number in range(300):
            # Every other text is also written by the others.
            table.number_of(f"{number}" if number % 2 else f"{writer}-{number}")

    with running(*(lambda writer=writer: write(writer) for writer in range(3))) as all_:
        assert [child.wait() for child in all_] == [0, 0, 0]
    table = Principals(segment)
    texts = {f"{n}" if n % 2 else f"{w}-{n}" for n in range(300) for w in range(3)}
    numbers = {table.number_of(text) for text in texts}
    assert len(table) == 1 + len(texts) == 1 + len(numbers) == 1 + 150 + 3 * 150


def test_a_writer_killed_at_any_line_has_put_its_text_or_nothing(segment):
    seen = set()
    Principals(segment).number_of("User:first")
    for line in itertools.count(1):
        text = f"User:dies at {line}"
        before = len(Principals(segment))

        def work(line=line, text=text):
            table = Principals(segment)
            table.number_of("User:first")  # it has read what there is
            kill_at_line(line, FILES)
            table.number_of(text)

        code = fork(work)
        table = Principals(segment)
        put = len(table) - before
        assert put in (0, 1)
        found = table.number_of(text)
        assert table.name(found) == text
        assert len(table) == before + 1  # it was put already, or is now
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


def small(monkeypatch, entries):
    """Let a table have so few entries."""
    monkeypatch.setattr(principals, "MAX_PRINCIPALS", entries)


def test_a_full_table_says_so_and_goes_on_giving_the_numbers_it_has(
    segment, monkeypatch
):
    small(monkeypatch, 3)
    table = Principals(segment)
    numbers = [table.number_of(str(number)) for number in range(3)]
    table = Principals(segment, lambda: set(numbers))
    with pytest.raises(PrincipalsFullError, match=r"no room for another principal.* 3"):
        table.number_of("3")
    assert table.number_of("2") == numbers[2]
    assert len(Principals(segment)) == 4
    with pytest.raises(PrincipalsFullError, match=f"at most {MAX_TEXT_BYTES}"):
        table.number_of("x" * (MAX_TEXT_BYTES + 1))


def test_numbers_that_no_connection_has_are_free_and_are_never_given_again(
    segment, monkeypatch
):
    small(monkeypatch, 3)
    connected = set()
    tables = [Principals(segment, lambda: set(connected)) for _ in range(2)]
    given = {}
    for round_ in range(30):
        text = f"User:{round_}"
        with tables[round_ % 2].assigning(text) as number:
            connected.add(number)
        assert number not in given
        given[number] = text
        for table in tables:
            assert table.name(number) == text
            assert table.number_of(text) == number
        if len(connected) == 3:
            connected.remove(min(connected))
    later = Principals(segment)
    for number, text in given.items():
        if number in connected:
            assert later.name(number) == text
    with pytest.raises(DamagedSegmentError):
        later.name(min(given))
    # Whoever knows the number of a text that was freed gives it another one.
    assert tables[0].number_of("User:0") not in given


def test_a_writer_killed_at_any_line_while_it_frees_numbers_frees_no_other(
    segment, monkeypatch
):
    small(monkeypatch, 4)
    kept = Principals(segment).number_of("User:kept")
    table = Principals(segment, lambda: {kept})
    for line in itertools.count(1):
        for number in range(3):  # full again
            table.number_of(f"User:{line}-{number}")

        def work(line=line):
            own = Principals(segment, lambda: {kept})
            own.number_of("User:kept")
            kill_at_line(line, FILES)
            own.number_of("User:new")

        code = fork(work)
        assert table.name(kept) == "User:kept"
        assert Principals(segment).number_of("User:kept") == kept
        if code == 0:
            break
        assert code == -signal.SIGKILL
    assert line > 40


def test_a_number_that_was_never_given_is_damage(segment):
    for number in (1, 500_000, -1):
        with pytest.raises(DamagedSegmentError, match=f"principal {number}"):
            Principals(segment).name(number)
