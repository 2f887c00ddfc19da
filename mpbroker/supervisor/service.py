"""Service: prove that the broker serves, and tell the service manager how it is.

The broker is ready when a request has passed every stage of every listener that this
host can reach, not when its processes report ready. Under a watchdog such a request is
made twice in the watchdog's interval, and only its answer feeds the watchdog: a broker
that lives and does not answer is restarted.

Two cases are not taken for a hung broker. An address that this host cannot reach says
nothing about the broker. And a handler in uninterruptible sleep waits for its disk: a
restart would lose its work and wait for the same disk.
"""

from __future__ import annotations

import faulthandler
import time
from collections.abc import Callable, Iterable, Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING, Final, TypeVar

from mpbroker.base.logger import get_logger
from mpbroker.inspect.process_state import process_state
from mpbroker.supervisor import probe
from mpbroker.supervisor.listen_sockets import Listener, Origin
from mpbroker.supervisor.probe import Outcome, Round
from mpbroker.supervisor.systemd import ServiceManager

if TYPE_CHECKING:
    from typing import Protocol  # such a class takes its time to make

    class Loop(probe.Loop, Protocol):
        """An event loop with timers; ``failed`` ends the broker."""

        failed: bool

        def every(self, interval_s: float, run: Callable[[], None]) -> None: ...


_LOG = get_logger(__name__)

_T = TypeVar("_T")

_TICK_S: Final = 1.0
_STATUS_S: Final = 2.0
# The extension of the manager's timeout that each tick of a start or a stop asks for.
# The supervisor has limits of its own for both.
_EXTENSION_S: Final = 30.0
_FIRST_ANSWER_S: Final = 60.0
_ROUND_S: Final = 5.0
# A failed request is repeated at once this many times, since the process that had it
# may have died; then it is repeated once a tick.
_QUICK_RETRIES: Final = 3


class _State(Enum):
    STARTING = auto()  # not all processes serve
    PROVING = auto()  # all serve; no request has come through yet
    SERVING = auto()
    STOPPING = auto()


class Service:
    """Decides when the broker is ready, and reports its state to the service manager.

    It sends requests through the listeners, and fails the start if none is answered
    for 60 s. Without a service manager it does the same, and drops the reports.

    Args:
        manager: gets the reports.
        loop: the supervisor.
        listeners: the listeners that the requests go through.
        serving: called once, in the loop, when a request has come through.
        describe: returns a few words on how busy the broker is.
        children: returns the ids of the processes that use the disk. While one of
            them waits for it, an unanswered request does not mean that the broker
            hangs: that process may hold a lock that all handlers need.
        is_accepting: returns False while new connections are refused on purpose. No
            request is sent then.
        stored_names: names of the sockets in the manager's store at our start.
    """

    def __init__(
        self,
        manager: ServiceManager,
        loop: Loop,
        listeners: Sequence[Listener],
        serving: Callable[[], None],
        describe: Callable[[], str],
        children: Callable[[], Iterable[int]],
        is_accepting: Callable[[], bool],
        stored_names: Iterable[str] = (),
    ) -> None:
        self._manager = manager
        self._loop = loop
        self._listeners = listeners
        self._targets = probe.targets_of(listeners)
        self._serving = serving
        self._describe = describe
        self._children = children
        self._is_accepting = is_accepting
        self._stored_names = set(stored_names)
        self._state = _State.STARTING
        self._round: Round | None = None
        self._round_began = 0.0
        self._proved = False
        self._reached: set[str] = set()
        self._unreached = ""
        self._retries = 0
        self._began = self._answered_at = self._said_at = time.monotonic()
        self._status = ""

    def begin(self) -> None:
        """Send the first test request, which waits until the children serve it."""
        watchdog_s = self._manager.watchdog_s
        if watchdog_s:
            # The manager aborts a process that it takes for hung; faulthandler then
            # writes where it was.
            faulthandler.enable()
        self._loop.every(
            min(_TICK_S, watchdog_s / 8) if watchdog_s else _TICK_S, self._tick
        )
        self._ask()

    def all_started(self) -> None:
        """Note that all processes serve; report ready after an answered request."""
        self._state = _State.PROVING
        self._look()

    def stopping(self) -> None:
        """Tell the service manager that we stop; each tick asks it for more time."""
        self._state = _State.STOPPING
        self._manager.tell("STOPPING=1", "STATUS=Stopping", wait=True)
        if self._round is not None:
            self._round.give_up(self._reached)

    def reload(self, run: Callable[[], _T]) -> _T:
        """Call ``run()``, and tell the service manager of a reload before and after."""
        self._manager.reloading()
        try:
            return run()
        finally:
            self._manager.tell("READY=1", wait=True)

    # -- rounds ------------------------------------------------------------------------

    def _ask(self) -> None:
        self._round_began = time.monotonic()
        # A broker that drains refuses new connections, also from its own probe.
        targets = self._targets if self._is_accepting() else ()
        self._round = Round(targets, self._loop, self._answered)
        self._round.start()

    def _answered(self, ended: Round) -> None:
        self._round = None
        self._reached.update(ended.names(Outcome.ANSWERED))
        if self._state is _State.STOPPING:
            return
        if ended.names(Outcome.FAILED):
            self._failed(ended.explain(Outcome.FAILED))
            return
        self._retries = 0
        self._proved = True
        self._answered_at = time.monotonic()
        self._say_unreached(ended)
        if self._state is _State.SERVING:
            self._manager.tell("WATCHDOG=1")
        self._look()

    def _say_unreached(self, ended: Round) -> None:
        unreached = ended.explain(Outcome.UNREACHABLE)
        if unreached and unreached != self._unreached:
            _LOG.warning(
                "not reachable from this host, and so not watched: %s", unreached
            )
        self._unreached = unreached

    def _failed(self, why: str) -> None:
        if self._state is _State.SERVING:
            _LOG.error("a request of the broker to itself failed: %s", why)
            if self._waits_for_disk():
                _LOG.warning("a process waits for its disk; the watchdog is fed")
                self._manager.tell("WATCHDOG=1", "STATUS=Waiting for a disk")
                self._answered_at = time.monotonic()
        if self._retries < _QUICK_RETRIES:
            self._retries += 1
            self._ask()

    def _waits_for_disk(self) -> bool:
        return any(process_state(pid) == "D" for pid in self._children())

    def _look(self) -> None:
        if self._state is not _State.PROVING or not self._proved:
            return
        self._state = _State.SERVING
        self._serving()
        self._status = self._status_now()
        self._manager.tell("READY=1", "WATCHDOG=1", self._status, wait=True)
        if self._manager.is_there:
            self._fill_store()

    def _fill_store(self) -> None:
        """Leave our listen sockets with the service manager, and remove others."""
        used = {
            each.stored_name for each in self._listeners if each.origin is Origin.STORED
        }
        for name in self._stored_names - used:
            self._manager.forget(name)  # or the manager would listen there for ever
        for listener in self._listeners:
            # Not a Unix socket: we remove its file, and it would be unreachable.
            if listener.origin is Origin.BOUND and listener.path is None:
                self._manager.keep(listener.stored_name, listener.sock.fileno())

    # -- the clock ---------------------------------------------------------------------

    def _tick(self) -> None:
        now = time.monotonic()
        if self._state is _State.STOPPING:
            self._manager.extend_timeout(_EXTENSION_S)
            return
        if self._round is not None and now - self._round_began >= self._patience_s():
            self._round.give_up(self._reached)
        if self._state is _State.SERVING:
            self._watch(now)
        else:
            self._wait_for_start(now)

    def _patience_s(self) -> float:
        """Return the seconds in which a test request must be answered.

        Under a watchdog several such times fit into the watchdog's interval.
        """
        if self._state is _State.SERVING and self._manager.watchdog_s:
            return self._manager.watchdog_s / 4
        return _ROUND_S

    def _watch(self, now: float) -> None:
        due = self._answered_at + self._manager.watchdog_s / 2
        if self._manager.watchdog_s and self._round is None and now >= due:
            self._ask()
        if now - self._said_at >= _STATUS_S:
            self._say_status(now)

    def _wait_for_start(self, now: float) -> None:
        self._manager.extend_timeout(_EXTENSION_S, "STATUS=Starting")
        if self._state is _State.PROVING and now - self._began > _FIRST_ANSWER_S:
            _LOG.critical(
                "no request came through within %d s; the broker stops", _FIRST_ANSWER_S
            )
            self._loop.failed = True
        elif self._round is None and not self._proved:
            self._ask()

    def _say_status(self, now: float) -> None:
        self._said_at = now
        status = self._status_now()
        if status != self._status and self._manager.tell(status):
            self._status = status

    def _status_now(self) -> str:
        on = ", ".join(each.told for each in self._listeners)
        unreached = f"; unreachable from here: {self._unreached}"
        return (
            f"STATUS=Serving {on}; {self._describe()}"
            f"{unreached if self._unreached else ''}"
        ).replace("\n", " ")
