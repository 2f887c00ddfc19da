"""Where a newcomer tries itself: a directory that does not outlive its maker for long.

The supervisor that makes it holds a lock of it, and removes it in the end. If that was
killed the lock is free, and whoever makes the next one, or starts next, removes it.
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
    """Made, and locked until it is removed.

    Attributes:
        lock_fd: not for children: whoever has it holds the lock.

    Raises:
        OSError: there is no place for it.
    """

    def __init__(self) -> None:
        lock_fd: int | None = None
        while lock_fd is None:  # somebody may take it for one that was left
            parent = next(iter(_parents()), "/tmp")
            self.path = os.path.join(parent, _PREFIX + os.urandom(6).hex())
            os.mkdir(self.path, 0o700)
            lock_fd = _lock(self.path)
        self.lock_fd = lock_fd

    def remove(self) -> None:
        _remove(self.path, self.lock_fd)


def remove_left_directories() -> None:
    """Remove those whose makers have died."""
    for path in _found():
        try:
            lock_fd = _lock(path)
        except OSError:
            continue  # another user's, or nothing that we make
        if lock_fd is not None:
            _remove(path, lock_fd)
            _LOG.info("removed %s, which a dead broker has left", path)


def _found() -> Iterator[str]:
    for parent in _parents():
        with suppress(PermissionError):  # that we may write, and not list
            for name in os.listdir(parent):
                if name.startswith(_PREFIX):
                    yield os.path.join(parent, name)


def _parents() -> list[str]:
    """Where one may be, the place for the next first. As tempfile, which is large."""
    named = dict.fromkeys((os.environ.get("TMPDIR", ""), "/tmp", "/var/tmp"))
    return [each for each in named if os.access(each, os.W_OK | os.X_OK)]


def _lock(path: str) -> int | None:
    """Lock a directory of ours; None: somebody has it, or it is gone.

    Raises:
        OSError: that cannot be.
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
