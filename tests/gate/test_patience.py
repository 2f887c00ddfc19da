"""Patience counts the time in which a CPU was to be had."""

from __future__ import annotations

import pytest

from tests.support import patience as patience_module
from tests.support.children import wait_until
from tests.support.patience import LONGEST_S, PATIENCE_S, Patience
from tests.support.pressure import Reading
from tests.support.promises import NotInTimeError


class Machine:
    """A clock and the kernel's counters, turned by the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reading = Reading(1000.0, 0.0, 0.0)
        monkeypatch.setattr(Reading, "now", lambda: self.reading)
        monkeypatch.setattr(
            patience_module.time, "monotonic", lambda: self.reading.at_s
        )

    def let_pass(self, seconds: float, waited: float = 0.0) -> None:
        """Turn the clock; tasks waited for a CPU in this share of the time."""
        at_s, waited_s, stolen_s = self.reading
        self.reading = Reading(at_s + seconds, waited_s + waited * seconds, stolen_s)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_on_an_idle_machine_it_ends_when_the_time_is_over(machine: Machine) -> None:
    patience = Patience()
    machine.let_pass(PATIENCE_S - 1)
    assert not patience.is_over
    machine.let_pass(1)
    assert patience.is_over
    with pytest.raises(NotInTimeError, match="the answer"):
        patience.check("the answer")


def test_time_in_which_others_had_the_cpu_does_not_count(machine: Machine) -> None:
    patience = Patience()
    machine.let_pass(2 * PATIENCE_S - 2, waited=0.5)
    assert not patience.is_over
    patience.check("nothing is raised")
    machine.let_pass(2, waited=0.5)
    assert patience.is_over


def test_it_ends_however_busy_the_machine_is(machine: Machine) -> None:
    patience = Patience()
    machine.let_pass(LONGEST_S - 1, waited=1.0)
    assert not patience.is_over
    machine.let_pass(1, waited=1.0)
    assert patience.is_over


def test_a_wait_gives_what_came_and_raises_when_it_does_not_come() -> None:
    answers = iter([0, "", None, "here"])
    assert wait_until(lambda: next(answers)) == "here"
    with pytest.raises(NotInTimeError):
        wait_until(lambda: False, 0.01)
