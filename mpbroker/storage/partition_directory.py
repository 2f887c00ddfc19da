"""Name, create, identify and remove the directory of one partition.

The text file `partition.metadata` has the lines `version: 0` and `topic_id: ID`. So a
directory that a deleted topic has left is not used for a new topic of the same name.

Source: Kafka's PartitionMetadataFile; base64url is Kafka's text form of a UUID.
"""

import base64
import binascii
import os
import re
from typing import Final

from mpbroker.base.logger import get_logger
from mpbroker.storage.files.leader_epochs import FILE_NAME as LEADER_EPOCHS
from mpbroker.storage.files.log_files import (
    DELETE_DIRECTORY_SUFFIX,
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
_MAX_NAME: Final = 255
DIRECTORY_MODE: Final = 0o750


def directory_name(topic: str, partition: int) -> str:
    """Return the name of a partition's directory."""
    return f"{topic}-{partition}"


def parse_directory_name(name: str) -> tuple[str, int] | None:
    """Return (topic, partition); None: not a directory of a partition that exists."""
    match = _NAME.fullmatch(name)
    if match is None or _GONE.fullmatch(name):
        return None
    return match["topic"], int(match["partition"])


def partition_directories(log_directory: str) -> list[str]:
    """Return the names of the directories of all partitions that exist.

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
    """Return Kafka's text of a 16-byte id: 22 characters of URL-safe base64."""
    return base64.urlsafe_b64encode(topic_id).rstrip(b"=").decode()


def read_topic_id(directory: str) -> bytes | None:
    """Return the topic id (16 bytes) of a partition's directory.

    Returns:
        None if the file is missing or malformed.

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
    """Create a partition's directory and its two files, as far as they are missing.

    A process may be killed at any point in here: the next one creates the rest. Nothing
    is forced to disk: the first sync of the log does so with the names, and files that
    a power cut takes before that are created again.

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
    """Rename a directory to `NAME.<32 hex digits><suffix>`; return the new path.

    Raises:
        OSError: it cannot be renamed.
    """
    parent, name = os.path.split(directory)
    ending = f".{os.urandom(16).hex()}{suffix}"
    gone = f"{parent}/{name[: _MAX_NAME - len(ending)]}{ending}"
    os.rename(directory, gone)
    return gone


def remove_deleted_directories(log_directory: str, before_s: float) -> int:
    """Remove the `-delete` directories that were renamed before a time.

    The time of the rename is the directory's ctime.

    Args:
        log_directory: a directory of ``log.dirs``.
        before_s: the time, in seconds since 1970.

    Returns:
        How many directories were due.
    """
    removed = 0
    with os.scandir(log_directory) as entries:
        gone = [e for e in entries if e.name.endswith(DELETE_DIRECTORY_SUFFIX)]
    for entry in gone:
        if _GONE.fullmatch(entry.name) and entry.stat().st_ctime <= before_s:
            _remove_flat(entry.path)
            removed += 1
    return removed


def _remove_flat(directory: str) -> None:
    """Remove a directory that has only files.

    Without shutil, because importing it costs every start 7 ms.
    """
    try:
        for name in os.listdir(directory):
            os.unlink(f"{directory}/{name}")
        os.rmdir(directory)
    except OSError as error:
        logger.warning("%s cannot be removed yet: %s", directory, error)
