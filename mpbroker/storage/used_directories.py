"""Know the log directories that have partitions, also when they are gone.

A file in the first directory of ``log.dirs`` lists the others that have partitions:

    log-directories      the version 0, the number of entries, then a line per entry:
                         directory.id, a space, path

A directory whose id is in the file, and in no ``meta.properties`` now, is lost: it was
taken out of ``log.dirs``, or an empty disk is mounted in its place. Its partitions must
not begin anew. So a directory is entered before its first partition is made there, and
taken out when it has none any more.

An operator may give a lost directory up (`forget`). Then its entry stays, and its id
begins with "!", or with "~" once the log has told of it. Partitions that were only in
that directory begin anew in the others. If the directory comes back all the same, what
was begun anew counts: `look_at_start` puts aside what it has of those partitions.

Apache Kafka has the directory of each partition in its metadata log instead (KIP-858).
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Final

from mpbroker.base.errors import MpbrokerError
from mpbroker.base.logger import get_logger
from mpbroker.base.named_tuple import NamedTuple
from mpbroker.base.storage_errors import CheckpointError, LogDirectoryError
from mpbroker.metadata.meta_properties import read_meta_properties
from mpbroker.storage.files.checkpoints import checkpoints_locked
from mpbroker.storage.files.log_files import (
    LOG_DIRECTORIES_FILE,
    STRAY_DIRECTORY_SUFFIX,
    write_file,
)
from mpbroker.storage.partition_directory import partition_directories, rename_away

_HEADER_LINES: Final = 2
# In front of the id of a directory that was given up: the log has not told of it yet,
# and it has.
_UNTOLD: Final = "!"
_TOLD: Final = "~"

logger = get_logger(__name__)


class NotForgottenError(MpbrokerError):
    """A directory cannot be given up; the text says why, and what can be."""


class UsedDirectory(NamedTuple):
    """Describes a log directory that has partitions."""

    directory_id: str
    path: str  # where it was last
    is_there: bool  # a directory with this id is in that place now


def used_directories(home: str) -> list[UsedDirectory]:
    """Return the directories with partitions, except the first one.

    Args:
        home: the first directory of ``log.dirs``.

    Raises:
        OSError: the file cannot be read.
    """
    return [
        UsedDirectory(key, path, _id_of(path) == key)
        for key, path in _in_use(_read(home)).items()
    ]


def forget(home: str, named: str) -> UsedDirectory:
    """Give up a directory that is not there: its partitions may begin anew.

    A running broker notices at once, and its housekeeper tells of it in the log; if
    none runs, the next start does.

    Args:
        home: the first directory of ``log.dirs``.
        named: the path or the id of the directory.

    Raises:
        NotForgottenError: no such directory has partitions, or it is there.
        OSError: the file cannot be written.
    """
    with _locked(home) as before:
        known = _in_use(before)
        keys = [key for key, path in known.items() if named in (key, path, f"{path}/")]
        if not keys:
            others = ", ".join(known.values()) or "none"
            raise NotForgottenError(
                f"{named} is no directory that has partitions of this broker; these"
                f" are, beside {home}: {others}"
            )
        if len(keys) > 1:
            raise NotForgottenError(
                f"several directories with partitions were at {named}; name one by its"
                f" directory.id: {', '.join(keys)}"
            )
        (key,) = keys
        found = UsedDirectory(key, known[key], _id_of(known[key]) == key)
        if found.is_there:
            raise NotForgottenError(
                f"{found.path} is there, with directory.id={key}: only a directory"
                " that is gone can be given up. If its disk has failed, unmount it, or"
                " move it away, and stop the broker first"
            )
        after = {(_UNTOLD + id_ if id_ == key else id_): before[id_] for id_ in before}
        _write(home, before, after)
    return found


def _in_use(entries: dict[str, str]) -> dict[str, str]:
    """Return the entries of directories that were not given up."""
    return {
        key: path
        for key, path in entries.items()
        if not key.startswith((_UNTOLD, _TOLD))
    }


def lost_directories(paths: Sequence[str]) -> dict[str, str]:
    """Return the lost directories: the former path of each by its id.

    Args:
        paths: the directories of ``log.dirs`` that can be used, the first one first.

    Raises:
        OSError: the file cannot be read.
    """
    used = _in_use(_read(paths[0]))
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


class LostDirectories:
    """Tells whether directories are lost, also after one of them was given up.

    Args:
        paths: as in ``lost_directories``.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = paths
        self._file = f"{paths[0]}/{LOG_DIRECTORIES_FILE}"
        self._seen: tuple[int, int] | None = None
        self._are_lost = True

    def __call__(self) -> bool:
        try:
            found = os.stat(self._file)
            seen = found.st_ino, found.st_mtime_ns
        except OSError:
            seen = 0, 0
        if seen != self._seen:  # the file was replaced, or this is the first call
            self._are_lost = may_lack_partitions(self._paths)
            self._seen = seen
        return self._are_lost


def look_at_start(paths: Sequence[str], all_paths: Collection[str]) -> None:
    """Log which directories are lost, and what an operator can do; note all others.

    Put aside what a directory that was given up has of partitions that have begun anew.

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
                    " up, and begin them anew: mpbroker log-dirs forget --data-dir %s"
                    " %s",
                    *(path, directory_id, shlex.quote(paths[0]), shlex.quote(path)),
                )
        _take_back(paths)
        refresh(paths)
    except OSError as error:
        logger.error("%s: %s", paths[0], error)


def _take_back(paths: Sequence[str]) -> None:
    """Use directories again that were given up, without what has begun anew elsewhere.

    Raises:
        OSError: a directory cannot be read or renamed.
    """
    home = paths[0]
    entries = _read(home)
    given_up = {key[1:] for key in entries.keys() - _in_use(entries).keys()}
    for path in paths if given_up else ():
        directory_id = _id_of(path)
        if directory_id not in given_up:
            continue
        for partition in partition_directories(path):
            others = [f"{other}/{partition}" for other in paths if other != path]
            if any(map(os.path.isdir, others)):
                gone = rename_away(f"{path}/{partition}", STRAY_DIRECTORY_SUFFIX)
                logger.warning(
                    "%s was given up, and %s has begun anew; what it had is in %s",
                    *(path, partition, gone),
                )
        # Last: a start that is killed before does all this again.
        with _locked(home) as before:
            kept = {key: old for key, old in before.items() if key[1:] != directory_id}
            _write(home, before, {**kept, directory_id: path})


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
        for key in [key for key in used if key.startswith(_UNTOLD)]:
            logger.warning(
                "log.dirs: the directory %s with directory.id=%s was given up (mpbroker"
                " log-dirs forget): partitions that were only there begin anew, empty",
                *(used[key], key[1:]),
            )
            used[_TOLD + key[1:]] = used.pop(key)
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

    The number of entries is not compared: operators have deleted lines.

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
