"""Tell the other nodes of a cluster which partitions of this node are offline.

A partition is offline if its log directory has failed, or was not there at the start.
It has no leader then, whichever node a client asks.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Final

from mpbroker.cluster.errors import DatabaseUnavailableError

if TYPE_CHECKING:
    from mpbroker.cluster.database import ClusterDatabase
    from mpbroker.cluster.membership import Membership
    from mpbroker.metadata.topics import TopicRegistry
    from mpbroker.storage.log_manager import LogManager

_EVERY_S: Final = 0.5


class OfflinePartitions:
    """Follows which partitions of this node are offline.

    Args:
        database: the cluster's database, which other nodes read.
        membership: this node in its current epoch.
        registry: this process's view of the metadata log.
        logs: knows which partitions of this node are offline.
    """

    def __init__(
        self,
        database: ClusterDatabase,
        membership: Membership,
        registry: TopicRegistry,
        logs: LogManager,
    ) -> None:
        self._database = database
        self._membership = membership
        self._registry = registry
        self._logs = logs
        self._seen: tuple[object, int] | None = None
        self._text = ""

    async def run(self) -> None:
        """Tell the cluster of changes, until this is cancelled.

        Raises:
            ClusterError: the database refuses.
        """
        told: tuple[int, str] | None = None
        while True:
            try:
                found = self._membership.epoch, self.encoded()
                if found != told and found[0] >= 0:
                    await self._database.rows(
                        "SELECT mpbroker.tell_offline_v1($1, $2, $3)",
                        *(self._membership.node_id, *found),
                    )
                    told = found
            except (DatabaseUnavailableError, OSError):
                pass  # the tasks that copy and read the metadata log this
            await asyncio.sleep(_EVERY_S)

    def encoded(self) -> str:
        """Return the offline partitions: a JSON object, or "" if there are none.

        It has the numbers of a topic's offline partitions by the topic's id, which is
        written in hexadecimal digits. Shared topics are left out: each node has them.
        """
        self._registry.catch_up()
        version = self._logs.offline_version()
        # A topic that is made while all directories are there has no offline partition.
        is_known = self._seen is not None and self._seen[0] == version
        has_lost = self._text or self._logs.lacks_directory()
        seen = version, self._registry.version
        if not is_known or (has_lost and seen != self._seen):
            self._seen = seen
            self._text = self._look()
        return self._text

    def _look(self) -> str:
        logs = self._logs
        offline: dict[str, list[int]] = {}
        for topic in self._registry.topics():
            if logs.is_elsewhere(topic) or topic.config.diskless_enable:
                continue
            numbers = range(len(topic.partitions))
            found = [number for number in numbers if logs.is_offline(topic, number)]
            if found:
                offline[topic.topic_id.hex()] = found
        return json.dumps(offline) if offline else ""
