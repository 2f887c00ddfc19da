"""Black boxes: what a process noted is there when it is not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpbroker.ipc import black_box
from mpbroker.ipc.black_box import (
    BOX_WORDS,
    BOXES,
    EVENTS,
    ROLES,
    BlackBox,
    EventKind,
    Fault,
    box_number,
    create_boxes,
)
from mpbroker.ipc.layout import MAX_HANDLERS, MAX_PROCESSORS
from mpbroker.supervisor.child import Role
from tests.support.children import Child, die


@pytest.fixture(scope="module")
def segment():
    return create_boxes()


@pytest.fixture
def box(segment):
    made = BlackBox(segment.words, 3)
    segment.view[:] = bytes(segment.size_bytes)
    return made


def test_events_are_read_in_order_and_the_oldest_go(box):
    assert box.events() == []
    for number in range(EVENTS + 5):
        box.note(EventKind.BUG, number, -1)
    events = box.events()
    assert [event.a for event in events] == list(range(5, EVENTS + 5))
    assert all(event.kind == EventKind.BUG and event.b == -1 for event in events)
    times = [event.at_ns for event in events]
    assert times == sorted(times)


def test_a_killed_process_leaves_its_notes(segment, box):
    def live_briefly():
        own = black_box.open_own_box(segment, 3)
        black_box.note(EventKind.SPAWNED, 42)
        try:
            raise ValueError("the last word")
        except ValueError as error:
            black_box.note_failure(error)
        own.words[own.requests + 1] += 1
        own.words[own.spent + 1] += 500
        die()

    Child(live_briefly).wait()
    assert [(e.kind, e.a) for e in box.events()] == [
        (EventKind.SPAWNED, 42),
        (EventKind.FAILED, 0),
    ]
    assert box.last_words().rstrip().endswith("ValueError: the last word")
    assert box.totals() == {1: (1, 500)}
    box.forget_last_words()
    assert box.last_words() == ""
    assert len(box.events()) == 2


def test_of_long_last_words_the_end_is_kept(box):
    box.note_failure(ValueError("x" * 10_000 + " the end"))
    assert box.last_words().rstrip().endswith("x the end")
    assert len(box.last_words()) <= 4096
    assert BlackBox(box.words, 4).events() == []  # the neighbour's


def test_a_process_without_a_box_notes_nothing_and_does_not_fail(monkeypatch):
    monkeypatch.setattr(black_box, "_own", None)
    black_box.note(EventKind.BUG)
    black_box.note_failure(ValueError())
    assert black_box.own_box().events() == []


WORDS = st.integers(-(2**63), 2**63 - 1)


@given(WORDS, WORDS, st.binary(max_size=64))
def test_damaged_boxes_are_read_without_an_error(noted, length, text):
    data = bytearray(BOX_WORDS * 8)
    data[4096 : 4096 + len(text)] = text
    box = BlackBox(memoryview(data).cast("q"), 0)
    box.words[0], box.words[1] = noted, length
    assert len(box.events()) <= EVENTS
    assert len(box.last_words()) <= 4096
    assert box.totals() == {}


def test_faults_are_off_until_they_are_set(box):
    assert [box.fault(fault) for fault in Fault] == [0, 0, 0]
    box.set_fault(Fault.SYNC_ERRNO, 5)
    assert [box.fault(fault) for fault in Fault] == [0, 5, 0]


def test_every_process_has_a_box_of_its_own():
    """Else one would overwrite what another has noted before its death."""
    assert ROLES.keys() == {role.value for role in Role}
    numbers = [box_number(role, n) for role, ids in ROLES.items() for n in range(ids)]
    assert ROLES["processor"] == MAX_PROCESSORS
    assert ROLES["handler"] == MAX_HANDLERS
    assert len(set(numbers)) == len(numbers)
    assert max(numbers) < BOXES
    assert 0 <= box_number("acceptor", 10_000) < BOXES
    assert box_number("what comes later", 3) not in numbers
