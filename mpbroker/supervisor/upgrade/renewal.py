"""Renewal: after a takeover, replace the children and prove the result."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from mpbroker.base.logger import get_logger
from mpbroker.supervisor import probe
from mpbroker.supervisor.child import Child, ChildState, Role
from mpbroker.supervisor.listen_sockets import Listener
from mpbroker.supervisor.pools import AT_ONCE
from mpbroker.supervisor.probe import Outcome, Round, targets_of
from mpbroker.supervisor.upgrade.manifest import TakeoverError

_LOG = get_logger(__name__)

_RENEWAL_S: Final = 60.0  # for each step
_PROOF_S: Final = 10.0
_OWING_S: Final = 5.0
_LOOK_S: Final = 0.02
# A new child that dies so often does not work, whatever the cause of its deaths.
_MAX_FAILURES: Final = 3
# Roles with a single process; they come after those whose successors serve first.
_ALONE: Final = (Role.COORDINATOR, Role.HOUSEKEEPER, Role.KEEPER, Role.EXPORTER)


class Loop(probe.Loop, Protocol):
    """The part of the supervisor that is needed here."""

    def is_accepting(self) -> bool: ...


class Renewal:
    """Replaces the children of the old program, one after another; proves the result.

    If the broker begins to drain meanwhile, its sockets do not listen any more. Then
    the result cannot be proved, and there is no way back either: the broker is
    stopping.

    Args:
        children: all children; those of the old program are replaced.
        are_ours: none is the old program's: only the proof is made.
        kill: ends a process of a role that has only one; its successor carries on.
        done: called at the end with the reason if this program does not work, or "".
        keeper_owes: says whether the keeper alone has the sockets of some connections,
            because their processor has died: then it cannot be replaced yet.
    """

    def __init__(
        self,
        loop: Loop,
        children: Sequence[Child],
        listeners: Sequence[Listener],
        kill: Callable[[Child], None],
        done: Callable[[str], None],
        *,
        are_ours: bool = False,
        keeper_owes: Callable[[], bool] = lambda: False,
    ) -> None:
        self._loop = loop
        self._keeper_owes = keeper_owes
        self._owed_until = 0.0  # deadline of _must_keep(); 0: not looked yet
        self._children = children
        self._listeners = listeners
        self._kill = kill
        self._done = done
        self._deadline = time.monotonic() + _RENEWAL_S
        self._alone = [
            (child, child.pid)
            for role in _ALONE
            for child in children
            if child.role is role and not are_ours
        ]
        self._beside = [
            child for child in children if child.role not in _ALONE and not are_ours
        ]
        self._round: Round | None = None
        self._round_ended = False
        self.is_done = False

    def turn(self) -> float | None:
        """Do what is due; return in how many seconds to call again."""
        if self.is_done:
            return None
        try:
            self._step()
        except TakeoverError as error:
            self.is_done = True
            drains = not self._loop.is_accepting()
            if drains:
                _LOG.error("upgrade: not proved, as the broker drains: %s", error)
            self._done("" if drains else str(error))
        return _LOOK_S

    def _step(self) -> None:
        is_late = time.monotonic() > self._deadline
        if is_late and (self._round is not None or not self._is_quiet()):
            raise TakeoverError("its processes did not all serve in time")
        for child in self._children:
            if child.failures >= _MAX_FAILURES:
                raise TakeoverError(
                    f"its {child.role.value} {child.number} died again and again:"
                    f" {child.last_exit}"
                )
        if self._round is not None:
            self._look_at_proof()
        elif self._is_quiet():
            self._next()

    def _is_quiet(self) -> bool:
        """Whether all processes are ours; processors may still wait for clients."""
        return all(
            child.role is Role.PROCESSOR
            if child.state is ChildState.DRAINING
            else child.state is ChildState.READY and not child.replaced
            for child in self._children
        )

    def _next(self) -> None:
        self._deadline = time.monotonic() + _RENEWAL_S
        if self._beside:
            few, self._beside = self._beside[:AT_ONCE], self._beside[AT_ONCE:]
            for child in few:
                # A resize may have retired the child meanwhile.
                if child in self._children and child.state is not ChildState.DRAINING:
                    child.replaced = True
            return
        while self._alone:
            if self._alone[0][0].role is Role.KEEPER and self._must_keep():
                return
            child, pid = self._alone.pop(0)
            if child in self._children and child.pid == pid:
                self._kill(child)
                return
        listeners = self._listeners if self._loop.is_accepting() else ()
        self._round = Round(targets_of(listeners), self._loop, self._proved)
        self._deadline = time.monotonic() + _PROOF_S
        self._round.start()

    def _must_keep(self) -> bool:
        """Whether to let the keeper hand out sockets first; at most for _OWING_S."""
        now = time.monotonic()
        self._owed_until = self._owed_until or now + _OWING_S
        return now < self._owed_until and self._keeper_owes()

    def _proved(self, ended: Round) -> None:
        self._round = ended
        self._round_ended = True

    def _look_at_proof(self) -> None:
        assert self._round is not None
        if not self._round_ended:
            return
        if self._round.names(Outcome.FAILED):
            reason = self._round.explain(Outcome.FAILED)
            raise TakeoverError(f"a request through every stage failed: {reason}")
        self.is_done = True
        self._done("")
