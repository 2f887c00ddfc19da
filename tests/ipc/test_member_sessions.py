"""The table of members' sessions, which a coordinator leaves to its successor."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from mpbroker.ipc.segment import Segment
from mpbroker.ipc.tables.member_sessions import MemberSessions


@pytest.fixture
def segment() -> Iterator[Segment]:
    made = MemberSessions.create_segment()
    yield made
    os.close(made.fd)


def test_a_successor_takes_over_how_long_each_member_was_silent(
    segment: Segment,
) -> None:
    first = MemberSessions(segment.words)
    first.heard("a", 1000)
    first.heard("parked", 1000)
    first.forget("parked")
    first.heard("b", 5000)
    second = MemberSessions(segment.words)
    # 60 s without a coordinator count for no member.
    silent = [second.take_over(each, 65_000) for each in ("a", "b", "parked", "new")]
    assert silent == [4000, 0, 0, 0]
    second.heard("b", 66_000)
    third = MemberSessions(segment.words)
    assert [third.take_over(each, 70_000) for each in ("a", "b")] == [5000, 0]


def test_a_member_that_was_heard_of_since_the_start_has_not_been_silent(
    segment: Segment,
) -> None:
    MemberSessions(segment.words).heard("a", 1000)
    second = MemberSessions(segment.words)
    second.heard("b", 9000)
    assert second.take_over("b", 9500) == 0


def test_requests_during_a_load_that_was_killed_make_nobody_else_silent(
    segment: Segment,
) -> None:
    first = MemberSessions(segment.words)
    first.heard("a", 1000)
    first.heard("b", 2000)
    second = MemberSessions(segment.words)
    second.heard_while_loading("a", 9000)  # and it dies
    second.heard_while_loading("nobody", 9000)
    third = MemberSessions(segment.words)
    assert [third.take_over(each, 9500) for each in ("a", "b")] == [0, 0]


def test_a_successor_knows_whom_its_predecessor_had_heard(segment: Segment) -> None:
    first = MemberSessions(segment.words)
    assert not first.had_heard("a")
    for member in ("a", "gone", "c"):
        first.heard(member, 1000)
    first.forget("gone")
    assert not first.had_heard("a")  # it knows its own
    second = MemberSessions(segment.words)
    second.heard_while_loading("stranger", 1500)
    second.heard("b", 2000)
    second.heard("c", 2000)
    members = ("a", "b", "c", "gone", "stranger")
    assert [second.had_heard(each) for each in members] == [True, *[False] * 4]
    third = MemberSessions(segment.words)
    assert [third.had_heard(each) for each in members] == [True] * 3 + [False] * 2
