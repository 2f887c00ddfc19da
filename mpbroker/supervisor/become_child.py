"""The first steps of every child process, right after its fork."""

from __future__ import annotations

import ctypes
import importlib.machinery
import os
import signal
from collections.abc import Callable
from importlib.util import find_spec, module_from_spec
from typing import Final

from mpbroker.ipc.layout import HEADER, HEADER_SUPERVISOR_PID
from mpbroker.supervisor.memory import BrokerMemory
from mpbroker.supervisor.signals import reset_in_child

_PR_SET_PDEATHSIG: Final = 1


def _setter() -> Callable[[str], None]:
    """Return setproctitle's compiled function without importing its package.

    The package imports logging, which would cost a tenth of the time of a start.
    """
    package = find_spec("setproctitle")
    if package is not None and package.submodule_search_locations:
        spec = importlib.machinery.PathFinder.find_spec(
            "setproctitle._setproctitle", list(package.submodule_search_locations)
        )
        if spec is not None and spec.loader is not None:
            module = module_from_spec(spec)
            spec.loader.exec_module(module)
            found: Callable[[str], None] | None = getattr(module, "setproctitle", None)
            if found is not None:
                return found
    from setproctitle import setproctitle

    return setproctitle


set_process_title = _setter()


def become_child(title: str, memory: BrokerMemory) -> None:
    """Prepare a forked process to die with the supervisor, and to ignore signals.

    Args:
        title: shown by ``ps`` behind the broker's name.
    """
    reset_in_child()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != memory.control.words[HEADER + HEADER_SUPERVISOR_PID]:
        os._exit(0)  # the supervisor died before prctl() took effect
    set_process_title(f"mpbroker: {title}")
