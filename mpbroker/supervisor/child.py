"""The states of one child process, and a table of the transitions between them."""

import os
import signal
import time
from collections.abc import Callable, Mapping
from enum import Enum, auto
from typing import Final

from mpbroker.base.errors import MpbrokerError
from mpbroker.base.exit_status import explain_exit
from mpbroker.base.named_tuple import NamedTuple
from mpbroker.ipc.layout import METRICS


class Role(Enum):
    """A child's task; acceptor, processor and handler are threads in Kafka."""

    ACCEPTOR = "acceptor"
    PROCESSOR = "processor"
    HANDLER = "handler"
    COORDINATOR = "coordinator"
    HOUSEKEEPER = "housekeeper"
    KEEPER = "keeper"
    EXPORTER = "exporter"  # only if the settings ask for metrics or a request log
    CONSOLE = "console"  # only if console.listeners is set


class ChildState(Enum):
    """The state of a child process; the table TRANSITIONS says what may follow."""

    STARTING = auto()  # forked, not yet serving
    READY = auto()  # serving
    DRAINING = auto()  # told to end; it finishes the work that it has
    BACKOFF = auto()  # dead; its successor is forked at ``restart_at``
    ENDED = auto()  # dead, as intended
    FAILED = auto()  # dead, and a restart cannot help


class ChildEvent(Enum):
    """An event that changes the state of a child process."""

    REPORTED_READY = auto()
    STOP_REQUESTED = auto()
    EXITED = auto()
    EXITED_CONFIG = auto()  # EX_CONFIG: it cannot work with this configuration
    RESTARTED = auto()


class IllegalTransitionError(MpbrokerError):
    """An event that cannot happen in a child's state: a bug of the supervisor."""


S, E = ChildState, ChildEvent

# A pair that is absent is illegal; nothing is ignored silently.
TRANSITIONS: Final[Mapping[tuple[ChildState, ChildEvent], ChildState]] = {
    (S.STARTING, E.REPORTED_READY): S.READY,
    (S.STARTING, E.STOP_REQUESTED): S.DRAINING,
    (S.STARTING, E.EXITED): S.BACKOFF,
    (S.STARTING, E.EXITED_CONFIG): S.FAILED,
    (S.READY, E.STOP_REQUESTED): S.DRAINING,
    (S.READY, E.EXITED): S.BACKOFF,
    (S.READY, E.EXITED_CONFIG): S.FAILED,
    (S.DRAINING, E.EXITED): S.ENDED,
    (S.DRAINING, E.EXITED_CONFIG): S.ENDED,
    (S.BACKOFF, E.RESTARTED): S.STARTING,
    (S.BACKOFF, E.STOP_REQUESTED): S.ENDED,
    (S.ENDED, E.STOP_REQUESTED): S.ENDED,
    (S.FAILED, E.STOP_REQUESTED): S.FAILED,
}

_FIRST_BACKOFF_S: Final = 0.02
_LAST_BACKOFF_S: Final = 2.0
# A child that lived this long before it died is restarted at once.
_GOOD_LIFE_S: Final = 0.5
# A keeper of this age has received duplicates of all sockets.
KEEPER_FILLS_S: Final = 1.0


class ChildRecord(NamedTuple):
    """What the program that takes over in an upgrade must know of a child process."""

    role: str
    number: int
    listener: int
    pid: int  # 0: the process is dead; a successor is to be forked
    state: str
    restarts: int
    last_exit: str


class Child:
    """A child of the supervisor: an id within a role, and the process that has it now.

    The id outlives the process: the successor of a dead process has the same id.
    """

    def __init__(
        self, role: Role, number: int, run: Callable[[], None], listener: int = -1
    ) -> None:
        self.role = role
        self.number = number  # its id within the role; an acceptor has its listener's
        self.listener = listener  # the one that it serves; -1: none in particular
        self.run = run
        self.targets: frozenset[int] | None = None  # processors for its connections
        self.dismissed = False  # killed on purpose: its end is not counted as a death
        # Killed because a request has kept it computing for a whole lease.
        self.overran = False
        self.replaced = False  # it retires as soon as a successor is ready
        self.killed_at = 0.0  # deadline of its retirement, monotonic; 0: it has none
        self.state = ChildState.BACKOFF
        self.pid = 0
        self.pidfd = -1
        self.incarnation = 0
        self.restarts = 0
        self.failures = 0  # deaths in a row without a good life in between
        # Deaths in a row before the process was ready, and not caused by SIGKILL.
        self.crashes = 0
        self.started_at = 0.0
        self.restart_at = 0.0
        self.last_exit = ""

    @property
    def is_alive(self) -> bool:
        return self.pidfd >= 0

    @property
    def age_s(self) -> float:
        """The seconds since the child's present process was forked."""
        return time.monotonic() - self.started_at

    def happens(self, event: ChildEvent) -> None:
        """Go to the state that the transition table names for an event.

        Raises:
            IllegalTransitionError: the table has no such transition.
        """
        try:
            self.state = TRANSITIONS[self.state, event]
        except KeyError:
            raise IllegalTransitionError(
                f"{event.name} while {self.state.name}: {self.role.value} {self.number}"
            ) from None

    def started(self, pid: int) -> None:
        self.happens(ChildEvent.RESTARTED)
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self.started_at = time.monotonic()

    @property
    def record(self) -> ChildRecord:
        return ChildRecord(
            self.role.value,
            self.number,
            self.listener,
            self.pid if self.is_alive else 0,
            self.state.name,
            self.restarts,
            self.last_exit,
        )

    def adopt(self, record: ChildRecord) -> None:
        """Take over the process that the previous program forked for this child.

        If that process is dead, only the number of restarts and the last exit are kept.
        """
        self.restarts, self.last_exit = record.restarts, record.last_exit
        if record.pid:
            self.pid = record.pid
            self.pidfd = os.pidfd_open(record.pid)
            self.started_at = time.monotonic()
            self.state = ChildState[record.state]

    def exited(self, status: int) -> None:
        """Note the end of the child's process; compute when a successor may start.

        Args:
            status: the process's wait status.
        """
        os.close(self.pidfd)
        self.pidfd = -1
        if not self.dismissed:  # a replaced process has not failed
            self.last_exit = explain_exit(status)
            self.restarts += 1
        config = os.WIFEXITED(status) and os.WEXITSTATUS(status) == os.EX_CONFIG
        was_ready = self.state is not ChildState.STARTING
        self.happens(ChildEvent.EXITED_CONFIG if config else ChildEvent.EXITED)
        now = time.monotonic()
        if now - self.started_at >= _GOOD_LIFE_S:
            self.failures = self.crashes = 0
        elif was_ready:
            # It can work, and something that it serves kills it. If one client does so
            # again and again, the other clients are served in between.
            self.failures += 1
            self.crashes = 0
        else:
            self.failures += 1
            self.crashes += not is_kill(status)
        pause = 0.0
        if self.failures > 1:
            pause = min(
                _LAST_BACKOFF_S, _FIRST_BACKOFF_S * 2.0 ** min(10, self.failures)
            )
        self.restart_at = now + pause


def count_of_role(words: memoryview, counts: int, role: Role) -> None:
    """Add 1 to the starts or the deaths of a role's processes, in shared memory.

    Args:
        counts: METRICS_STARTS or METRICS_DEATHS, whichever is to be counted.
    """
    words[METRICS + counts + list(Role).index(role)] += 1


def is_kill(status: int) -> bool:
    """Whether a wait status says that the process was ended by SIGKILL."""
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
