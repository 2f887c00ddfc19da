"""Follow the shared topics (diskless.enable=true) of a cluster, as one of its nodes.

A topic is made in the metadata log first. Any node that finds it there makes its
partitions in the database, which ignores repeated calls. If a topic was deleted in the
metadata log, the nodes delete it in the database, too.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final
from uuid import UUID

from mpbroker.base.logger import get_logger
from mpbroker.cluster.errors import ClusterError, DatabaseUnavailableError
from mpbroker.cluster.materialiser import SharedPartition
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError

if TYPE_CHECKING:
    from mpbroker.cluster.sequencer import PartitionEnds, Sequencer
    from mpbroker.metadata.log_config import LogConfig
    from mpbroker.metadata.topics import Topic, TopicRegistry
    from mpbroker.storage.log.partition_log import PartitionLog
    from mpbroker.storage.log_manager import LogManager

logger = get_logger(__name__)
_LOOK_EVERY_S: Final = 0.1
_RETRY_S: Final = 1.0
_PLACES_AT_ONCE: Final = 1000


class SharedTopics:
    """Knows the shared topics (with records in the object store) and their local logs.

    It also makes their partitions in the database.

    Args:
        sequencer: makes and removes the topics' partitions in the database.
        registry: this process's view of the metadata log.
        logs: this process's logs.
        notify: called with each log that has grown.
        passed: called with the position in the metadata log below which this process
            uses no deleted partition.
    """

    def __init__(
        self,
        sequencer: Sequencer,
        registry: TopicRegistry,
        logs: LogManager,
        notify: Callable[[PartitionLog], None],
        passed: Callable[[int], None],
    ) -> None:
        self._sequencer = sequencer
        self._registry = registry
        self._logs = logs
        self._notify = notify
        self._passed = passed
        # The number of partitions that the database has, by topic id.
        self._made: dict[UUID, int] = {}
        self._deleted: list[UUID] = []
        self._version = -1  # the position in the metadata log up to which it was read
        self._kept_version = -1  # the position that `_places` agrees with
        self._shared: dict[UUID, Topic] = {}
        self._places: dict[SharedPartition, PartitionLog] = {}
        # All partitions of the metadata log, as far as it is read, have a log.
        self.has_all_logs = False
        self._grown = asyncio.Event()
        self._wake: Callable[[Iterable[SharedPartition]], None] = lambda _: None

    def wakes(self, materialiser: Callable[[Iterable[SharedPartition]], None]) -> None:
        """Set a function to call when records may be ready to be copied to local logs.

        It makes the materialiser, which copies them, begin at once; with the partitions
        that they are in, or with none if they may be anywhere.
        """
        self._wake = materialiser

    def removed(self, topic: Topic) -> None:
        """Forget the local logs of a topic that was deleted in the metadata log.

        If it was a shared topic, `run` deletes it in the cluster's database, too.
        """
        self._logs.forget(topic)
        if topic.config.diskless_enable:
            self._deleted.append(UUID(bytes=topic.topic_id))

    def removed_before(self, topic_ids: Iterable[bytes]) -> None:
        """Note topics (by id) that `run` must delete in the cluster's database, too.

        They were deleted in the metadata log before this process began.
        """
        self._deleted += [UUID(bytes=topic_id) for topic_id in topic_ids]

    # -- for retention -----------------------------------------------------------------

    def partitions(self) -> Iterator[tuple[UUID, int, LogConfig]]:
        """Yield topic id, number and settings of the database's shared partitions."""
        for topic_id, topic in self._shared.items():
            for partition in range(self._made.get(topic_id, 0)):
                yield topic_id, partition, topic.config

    # -- for the materialiser ----------------------------------------------------------

    def logs(self) -> Mapping[SharedPartition, PartitionLog]:
        """Return the local logs of all shared partitions that the database has.

        The materialiser, which copies records from the store into these logs, calls
        this between two rounds, when it uses no log.
        """
        self._catch_up()
        if self._kept_version != self._version:
            self._kept_version = self._version
            self._places = {}  # the materialiser may be in the middle of the last one
            for topic_id, topic in self._shared.items():
                self._open(topic_id, topic)
            self._passed(self._version)
            wanted = sum(len(topic.partitions) for topic in self._shared.values())
            self.has_all_logs = len(self._places) == wanted
        return self._places

    def _open(self, topic_id: UUID, topic: Topic) -> None:
        for partition in range(self._made.get(topic_id, 0)):
            try:
                log = self._logs.log(topic, partition)
            except ApiError as error:
                logger.error("%s-%d: %s", topic.name, partition, error)
            else:
                self._places[SharedPartition(topic_id, partition)] = log

    def appended(self, log: PartitionLog) -> None:
        """Wake the fetches that wait for this log, and all calls of ``visible``."""
        self._notify(log)
        grown, self._grown = self._grown, asyncio.Event()
        grown.set()

    # -- for the writer ----------------------------------------------------------------

    async def ready(self, topic_id: UUID) -> None:
        """Wait until the database has a topic's partitions; make them if necessary.

        Raises:
            ApiError: UNKNOWN_TOPIC_OR_PARTITION.
            ClusterError: as `ClusterDatabase.rows`.
        """
        self._catch_up()
        topic = self._shared.get(topic_id)
        if topic is not None:
            await self._make(topic_id, topic)
        if topic_id not in self._shared:
            raise ApiError(
                ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
                f"no shared topic has the id {topic_id}",
            )

    async def visible(self, ends: Mapping[SharedPartition, int]) -> None:
        """Wait until the local logs of partitions reach these end offsets."""
        self._wake(ends)
        for place, end in ends.items():
            while (log := self._places.get(place)) is None or (
                log.row.log_end_offset < end
            ):
                await self._grown.wait()

    async def up_to_date(
        self, places: Sequence[SharedPartition], timeout_s: float
    ) -> list[bool]:
        """Return, when local logs have all that is committed now, which of them do.

        Args:
            places: the partitions. What does not exist in the database has all.
            timeout_s: how long to wait.
        """
        ends: Sequence[PartitionEnds] | None = None
        with suppress(TimeoutError, DatabaseUnavailableError):
            async with asyncio.timeout(timeout_s):
                ends = await self._sequencer.ends(places)
                await self.visible(
                    {
                        place: end.high_watermark
                        for place, end in zip(places, ends, strict=True)
                        if end.high_watermark > 0
                    }
                )
        if ends is None:
            return [False] * len(places)
        return [
            end.high_watermark <= 0
            or (
                (log := self._places.get(place)) is not None
                and log.row.log_end_offset >= end.high_watermark
            )
            for place, end in zip(places, ends, strict=True)
        ]

    async def begun(self, starts: Mapping[SharedPartition, int]) -> None:
        """Return when no local log shows records below some starts."""
        self._wake(starts)
        for place, start in starts.items():
            while (log := self._places.get(place)) is None or (
                log.row.log_start_offset < start
            ):
                await self._grown.wait()

    # -- the metadata log --------------------------------------------------------------

    async def run(self) -> None:
        """Make and remove shared topics' partitions in the database, until stopped."""
        is_known = False
        while True:
            try:
                self._catch_up()
                if not is_known:
                    await self._look_what_is_made()
                    is_known = True
                for topic_id, topic in list(self._shared.items()):
                    await self._make(topic_id, topic)
                while self._deleted:
                    await self._sequencer.delete_topic(self._deleted[0])
                    self._made.pop(self._deleted.pop(0), None)
            except (ClusterError, OSError) as error:
                logger.warning("shared topics cannot be looked after: %s", error)
                await asyncio.sleep(_RETRY_S)
            await asyncio.sleep(_LOOK_EVERY_S)

    def _catch_up(self) -> None:
        """Read the new records of the metadata log; update the set of shared topics.

        These are the topics with diskless.enable=true: their records are in the object
        store.
        """
        registry = self._registry
        registry.catch_up()
        if registry.version == self._version:
            return
        self._shared = {
            UUID(bytes=topic.topic_id): topic
            for topic in registry.topics()
            if topic.config.diskless_enable
        }
        self._version = registry.version

    async def _look_what_is_made(self) -> None:
        """Ask which topics' partitions the database has, many at a time.

        A node that starts does not make them again, which would be a write for each.
        """
        places = [
            (topic_id, partition)
            for topic_id, topic in self._shared.items()
            for partition in range(len(topic.partitions))
        ]
        made: Counter[UUID] = Counter()
        for start in range(0, len(places), _PLACES_AT_ONCE):
            part = places[start : start + _PLACES_AT_ONCE]
            ends = await self._sequencer.ends(part)
            made.update(
                topic_id
                for (topic_id, _), each in zip(part, ends, strict=True)
                if each.high_watermark >= 0
            )
        for topic_id, count in made.items():
            topic = self._shared.get(topic_id)
            # A count of some of them does not say which.
            if topic is not None and count == len(topic.partitions):
                self._made.setdefault(topic_id, count)
        self._kept_version = -1
        self._wake(())

    async def _make(self, topic_id: UUID, topic: Topic) -> None:
        count = len(topic.partitions)
        if self._made.get(topic_id, 0) < count:
            await self._sequencer.create_partitions(topic_id, count)
            self._catch_up()
            if topic_id not in self._shared:
                # Other nodes may have removed it from the database before this call
                # made it there: then nobody else knows that it is to be deleted.
                self._deleted.append(topic_id)
                return
            self._made[topic_id] = count
            self._kept_version = -1  # there are more logs to keep
            self._wake(())
