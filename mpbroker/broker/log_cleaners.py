"""LogCleaners: compact logs in log.cleaner.threads children of the housekeeper.

A compaction takes minutes. In processes of its own it keeps no task of the housekeeper
waiting. The cleaners agree with the housekeeper, and with each other, by these means:

    flock on a partition's directory     one process at a time compacts it or applies
                                         its retention; the kernel releases it
    flock on a log directory             one process at a time changes its
                                         cleaner-offset-checkpoint
    words that the housekeeper and its   how far each cleaner has seen the metadata log,
    children share                       and up to where the checkpoints lack deleted
                                         topics. A row is another partition's only
                                         when each cleaner has let go of it
    the owner of a log's sync            a cleaner's own id; the housekeeper releases
                                         the syncs of a dead one

Source: Kafka's LogCleaner, LogCleanerManager.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, Final

from mpbroker.base.errors import MpbrokerError
from mpbroker.base.logger import get_logger
from mpbroker.broker.housekeeper_child import HousekeeperChild
from mpbroker.ipc.layout import (
    HOUSEKEEPER,
    ROW_SYNC_OWNER,
    ROW_WORDS,
    Phase,
)
from mpbroker.storage.cleaning.log_upkeep import LogUpkeep

if TYPE_CHECKING:
    from mpbroker.broker.process_parts import ProcessParts
    from mpbroker.metadata.metadata_image import TopicImage
    from mpbroker.metadata.topics import Topic, TopicRegistry

_LOG = get_logger(__name__)
_TURN_MS: Final = 1000
_PAGE_BYTES: Final = 4096
# Index of the word with a metadata version: the checkpoints have none of the topics
# that were deleted up to it.
_NOTED: Final = 0
_NEVER: Final = 1 << 62


class LogCleaners:
    """Starts and stops the log cleaners, in the housekeeper's process.

    Args:
        parts: the settings and the shared memory.
        registry: the housekeeper's view of the metadata log.
    """

    LOOK_INTERVAL_MS: Final = HousekeeperChild.LOOK_INTERVAL_MS

    def __init__(self, parts: ProcessParts, registry: TopicRegistry) -> None:
        config = parts.config
        count = config.log_cleaner_threads if config.log_cleaner_enable else 0
        pages = -(-8 * (count + 1) // _PAGE_BYTES)
        self._words = memoryview(mmap.mmap(-1, pages * _PAGE_BYTES)).cast("q")
        self._registry = registry
        self._children = [
            CleanerProcess(parts, number, self._words, registry)
            for number in range(count)
        ]
        self._words[_NOTED] = -1  # no checkpoint was written yet
        for child in self._children:
            child.passed = _NEVER

    def look(self, now_ms: int) -> None:
        """Start the cleaners that are not running, if a topic is to be compacted."""
        if any("compact" in t.config.cleanup_policy for t in self._registry.topics()):
            for child in self._children:
                child.look(now_ms)

    def noted(self) -> None:
        """Tell the log cleaners that the checkpoints name no deleted topic now.

        These are the files cleaner-offset-checkpoint, one in each log directory.
        """
        self._words[_NOTED] = self._registry.version

    def may_hold_rows(self) -> bool:
        """Return whether a log cleaner may still use partitions that were deleted."""
        return any(child.passed < self._registry.version for child in self._children)

    def stop(self) -> None:
        """End the log cleaners; their unfinished compactions change no log."""
        for child in self._children:
            child.stop()


class CleanerProcess(HousekeeperChild):
    """One log cleaner, a child process of the housekeeper.

    Args:
        parts: the settings and the shared memory.
        number: the number of this cleaner, from 0 on.
        words: memory that the housekeeper and all cleaners share.
        registry: the housekeeper's view of the metadata log.
    """

    NAME = "a log cleaner"
    TITLE = "kafka-log-cleaner-thread"
    PASSING: ClassVar[tuple[type[MpbrokerError], ...]] = ()

    def __init__(
        self,
        parts: ProcessParts,
        number: int,
        words: memoryview,
        registry: TopicRegistry,
    ) -> None:
        super().__init__(parts)
        self._words = words
        self._number = number
        self._process = HOUSEKEEPER + 1 + number
        self._housekeepers = registry

    @property
    def passed(self) -> int:
        """The metadata's version up to which this cleaner let go of deleted topics."""
        return self._words[1 + self._number]

    @passed.setter
    def passed(self, version: int) -> None:
        self._words[1 + self._number] = version

    def _before_fork(self) -> None:
        self.passed = -1

    def _after_death(self) -> None:
        """Let other processes make the fsyncs of logs that a dead cleaner had begun."""
        self.passed = _NEVER
        memory = self._parts.memory
        words, owner = memory.table.row(0).words, self._process + 1
        for index in range(self._housekeepers.row_count):
            if words[index * ROW_WORDS + ROW_SYNC_OWNER] == owner:
                memory.table.row(index).forget_sync(self._process)
        for notices in memory.notices:
            notices.overflow()
        memory.wake_everybody()

    def _serve(self) -> None:
        # Imported here: a broker without compacted topics has no such process.
        from mpbroker.storage.cleaning.compaction import CleaningAbortedError
        from mpbroker.storage.cleaning.log_cleaner import LogCleaner

        parts, config = self._parts, self._parts.config
        deleted: set[int] = set()
        deleted_names: dict[str, int] = {}  # and by which version of the metadata
        before: list[TopicImage] = []

        def removed(topic: Topic) -> None:
            logs.forget(topic)
            deleted.update(topic.partitions)
            deleted_names[topic.name] = _NEVER

        def may_clean(name: str) -> bool:
            # Another topic may have got the name of a deleted one: then the checkpoint
            # must not have the offset up to which that one was compacted.
            return name not in deleted_names

        def stop_cleaning() -> None:
            if parts.memory.phase >= Phase.DRAINING:
                raise CleaningAbortedError("the broker stops")

        registry = parts.registry(removed, removed_before=before)
        logs = parts.logs(registry, process=self._process)
        cleaner = LogCleaner(
            config.log_cleaner_dedupe_buffer_size // config.log_cleaner_threads,
            stop_cleaning,
            config.log_cleaner_io_max_bytes_per_second / config.log_cleaner_threads,
        )
        upkeep = LogUpkeep(logs, registry, cleaner, may_clean=may_clean)
        for topic in before:
            deleted_names[topic.name] = _NEVER
        backoff_ms = config.log_cleaner_backoff_ms
        next_ms = _now_ms() + min(config.log_initial_task_delay_ms, backoff_ms)
        while True:
            registry.catch_up()
            upkeep.forget_rows(deleted)
            deleted.clear()
            for name, version in list(deleted_names.items()):
                if version <= self._words[_NOTED]:
                    del deleted_names[name]
                else:
                    deleted_names[name] = min(version, registry.version)
            self.passed = registry.version
            if _now_ms() >= next_ms and self._words[_NOTED] >= 0:
                _log_failures(lambda: upkeep.run_cleaner(_now_ms()))
                next_ms = _now_ms() + backoff_ms
            upkeep.remove_files(_now_ms())
            time.sleep(min(_TURN_MS, max(1, backoff_ms)) / 1000)


def _log_failures(work: Callable[[], object]) -> None:
    try:
        work()
    except Exception:  # noqa: BLE001 - the next round tries again
        _LOG.exception("cleaning failed")


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
