"""Read the partitions of topics for share groups.

Only the headers of record batches are read here. The processor of the connection sends
the records from the file. Only small reads are copied into the answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from mpbroker.base.storage_errors import CorruptLogError
from mpbroker.ipc.layout import COORDINATOR
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.records.batch_header import BatchHeader
from mpbroker.server.fetch.fetch_handler import SegmentRegion
from mpbroker.server.fetch.fetch_service import SMALL_BYTES, read_small
from mpbroker.storage.files.batch_scan import scan_batches

if TYPE_CHECKING:
    from mpbroker.coordinator.share.share_records import ShareKey
    from mpbroker.metadata.topics import Topic, TopicRegistry
    from mpbroker.storage.log.log_reader import ReadResult
    from mpbroker.storage.log.partition_log import PartitionLog

# A fetch looks at so many batches at most.
_MOST_BATCHES: Final = 2000


class LogRead:
    """Describes the record batches that a read has found in a log.

    Attributes:
        batches: the first and last offset of each batch.
        aborted: the first and last offset of each batch of an aborted transaction.
        length: the size of all batches in bytes.
    """

    __slots__ = ("_places", "_result", "aborted", "batches", "length")

    def __init__(self, result: ReadResult) -> None:
        self._result = result
        self._places: list[tuple[int, int]] = []  # position and end of each batch
        self.batches: list[tuple[int, int]] = []
        self.aborted: list[tuple[int, int]] = []
        self.length = 0

    def add(self, position: int, header: BatchHeader, first: int) -> None:
        self._places.append((position, position + header.size_in_bytes))
        self.batches.append((first, header.base_offset + header.last_offset_delta))
        self.length += header.size_in_bytes

    def records(self, first: int, last: int) -> Any:
        """Return the batches with offsets from ``first`` to ``last``.

        Small batches are returned as bytes, others as a SegmentRegion: a range of the
        log's file.
        """
        places = [
            place
            for place, (begin, end) in zip(self._places, self.batches, strict=True)
            if begin <= last and end >= first
        ]
        position = places[0][0]
        length = places[-1][1] - position
        result = self._result
        small = None
        if length <= SMALL_BYTES:
            small = read_small(result._replace(position=position, length=length))
        return small or SegmentRegion(
            result.segment_path, result.segment_id, position, length
        )


class ShareLogReader:
    """Reads partitions for share groups, and has the coordinator told when they grow.

    Args:
        log: returns a partition's log.
    """

    def __init__(
        self, registry: TopicRegistry, log: Callable[[Topic, int], PartitionLog]
    ) -> None:
        self._registry = registry
        self._log = log

    def name(self, topic_id: bytes) -> str | None:
        topic = self._registry.topic_by_id(topic_id)
        return None if topic is None else topic.name

    def has_partition(self, topic_id: bytes, partition: int) -> bool:
        topic = self._registry.topic_by_id(topic_id)
        return topic is not None and 0 <= partition < len(topic.partitions)

    def _of(self, topic_id: bytes, partition: int) -> PartitionLog:
        topic = self._registry.topic_by_id(topic_id)
        if topic is None or not 0 <= partition < len(topic.partitions):
            raise ApiError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
        return self._log(topic, partition)

    def offsets(self, topic_id: bytes, partition: int) -> tuple[int, int]:
        """Return the start offset and the end offset of a partition's log.

        Raises:
            ApiError: there is no such partition, or it is offline.
        """
        log = self._of(topic_id, partition)
        log.view.require_online()  # after a start no process may have opened it yet
        return log.row.log_start_offset, log.row.log_end_offset

    def offset_at(self, topic_id: bytes, partition: int, timestamp: int) -> int:
        """Return the first offset with this timestamp (ms) or a later one.

        Return the log end offset if there is none.
        """
        log = self._of(topic_id, partition)
        found = log.lookup.offset_for_timestamp(timestamp)
        return log.row.log_end_offset if found is None else found[0]

    def watch(self, key: ShareKey) -> int | None:
        """Have the coordinator notified when a share group's partition gets records.

        Returns:
            The partition's row (the number of its entry in shared memory), by which
            notices name it; None if the partition does not exist.
        """
        try:
            log = self._of(key.topic_id, key.partition)
        except ApiError:
            return None
        log.row.add_waiter(COORDINATOR)
        return log.row.index

    def read(
        self,
        key: ShareKey,
        offset: int,
        max_bytes: int,
        max_records: int,
        *,
        min_one_batch: bool,
        read_committed: bool,
    ) -> LogRead:
        """Find the record batches of a partition from an offset on, up to some limits.

        Args:
            min_one_batch: return the first batch even if it exceeds ``max_bytes``.
            read_committed: stop before open transactions, and list aborted batches.

        Raises:
            ApiError: the log cannot be read: CORRUPT_MESSAGE if the first batch is
                damaged.
        """
        result = self._of(key.topic_id, key.partition).reader.read(
            offset,
            max_bytes,
            min_one_batch=min_one_batch,
            read_committed=read_committed,
        )
        read = LogRead(result)
        end = result.position + result.length
        aborted = _Aborted(result.aborted_transactions or ())
        count = 0
        try:
            for position, header in scan_batches(result.fd, result.position, end):
                first = max(offset, header.base_offset) if read.batches else offset
                read.add(position, header, first)
                if aborted.has(header):
                    read.aborted.append(read.batches[-1])
                last = read.batches[-1][1]
                count += last - first + 1
                if count >= max_records or len(read.batches) >= _MOST_BATCHES:
                    break
        except CorruptLogError as error:
            # Mostly this is a last batch that is cut off by ``max_bytes``.
            if not read.batches:
                raise ApiError(ErrorCode.CORRUPT_MESSAGE, str(error)) from error
        return read


class _Aborted:
    """Tells whether a batch is of an aborted transaction.

    It must be asked about the batches in the order in which the log has them.
    """

    def __init__(self, transactions: Any) -> None:
        # By producer id, the first offsets of its aborted transactions. The earliest is
        # at the end of the list, and is removed at the transaction's marker.
        self._begins: dict[int, list[int]] = {}
        for producer_id, first in sorted(transactions, key=lambda each: -each[1]):
            self._begins.setdefault(producer_id, []).append(first)

    def has(self, header: BatchHeader) -> bool:
        """Return whether a batch is of an aborted transaction."""
        begins = self._begins.get(header.producer_id)
        if not begins or header.base_offset < begins[-1]:
            return False
        if header.is_control:
            begins.pop()  # the marker that ends it
            return False
        return header.is_transactional
