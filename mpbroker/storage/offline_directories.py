"""Which log directories are offline: not there since the start, or failed since.

The broker publishes with its state which directories were not there when it started.
The housekeeper sets a bit in shared memory for each directory that it cannot read any
more. Status, readiness and metrics read both. Partitions that may be in an offline
directory are refused, see LogManager.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

from mpbroker.base.logger import get_logger
from mpbroker.ipc.layout import HEADER, HEADER_DIRECTORIES_OFFLINE, MASK_BITS
from mpbroker.ipc.tables.partition_table import note_offline_change
from mpbroker.storage.log_directory import LogDirectory

_LOG = get_logger(__name__)

LOOK_INTERVAL_MS: Final = 1000
_OFFLINE: Final = HEADER + HEADER_DIRECTORIES_OFFLINE
_NOT_THERE: Final = "log_dirs_not_there"  # the key of the published state


class OfflineDirectories:
    """Notes and tells which log directories cannot be read any more.

    Args:
        words: the control segment of shared memory.
        directories: the log directories in use, in the order that all processes have.
    """

    def __init__(self, words: memoryview, directories: Sequence[LogDirectory]) -> None:
        self._words = words
        self._directories = directories[:MASK_BITS]

    def look(self, now_ms: int) -> None:
        """Tell of directories that cannot be read since the last look, or can again.

        Only the housekeeper calls this. If it is killed, the next one goes on with what
        the word says.
        """
        for number, directory in enumerate(self._directories):
            bit, path = 1 << number, directory.path
            was_offline = bool(self._words[_OFFLINE] & bit)
            failure = directory.failure()
            if failure is not None and not was_offline:
                self._words[_OFFLINE] |= bit
                note_offline_change(self._words)
                _LOG.error(
                    "log.dirs: %s is offline, and its partitions are refused: %s; mend"
                    " the disk, and start the broker again",
                    *(path, failure.strerror or failure),
                )
            elif failure is None and was_offline:
                self._words[_OFFLINE] &= ~bit
                note_offline_change(self._words)
                _LOG.warning(
                    "log.dirs: %s can be read again; partitions that have failed stay"
                    " offline until the next start",
                    path,
                )


def not_there_at_start(
    log_dirs: Sequence[str], paths: Sequence[str]
) -> dict[str, list[dict[str, Any]]]:
    """Return what the broker publishes of directories that are not there at its start.

    Args:
        log_dirs: all of ``log.dirs``.
        paths: those that can be used, as absolute paths, the first one first.
    """
    from mpbroker.storage.used_directories import lost_directories

    try:
        lost = {path: key for key, path in lost_directories(paths).items()}
    except OSError:
        lost = {}
    wanted = [os.path.abspath(path) for path in log_dirs]
    unusable = [path for path in wanted if path not in paths]
    return {
        _NOT_THERE: [
            {"path": path, "id": lost.get(path, ""), "is_unusable": path in unusable}
            for path in dict.fromkeys([*unusable, *lost])
        ]
    }


def offline_directories(words: memoryview, state: Mapping[str, Any]) -> list[str]:
    """Return the log directories that are offline now.

    Args:
        words: the control segment of shared memory.
        state: what the broker has published.
    """
    paths = state.get("log_dirs", ())
    offline = words[_OFFLINE]
    found = [path for n, path in enumerate(paths[:MASK_BITS]) if offline >> n & 1]
    missing = state.get(_NOT_THERE, ())
    if missing:
        # Imported here: most brokers have one log directory.
        from mpbroker.storage.used_directories import used_directories

        try:
            used = {each.directory_id for each in used_directories(paths[0])}
        except OSError:
            used = {each["id"] for each in missing}
        found += [
            each["path"]
            for each in missing
            if each["path"] not in found
            # If it was lost, it may have been given up since.
            and (each["is_unusable"] or each["id"] in used)
        ]
    return found
