"""Checkpoint files of a log directory: one offset a partition.

Version 0, the number of entries, then `topic partition offset` lines. Three of them:
up to where a partition is surely on disk (recovery-point-offset-checkpoint), where it
starts (log-start-offset-checkpoint), up to where it is compacted
(cleaner-offset-checkpoint).

They know topics by name, and a name may be another topic's since. So there is one more
file, which Kafka does not have: checkpoint-topic-ids, of `topic id` lines, says of
which topics the others speak. It is written behind them, so that it never says it of
too many.

Source: Kafka's OffsetCheckpointFile.
"""

from collections.abc import Mapping
from typing import Final

from mpbroker.base.storage_errors import CheckpointError
from mpbroker.storage.files.log_files import write_file

RECOVERY_POINT: Final = "recovery-point-offset-checkpoint"
LOG_START_OFFSET: Final = "log-start-offset-checkpoint"
CLEANER_OFFSET: Final = "cleaner-offset-checkpoint"
TOPIC_IDS: Final = "checkpoint-topic-ids"
TopicPartition = tuple[str, int]


def parse_checkpoint(text: str, *, fields: int) -> list[list[str]]:
    """Return the fields of each entry; nothing for an empty file.

    Raises:
        CheckpointError: another version, a line of other fields, another count.
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
    """Read a checkpoint; a missing file holds nothing.

    Raises:
        CheckpointError: the file is not one; the message names it.
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
    """Replace a checkpoint, durably."""
    lines = [f"0\n{len(offsets)}\n"]
    lines += [f"{topic} {part} {offset}\n" for (topic, part), offset in offsets.items()]
    write_file(path, "".join(lines).encode())


def read_topic_ids(path: str) -> dict[str, str] | None:
    """Return the ids of the topics that the checkpoints speak of; None: of any.

    Raises:
        CheckpointError: the file is not one; the message names it.
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
    """Replace that file, durably."""
    lines = [f"0\n{len(topic_ids)}\n"]
    lines += [f"{name} {topic_id}\n" for name, topic_id in topic_ids.items()]
    write_file(path, "".join(lines).encode())
