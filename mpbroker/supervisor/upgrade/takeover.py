"""Tell the next program, by an environment variable, that it is to take over.

An upgrade replaces the program and not the process (see upgrade.py). The variable names
the descriptor of the manifest (the list of all that is handed over), and says whether
the next program is only tried:

    _MPBROKER_TAKEOVER=trial:<manifest>:<directory>:<descriptor for the reason>
    _MPBROKER_TAKEOVER=takeover:<manifest>

Its name is not one of the broker's settings, and it is removed when it is read.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from typing import Final

from mpbroker.base.named_tuple import NamedTuple
from mpbroker.supervisor import TAKEOVER_VARIABLE
from mpbroker.supervisor.upgrade.manifest import Manifest, TakeoverError

VARIABLE: Final = TAKEOVER_VARIABLE
_TRIAL: Final = "trial"
_TAKEOVER: Final = "takeover"
# With this a trial begins its reason if the program needs shared memory of its own.
NEW_GENERATION: Final = "new generation: "


class Takeover(NamedTuple):
    """The order to take over from another program, or to try whether that works."""

    manifest: Manifest
    trial_directory: str  # "": no trial
    reason_fd: int  # in a trial: receives the reason if we cannot take over

    @property
    def is_trial(self) -> bool:
        return bool(self.trial_directory)

    def refuse(self, reason: str) -> None:
        """Tell the running broker, in a trial, why this program cannot take over."""
        os.write(self.reason_fd, reason.encode())

    def ask_for_generation(self, reason: str) -> None:
        """Tell the running broker, in a trial, why we need shared memory of our own."""
        os.write(self.reason_fd, (NEW_GENERATION + reason).encode())


def takeover(environ: MutableMapping[str, str] = os.environ) -> Takeover | None:
    """Return the order to take over from another program; None: there is no order.

    The environment variable is removed.

    Raises:
        TakeoverError: the other program's manifest (the list of what it hands over)
            cannot be read.
    """
    text = environ.pop(VARIABLE, "")
    if not text:
        return None
    kind, _, rest = text.partition(":")
    fields = rest.split(":")
    manifest_fd = int(fields[0])
    directory, reason_fd = "", -1
    if kind == _TRIAL:
        directory, reason_fd = ":".join(fields[1:-1]), int(fields[-1])
        os.set_inheritable(reason_fd, False)
    try:
        manifest = Manifest.read(manifest_fd)
    except TakeoverError as error:
        if reason_fd >= 0:
            os.write(reason_fd, str(error).encode())
        raise
    finally:
        os.close(manifest_fd)
    manifest.keep_private()
    return Takeover(manifest, directory, reason_fd)


def environment_of_trial(manifest_fd: int, directory: str, reason_fd: int) -> str:
    return f"{_TRIAL}:{manifest_fd}:{directory}:{reason_fd}"


def environment_of_takeover(manifest_fd: int) -> str:
    return f"{_TAKEOVER}:{manifest_fd}"
