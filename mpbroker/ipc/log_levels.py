"""The levels of loggers that were set while the broker runs: one page for all.

A level applies to every process, including those that are forked later, for the life of
the broker. So the levels are in shared memory, and each process checks for changes
before it logs: it compares one word (base/logger.py). The page has two copies, and a
version that says which one is valid, as in limits_page.py, but any handler may write.

    word     field       written by                      notes
    0-15     mutex       its holder                      robust, process-shared
    16       version     a handler, under the mutex      +1 commits the copy it
                                                        points to (version & 1)
    32..     copy 0      a handler, under the mutex, while copy 1 is valid
    8224..   copy 1      a handler, under the mutex, while copy 0 is valid

A copy is a word with the length of a text in bytes, and the text: one line for each
logger, with the number of its level and its name. If a handler is killed before the
store to the version, no process reads what it wrote, and the next owner of the mutex
overwrites it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

from mpbroker.ipc.robust_mutex import RobustMutex
from mpbroker.ipc.segment import Segment

_MUTEX: Final = 0
_VERSION: Final = 16
_COPIES: Final = 32
_COPY_WORDS: Final = 8192
_SEGMENT_WORDS: Final = _COPIES + 2 * _COPY_WORDS
_MAX_TEXT_BYTES: Final = (_COPY_WORDS - 1) * 8  # room for 700 loggers; there are 60


class LogLevels:
    """The page of log levels in shared memory, as one process sees it."""

    def __init__(self, segment: Segment) -> None:
        self._words = segment.words
        self._view = segment.view
        self._mutex = RobustMutex(segment, _MUTEX)

    @staticmethod
    def create_segment() -> Segment:
        segment = Segment.create("mpbroker-log-levels", _SEGMENT_WORDS * 8)
        RobustMutex.initialise(segment, _MUTEX)
        return segment

    @property
    def version(self) -> int:
        """A number that grows with each change of a level, for a cheap comparison."""
        return self._words[_VERSION]

    def read(self) -> dict[str, int]:
        """Return the log levels that were set, by the logger's name.

        Never fails on damaged memory: a process that reports the damage must be able to
        log.
        """
        return _read(self._words, self._view)

    def change(self, put: Mapping[str, int | None]) -> None:
        """Set the levels of loggers. All changes are made, or none.

        Args:
            put: the level of each logger, by its name; None removes the level.

        Raises:
            ValueError: the page has no room for them; nothing has changed.
        """
        # A dead owner has either committed its change or not: nothing to repair.
        with self._mutex:
            levels: dict[str, int | None] = {**self.read(), **put}
            lines = [
                f"{level} {name}\n"
                for name, level in levels.items()
                if level is not None
            ]
            data = "".join(lines).encode()
            if len(data) > _MAX_TEXT_BYTES:
                raise ValueError(
                    f"levels of {len(data)} bytes; at most {_MAX_TEXT_BYTES}"
                )
            words, version = self._words, self._words[_VERSION] + 1
            at = _copy(version)
            start = (at + 1) * 8
            self._view[start : start + len(data)] = data
            words[at] = len(data)
            words[_VERSION] = version  # last: from here on the copy is valid


def levels_left_in(fd: int) -> dict[str, int]:
    """Return the log levels set in the program that this one replaces in an upgrade.

    Args:
        fd: the segment of that program's log levels.

    Returns:
        The levels by the logger's name; {} if the segment is too short.
    """
    data = memoryview(os.pread(fd, _SEGMENT_WORDS * 8, 0))
    if len(data) < _SEGMENT_WORDS * 8:
        return {}
    return _read(data.cast("q"), data)


def _read(words: memoryview, view: memoryview) -> dict[str, int]:
    while True:
        version = words[_VERSION]
        at = _copy(version)
        start, length = (at + 1) * 8, min(max(0, words[at]), _MAX_TEXT_BYTES)
        data = bytes(view[start : start + length])
        if words[_VERSION] == version:  # else it may have been overwritten
            break
    levels = {}
    for line in data.decode(errors="replace").splitlines():
        number, _, name = line.partition(" ")
        with suppress(ValueError):
            levels[name] = int(number)
    return levels


def _copy(version: int) -> int:
    return _COPIES + (version & 1) * _COPY_WORDS
