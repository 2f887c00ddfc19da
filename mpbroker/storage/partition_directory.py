"""The directory of one partition: its name, its identity, its making and removal.

`partition.metadata` holds the topic's id, so that a directory left by a deleted topic
is never taken for that of a new topic of the same name.

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
DIRECTORY_MODE: Final = 0o755


def directory_name(topic: str, partition: int) -> str:
    return f"{topic}-{partition}"


def parse_directory_name(name: str) -> tuple[str, int] | None:
    """Return (topic, partition), or None if it is not a live partition's directory."""
    match = _NAME.fullmatch(name)
    if match is None or _GONE.fullmatch(name):
        return None
    return match["topic"], int(match["partition"])


def partition_directories(log_directory: str) -> list[str]:
    """Return the names of the live partitions' directories."""
    with os.scandir(log_directory) as entries:
        return [
            entry.name
            for entry in entries
            if parse_directory_name(entry.name) and entry.is_dir()
        ]


def encode_topic_id(topic_id: bytes) -> str:
    return base64.urlsafe_b64encode(topic_id).rstrip(b"=").decode()


def read_topic_id(directory: str) -> bytes | None:
    """Return the topic id in a partition's directory, None if it does not say."""
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
    """Make a partition's directory, or what a killed maker left out of it.

    Not forced to disk: the first sync of the log forces the names, and what a power
    cut takes before that is made again.
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
    """Rename a directory so that it is no partition any more; return the new path."""
    parent, name = os.path.split(directory)
    ending = f".{os.urandom(16).hex()}{suffix}"
    gone = f"{parent}/{name[: _MAX_NAME - len(ending)]}{ending}"
    os.rename(directory, gone)
    return gone


def remove_deleted_directories(log_directory: str, before_s: float) -> int:
    """Remove directories renamed for deletion before a time; return how many.

    A rename changes a directory's ctime, so that needs no note of its own.
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
    """Remove a directory of files. Not by shutil, whose import costs a start 7 ms."""
    try:
        for name in os.listdir(directory):
            os.unlink(f"{directory}/{name}")
        os.rmdir(directory)
    except OSError as error:
        logger.warning("%s cannot be removed yet: %s", directory, error)
