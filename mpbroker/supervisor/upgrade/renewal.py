"""Renewal: after a takeover, replace the children and prove that the new ones serve."""

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
# A new child that dies this often does not work, whatever the cause of its deaths.
_MAX_FAILURES: Final = 3
# Roles with a single process; they come after those whose successors serve first.
_ALONE: Final = (
    Role.COORDINATOR,
    Role.HOUSEKEEPER,
    Role.KEEPER,
    Role.EXPORTER,
    Role.CONSOLE,
)


class Loop(probe.Loop, Protocol):
    """A supervisor's event loop, which knows whether new connections are accepted."""

    def is_accepting(self) -> bool: ...


class Renewal:
    """Replaces the children of the old program a few at a time, and proves the result.

    The proof is a request that passes every stage of each listener. If the broker
    begins to drain meanwhile, its sockets do not listen any more. Then the result
    cannot be proved, and there is no way back either: the broker is stopping.

    Args:
        loop: the supervisor.
        children: all children; those of the old program are replaced.
        listeners: the listeners through which the proof is made.
        kill: ends the process of a role that has only one; its successor carries on.
        done: called at the end with the reason if this program does not work, or "".
        are_ours: whether this program has forked all children itself: then only the
            proof is made.
        keeper_owes: returns whether only the keeper (the process with a duplicate of
            each client's socket) has the sockets of some connections, because their
            processor has died. While that is so, the keeper is not replaced.
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
        """Take the renewal's next step if due; return the seconds until the next call.

        None: the renewal has ended.
        """
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
        """Whether all new children serve; old processors may still have connections."""
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
        """Whether the old keeper is the only one that has the sockets of connections.

        The keeper is the process with a duplicate of each. If it alone has some, it
        must live on, until a processor has them.

        True for at most 5 s after the first call.
        """
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
