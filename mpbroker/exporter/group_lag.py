"""Read the offsets that groups have committed, from __consumer_offsets.

The coordinator's log is the truth: a reader that follows it knows what the coordinator
knows, and no process is asked. Offsets that a transaction commits count from its end.
What is damaged is skipped, as the coordinator does it. A node of a cluster has no such
log: its coordinator writes a file instead.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Protocol

from mpbroker.coordinator.coordinator_topic import LoadedRecord, records_of
from mpbroker.coordinator.group_positions import Position, read_positions
from mpbroker.coordinator.groups.group_offsets import GroupOffsets, OffsetAndMetadata
from mpbroker.coordinator.groups.group_records import OffsetCommitKey, read_record
from mpbroker.ipc.layout import RowStatus
from mpbroker.metadata.topic_names import OFFSETS_TOPIC
from mpbroker.protocol.errors import ApiError, ProtocolError
from mpbroker.storage.log.log_walk import walk_log
from mpbroker.storage.partition_directory import directory_name

if TYPE_CHECKING:
    from mpbroker.coordinator.groups.group_records import OffsetCommitValue
    from mpbroker.metadata.topics import Topic, TopicRegistry
    from mpbroker.protocol.records.batch_header import BatchHeader
    from mpbroker.storage.log_manager import LogManager

_READ_BYTES: Final = 1024 * 1024


class CommittedOffsets(Protocol):
    """The offsets that groups have committed, as of the last ``catch_up``.

    Attributes:
        hidden: how many more there are, which ``committed`` leaves out.
    """

    hidden: int

    def catch_up(self) -> None: ...

    def committed(self) -> Iterator[Position]: ...


class NodeGroupLag:
    """The committed offsets of the groups that this node of a cluster coordinates.

    Args:
        home: the first log directory, where the coordinator writes them.
    """

    def __init__(self, home: str) -> None:
        self._home = home
        self._found: list[Position] = []
        self.hidden = 0

    def catch_up(self) -> None:
        """Read what the coordinator has written last."""
        self._found, self.hidden = read_positions(self._home)

    def committed(self) -> Iterator[Position]:
        """Yield each committed offset, as group, topic, partition and offset."""
        return iter(self._found)


class GroupLag:
    """Follows __consumer_offsets, and keeps the committed offsets of all groups.

    Args:
        budget_bytes: about how much of the log to read in a call; a long log takes
            several calls.

    Attributes:
        groups: the offsets of each group, by its id.
        hidden: 0, as none is left out.
    """

    hidden = 0

    def __init__(
        self,
        registry: TopicRegistry,
        logs: LogManager,
        *,
        budget_bytes: int = 8 * 1024 * 1024,
    ) -> None:
        self._registry = registry
        self._logs = logs
        self._budget_bytes = budget_bytes
        self._positions: dict[int, int] = {}
        self._topic_id = b""
        self.groups: dict[str, GroupOffsets] = {}

    def catch_up(self) -> None:
        """Read the offsets that groups have committed since the last call.

        At most about ``budget_bytes`` are read; the next call goes on there.
        """
        topic = self._registry.topic(OFFSETS_TOPIC)
        if topic is None or topic.topic_id != self._topic_id:
            self._positions.clear()
            self.groups.clear()
            self._topic_id = b"" if topic is None else topic.topic_id
        if topic is None:
            return
        left = self._budget_bytes
        for partition in range(len(topic.partitions)):
            if left > 0 and self._exists(topic, partition):
                left -= self._follow(topic, partition, left)

    def _exists(self, topic: Topic, partition: int) -> bool:
        name = directory_name(topic.name, partition)
        return any(os.path.isdir(f"{d.path}/{name}") for d in self._logs.directories)

    def _follow(self, topic: Topic, partition: int, budget: int) -> int:
        """Apply new records of a partition; return how many bytes were read.

        Damaged parts are skipped, as by the coordinator, which has them in the log.
        """
        read = offset = 0

        def take(header: BatchHeader, batch: memoryview) -> tuple[None]:
            nonlocal read
            read += len(batch)
            with suppress(ProtocolError):
                for record in records_of(header, batch, offset):
                    self._apply(record)
            position = max(self._positions[partition], header.next_offset)
            self._positions[partition] = position
            return (None,)  # so that the walk can be left behind each piece

        try:
            log = self._logs.log(topic, partition)
            if log.row.status != RowStatus.ONLINE:
                return 0  # loading it is the coordinator's task
            end = log.row.log_end_offset
            offset = max(self._positions.get(partition, 0), log.row.log_start_offset)
            self._positions[partition] = offset
            if offset >= end:
                return 0
            for _ in walk_log(log.view, offset, _READ_BYTES, take):
                if read >= budget:
                    return read
            # What is damaged at the end is not looked at again and again.
            self._positions[partition] = max(self._positions[partition], end)
        except (ApiError, OSError):
            return read  # being deleted or compacted, perhaps; tried again next time
        return read

    def _apply(self, record: LoadedRecord) -> None:
        if record.commit is not None:
            for group in self.groups.values():
                group.complete(record.producer_id, commit=record.commit)
            return
        try:
            read = read_record(record.key, record.value)
        except ProtocolError:
            return  # those behind it count nevertheless
        if read is None or not isinstance(read[0], OffsetCommitKey):
            return
        key = read[0]
        group = self.groups.setdefault(key.group, GroupOffsets())
        value: OffsetCommitValue | None = read[1]  # type: ignore[assignment]
        committed = None if value is None else OffsetAndMetadata.of_record(value)
        if record.producer_id >= 0:
            group.put_pending(record.producer_id, key.topic, key.partition, committed)
        elif committed is None:
            group.remove(key.topic, key.partition)
            if not group:
                del self.groups[key.group]
        else:
            group.put(key.topic, key.partition, committed)

    def committed(self) -> Iterator[Position]:
        """Yield each committed offset, as group, topic, partition and offset."""
        for name, group in self.groups.items():
            for topic, partition, committed in group:
                yield name, topic, partition, committed.offset
