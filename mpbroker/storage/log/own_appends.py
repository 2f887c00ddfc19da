"""Appends of the broker's own, by the compiled core where there is one.

What the coordinator appends is made by itself: nothing of it has to be validated, and
no request remembers it. ``None`` says that it is not plain, or that there is no core:
then it goes the usual way, through PartitionLog.append.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

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

_HELD: Final = -1  # as native/coordinator/coordinator_end.c has it


class OwnAppends:
    """One process's appends of what it has made itself.

    Args:
        table: the partitions' rows; None: everything goes the usual way.
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
        """Append records as one uncompressed batch of no producer.

        Returns:
            The offset behind it.
        """
        if self._end is None:
            return None
        return self._do(self._end.append, log, records, now_ms)

    def append_marker(
        self, log: PartitionLog, marker: bytes, now_ms: int
    ) -> int | None:
        """Append the marker that ends a transaction, unless it has ended.

        Returns:
            The offset behind it or, if it was there, the log's end.
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
        if end == _HELD:
            # The lock's last owner died: the usual way, behind what it has left.
            log.row.settle_and_unlock()
            return None
        return end
