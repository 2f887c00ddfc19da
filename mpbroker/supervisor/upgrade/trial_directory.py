"""The data directory of an upgrade's trial, removed even if its maker is killed.

The supervisor that makes it holds a lock on it, and removes it in the end. If the
supervisor is killed, the lock is free: the next one that starts, or makes such a
directory, removes it.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

from mpbroker.base.logger import get_logger

_LOG = get_logger(__name__)

_PREFIX: Final = "mpbroker-trial-"
_OPEN: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class TrialDirectory:
    """A temporary data directory for the trial of an upgrade, locked until removed.

    Attributes:
        lock_fd: holds the lock; children must close it.

    Raises:
        OSError: the directory cannot be made.
    """

    def __init__(self) -> None:
        lock_fd: int | None = None
        while lock_fd is None:  # before the lock another broker may remove it
            parent = next(iter(_parents()), "/tmp")
            self.path = os.path.join(parent, _PREFIX + os.urandom(6).hex())
            os.mkdir(self.path, 0o700)
            lock_fd = _lock(self.path)
        self.lock_fd = lock_fd

    def remove(self) -> None:
        _remove(self.path, self.lock_fd)


def remove_left_directories() -> None:
    """Remove directories of upgrades' trials whose makers (supervisors) have died."""
    for path in _found():
        try:
            lock_fd = _lock(path)
        except OSError:
            continue  # another user's, or not a directory
        if lock_fd is not None:
            _remove(path, lock_fd)
            _LOG.info("removed %s, which a dead broker has left", path)


def _found() -> Iterator[str]:
    for parent in _parents():
        with suppress(PermissionError):  # a directory that we may write but not list
            for name in os.listdir(parent):
                if name.startswith(_PREFIX):
                    yield os.path.join(parent, name)


def _parents() -> list[str]:
    """Return the directories for temporary files, the preferred one first.

    This replaces tempfile.gettempdir(), whose module is large.
    """
    named = dict.fromkeys((os.environ.get("TMPDIR", ""), "/tmp", "/var/tmp"))
    return [each for each in named if os.access(each, os.W_OK | os.X_OK)]


def _lock(path: str) -> int | None:
    """Lock a directory of this user; return the descriptor that holds the lock.

    None: another process has the lock, or the directory is gone or another user's.

    Raises:
        OSError: the directory cannot be opened or locked.
    """
    fd = -1
    try:
        fd = os.open(path, _OPEN)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        ours, there = os.fstat(fd), os.lstat(path)
        if os.path.samestat(ours, there) and ours.st_uid == os.geteuid():
            locked, fd = fd, -1
            return locked
    except (FileNotFoundError, BlockingIOError):
        pass
    finally:
        if fd >= 0:
            os.close(fd)
    return None


def _remove(path: str, lock_fd: int) -> None:
    import shutil

    shutil.rmtree(path, ignore_errors=True)
    os.close(lock_fd)
