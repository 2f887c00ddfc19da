"""Replace the whole broker by another version of itself, with its clients connected.

The supervisor replaces its program (execve) and not itself. It keeps its process id: so
its children stay its children, the service manager need not be told, and there are
never two supervisors that repair the same memory. The steps, and what does each:

    trial     the new program in a process   reads the settings, attaches the memory;
              of its own                     then is a broker with data of its own until
                                             a request has come through
    exec      the supervisor                 hands over: see takeover.py
    renewal   the new program                replaces one child after another
    proof     the new program                sends a request through every stage

If the new program has another layout of memory, the children cannot stay. When it is
ready they all end, and the connections go on in a second generation of children: see
generation.py.

A trial that fails has changed nothing. A new program that fails later goes back: it
replaces itself by the old one in the same way, with the reason, and the old program
renews the children once more. Children serve all the time. Only a repair after a death
waits the tenth of a second that a program takes to start.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from mpbroker.base.logger import get_logger
from mpbroker.ipc.named_segment import remove_leftovers
from mpbroker.metadata.meta_properties import FILE_NAME
from mpbroker.supervisor.own_command import installed_command
from mpbroker.supervisor.signals import HANDLED
from mpbroker.supervisor.upgrade.manifest import Manifest
from mpbroker.supervisor.upgrade.replacement import UpgradeError, replace_program
from mpbroker.supervisor.upgrade.takeover import (
    NEW_GENERATION,
    VARIABLE,
    environment_of_trial,
)
from mpbroker.supervisor.upgrade.trial_directory import (
    TrialDirectory,
    remove_left_directories,
)

_LOG = get_logger(__name__)

_TRIAL_S: Final = 120.0
# The trial must not take CPU time from the processes that serve.
_TRIAL_NICENESS: Final = 5
# After the trial, other changes of processes (a resize) may take so long to end.
_QUIET_S: Final = 60.0
_LOOK_S: Final = 0.02
_REASON_BYTES: Final = 4096


class Upgrade:
    """An upgrade, from the order until this program is replaced or the upgrade fails.

    Args:
        fork_aside: calls its first argument in a forked process, and at the end of that
            process its second argument with the wait status. It returns a function that
            kills the process; None: the process could not be started.
        manifest: describes the broker as it is now, for the next program.
        leave: does the same for a program that cannot share memory; raises UpgradeError
            if that is impossible.
        say: publishes the progress.
        is_quiet: returns whether the children may be handed over: none starts or
            retires.
        only_ours: the descriptors that children close after their fork.
    """

    def __init__(
        self,
        fork_aside: Callable[
            [Callable[[], None], Callable[[int], None]], Callable[[], None] | None
        ],
        manifest: Callable[[], Manifest],
        leave: Callable[[], Manifest],
        say: Callable[[str], None],
        is_quiet: Callable[[], bool],
        only_ours: set[int],
    ) -> None:
        self._leave = leave
        self._only_ours = only_ours
        self._is_quiet = is_quiet
        self._fork_aside = fork_aside
        self._manifest = manifest
        self._say = say
        self._command: list[str] = []
        self._kill: Callable[[], None] | None = None
        self._deadline = 0.0
        self._directory: TrialDirectory | None = None
        self._reason_fd = -1
        self._given_up = ""  # why the upgrade is not to go on
        self._is_tried = False  # the trial has succeeded
        self._new_generation = ""  # why the new program needs memory of its own

    @property
    def is_under_way(self) -> bool:
        return bool(self._command)

    def begin(self, command: Sequence[str] | None) -> None:
        """Begin an upgrade: try the new program in a process of its own.

        Raises:
            UpgradeError: an upgrade is under way already, or there is no such program.
        """
        if self.is_under_way:
            raise UpgradeError("an upgrade is under way; wait for its end")
        self._command = list(command or installed_command())
        if shutil.which(self._command[0]) is None:
            missing, self._command = self._command[0], []
            raise UpgradeError(f"{missing}: there is no such program")
        _LOG.info("upgrade: trying %s", " ".join(self._command))
        self._given_up = ""
        self._say("trying the newcomer")  # whatever is said next is the result
        try:
            self._begin_trial()
        except OSError as error:
            self._failed(str(error))
            raise UpgradeError(f"the newcomer cannot be tried: {error}") from error

    def _begin_trial(self) -> None:
        """Fork the process that tries the new program.

        Raises:
            OSError: there is no room for its files or descriptors; nothing is left of
                the attempt.
        """
        manifest = self._manifest()
        with contextlib.ExitStack() as closing, contextlib.ExitStack() as undoing:
            fd = manifest.write()
            closing.callback(os.close, fd)
            self._reason_fd, theirs = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            closing.callback(os.close, theirs)
            undoing.callback(os.close, self._reason_fd)
            remove_left_directories()
            self._directory = directory = TrialDirectory()
            undoing.pop_all()
            self._only_ours.update((self._reason_fd, directory.lock_fd))
            self._deadline = time.monotonic() + _TRIAL_S
            run = partial(self._become_trial, manifest, fd, directory.path, theirs)
            self._kill = self._fork_aside(run, self._ended)

    def give_up(self, reason: str) -> None:
        """End an upgrade that is under way, because the broker drains or stops."""
        if self._kill is not None:
            self._given_up = reason
            self._kill()
        elif self._is_tried:
            self._failed(reason)

    def _become_trial(
        self, manifest: Manifest, fd: int, directory: str, reason_fd: int
    ) -> None:
        """Execute the new program as a trial; called in the trial's process."""
        for each in (*manifest.fds, fd, reason_fd):
            os.set_inheritable(each, True)
        environ = {
            **os.environ,
            VARIABLE: environment_of_trial(fd, directory, reason_fd),
        }
        # The trial must not send states in the service's name.
        for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"):
            environ.pop(name, None)
        for number in HANDLED:
            signal.signal(number, signal.SIG_DFL)
        with contextlib.suppress(PermissionError):  # our units forbid the call
            os.nice(_TRIAL_NICENESS)
        try:
            os.execvpe(self._command[0], self._command, environ)
        except OSError as error:
            reason = f"{self._command[0]} cannot be run: {error.strerror}"
            os.write(reason_fd, reason.encode())
            raise

    def _ended(self, status: int) -> None:
        try:
            reason = os.read(self._reason_fd, _REASON_BYTES).decode(errors="replace")
        except BlockingIOError:  # a process that it has started has the other end
            reason = ""
        assert self._directory is not None
        # Exit status 0 alone proves nothing: any program may end with it.
        has_served = os.path.exists(f"{self._directory.path}/{FILE_NAME}")
        self._close_trial()
        self._kill = None
        if status == 0 and not has_served:
            reason = (
                f"{self._command[0]} ended without having served; name a command that"
                " starts mpbroker"
            )
        elif status == 0 and not self._given_up:
            self._is_tried = True
            self._new_generation = reason.removeprefix(NEW_GENERATION)
            if reason:
                self._say(f"handing over to a new generation: {self._new_generation}")
            self._deadline = time.monotonic() + _QUIET_S
            return
        remove_leftovers()  # a killed trial leaves its named segment
        self._failed(self._given_up or reason or _explain(status))

    def _failed(self, reason: str) -> None:
        """Publish why an upgrade has failed; this program goes on as before."""
        _LOG.error("upgrade: failed, and nothing has changed: %s", reason)
        self._say(f"failed, and nothing has changed: {reason}")
        self._command = []
        self._is_tried = False

    def turn(self) -> float | None:
        """Take the upgrade's next step if due; return the seconds until the next call.

        None: no upgrade is under way.
        """
        if self._kill is not None and time.monotonic() >= self._deadline:
            self._deadline = time.monotonic() + _TRIAL_S
            self._kill()
        if self._is_tried and self._is_quiet():
            try:
                manifest = self._leave if self._new_generation else self._manifest
                replace_program(self._command, manifest())
            except UpgradeError as error:
                self._failed(str(error))
        elif self._is_tried and time.monotonic() >= self._deadline:
            self._failed(
                "processes start or retire all the time; wait for the end of the"
                " resize, or find out why they die"
            )
        return _LOOK_S if self.is_under_way else None

    def _close_trial(self) -> None:
        assert self._directory is not None
        self._only_ours -= {self._reason_fd, self._directory.lock_fd}
        os.close(self._reason_fd)
        self._directory.remove()
        self._directory = None

    def close(self) -> None:
        """Close files and the trial's directory when the broker stops."""
        if self._directory is not None:
            self._close_trial()
            remove_leftovers()


def _explain(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"the newcomer was ended by signal {os.WTERMSIG(status)}"
    return (
        f"the newcomer ended with exit status {os.WEXITSTATUS(status)} before it could"
        " say why; see the log"
    )
