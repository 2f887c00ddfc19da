"""Replace this program by another one in the same process, which takes over from it."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

from mpbroker.base.errors import MpbrokerError
from mpbroker.base.logger import shut_down
from mpbroker.supervisor.signals import HANDLED, SignalSocket
from mpbroker.supervisor.upgrade.manifest import Manifest
from mpbroker.supervisor.upgrade.takeover import VARIABLE, environment_of_takeover


class UpgradeError(MpbrokerError):
    """The broker was not replaced; it goes on as before."""


def replace_program(command: Sequence[str], manifest: Manifest) -> None:
    """Execute another program in this process; it takes over, so this never returns.

    Args:
        command: the command line of the other program.
        manifest: the description of the broker for that program.

    Raises:
        UpgradeError: there is no such program, or no descriptor or memory for it;
            nothing has changed.
    """
    try:
        fd = manifest.write()
    except OSError as error:
        _forget_generation(manifest)
        raise UpgradeError(f"nothing can be handed over: {error}") from error
    # Killed anywhere from here to the exec, the broker dies as at any other time: the
    # children end with this process. What can be undone is what *fails*, and all of it
    # is undone below.
    kept = {*manifest.fds, fd}
    shut_down()
    # A signal that comes now waits: execve keeps what is pending, and what is blocked.
    # Blocked before those that came already are given back to the kernel, or they would
    # be delivered again at once, to a handler that does nothing.
    signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
    SignalSocket.give_back()
    try:
        # Last before the exec, and taken back if that fails: a child that is forked
        # with it, and executes something, would hold our segments and locks.
        for each in kept:
            os.set_inheritable(each, True)
        environ = {**os.environ, VARIABLE: environment_of_takeover(fd)}
        os.execvpe(command[0], list(command), environ)
    except OSError as error:
        raise UpgradeError(f"{command[0]} cannot be run: {error.strerror}") from error
    finally:
        for each in kept:
            os.set_inheritable(each, False)
        _forget_generation(manifest)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
        os.close(fd)


def _forget_generation(manifest: Manifest) -> None:
    """Kill the process that was to end the children for the next program.

    The manifest names it, and no program will read the manifest.
    """
    if manifest.is_generation:
        os.close(manifest.generation)
        manifest.dismiss_leaver()
