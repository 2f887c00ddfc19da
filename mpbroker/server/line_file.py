"""A file that lines are appended to; it may be a pipe, whose reader holds up nobody."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import time
from typing import Final

from mpbroker.logger import get_logger

_LOG = get_logger(__name__)
_FLAGS: Final = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
_MODE: Final = 0o640
# So long the reader of a pipe is waited for that has taken a part of a line.
_PATIENCE_S: Final = 0.1


class LineFile:
    """See the module.

    Args:
        path: made if it is not there; never rotated here: it is opened for each append,
            so that it may be moved away at any time.
        setting: which names it, for the log.
    """

    def __init__(self, path: str, setting: str) -> None:
        self._path = path
        self._setting = setting
        self._failed = False
        self._is_cut = False  # the last line has no end

    def append(self, data: bytes) -> None:
        """Write whole lines; what cannot be written is lost, and the log says so."""
        try:
            # A pipe without a reader, or with a slow one, must hold up nobody.
            fd = os.open(self._path, _FLAGS, _MODE)
            try:
                self._write_whole(fd, b"\n" + data if self._is_cut else data)
            finally:
                os.close(fd)
            self._failed = False
        except OSError as error:
            if not self._failed:  # once, until it works again
                _LOG.error("%s=%s: %s", self._setting, self._path, error)
            self._failed = True

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
