"""OwnAppends: append the coordinator's own batches, by the compiled core.

The coordinator makes these batches itself, so they need no validation. And no client
waits for them, so no slot (the entry of a request in flight) has to note the append. A
method that returns None has appended nothing, because the compiled core was not built
or because the append needs the Python code: then call PartitionLog.append.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mpbroker.ipc.compiled import core
from mpbroker.storage.files.log_segment import LogSegment
from mpbroker.storage.files.offset_index import OffsetIndex
from mpbroker.storage.files.time_index import TimeIndex
from mpbroker.storage.log.core_plans import AppendPlan
from mpbroker.storage.producers.producer_state import (
    AppendedBatch,
    ProducerEntry,
    ProducerState,
)

if TYPE_CHECKING:
    from mpbroker.ipc.tables.partition_table import PartitionTable
    from mpbroker.storage.log.partition_log import PartitionLog


class OwnAppends:
    """Appends the coordinator's own batches to logs, by the compiled core.

    Args:
        table: the partitions' rows (entries in shared memory); None: the methods append
            nothing, and return None.
    """

    def __init__(self, table: PartitionTable | None = None) -> None:
        self._end = None
        if core is not None and table is not None:
            self._end = core.CoordinatorEnd(
                table.segment.view,
                AppendPlan,
                LogSegment,
                OffsetIndex,
                TimeIndex,
                ProducerState,
                ProducerEntry,
                AppendedBatch,
            )

    def append(
        self,
        log: PartitionLog,
        records: list[tuple[bytes, bytes | None]],
        now_ms: int,
    ) -> int | None:
        """Append records as one uncompressed batch without a producer id.

        Args:
            log: the log to append to.
            records: (key, value) pairs; a value of None is a tombstone.
            now_ms: the wall clock, for the records' timestamps.

        Returns:
            The offset after the batch. None: nothing was appended; the caller uses
            PartitionLog.append instead.
        """
        if self._end is None:
            return None
        return self._do(self._end.append, log, records, now_ms)

    def append_marker(
        self, log: PartitionLog, marker: bytes, now_ms: int
    ) -> int | None:
        """Append the marker that ends a transaction, unless it is in the log already.

        Args:
            log: the log to append to.
            marker: a whole control batch.
            now_ms: the wall clock.

        Returns:
            The offset after the marker or, if it was in the log already, the log end
            offset. None: nothing was appended; the caller uses PartitionLog.append
            instead.
        """
        if self._end is None:
            return None
        return self._do(self._end.append_marker, log, marker, now_ms)

    def _do(
        self,
        append: Callable[[AppendPlan, Any, int], int | None],
        log: PartitionLog,
        data: Any,
        now_ms: int,
    ) -> int | None:
        plan = log.append_plan()
        end = None if plan is None else append(plan, data, now_ms)
        if core is not None and end == core.ROW_IS_HELD:
            # The core has taken the lock from a process that was killed. Settle the
            # intent that process left, as PartitionRow.lock does, and let the Python
            # code append.
            log.row.settle_and_unlock()
            return None
        return end
