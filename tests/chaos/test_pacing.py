"""Paced clients ask at times drawn beforehand, and nothing that goes on hides that."""

from __future__ import annotations

import itertools
import random
import select
import socket
import time
from collections.abc import Iterator

import pytest

from tests.bench import wire
from tests.chaos.clients import Expected, Fleet, Pause
from tests.chaos.pacing import Pace
from tests.chaos.witness import Moment, Witness, tell

_RATE = 10.0


def paced(seed: int = 1) -> Pace:
    pace = Pace(random.Random(seed), _RATE)
    pace.begin(1000.0)
    return pace


def test_in_a_closed_loop_a_question_is_always_due() -> None:
    pace = Pace(random.Random(1), 0.0)
    pace.begin(1000.0)
    before = pace.due
    pace.asked(0.0)
    assert not pace.is_open
    assert before == pace.due < 0


def test_times_do_not_depend_on_when_questions_are_asked() -> None:
    prompt, late = paced(), paced()
    times = [prompt.asked(0.0) for _ in range(50)]
    assert [late.asked(0.0) for _ in range(50)] == times  # all of them at the end
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert all(0.5 / _RATE <= gap <= 1.5 / _RATE for gap in gaps)
    assert sum(gaps) / len(gaps) == pytest.approx(1 / _RATE, rel=0.2)


def test_nothing_is_due_while_the_broker_may_wait() -> None:
    one, other = paced(), paced()
    one.asked(0.0)
    other.asked(5.0)
    assert other.due == pytest.approx(one.due + 5.0)


def test_a_question_that_is_lost_stays_as_late_as_it_is() -> None:
    pace = paced()
    lost = pace.asked(0.0)
    pace.asked(0.0)
    pace.again(lost)
    assert pace.asked(0.0) == lost


# -- a client over a connection that nobody answers but the test -----------------------


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        sock.settimeout(60)
        yield sock


@pytest.fixture
def fleet(listening: socket.socket) -> Iterator[Fleet]:
    made = Fleet([listening.getsockname()], 1, rate=_RATE)
    yield made
    made.close()


def answer(fleet: Fleet, now: float) -> Expected:
    """The oldest question of the one client has been answered: its api versions."""
    client = fleet.clients[0]
    expected = client.expected[0]
    correlation_id = expected.correlation_id.to_bytes(4, "big")
    client.expected[0] = expected._replace(check=lambda payload: None)
    client._answered(correlation_id, now)
    return expected


def test_what_became_due_during_a_pause_counts_from_then(
    fleet: Fleet, listening: socket.socket
) -> None:
    client = fleet.clients[0]  # has three questions under way at most
    client.pace.begin(0.0)
    first = client.pace.due
    client.look(first - 0.001, 90.0)
    assert client.sock is None  # it does not even dial before
    client.look(first, 90.0)
    sock, _ = listening.accept()
    with sock:
        client.happens(select.EPOLLOUT, first + 1.0)  # a second later it is connected
        asked = list(client.expected)
        assert len(asked) == client.window == 3  # all were due by then
        assert asked[0].due == first
        assert all(each.due <= first + 1.0 for each in asked)
        for _ in asked:
            answer(fleet, first + 1.5)
        assert client.worst_pause_s == pytest.approx(1.5 - asked[0].patience_s)


def test_a_pause_is_no_longer_for_the_time_in_which_nothing_was_due(
    fleet: Fleet, listening: socket.socket
) -> None:
    client = fleet.clients[0]
    client.pace.begin(0.0)
    first = client.pace.due
    client.look(first, 90.0)
    sock, _ = listening.accept()
    with sock:
        client.happens(select.EPOLLOUT, first)
        assert len(client.expected) == 1
        patience_s = client.expected[0].patience_s
        expected = answer(fleet, first + patience_s + 0.004)
        assert client.worst_pause_s == pytest.approx(0.004)
        second = client.pace.due
        client.look(second + 0.002, 90.0)
        assert client.expected[0].due == second > expected.due
        answer(fleet, second + client.expected[0].patience_s + 0.003)
        assert client.worst_pause_s == pytest.approx(0.004)


def test_what_is_looked_at_later_is_looked_at_before_all_is_verified(
    fleet: Fleet,
) -> None:
    def is_wrong(payload: bytes) -> None:
        raise wire.AnswerError("it has a gap")

    fleet.check_later(Expected(1, "fetch", 0.0, 0.0, 0.0, is_wrong), b"")
    assert not fleet.ledger.wrong_count
    assert fleet.settle()
    assert fleet.ledger.wrong_count == 1
    assert "it has a gap" in fleet.ledger.wrong[0]


# -- the story of a pause --------------------------------------------------------------


def test_a_pause_is_told_by_its_own_stamps_and_what_happened_beside_it() -> None:
    pause = Pause("produce", 10.0, 10.002, 10.2, 0.03, ("127.0.0.1", 1), 2)
    stages = [
        Moment(9.0, "of the question before"),
        Moment(10.15, "answered"),
        Moment(10.01, "read"),
        Moment(11.0, "of the next one"),
    ]
    beside = [Moment(9.95, "handler 1 killed"), Moment(9.0, "long ago")]
    assert tell(pause, stages, beside) == (
        "produce: asked +2, read +10, answered +150, answer seen +200 ms"
        " (30 of it the clients' own work); beside it: handler 1 killed -50"
    )


def test_a_pause_that_ends_while_there_is_no_broker_is_told_all_the_same() -> None:
    witness = Witness(lambda: 2**22 + 1)  # nobody's number
    at = time.monotonic()
    witness.note("handler 1 killed")
    told = witness(Pause("fetch", at, at, at + 60, 0.0, ("127.0.0.1", 1), 2))()
    assert told.startswith("fetch: asked +0, answer seen +60000 ms")
    assert "handler 1 killed +" in told


def test_a_pause_beside_which_nothing_happened_is_told_by_itself() -> None:
    pause = Pause("fetch", 10.0, 10.0, 10.1, 0.0, ("127.0.0.1", 1), 2)
    assert tell(pause, [], []) == (
        "fetch: asked +0, answer seen +100 ms (0 of it the clients' own work)"
    )
