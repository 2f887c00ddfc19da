"""Which log directories have no room left, as words of shared memory.

A process whose append fails for lack of room notes the directory. The housekeeper sees
the note, says once in the log that the directory is full, and once that it has room
again; appends go on by themselves. Status and metrics read what the housekeeper says.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from typing import Final

from mpbroker.base.logger import get_logger
from mpbroker.ipc.layout import (
    HEADER,
    HEADER_DIRECTORIES_FULL,
    HEADER_DIRECTORIES_REFUSED,
    MASK_BITS,
)

_LOG = get_logger(__name__)

LOOK_INTERVAL_MS: Final = 1000
NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
"""The errors by which a file system says that it, or a quota of it, is full."""

_REFUSED: Final = HEADER + HEADER_DIRECTORIES_REFUSED
_FULL: Final = HEADER + HEADER_DIRECTORIES_FULL
# A directory has room again if no append has failed for so long, and so many bytes can
# be allocated. Producers try again more often, so the two lines are not told in turns.
_QUIET_MS: Final = 3000
_ROOM_BYTES: Final = 1 << 20


class FullDirectories:
    """Notes and tells which log directories are full.

    Args:
        words: the control segment of shared memory.
        paths: the log directories, in the order that all processes have.
    """

    def __init__(self, words: memoryview, paths: Sequence[str]) -> None:
        self._words = words
        self._paths = paths[:MASK_BITS]
        self._refused_ms: dict[int, int] = {}  # the last note, by directory

    def note(self, partition_directory: str) -> bool:
        """Note that an append failed for lack of room; any process may call this.

        Two processes may store at the same time, and one note may be lost: the next
        append that fails notes it again.

        Returns:
            Whether it is noted. False: the directory is not one of ``paths``.
        """
        path = os.path.dirname(partition_directory)
        if path not in self._paths:
            return False
        bit = 1 << self._paths.index(path)
        if not self._words[_REFUSED] & bit:
            self._words[_REFUSED] |= bit
        return True

    def look(self, now_ms: int) -> None:
        """Tell of directories that are full since the last look, or have room again.

        Only the housekeeper calls this. If it is killed, the next one goes on with what
        the words say.

        Args:
            now_ms: the wall clock.
        """
        noted = self._words[_REFUSED]
        if noted:
            self._words[_REFUSED] = 0
        full = self._words[_FULL]
        for number, path in enumerate(self._paths):
            bit = 1 << number
            if noted & bit:
                self._refused_ms[number] = now_ms
                if not full & bit:
                    self._words[_FULL] |= bit
                    _LOG.error(
                        "%s is full: appends to its partitions are refused until there"
                        " is room; reads go on",
                        path,
                    )
            elif full & bit and self._has_healed(number, path, now_ms):
                self._words[_FULL] &= ~bit
                _LOG.warning("%s has room again: appends go on", path)

    def _has_healed(self, number: int, path: str, now_ms: int) -> bool:
        quiet_ms = now_ms - self._refused_ms.setdefault(number, now_ms)
        # The clock may have been set back.
        return not 0 <= quiet_ms < _QUIET_MS and has_room(path)


def full_directories(words: memoryview, paths: Sequence[str]) -> list[str]:
    """Return the log directories that are full, by the housekeeper's last look."""
    full = words[_FULL]
    return [path for number, path in enumerate(paths[:MASK_BITS]) if full >> number & 1]


def has_room(
    path: str, allocate: Callable[[int, int, int], None] = os.posix_fallocate
) -> bool:
    """Return whether a directory's file system has room for some more records.

    Bytes are allocated in a file without a name, which is gone at once: the number of
    free blocks says nothing of quotas. Where there are no such files it has to do.

    Args:
        path: the directory.
        allocate: allocates bytes of a file. A test may replace it.
    """
    try:
        fd = os.open(path, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError:
        return _has_free_blocks(path)
    try:
        allocate(fd, 0, _ROOM_BYTES)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EINVAL):
            return _has_free_blocks(path)
        return False
    finally:
        os.close(fd)
    return True


def _has_free_blocks(path: str) -> bool:
    try:
        found = os.statvfs(path)
    except OSError:
        return False
    return found.f_bavail * found.f_frsize >= _ROOM_BYTES
