"""Whoever ended, and why: nobody who is stopped may be in the way of the repair."""

from __future__ import annotations

import mmap
import os
from types import SimpleNamespace
from typing import Any

import pytest

from mpbroker.ipc.layout import CONTROL_WORDS
from mpbroker.supervisor.child import Child, ChildState, Role
from mpbroker.supervisor.supervisor import Supervisor


class Reaper(Supervisor):
    """A supervisor that notes what it does about an end."""

    def __init__(self) -> None:  # no broker
        self.did: list[str] = []
        self.only_ours: set[int] = set()
        self.on_death = lambda child: None
        self.before_repair = lambda: self.did.append("end the stopped")
        parts: dict[str, Any] = {
            "_ending": False,
            "_words": memoryview(mmap.mmap(-1, CONTROL_WORDS * 8)).cast("q"),
            "_partition_rows": lambda: 0,
            "_publish": lambda: None,
            "_spawn": lambda child: None,
            "_pools": SimpleNamespace(forget=lambda child, was_killed: None),
            "repair": SimpleNamespace(after_handler=self._repair),
        }
        vars(self).update(parts)

    def _repair(self, *arguments: object, was_killed: bool) -> None:
        self.did.append("repair")

    def unwatch(self, fd: int) -> None:
        pass

    def reap(self, child: Child) -> None:
        self._reap(child)


def child_that_ends(status: int) -> Child:
    child = Child(Role.HANDLER, 0, lambda: None)
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
