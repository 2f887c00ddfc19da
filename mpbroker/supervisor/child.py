"""The life of one child process, as a table."""

import os
import signal
import time
from collections.abc import Callable, Mapping
from enum import Enum, auto
from typing import Final, NamedTuple

from mpbroker.base.errors import MpbrokerError
from mpbroker.base.exit_status import explain_exit
from mpbroker.ipc.layout import METRICS


class Role(Enum):
    """A child's task; the names are those of Kafka's threads."""

    ACCEPTOR = "acceptor"
    PROCESSOR = "processor"
    HANDLER = "handler"
    COORDINATOR = "coordinator"
    HOUSEKEEPER = "housekeeper"
    KEEPER = "keeper"
    EXPORTER = "exporter"  # only if the settings ask for metrics or a request log


class ChildState(Enum):
    """What is true of a child."""

    STARTING = auto()  # forked, not yet serving
    READY = auto()  # serving
    DRAINING = auto()  # told to end; it finishes the work that it has
    BACKOFF = auto()  # dead; its successor is forked at ``restart_at``
    ENDED = auto()  # dead, as intended
    FAILED = auto()  # dead, and a restart cannot help


class ChildEvent(Enum):
    """What happens to a child."""

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
    """A child, as described for a program that takes over from ours."""

    role: str
    number: int
    listener: int
    pid: int  # 0: the process is dead; a successor is to be forked
    state: str
    restarts: int
    last_exit: str


class Child:
    """One child id, and the process that has it now.

    The id outlives the process: a successor has the same one.
    """

    def __init__(
        self, role: Role, number: int, run: Callable[[], None], listener: int = -1
    ) -> None:
        self.role = role
        self.number = number  # its id within the role; an acceptor has its listener's
        self.listener = listener  # that it serves; -1: none in particular
        self.run = run
        self.targets: frozenset[int] | None = None  # processors for its connections
        self.dismissed = False  # killed on purpose: its end is not counted as a death
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
        """Go to the next state.

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
        """Go on with the process that a program before this one forked."""
        self.restarts, self.last_exit = record.restarts, record.last_exit
        if record.pid:
            self.pid = record.pid
            self.pidfd = os.pidfd_open(record.pid)
            self.started_at = time.monotonic()
            self.state = ChildState[record.state]

    def exited(self, status: int) -> None:
        """Note the death of its process; compute when a successor may start."""
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
            # It can work, and something that it serves kills it. If that is a stranger
            # who does it again and again, the others are served in between.
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
    """Count a start or a death of a process of a role, in shared memory.

    Args:
        counts: METRICS_STARTS or METRICS_DEATHS.
    """
    words[METRICS + counts + list(Role).index(role)] += 1


def is_kill(status: int) -> bool:
    """Whether a wait status says that the process was ended by SIGKILL."""
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
