"""Name, create, identify and remove the directory of one partition.

The text file `partition.metadata` has the lines `version: 0` and `topic_id: ID`. So a
directory that a deleted topic has left is not used for a new topic of the same name.

Source: Kafka's PartitionMetadataFile; base64url is Kafka's text form of a UUID.
"""

import base64
import binascii
import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from mpbroker.base.logger import get_logger
from mpbroker.storage.files.leader_epochs import FILE_NAME as LEADER_EPOCHS
from mpbroker.storage.files.log_files import (
    DELETE_DIRECTORY_SUFFIX,
    FUTURE_DIRECTORY_SUFFIX,
    STRAY_DIRECTORY_SUFFIX,
    write_file,
)

logger = get_logger(__name__)

PARTITION_METADATA: Final = "partition.metadata"
_NAME: Final = re.compile(
    r"(?P<topic>[a-zA-Z0-9._-]{1,249})-(?P<partition>[0-9]{1,10})"
)
_GONE: Final = re.compile(
    r".+\.[0-9a-f]{32}" f"({DELETE_DIRECTORY_SUFFIX}|{STRAY_DIRECTORY_SUFFIX})"
)
_FUTURE: Final = re.compile(f"(?P<name>.+)\\.[0-9a-f]{{32}}{FUTURE_DIRECTORY_SUFFIX}")
MAX_NAME: Final = 255
DIRECTORY_MODE: Final = 0o750


def directory_name(topic: str, partition: int) -> str:
    """Return the name of a partition's directory."""
    return f"{topic}-{partition}"


def parse_directory_name(name: str) -> tuple[str, int] | None:
    """Return (topic, partition) from the name of a partition's directory.

    Returns:
        None for other names, such as those that end with `-delete` or `-stray`.
    """
    match = _NAME.fullmatch(name)
    if match is None or _GONE.fullmatch(name):
        return None
    return match["topic"], int(match["partition"])


def future_name(name: str) -> str:
    """Return a new name for the copy of a partition that moves to a log directory.

    Args:
        name: the name of the partition's directory.
    """
    return f"{name}.{os.urandom(16).hex()}{FUTURE_DIRECTORY_SUFFIX}"


def parse_future_name(name: str) -> tuple[str, int] | None:
    """Return (topic, partition) of such a copy's directory; None: another name."""
    match = _FUTURE.fullmatch(name)
    return None if match is None else parse_directory_name(match["name"])


@contextmanager
def exclusive(directory: str) -> Iterator[bool]:
    """Keep other processes from changing which segments a partition has on the disk.

    The compaction of a log has this lock, its retention, and the remote log manager
    when it is about to remove copies of local segments from the store.

    Args:
        directory: the partition's directory.

    Yields:
        True: the caller has the lock. False: another process has it, or the directory
        was removed with its topic.

    Raises:
        OSError: the directory cannot be opened.
    """
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield False
        return
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            is_ours = False
        else:
            # Between open and flock, another process may have moved the partition.
            is_ours = _is_same(fd, directory)
        yield is_ours
    finally:
        os.close(fd)


def _is_same(fd: int, path: str) -> bool:
    """Return whether a path still leads to the directory that is open."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def partition_directories(log_directory: str) -> list[str]:
    """Return the names of the partitions' directories in a log directory.

    Directories that end with `-delete` or `-stray` are left out.

    Raises:
        OSError: the log directory cannot be read.
    """
    with os.scandir(log_directory) as entries:
        return [
            entry.name
            for entry in entries
            if parse_directory_name(entry.name) and entry.is_dir()
        ]


def encode_topic_id(topic_id: bytes) -> str:
    """Return Kafka's text form of a 16-byte id: 22 characters of URL-safe base64."""
    return base64.urlsafe_b64encode(topic_id).rstrip(b"=").decode()


def read_topic_id(directory: str) -> bytes | None:
    """Return the topic id (16 bytes) of a partition's directory.

    Returns:
        The id; None if the file `partition.metadata` is missing or malformed.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        with open(f"{directory}/{PARTITION_METADATA}", encoding="ascii") as file:
            lines = dict(line.split(": ", 1) for line in file.read().splitlines())
        text = lines["topic_id"].strip()
        topic_id = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except (
        FileNotFoundError,
        UnicodeDecodeError,
        ValueError,
        KeyError,
        binascii.Error,
    ):
        return None
    return topic_id if len(topic_id) == 16 else None


def complete_directory(directory: str, topic_id: bytes) -> None:
    """Create a partition's directory, and its two files about topic id and epochs.

    Files that exist are kept. A process may be killed at any point in here: the next
    one creates the rest. Nothing is forced to disk: the first sync of the log forces
    the names to disk, and files that a power cut takes before that are created again.

    Raises:
        OSError: the directory or a file cannot be written.
    """
    try:
        os.mkdir(directory, DIRECTORY_MODE)
    except FileExistsError:
        pass
    if read_topic_id(directory) is None:
        text = f"version: 0\ntopic_id: {encode_topic_id(topic_id)}\n"
        write_file(f"{directory}/{PARTITION_METADATA}", text.encode(), sync=False)
    epochs = f"{directory}/{LEADER_EPOCHS}"
    if not os.path.exists(epochs):
        write_file(epochs, b"0\n1\n0 0\n", sync=False)


def rename_away(directory: str, suffix: str) -> str:
    """Rename a directory to `NAME.<32 hex digits><suffix>`, and return the new path.

    Raises:
        OSError: the directory cannot be renamed.
    """
    parent, name = os.path.split(directory)
    ending = f".{os.urandom(16).hex()}{suffix}"
    gone = f"{parent}/{name[: MAX_NAME - len(ending)]}{ending}"
    os.rename(directory, gone)
    return gone


def remove_deleted_directories(log_directory: str, before_s: float) -> int:
    """Remove the `-delete` directories that were renamed before a time.

    The time of the rename is the directory's ctime.

    Args:
        log_directory: a directory of ``log.dirs``.
        before_s: the time, in seconds since 1970.

    Returns:
        The number of directories that were due. The log names those that could not be
        removed.
    """
    removed = 0
    with os.scandir(log_directory) as entries:
        gone = [e for e in entries if e.name.endswith(DELETE_DIRECTORY_SUFFIX)]
    for entry in gone:
        if _GONE.fullmatch(entry.name) and entry.stat().st_ctime <= before_s:
            remove_flat(entry.path)
            removed += 1
    return removed


def remove_flat(directory: str) -> None:
    """Remove a directory that contains only files. An error is logged.

    This does not use shutil, because importing it costs every start 7 ms.
    """
    try:
        for name in os.listdir(directory):
            os.unlink(f"{directory}/{name}")
        os.rmdir(directory)
    except OSError as error:
        logger.warning("%s cannot be removed yet: %s", directory, error)
