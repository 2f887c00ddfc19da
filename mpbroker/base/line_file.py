"""Append lines to a file, or to a pipe whose reader may be slow or absent."""

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
# How long to wait for the reader of a pipe that has read a part of a line.
_PATIENCE_S: Final = 0.1


class LineFile:
    """Appends lines to a file.

    Args:
        path: the file, which is made if it does not exist. It is opened for each
            append, so it may be renamed at any time.
        setting: the setting that names the file, for the log.
        max_bytes: a file of this size is renamed to ``path.1``, which is replaced, and
            a new file is begun. None: the file has no limit.
    """

    def __init__(self, path: str, setting: str, max_bytes: int | None = None) -> None:
        self._path = path
        self._setting = setting
        self._max_bytes = max_bytes
        self._failed = False
        self._is_cut = False  # whether the end of the last line is missing

    def append(self, data: bytes) -> None:
        """Write whole lines. If they cannot be written, log it and drop them."""
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
        # O_NONBLOCK: a pipe without a reader, or with a slow one, must not block.
        fd = os.open(self._path, _FLAGS, _MODE)
        if self._max_bytes is None:
            return fd
        found = os.fstat(fd)
        if found.st_size < self._max_bytes:  # also of a pipe, whose size is 0
            return fd
        try:
            self._move_away(fd, found)
        finally:
            os.close(fd)
        return os.open(self._path, _FLAGS, _MODE)

    def _move_away(self, fd: int, found: os.stat_result) -> None:
        """Rename the open file, which is full, unless another process has renamed it.

        Raises:
            OSError: the file cannot be renamed; the caller must not append to it.
        """
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return  # another process renames it, or was stopped there: do not wait
        # If another process was quicker, the path names a new file, which is not full.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(self._path), found):
                os.replace(self._path, f"{self._path}.1")

    def _write_whole(self, fd: int, data: bytes) -> None:
        """Write all of the data.

        Raises:
            OSError: nothing could be written, or only a part.
        """
        # With one call if possible, so that lines of several processes do not mix.
        rest = memoryview(data)[os.write(fd, data) :]
        self._is_cut = bool(rest)
        until = time.monotonic() + _PATIENCE_S
        while rest:  # a pipe had no room for all of it, so it has a reader
            room = select.poll()
            room.register(fd, select.POLLOUT)
            if not room.poll(max(0.0, until - time.monotonic()) * 1e3):
                raise OSError(errno.EAGAIN, "its reader is too slow: a line was cut")
            with contextlib.suppress(BlockingIOError):
                rest = rest[os.write(fd, rest) :]
        self._is_cut = False
