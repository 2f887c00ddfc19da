"""The two files through which the housekeeper and the remote log manager talk.

The housekeeper decides which segments are copied to the remote store; the remote log
manager copies them. Both files are in the first directory of log.dirs, and are replaced
as a whole:

    remote-log-plan          by the housekeeper: the ids of all topics, and the
                             partitions with remote storage
    remote-log-partitions    by the remote log manager: the partitions that may have
                             objects in the store; written before the first of them
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

import msgpack

from mpbroker.storage.files.log_files import write_file
from mpbroker.storage.remote.remote_manifest import seal, unseal

_PLAN_FILE: Final = "remote-log-plan"
_PARTITIONS_FILE: Final = "remote-log-partitions"


class PartitionPlan(NamedTuple):
    """What the housekeeper wants copied to, and removed from, the store: one partition.

    Attributes:
        topic: the topic's name.
        topic_id: the topic's id, 16 bytes.
        partition: the partition number.
        directory: the partition's directory.
        copy_below: closed segments that end at or below this offset may be copied;
            -1: no segment may be copied.
        log_start_offset: segments that end at or below this offset are to be removed.
        end_offset: the log end offset; with it a restore tells how much was lost.
        remove_all: the topic has no remote storage any more, and all of the partition's
            objects are to be removed.
    """

    topic: str
    topic_id: bytes
    partition: int
    directory: str
    copy_below: int
    log_start_offset: int
    end_offset: int = -1
    remove_all: bool = False


class StateLogPlan(NamedTuple):
    """A partition of a coordinator's topic, which is copied with the metadata log.

    Attributes:
        topic: the topic's name.
        topic_id: the topic's id, 16 bytes.
        partition: the partition number.
        directory: the partition's directory.
        end_offset: the log below this offset is on disk.
        segments: base offset of each `.log`, and the number that identifies the file,
            by ascending offsets.
    """

    topic: str
    topic_id: bytes
    partition: int
    directory: str
    end_offset: int
    segments: tuple[tuple[int, int], ...]


class RemotePlan(NamedTuple):
    """What the housekeeper wants copied to, and removed from, the remote store.

    Attributes:
        topic_ids: the ids of all topics; the objects of other topics are to be removed.
        partitions: the partitions with remote storage.
        state: the partitions of the coordinators' topics.
    """

    topic_ids: frozenset[bytes]
    partitions: tuple[PartitionPlan, ...]
    state: tuple[StateLogPlan, ...] = ()


class KnownPartition(NamedTuple):
    """A partition that may have objects in the remote store.

    When its topic is gone, the objects are found by this and removed.
    """

    topic: str
    topic_id: bytes
    partition: int


def plan_path(log_directory: str) -> str:
    """Return the path of the file that says what to copy to the remote store."""
    return f"{log_directory}/{_PLAN_FILE}"


def write_plan(log_directory: str, plan: RemotePlan) -> None:
    """Write the file that says what to copy to the remote store; raises OSError.

    It is forced to disk. Otherwise a power cut could bring back an older plan, which
    lacks topics that were created after it, and the objects of these were removed.
    """
    content = msgpack.packb([sorted(plan.topic_ids), plan.partitions, plan.state])
    write_file(plan_path(log_directory), seal(content))


def read_plan(log_directory: str) -> RemotePlan | None:
    """Read what the housekeeper wants copied to the store; None: no plan is there yet.

    Raises:
        ManifestError: the plan is damaged; the housekeeper will write another one.
        OSError: the file cannot be read.
    """
    content = _read(plan_path(log_directory))
    if content is None:
        return None
    found = msgpack.unpackb(unseal(content, "the plan"))
    topic_ids, partitions, *rest = found  # an older mpbroker has written no state
    return RemotePlan(
        frozenset(topic_ids),
        tuple(PartitionPlan(*each) for each in partitions),
        tuple(
            StateLogPlan._make((*fields, tuple(map(tuple, segments))))
            for *fields, segments in (rest[0] if rest else ())
        ),
    )


def write_known(log_directory: str, known: Iterable[KnownPartition]) -> None:
    """Write the list of partitions that may have remote objects; raises OSError."""
    content = msgpack.packb(sorted(known))
    write_file(f"{log_directory}/{_PARTITIONS_FILE}", seal(content))


def read_known(log_directory: str) -> set[KnownPartition]:
    """Read the list of the partitions that may have objects in the store.

    Raises:
        ManifestError: the list is damaged.
        OSError: the file cannot be read.
    """
    content = _read(f"{log_directory}/{_PARTITIONS_FILE}")
    if content is None:
        return set()
    found = msgpack.unpackb(unseal(content, "the list of partitions"))
    return {KnownPartition(*each) for each in found}


def _read(path: str) -> bytes | None:
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        return None
