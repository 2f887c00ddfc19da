"""Read a broker that does not answer: its named segment and its shared memory.

The named segment holds what the broker has published: its identity, its processes, the
last deaths and their reasons. Its present counters and states are in shared memory
without a name, which Linux shows to the same user and to root as the supervisor's
descriptors in /proc; they are mapped read-only. No process is asked or stopped.

Source: proc(5), /proc/pid/fd; ptrace(2), "Ptrace access mode checking".
"""

from __future__ import annotations

import mmap
import os
from contextlib import AbstractContextManager
from typing import Any, Final

from mpbroker.base.errors import MpbrokerError
from mpbroker.base.named_tuple import NamedTuple
from mpbroker.inspect.broker_view import BrokerView, NameOfRow
from mpbroker.ipc.layout import (
    CELL_END,
    CONTROL_WORDS,
    HEADER,
    HEADER_MAGIC,
    HEADER_SUPERVISOR_PID,
    HEADER_VERSION,
    LAYOUT_VERSION,
    MAGIC,
    MAX_PARTITIONS,
    METADATA_CELL,
    cell,
)
from mpbroker.ipc.named_segment import broker_names, read_telemetry

_MEMFD: Final = "/memfd:mpbroker-"
_DELETED: Final = " (deleted)"
_WANTED: Final = ("control", "partitions", "black-boxes")


class FoundBroker(NamedTuple):
    """A broker on this machine, as its named segment of shared memory shows it."""

    name: str  # of the segment
    pid: int
    alive: bool
    state: dict[str, Any] | None  # None: not readable for us, or not yet complete

    def serves(self, path: str) -> bool:
        """Whether a path is one of the broker's data directories."""
        return self.state is not None and path in self.state.get("log_dirs", ())


def find_brokers() -> list[FoundBroker]:
    """Return all brokers on this machine with a named segment, living ones first."""
    found = [
        FoundBroker(name, pid, alive, read_telemetry(name))
        for name, pid, alive in broker_names()
    ]
    return sorted(found, key=lambda each: (not each.alive, each.name))


def attach(pid: int) -> BrokerView | None:
    """Map a broker's shared memory read-only; return a view of it.

    Returns:
        None if this user may not read it, if the broker is still starting, or if it has
        a layout that this version does not know.
    """
    found: dict[str, list[memoryview]] = {}
    folder = f"/proc/{pid}/fd"
    try:
        for fd in os.listdir(folder):
            try:
                target = os.readlink(f"{folder}/{fd}")
            except FileNotFoundError:  # closed meanwhile: not a segment
                continue
            name = target.removeprefix(_MEMFD).removesuffix(_DELETED)
            if target.startswith(_MEMFD) and name in _WANTED:
                found.setdefault(name, []).append(_map(f"{folder}/{fd}"))
    except (OSError, ValueError):  # early in a start the segments are empty
        return None
    try:
        # After an upgrade it may hold a segment of its predecessor beside its own.
        control = next(each for each in found["control"] if _is_of(each, pid))
        return BrokerView(control, found["partitions"][-1], found["black-boxes"][-1])
    except (KeyError, StopIteration):
        return None


def names_of_rows(view: BrokerView, log_dir: str, broker_id: int = 0) -> NameOfRow:
    """Return a function that names the partition of a row of the partition table.

    A row is a partition's entry in shared memory. The function returns topic and
    partition, by the committed metadata log. It returns None for a row that no
    partition has, and for every row if the log cannot be read.
    """
    from mpbroker.metadata.metadata_log import MetadataLog
    from mpbroker.metadata.topics import TopicRegistry

    try:
        log = MetadataLog(log_dir, _CommittedEnd(view.control))
        registry = TopicRegistry(
            log, broker_id=broker_id, capacity=MAX_PARTITIONS, now_ms=lambda: 0
        )
    except (OSError, MpbrokerError):
        return lambda row: None

    def name(row: int) -> tuple[str, int] | None:
        partition = registry.partition_by_row(row)
        return partition and (partition.topic.name, partition.partition_id)

    return name


class _CommittedEnd:
    """The end of the committed metadata log, for a reader that never writes.

    It takes the place of SharedLogCell, by which the broker's processes find the end
    and take the log's lock.
    """

    def __init__(self, control: memoryview) -> None:
        self.end = int(control[cell(METADATA_CELL) + CELL_END])

    def locked(self) -> AbstractContextManager[None]:
        raise MpbrokerError("a broker that is only looked at is not changed")


def _map(path: str) -> memoryview:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        return memoryview(mmap.mmap(fd, size, prot=mmap.PROT_READ)).cast("q")
    finally:
        os.close(fd)


def _is_of(words: memoryview, pid: int) -> bool:
    return (
        len(words) == CONTROL_WORDS
        and words[HEADER + HEADER_MAGIC] == MAGIC
        and words[HEADER + HEADER_VERSION] == LAYOUT_VERSION
        and words[HEADER + HEADER_SUPERVISOR_PID] == pid
    )
