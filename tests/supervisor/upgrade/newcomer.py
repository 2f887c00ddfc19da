"""Another version of the broker, for upgrades: it works, or fails where it is told to.

python -m tests.supervisor.upgrade.newcomer VERSION FAULT serve ...

Several faults are joined by "+". With "layout" it is none: the newcomer has another
layout of shared memory, in all that may differ: sizes, places and words of rows. With
"held=FILE" its handlers begin when there is such a file, so that the upgrade lasts;
with "still=FILE" it replaces no process before that, and with "late=FILE" it does not
even begin.
"""

from __future__ import annotations

import errno
import importlib
import os
import re
import signal
import sys
import types
from pathlib import Path

import mpbroker

_WORDS = {
    "LAYOUT_VERSION": 77,
    "SLOTS_PER_PROCESSOR": 4096,
    "MAX_PROCESSORS": 8,
    "CONNECTION_SLOT": 28,
    "CONNECTION_POSITION": 29,
    "CONNECTION_EXTENT": 3,
    "CONNECTION_COOKIE": 4,
    "SLOT_BLOCK": 6,
    "SLOT_PROGRESS": 25,
    "SLOT_SESSION_CLAIM": 18,
    "HEADER_PHASE": 20,
}
_SOURCE = re.compile(r"^([A-Z_]+): Final = (\(\n.*?\n\)|[^\n]*)", re.M | re.S)


def use_another_layout() -> None:
    """Load ``ipc.layout`` with other numbers, before anybody else does."""
    path = Path(mpbroker.__file__).parent / "ipc" / "layout.py"
    source = _SOURCE.sub(
        lambda found: f"{found[1]}: Final = {_WORDS.get(found[1], found[2])}",
        path.read_text(),
    )
    module = types.ModuleType("mpbroker.ipc.layout")
    sys.modules[module.__name__] = module
    exec(compile(source, str(path), "exec"), module.__dict__)
    importlib.import_module("mpbroker.ipc").layout = module


def kill_keeper() -> None:
    """That of the program before us, whose child it is, and so ours."""
    for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        if b"socket-keeper" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(int(pid), signal.SIGKILL)


def hold_start(until: Path) -> None:
    """Wait here until a file is there."""
    from tests.support.children import wait_until

    wait_until(until.exists)


def hold_handlers(until: Path) -> None:
    """Let no handler begin before a file is there."""
    from mpbroker.server.request_handler import RequestHandler
    from tests.support.children import wait_until

    run = RequestHandler.run

    def held(self: RequestHandler) -> None:
        wait_until(until.exists)
        run(self)

    RequestHandler.run = held


def hold_renewal(until: Path) -> None:
    """Replace none of the old program's processes before a file is there."""
    from mpbroker.supervisor.upgrade.predecessor import Predecessor
    from tests.support.children import wait_until

    renew = Predecessor.renew

    def held(*arguments: object) -> None:
        wait_until(until.exists)
        renew(*arguments)

    Predecessor.renew = held


def main() -> int:
    version, faults = sys.argv[1], sys.argv[2].split("+")
    del sys.argv[1:3]
    mpbroker.__version__ = version
    is_trial = os.environ.get("_MPBROKER_TAKEOVER", "").startswith("trial")
    if "trial" in faults and is_trial:
        sys.exit("the newcomer does not even start")
    if "settings" in faults and not is_trial:
        sys.argv.append("num.io.threads=many")  # since it was tried
    if "layout" in faults:
        use_another_layout()
    for fault in faults:
        if fault.startswith("late=") and not is_trial:
            hold_start(Path(fault.removeprefix("late=")))
    if "handler" in faults and not is_trial:
        from mpbroker.server.request_handler import RequestHandler

        RequestHandler.run = lambda self: os._exit(3)
    for fault in faults:
        if fault.startswith("held=") and not is_trial:
            hold_handlers(Path(fault.removeprefix("held=")))
        if fault.startswith("still=") and not is_trial:
            hold_renewal(Path(fault.removeprefix("still=")))
    if "takeover" in faults and not is_trial:
        from mpbroker.supervisor import pool_settings

        def broken(*_: object) -> None:
            if "keeper" in faults:
                kill_keeper()
            raise RuntimeError("cannot take over")

        pool_settings.PoolSettings.sizes = broken
    if "descriptors" in faults and not is_trial:
        from mpbroker.broker import broker

        def lacking(*_: object) -> None:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        broker.follow_levels = lacking
    from mpbroker.cli import main

    return main()


if __name__ == "__main__":
    sys.exit(main())
