"""Read partitions' figures from shared memory, without loading or locking any.

A partition that was never used has no directory: its log is empty. The housekeeper
loads the others soon after the start (LogUpkeep.load_logs).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from mpbroker.base.named_tuple import NamedTuple
from mpbroker.ipc.layout import (
    ROW_COPIES,
    ROW_COPY_WORDS,
    ROW_DURABLE_END,
    ROW_LOG_START_OFFSET,
    ROW_STATUS,
    ROW_STRUCTURE,
    ROW_VERSION,
    ROW_WORDS,
    RowStatus,
)
from mpbroker.ipc.tables.partition_table import LogState
from mpbroker.storage.files.log_files import LOG_SUFFIX
from mpbroker.storage.partition_directory import directory_name

if TYPE_CHECKING:
    from mpbroker.metadata.topics import Topic, TopicRegistry
    from mpbroker.storage.log_manager import LogManager
    from mpbroker.supervisor.memory import BrokerMemory

# Further partitions are only counted: the page of metrics would be too large.
MAX_PARTITIONS_SHOWN: Final = 20_000


class PartitionFigures(NamedTuple):
    """The figures of one partition."""

    topic: str
    partition: int
    log_start_offset: int
    log_end_offset: int
    size_bytes: int
    unflushed_records: int
    unflushed_bytes: int  # an estimate: the records' share of the active segment
    is_offline: bool


class Partitions:
    """Yields the figures of partitions, read from the partition table.

    It remembers the sizes of closed segments, which do not change.

    Attributes:
        unloaded: the number of partitions that the last iteration left out because no
            process has loaded their logs since the start.
        lost: the number that it left out because the log directory with them is not
            there: their offsets are not known.
        not_shown: the number that it left out because there are too many partitions.
    """

    def __init__(
        self, memory: BrokerMemory, registry: TopicRegistry, logs: LogManager
    ) -> None:
        self._words = memory.table.segment.words
        self.registry = registry
        self._log_dirs = [each.path for each in logs.directories]
        self._is_offline = logs.is_offline
        self._closed: dict[int, tuple[tuple[int, int], int]] = {}
        self.unloaded = self.lost = self.not_shown = 0

    def __iter__(self) -> Iterator[PartitionFigures]:
        self.unloaded = self.lost = self.not_shown = shown = 0
        used: set[str] | None = None
        for topic in list(self.registry.topics()):
            for partition, row in enumerate(topic.partitions):
                status = self._words[row * ROW_WORDS + ROW_STATUS]
                is_loaded = status in (RowStatus.ONLINE, RowStatus.OFFLINE)
                if not is_loaded:
                    # Listed after the status was read: a log is loaded before its first
                    # append, so one without a directory then is empty.
                    used = self._directories() if used is None else used
                    if directory_name(topic.name, partition) in used:
                        self.unloaded += 1
                        continue
                    if self._is_offline(topic, partition):
                        self.lost += 1
                        continue
                if shown >= MAX_PARTITIONS_SHOWN:
                    self.not_shown += 1
                    continue
                shown += 1
                if is_loaded:
                    yield self._figures(topic, partition, row)
                else:
                    yield PartitionFigures(
                        topic.name, partition, 0, 0, 0, 0, 0, is_offline=False
                    )

    def _directories(self) -> set[str]:
        found: set[str] = set()
        for parent in self._log_dirs:
            with contextlib.suppress(OSError):  # a failed disk
                found.update(os.listdir(parent))
        return found

    def _figures(self, topic: Topic, partition: int, row: int) -> PartitionFigures:
        words, word = self._words, row * ROW_WORDS
        state = self._state(word)
        durable = words[word + ROW_DURABLE_END]
        unflushed = max(0, state.log_end_offset - durable)
        in_active = max(1, state.log_end_offset - state.active_base_offset)
        structure = (words[word + ROW_STRUCTURE], state.active_base_offset)
        closed = self._closed.get(row)
        if closed is None or closed[0] != structure:
            size = self._closed_bytes(topic.name, partition, state.active_base_offset)
            closed = self._closed[row] = (structure, size)
        return PartitionFigures(
            topic.name,
            partition,
            words[word + ROW_LOG_START_OFFSET],
            state.log_end_offset,
            closed[1] + state.active_size,
            unflushed,
            state.active_size * min(unflushed, in_active) // in_active,
            self._is_offline(topic, partition),
        )

    def _state(self, word: int) -> LogState:
        """Read the committed state of a partition's log without taking its lock.

        It is in the partition's row in shared memory. If the row's version changes
        meanwhile, it is read again.

        Args:
            word: the row's first word.
        """
        words = self._words
        while True:
            version = words[word + ROW_VERSION]
            at = word + ROW_COPIES + (version & 1) * ROW_COPY_WORDS
            state = LogState._make(words[at : at + len(LogState._fields)].tolist())
            if words[word + ROW_VERSION] == version:
                return state

    def _closed_bytes(self, topic: str, partition: int, active_base: int) -> int:
        name, total = directory_name(topic, partition), 0
        active = f"{active_base:020d}{LOG_SUFFIX}"
        for parent in self._log_dirs:
            # The partition or its segments may be deleted meanwhile.
            with contextlib.suppress(OSError), os.scandir(f"{parent}/{name}") as files:
                for file in files:
                    if file.name.endswith(LOG_SUFFIX) and file.name != active:
                        total += file.stat().st_size
        return total
