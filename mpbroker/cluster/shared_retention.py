"""Remove old records of shared topics, and deleted topics, from the cluster's database.

Any node may do this, also several at once. Each step is small, and commits do not wait
for it. ObjectCollector deletes the objects that are not used any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, Protocol
from uuid import UUID

from mpbroker.base.logger import get_logger
from mpbroker.cluster.errors import ClusterError

if TYPE_CHECKING:
    from mpbroker.cluster.sequencer import Sequencer
    from mpbroker.metadata.log_config import LogConfig

logger = get_logger(__name__)
_AT_ONCE: Final = 1000


class Topics(Protocol):
    """A node's shared topics, whose records are in the object store."""

    def partitions(self) -> Iterator[tuple[UUID, int, LogConfig]]:
        """Return the topic id, number and settings of each shared partition."""


class SharedRetention:
    """Removes the due records of all shared topics, as one of the cluster's nodes.

    Args:
        sequencer: removes records in the database.
        topics: tells the partitions and their settings; see SharedTopics.
        every_s: the pause between two rounds, in seconds.
    """

    def __init__(self, sequencer: Sequencer, topics: Topics, every_s: float) -> None:
        self._sequencer = sequencer
        self._topics = topics
        self._every_s = every_s

    async def run(self) -> None:
        """Remove due records at intervals until cancelled; go on after errors."""
        while True:
            await asyncio.sleep(self._every_s)
            try:
                await self.remove()
            except ClusterError as error:
                logger.warning("shared topics keep old records for now: %s", error)

    async def remove(self) -> None:
        """Remove records that retention ends now, and deleted topics.

        Raises:
            ClusterError: as `ClusterDatabase.rows`.
        """
        for topic_id, partition, config in list(self._topics.partitions()):
            while await self._sequencer.expire_records(
                topic_id,
                partition,
                retention_ms=config.retention_ms,
                retention_bytes=config.retention_bytes,
            ):
                pass
            await self._trim(topic_id, partition)
        while deleted := await self._sequencer.deleted_partitions(_AT_ONCE):
            for topic_id, partition in deleted:
                await self._trim(topic_id, partition)
            removed = [
                await self._sequencer.remove_partitions(topic_id, _AT_ONCE)
                for topic_id in {topic_id for topic_id, _ in deleted}
            ]
            if not any(removed):
                return  # another node is removing these partitions

    async def _trim(self, topic_id: UUID, partition: int) -> None:
        while await self._sequencer.trim_extents(topic_id, partition, _AT_ONCE):
            pass
