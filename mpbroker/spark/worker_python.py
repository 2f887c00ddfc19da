"""Make Spark's Python processes import the installed PySpark, which is compiled.

Spark puts its own pyspark.zip in front of their PYTHONPATH. The archive has sources
only, so each new process compiles every module that it imports: 1.9 s of CPU where the
installed package takes 0.5 s. A query starts several such processes, and a stream fails
if one of them takes more than ten seconds, a limit that no setting changes.

With a local master, PYSPARK_PYTHON is therefore a short shell script that removes the
archives from PYTHONPATH and then executes Python. The script is a file in the driver's
memory (memfd), named by its path below /proc: no file is left behind, even by a driver
that is killed.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Final

_VARIABLE: Final = "PYSPARK_PYTHON"
_SCRIPT: Final = """\
#!/bin/sh
rest=$PYTHONPATH: PYTHONPATH=
while [ -n "$rest" ]; do
    entry=${rest%%%%:*} rest=${rest#*:}
    case $entry in
    '' | */python/lib/pyspark.zip | */python/lib/py4j-*.zip) ;;
    *) PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}$entry ;;
    esac
done
export PYTHONPATH
exec %s "$@"
"""
# The script's path by the id of the process that made it: all sessions of a process use
# one script, and a forked process makes its own.
_made: dict[int, str] = {}


@contextmanager
def quick_worker_python() -> Iterator[None]:
    """Set PYSPARK_PYTHON to a script that starts Python faster, while a session starts.

    Afterwards the variable has its old value: other processes could not use the path.
    The variable is not changed if the user has set it to another Python, or if workers
    would not find PySpark without Spark's zip archives.
    """
    before = os.environ.get(_VARIABLE)
    if before not in (None, sys.executable) or not _is_installed():
        yield
        return
    os.environ[_VARIABLE] = _launcher() or sys.executable
    try:
        yield
    finally:
        if before is None:
            del os.environ[_VARIABLE]
        else:
            os.environ[_VARIABLE] = before


def _is_installed() -> bool:
    """Return whether PySpark and Py4J are installed as directories on sys.path."""
    found = {
        Path(import_module(name).__file__ or "").parent.parent
        for name in ("pyspark", "py4j")
    }
    return all(each.is_dir() and str(each) in sys.path for each in found)


def _launcher() -> str | None:
    """Return the path of a script that starts Python without Spark's zip archives.

    It is a file in this process's memory, made by the first call.

    None: the kernel does not execute files in memory.
    """
    pid = os.getpid()
    if pid not in _made:
        try:
            descriptor = os.memfd_create("pyspark-python")
        except OSError:  # as with vm.memfd_noexec=2
            return None
        os.write(descriptor, (_SCRIPT % shlex.quote(sys.executable)).encode())
        _made[pid] = f"/proc/{pid}/fd/{descriptor}"
    return _made[pid] if os.access(_made[pid], os.X_OK) else None
