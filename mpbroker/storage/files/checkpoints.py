"""Read and write the checkpoint files of a log directory.

Each is a text file: the version 0, the number of entries, then a line per entry.

    recovery-point-offset-checkpoint  topic partition offset; on disk below this offset
    log-start-offset-checkpoint       topic partition offset; the log start offset
    cleaner-offset-checkpoint         topic partition offset; compacted below this
    checkpoint-topic-ids              topic id; not a file of Kafka's

The first three name topics, and after a deletion a new topic may have the same name.
So the fourth has the ids of the topics that the entries belong to. An entry is used
only if that id is still the topic's. This file is written last: a process killed
before that leaves old ids with new offsets, and a topic that is not in it, or has
another id there, is checked from its first segment on.

Source: Kafka's OffsetCheckpointFile.
"""

import fcntl
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from mpbroker.base.storage_errors import CheckpointError
from mpbroker.metadata.topic_names import TopicPartition
from mpbroker.storage.files.log_files import create_file, write_file

RECOVERY_POINT: Final = "recovery-point-offset-checkpoint"
LOG_START_OFFSET: Final = "log-start-offset-checkpoint"
CLEANER_OFFSET: Final = "cleaner-offset-checkpoint"
TOPIC_IDS: Final = "checkpoint-topic-ids"
_LOCK_FILE: Final = ".checkpoint-lock"
# A third of the time after which the supervisor replaces a process that does not move.
LOCK_PATIENCE_S: Final = 10.0
_LOOK_AGAIN_S: Final = 0.01


@contextmanager
def checkpoints_locked(log_directory: str) -> Iterator[None]:
    """Keep out other processes that change checkpoint files of a log directory.

    The lock is not one of the directory itself: whoever makes the directory of an
    upgrade's trial holds that.

    Raises:
        OSError: the lock's file cannot be made; or another process has the lock for too
            long, because it is stopped, or waits for a disk that hangs. Handlers wait
            for it, too, with the requests of all clients.
    """
    fd = create_file(f"{log_directory}/{_LOCK_FILE}")
    try:
        _lock(fd)
        yield
    finally:
        os.close(fd)


def _lock(fd: int) -> None:
    deadline = time.monotonic() + LOCK_PATIENCE_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(_LOOK_AGAIN_S)


def parse_checkpoint(text: str, *, fields: int) -> list[list[str]]:
    """Return the fields of each entry of a checkpoint file.

    Args:
        text: the content of the file; it may be empty.
        fields: the number of fields in each entry.

    Raises:
        CheckpointError: the version is not 0, a line has another number of fields, or
            the number of entries differs from the one stated.
    """
    lines = text.splitlines()
    if not lines:
        return []
    if lines[0] != "0":
        raise CheckpointError(f"version {lines[0]!r}, not 0")
    entries = [line.split() for line in lines[2:]]
    for entry in entries:
        if len(entry) != fields:
            raise CheckpointError(f"malformed line {' '.join(entry)!r}")
    if len(lines) < 2 or lines[1] != str(len(entries)):
        raise CheckpointError(f"{lines[1:2]} entries announced, {len(entries)} found")
    return entries


def read_offsets(path: str) -> dict[TopicPartition, int]:
    """Read the offset of each partition from a checkpoint file.

    If there is no such file, the dict is empty.

    Raises:
        CheckpointError: the content is malformed; the message names the file.
        OSError: the file cannot be read.
    """
    try:
        with open(path, encoding="utf-8") as file:
            entries = parse_checkpoint(file.read(), fields=3)
        return {(topic, int(part)): int(offset) for topic, part, offset in entries}
    except FileNotFoundError:
        return {}
    except (ValueError, CheckpointError) as error:
        raise CheckpointError(f"{path}: {error}") from error


def write_offsets(path: str, offsets: Mapping[TopicPartition, int]) -> None:
    """Replace a checkpoint file of offsets, and force it to disk.

    Raises:
        OSError: it cannot be written; the old file is still there.
    """
    lines = [f"0\n{len(offsets)}\n"]
    lines += [f"{topic} {part} {offset}\n" for (topic, part), offset in offsets.items()]
    write_file(path, "".join(lines).encode())


def read_topic_ids(path: str) -> dict[str, str] | None:
    """Read the topic ids (22 characters of base64) by topic name.

    Returns:
        None if there is no such file, as in a directory of Apache Kafka: then the
        entries of the other files count for the topic that has the name now.

    Raises:
        CheckpointError: the content is malformed; the message names the file.
        OSError: the file cannot be read.
    """
    try:
        with open(path, encoding="utf-8") as file:
            entries = parse_checkpoint(file.read(), fields=2)
        return {entry[0]: entry[1] for entry in entries}
    except FileNotFoundError:
        return None
    except (ValueError, CheckpointError) as error:
        raise CheckpointError(f"{path}: {error}") from error


def write_topic_ids(path: str, topic_ids: Mapping[str, str]) -> None:
    """Replace checkpoint-topic-ids, and force it to disk. Write it after the others.

    Raises:
        OSError: it cannot be written; the old file is still there.
    """
    lines = [f"0\n{len(topic_ids)}\n"]
    lines += [f"{name} {topic_id}\n" for name, topic_id in topic_ids.items()]
    write_file(path, "".join(lines).encode())
