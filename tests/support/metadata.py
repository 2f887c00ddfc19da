"""Metadata logs for tests: plain and shared cells, and dying writers."""

import os
import signal
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mpbroker.ipc.layout import CONTROL_WORDS, METADATA_CELL
from mpbroker.ipc.segment import Segment
from mpbroker.ipc.tables.shared_log_cell import SharedLogCell
from mpbroker.metadata.metadata_log import MetadataLog, recover_metadata_log
from mpbroker.metadata.topics import TopicRegistry

NOW_MS = 1_700_000_000_000


class PlainCell:
    """The shared cell's interface within one process."""

    def __init__(self) -> None:
        self.end = 0
        self.is_locked = False

    @contextmanager
    def locked(self) -> Iterator[None]:
        assert not self.is_locked, "the mutex is not recursive"
        self.is_locked = True
        try:
            yield
        finally:
            self.is_locked = False


def shared_cell() -> SharedLogCell:
    """Return a real cell, in a control segment of its own."""
    control = Segment.create("control", CONTROL_WORDS * 8)
    SharedLogCell.initialise(control, METADATA_CELL)
    return SharedLogCell(control, METADATA_CELL)


def start(directory: Path, **options: object) -> TopicRegistry:
    """Recover the log of a directory, as a starting broker does, and read it."""
    cell = PlainCell()
    recover_metadata_log(str(directory), cell, NOW_MS)
    return registry(directory, cell, **options)


def registry(directory: Path, cell: object, **options: object) -> TopicRegistry:
    """Return one more process's registry over the log of a running broker."""
    options = {"broker_id": 1, "capacity": 10_000, "now_ms": lambda: NOW_MS, **options}
    log_class = options.pop("log_class", MetadataLog)
    log = log_class(str(directory), cell)
    made = TopicRegistry(log, **options)
    # A registry lives as long as its process, and so has no close(): property tests
    # would run out of descriptors.
    weakref.finalize(made, log.close)
    return made


def contents(registry: TopicRegistry) -> object:
    """Return all that a registry knows, comparable."""
    topics = [
        (topic.name, topic.topic_id, list(topic.partitions), topic.config)
        for topic in registry.topics()
    ]
    return topics, {name: dict(registry.broker_overrides(name)) for name in ("", "1")}


class DyingLog(MetadataLog):
    """Killed when the batch is on disk and not yet published."""

    def _publish(self, end: int) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class TornLog(MetadataLog):
    """Killed when half of the batch is written."""

    def _write(self, batch: bytes, end: int) -> None:
        os.pwrite(self._fd, batch[: len(batch) // 2], end)
        os.kill(os.getpid(), signal.SIGKILL)


def in_child(work: Callable[[], object]) -> int:
    """Run work in a forked process; return its exit code, -9 if it was killed."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
