"""Let Spark's Python processes import PySpark from where it is compiled already.

Spark puts its own pyspark.zip in front of their PYTHONPATH. That has sources only, so
each new process compiles all that it imports: 1.9 s of CPU where the installed package
takes 0.5 s. Queries start several such processes, and Spark waits ten seconds for those
of a stream, which no setting changes.

So on one machine PYSPARK_PYTHON is a few lines of shell that take the archives out and
become Python. They lie in memory of the driver, named by its descriptor: nothing is
left behind, whoever is killed.
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
# Of this process, made once: sessions that follow one another share it.
_made: dict[int, str] = {}


@contextmanager
def quick_worker_python() -> Iterator[None]:
    """Have a session that is made meanwhile start its workers so.

    PYSPARK_PYTHON is as before afterwards: it would mean nothing to other processes.
    Nothing is done where somebody else has set it to another Python than this one, or
    where workers would not find PySpark without the archives.
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
    """Return whether PySpark and Py4J are directories that any Python here finds."""
    found = {
        Path(import_module(name).__file__ or "").parent.parent
        for name in ("pyspark", "py4j")
    }
    return all(each.is_dir() and str(each) in sys.path for each in found)


def _launcher() -> str | None:
    """Return the script's path, None if this system runs no script from memory."""
    pid = os.getpid()
    if pid not in _made:
        try:
            descriptor = os.memfd_create("pyspark-python")
        except OSError:  # as with vm.memfd_noexec=2
            return None
        os.write(descriptor, (_SCRIPT % shlex.quote(sys.executable)).encode())
        _made[pid] = f"/proc/{pid}/fd/{descriptor}"
    return _made[pid] if os.access(_made[pid], os.X_OK) else None
