"""SharedDeletions: DeleteRecords on shared topics.

A partition's start moves in the database, by one commit for each partition. All nodes
read it from there: this one before it answers, the others in their next look. Killed
behind the commit, a node's successor reads it, too. Extents without any record left are
removed by the next run of retention, and their objects by the collector.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from typing import Final, Protocol
from uuid import UUID

from mpbroker.cluster.errors import DatabaseUnavailableError
from mpbroker.cluster.materialiser import SharedPartition
from mpbroker.cluster.sequencer import PartitionEnds, Sequencer
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError

_TO_THE_END: Final = -1  # as an offset
_REFUSED: Final = -1  # as the start of a partition


class Topics(Protocol):
    """The shared topics of a node; ``SharedTopics`` is one."""

    def ready(self, topic_id: UUID) -> Awaitable[None]:
        """Return when the database has the topic's partitions.

        Raises:
            ApiError: there is no such topic.
        """

    def begun(self, starts: Mapping[SharedPartition, int]) -> Awaitable[None]:
        """Return when readers of this node see no records below some starts."""


class SharedDeletions:
    """Removes records of shared topics by the requests of one node's clients.

    Args:
        sequencer: has the starts.
        topics: the node's; see SharedTopics.
    """

    def __init__(self, sequencer: Sequencer, topics: Topics) -> None:
        self._sequencer = sequencer
        self._topics = topics

    async def delete(
        self, wanted: Sequence[tuple[UUID, int, int]], timeout_s: float
    ) -> list[tuple[int, int]]:
        """Remove records below offsets, and return when this node shows them no more.

        Args:
            wanted: topic, partition and offset; -1: the high watermark.
            timeout_s: what is not done by then is answered REQUEST_TIMED_OUT.

        Returns:
            Each partition's start and error code. The start is higher than wanted if it
            was so before.

        Raises:
            ClusterError: the database refuses; an operator must act.
        """
        results = [(_REFUSED, int(ErrorCode.REQUEST_TIMED_OUT))] * len(wanted)
        # What is committed by the deadline is answered as it is.
        with suppress(TimeoutError, DatabaseUnavailableError):
            async with asyncio.timeout(timeout_s):
                await self._delete_all(wanted, results)
                starts = {
                    SharedPartition(topic_id, partition): start
                    for (topic_id, partition, _), (start, _) in zip(
                        wanted, results, strict=True
                    )
                    if start >= 0
                }
                await self._topics.begun(starts)
        return results

    async def _delete_all(
        self,
        wanted: Sequence[tuple[UUID, int, int]],
        results: list[tuple[int, int]],
    ) -> None:
        """Do as ``delete``, and put each result in its place as it is known."""
        unknown: set[UUID] = set()
        for topic_id in {topic_id for topic_id, _, _ in wanted}:
            try:
                await self._topics.ready(topic_id)
            except ApiError:
                unknown.add(topic_id)  # it was deleted a moment ago
        ends = await self._sequencer.ends(
            [(topic_id, partition) for topic_id, partition, _ in wanted]
        )
        for place, (topic_id, partition, before) in enumerate(wanted):
            error = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            start = _REFUSED
            if topic_id not in unknown:
                error = _judge(before, ends[place])
            if not error:
                start = await self._sequencer.delete_records(
                    topic_id, partition, before
                )
                if start < 0:
                    error = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            results[place] = (start, int(error))


def _judge(before: int, ends: PartitionEnds) -> ErrorCode:
    """Return the error of a wanted start, given the ends of a moment ago.

    The end only grows, so what is in range now stays so.
    """
    if ends.high_watermark < 0:
        return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    if before != _TO_THE_END and not 0 <= before <= ends.high_watermark:
        return ErrorCode.OFFSET_OUT_OF_RANGE
    return ErrorCode.NONE
