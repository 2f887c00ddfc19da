"""LastLook: since when a node's local logs have all that the cluster had.

A consumer that comes from another node may ask for an offset which is not here yet. It
must not be told that the offset is out of range, or it would begin elsewhere. So the
process that copies records notes the time at which it has begun its last look, when all
that it has found then is copied. What was acknowledged before that time is here.

The note is one word, the time by CLOCK_MONOTONIC in ns, in a file that processes map.
"""

from __future__ import annotations

import mmap
import os
import time
from typing import Final

_FILE: Final = "cluster-node-look"
_WORD_BYTES: Final = 8


class LastLook:
    """The note in a directory.

    Args:
        home: the first log directory.
    """

    def __init__(self, home: str) -> None:
        self._path = os.path.join(home, _FILE)
        self._word: memoryview | None = None

    def begin(self) -> None:
        """Make the note anew, without a time; called by its one writer.

        Raises:
            OSError: the file cannot be made.
        """
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, _WORD_BYTES)
            self._word = memoryview(mmap.mmap(fd, _WORD_BYTES)).cast("q")
        finally:
            os.close(fd)
        self._word[0] = 0

    def note(self, began_ns: int) -> None:
        """Note the beginning of a look whose finds are all copied."""
        assert self._word is not None
        self._word[0] = began_ns

    def is_behind(self, since_ns: int) -> bool:
        """Return whether the logs may lack what was acknowledged before a time.

        Args:
            since_ns: the time, by CLOCK_MONOTONIC.
        """
        if self._word is None and not self._open():
            return True
        assert self._word is not None
        # One of an earlier start of the machine may be in the future.
        return not since_ns < self._word[0] <= time.monotonic_ns()

    def _open(self) -> bool:
        """Map the file for reading; return False if its writer has not made it."""
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            if os.fstat(fd).st_size < _WORD_BYTES:
                return False
            found = mmap.mmap(fd, _WORD_BYTES, prot=mmap.PROT_READ)
        except OSError:
            return False
        finally:
            os.close(fd)
        self._word = memoryview(found).cast("q")
        return True
