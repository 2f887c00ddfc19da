"""Know the log directories that have partitions, also when they are gone.

A file in the first directory of ``log.dirs`` lists the others that have partitions:

    log-directories      the version 0, the number of entries, then a line per entry:
                         directory.id, a space, path

A directory whose id is in the file, and in no ``meta.properties`` now, is lost: it was
taken out of ``log.dirs``, or an empty disk is mounted in its place. Its partitions must
not begin anew. So a directory is entered before its first partition is made there, and
taken out when it has none any more.

Apache Kafka has the directory of each partition in its metadata log instead (KIP-858).
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Final

from mpbroker.base.logger import get_logger
from mpbroker.base.storage_errors import CheckpointError, LogDirectoryError
from mpbroker.metadata.meta_properties import read_meta_properties
from mpbroker.storage.files.checkpoints import checkpoints_locked
from mpbroker.storage.files.log_files import LOG_DIRECTORIES_FILE, write_file
from mpbroker.storage.partition_directory import partition_directories

_HEADER_LINES: Final = 2

logger = get_logger(__name__)


def lost_directories(paths: Sequence[str]) -> dict[str, str]:
    """Return the lost directories: the former path of each by its id.

    Args:
        paths: the directories of ``log.dirs`` that can be used, the first one first.

    Raises:
        OSError: the file cannot be read.
    """
    used = _read(paths[0])
    return {key: used[key] for key in used.keys() - {_id_of(path) for path in paths}}


def may_lack_partitions(paths: Sequence[str]) -> bool:
    """Return whether a directory is lost; also if that cannot be known.

    Args:
        paths: as in ``lost_directories``.
    """
    try:
        return bool(lost_directories(paths))
    except OSError:
        return True


def look_at_start(paths: Sequence[str], all_paths: Collection[str]) -> None:
    """Log which directories are lost, and what an operator can do; note all others.

    Args:
        paths: as in ``lost_directories``.
        all_paths: all of ``log.dirs``. It was logged already which of them cannot be
            used.
    """
    told = {os.path.abspath(path) for path in all_paths} - set(paths)
    try:
        for directory_id, path in lost_directories(paths).items():
            if path not in told:
                logger.error(
                    "log.dirs: the directory %s with directory.id=%s is not there, and"
                    " has partitions; they are refused until it is back. To give them"
                    " up, and begin them anew, delete its line in %s and start again",
                    *(path, directory_id, f"{paths[0]}/{LOG_DIRECTORIES_FILE}"),
                )
        refresh(paths)
    except OSError as error:
        logger.error("%s: %s", paths[0], error)


def note_use(home: str, path: str) -> None:
    """Enter a directory, before a partition is put into it; see ``use_noted``."""
    with use_noted(home, path):
        pass


@contextmanager
def use_noted(home: str, path: str) -> Iterator[None]:
    """Enter a directory, and keep it entered while the caller makes its partition.

    If the file cannot be written, that is logged, and the caller goes on: with the disk
    of the first directory, the metadata log is lost, too.

    Args:
        home: the first directory of ``log.dirs``, which is never entered.
        path: the directory.
    """
    with ExitStack() as held:
        if path != home:
            try:
                used = held.enter_context(_locked(home))
                directory_id = _id_of(path)
                if directory_id:
                    _write(home, used, {**used, directory_id: path})
            except OSError as error:
                logger.error("%s: %s", f"{home}/{LOG_DIRECTORIES_FILE}", error)
        yield


def refresh(paths: Sequence[str]) -> None:
    """Enter the directories that have partitions, and take out those without any.

    Args:
        paths: as in ``lost_directories``; lost directories stay in the file.

    Raises:
        OSError: the file cannot be written.
    """
    home = paths[0]
    if len(paths) == 1 and not os.path.exists(f"{home}/{LOG_DIRECTORIES_FILE}"):
        return
    with _locked(home) as before:
        used = dict(before)
        for path in paths[1:]:
            directory_id = _id_of(path)
            if not directory_id:
                continue
            try:
                has_partitions = bool(partition_directories(path))
            except OSError:
                continue  # its disk has failed: it stays what it is
            if has_partitions:
                used[directory_id] = path
            else:
                used.pop(directory_id, None)
        used.pop(_id_of(home), None)  # it was not the first one before
        _write(home, before, used)


@contextmanager
def _locked(home: str) -> Iterator[dict[str, str]]:
    """Yield the content of the file; a lock keeps out other processes."""
    with checkpoints_locked(home):
        yield _read(home)


def _read(home: str) -> dict[str, str]:
    path = f"{home}/{LOG_DIRECTORIES_FILE}"
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return _parse(file.read())
    except FileNotFoundError:
        return {}
    except CheckpointError as error:
        logger.error("ignored: %s: %s", path, error)
        return {}


def _parse(text: str) -> dict[str, str]:
    """Return the paths in the file by directory id.

    The number of entries is not compared: operators delete lines.

    Raises:
        CheckpointError: the version is not 0, or a line has no path.
    """
    lines = text.split("\n")
    if lines[0] != "0":
        raise CheckpointError(f"version {lines[0]!r}, not 0")
    found = {}
    for line in filter(None, lines[_HEADER_LINES:]):
        directory_id, _, path = line.partition(" ")
        if not path:
            raise CheckpointError(f"malformed line {line!r}")
        found[directory_id] = path
    return found


def _write(home: str, before: dict[str, str], used: dict[str, str]) -> None:
    if used == before:
        return
    lines = [f"{directory_id} {path}\n" for directory_id, path in used.items()]
    text = f"0\n{len(used)}\n{''.join(lines)}"
    write_file(
        f"{home}/{LOG_DIRECTORIES_FILE}", text.encode("utf-8", "surrogateescape")
    )


def _id_of(path: str) -> str:
    """Return a directory's id; "" if it has none, or cannot be read."""
    try:
        found = read_meta_properties(path)
    except LogDirectoryError:
        return ""
    return found.directory_id if found is not None else ""
