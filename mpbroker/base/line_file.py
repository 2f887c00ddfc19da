"""A file that lines are appended to; it may be a pipe, whose reader holds up nobody."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import time
from typing import Final

from mpbroker.base.logger import get_logger

_LOG = get_logger(__name__)
_FLAGS: Final = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
_MODE: Final = 0o640
# So long the reader of a pipe is waited for that has taken a part of a line.
_PATIENCE_S: Final = 0.1


class LineFile:
    """See the module.

    Args:
        path: made if it is not there. It is opened for each append, so that it may be
            moved away at any time.
        setting: which names it, for the log.
        max_bytes: a file that has so many makes way for the next: it is renamed to
            ``path.1``, whatever was there before. None: it grows for ever.
    """

    def __init__(self, path: str, setting: str, max_bytes: int | None = None) -> None:
        self._path = path
        self._setting = setting
        self._max_bytes = max_bytes
        self._failed = False
        self._is_cut = False  # the last line has no end

    def append(self, data: bytes) -> None:
        """Write whole lines; what cannot be written is lost, and the log says so."""
        try:
            fd = self._open()
            try:
                self._write_whole(fd, b"\n" + data if self._is_cut else data)
            finally:
                os.close(fd)
            self._failed = False
        except OSError as error:
            if not self._failed:  # once, until it works again
                _LOG.error("%s=%s: %s", self._setting, self._path, error)
            self._failed = True

    def _open(self) -> int:
        # A pipe without a reader, or with a slow one, must hold up nobody.
        fd = os.open(self._path, _FLAGS, _MODE)
        if self._max_bytes is None:
            return fd
        found = os.fstat(fd)
        if found.st_size < self._max_bytes:  # as of all that are no files
            return fd
        try:
            self._move_away(fd, found)
        finally:
            os.close(fd)
        return os.open(self._path, _FLAGS, _MODE)

    def _move_away(self, fd: int, found: os.stat_result) -> None:
        """Rename the file that we have open, unless another process has.

        Raises:
            OSError: it cannot be renamed, and nothing more goes into it.
        """
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return  # somebody is at it, or was stopped there: we do not wait
        # Who was quicker has made a new one, which is not full.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(self._path), found):
                os.replace(self._path, f"{self._path}.1")

    def _write_whole(self, fd: int, data: bytes) -> None:
        """Raises:
        OSError: it cannot be written, or not as a whole.
        """
        # One call, if it can be: lines of several processes do not mix.
        rest = memoryview(data)[os.write(fd, data) :]
        self._is_cut = bool(rest)
        until = time.monotonic() + _PATIENCE_S
        while rest:  # longer than what a pipe has room for: somebody does read it
            room = select.poll()
            room.register(fd, select.POLLOUT)
            if not room.poll(max(0.0, until - time.monotonic()) * 1e3):
                raise OSError(errno.EAGAIN, "its reader is too slow: a line was cut")
            with contextlib.suppress(BlockingIOError):
                rest = rest[os.write(fd, rest) :]
        self._is_cut = False
