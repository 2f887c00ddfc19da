"""Whoever ended, and why: nobody who is stopped may be in the way of the repair."""

from __future__ import annotations

import mmap
import os
import select
from types import SimpleNamespace
from typing import Any

import pytest

from mpbroker.ipc.black_box import BlackBox, EventKind, box_number, create_boxes
from mpbroker.ipc.layout import CONTROL_WORDS
from mpbroker.supervisor.child import Child, ChildState, Role
from mpbroker.supervisor.loop import Loop
from mpbroker.supervisor.supervisor import Supervisor


class Reaper(Supervisor):
    """A supervisor that notes what it does about an end."""

    def __init__(self) -> None:  # no broker
        self.did: list[str] = []
        self.only_ours: set[int] = set()
        self.check_memory = lambda: None
        self.on_death = lambda child: None
        self.before_repair = lambda: self.did.append("end the stopped")
        parts: dict[str, Any] = {
            "_ending": False,
            "_words": memoryview(mmap.mmap(-1, CONTROL_WORDS * 8)).cast("q"),
            "_partition_rows": lambda: 0,
            "_publish": lambda: None,
            "_spawn": self._start,
            "_memory": SimpleNamespace(boxes=create_boxes()),
            "_pools": SimpleNamespace(forget=lambda child, was_killed: None),
            "repair": SimpleNamespace(after_handler=self._repair),
        }
        vars(self).update(parts)

    def _repair(self, *arguments: object) -> None:
        self.did.append("repair")

    def _start(self, child: Child) -> None:
        self.did.append("start a successor")
        child.state = ChildState.STARTING

    def unwatch(self, fd: int) -> None:
        pass

    def reap(self, child: Child) -> None:
        self._reap(child)

    def noted(self, child: Child) -> list[tuple[int, int]]:
        """What it noted in a child's box."""
        box = BlackBox(self._memory.boxes.words, box_number("handler", child.number))
        return [(event.kind, event.a) for event in box.events()]


class ReaperWithLoop(Reaper):
    """One that waits for its children to end."""

    def __init__(self, children: list[Child]) -> None:
        Loop.__init__(self)
        super().__init__()
        self.children = children
        for child in children:
            self._watch_child(child)

    def unwatch(self, fd: int) -> None:
        Loop.unwatch(self, fd)

    def turn(self) -> None:
        self._turn(0.0)


def child_that_ends(status: int, number: int = 0) -> Child:
    child = Child(Role.HANDLER, number, lambda: None)
    pid = os.fork()
    if pid == 0:
        os._exit(status)
    child.started(pid)
    return child


def retired(child: Child) -> None:
    child.state = ChildState.DRAINING


def renewed(child: Child) -> None:
    child.dismissed = True


def died(child: Child) -> None:
    pass


@pytest.mark.parametrize("how", [retired, renewed, died])
def test_whoever_is_stopped_is_ended_before_any_repair(how: Any) -> None:
    reaper = Reaper()
    child = child_that_ends(0 if how is retired else 1)
    how(child)
    reaper.reap(child)
    assert reaper.did == ["end the stopped", "repair"]


@pytest.mark.parametrize("how", [retired, renewed, died])
def test_memory_is_checked_after_every_end_before_it_is_believed(how: Any) -> None:
    """One that was asked to end may have damaged the memory all the same."""
    reaper = Reaper()
    reaper.on_death = lambda child: reaper.did.append("read the evidence")
    reaper.check_memory = lambda: reaper.did.append("check the memory")
    child = child_that_ends(0 if how is retired else 1)
    how(child)
    reaper.reap(child)
    evidence = ["read the evidence"] if how is died else []
    assert reaper.did == [
        "check the memory",
        *evidence,
        "end the stopped",
        "repair",
    ]


def test_an_end_and_its_repair_are_noted_in_the_box_of_the_dead() -> None:
    reaper = Reaper()
    child = child_that_ends(3)
    reaper.reap(child)
    assert reaper.noted(child) == [(EventKind.DIED, 3 << 8), (EventKind.REPAIRED, 0)]


def test_all_who_died_are_repaired_after_before_any_has_a_successor() -> None:
    """A fork takes longer than a repair, and what the dead had in hand waits for it."""
    children = [child_that_ends(1, number) for number in range(3)]
    for child in children:  # all are dead when it looks
        select.select([child.pidfd], [], [])
    reaper = ReaperWithLoop(children)
    reaper.turn()
    repairs = [each for each in reaper.did if each != "end the stopped"]
    assert repairs == ["repair"] * 3 + ["start a successor"] * 3


def test_whoever_dies_during_a_fork_is_repaired_after_before_the_next() -> None:
    first, second = child_that_ends(1), child_that_ends(1, 1)
    select.select([first.pidfd], [], [])
    pipe = os.pipe()
    late = Child(Role.HANDLER, 2, lambda: None)
    pid = os.fork()
    if pid == 0:
        os.read(pipe[0], 1)  # until the first fork
        os._exit(1)
    late.started(pid)
    select.select([second.pidfd], [], [])
    reaper = ReaperWithLoop([first, second, late])
    start = reaper._start

    def start_while_another_dies(child: Child) -> None:
        start(child)
        if child is first:
            os.write(pipe[1], b".")
            select.select([late.pidfd], [], [])

    reaper._spawn = start_while_another_dies  # type: ignore[method-assign]
    reaper.turn()
    for end in pipe:
        os.close(end)
    done = [each for each in reaper.did if each != "end the stopped"]
    repair, successor = "repair", "start a successor"
    assert done == [repair, repair, successor, repair, successor, successor]
