"""Read what groups have committed from __consumer_offsets.

The coordinator's log is the truth: a reader that follows it knows what the coordinator
knows, and no process is asked. Offsets that a transaction commits count from its end.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from mpbroker.coordinator.groups.group_offsets import GroupOffsets, OffsetAndMetadata
from mpbroker.coordinator.groups.group_records import OffsetCommitKey, read_record
from mpbroker.ipc.layout import RowStatus
from mpbroker.metadata.topic_names import OFFSETS_TOPIC
from mpbroker.protocol.errors import ApiError, ProtocolError
from mpbroker.protocol.records.batch_header import iter_batches, parse_batch_header
from mpbroker.protocol.records.control_record import parse_end_transaction_marker
from mpbroker.protocol.records.record_batch import iter_records
from mpbroker.storage.partition_directory import directory_name

if TYPE_CHECKING:
    from mpbroker.coordinator.groups.group_records import OffsetCommitValue
    from mpbroker.metadata.topics import Topic, TopicRegistry
    from mpbroker.storage.log_manager import LogManager

_READ_BYTES: Final = 1024 * 1024


class GroupLag:
    """Follows __consumer_offsets.

    Args:
        budget_bytes: read at most so much in a call; a long log takes several calls.
    """

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
        """Read what has been committed since the last call."""
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
        """Apply new records of a partition; return how many bytes were read."""
        read = 0
        try:
            log = self._logs.log(topic, partition)
            if log.row.status != RowStatus.ONLINE:
                return 0  # loading it is the coordinator's task
            offset = self._positions.get(partition, 0)
            offset = max(offset, log.row.log_start_offset)
            while offset < log.row.log_end_offset and read < budget:
                found = log.reader.read(offset, _READ_BYTES, min_one_batch=True)
                data = os.pread(found.fd, found.length, found.position)
                read += len(data)
                before = offset
                for header, batch in iter_batches(data):
                    end = header.base_offset + header.last_offset_delta + 1
                    if end > offset:
                        self._apply(batch, offset)
                        offset = end
                if offset == before:
                    break
            self._positions[partition] = offset
        except (ApiError, ProtocolError, OSError):
            return read  # being deleted or compacted, perhaps; tried again next time
        return read

    def _apply(self, batch: memoryview, from_offset: int) -> None:
        header = parse_batch_header(batch)
        if header.is_control:
            for record in iter_records(batch):
                commit = parse_end_transaction_marker(record).commit
                for group in self.groups.values():
                    group.complete(header.producer_id, commit=commit)
            return
        for record in iter_records(batch):
            if record.offset < from_offset or record.key is None:
                continue
            read = read_record(record.key, record.value)
            if read is None or not isinstance(read[0], OffsetCommitKey):
                continue
            key = read[0]
            group = self.groups.setdefault(key.group, GroupOffsets())
            value: OffsetCommitValue | None = read[1]  # type: ignore[assignment]
            committed = None if value is None else OffsetAndMetadata.of_record(value)
            if header.is_transactional:
                group.put_pending(
                    header.producer_id, key.topic, key.partition, committed
                )
            elif committed is None:
                group.remove(key.topic, key.partition)
                if not group:
                    del self.groups[key.group]
            else:
                group.put(key.topic, key.partition, committed)

    def committed(self) -> Iterator[tuple[str, str, int, int]]:
        """Yield group, topic, partition and offset of all that is committed."""
        for name, group in self.groups.items():
            for topic, partition, committed in group:
                yield name, topic, partition, committed.offset
