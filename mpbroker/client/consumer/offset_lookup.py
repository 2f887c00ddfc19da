"""OffsetLookup: find the leaders of partitions, and the offsets to begin at."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable
from typing import Final

from mpbroker.client.admin.topic_admin import EARLIEST, LATEST, list_offsets
from mpbroker.client.cluster import Cluster, TopicPartition
from mpbroker.client.consumer.consumer_config import ConsumerSettings
from mpbroker.client.consumer.fetcher import (
    LogTruncationError,
    NoOffsetError,
    OffsetOutOfRangeError,
)
from mpbroker.client.consumer.position_epochs import PositionEpochs
from mpbroker.client.errors import BrokerUnavailableError
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError

_log = logging.getLogger(__name__)

_RETRY_INTERVAL_S: Final = 0.1  # Kafka's retry.backoff.ms


class OffsetLookup:
    """Asks brokers for a consumer's leaders and offsets.

    Attributes:
        epochs: the leader epochs of the partitions, which it keeps up to date.
    """

    def __init__(self, cluster: Cluster, settings: ConsumerSettings) -> None:
        self._cluster = cluster
        self._offset_reset = settings.auto_offset_reset
        self._read_committed = settings.read_committed
        self._auto_create = settings.allow_auto_create_topics
        self.epochs = PositionEpochs()

    def offsets_for(
        self, partitions: Iterable[tuple[str, int]], timestamp: int
    ) -> dict[TopicPartition, int]:
        """Return the first offset at or after a time, for each partition.

        It tries again while a partition is new or changes its leader; see
        `Consumer.offsets_for`.
        """
        deadline = time.monotonic() + self._cluster.timeout_s
        wanted = [TopicPartition(*partition) for partition in partitions]
        while True:
            try:
                return self.ask(wanted, timestamp)
            except ApiError as error:
                if not error.error_code.retriable or time.monotonic() >= deadline:
                    raise
            time.sleep(_RETRY_INTERVAL_S)

    def reset_time(self, partitions: Iterable[TopicPartition]) -> int:
        """Return the place where partitions without a position begin.

        Returns:
            EARLIEST or LATEST, as auto.offset.reset says.

        Raises:
            NoOffsetError: auto.offset.reset is none.
        """
        if self._offset_reset == "none":
            names = ", ".join(map(str, partitions))
            raise NoOffsetError(
                f"no position for {names}, and auto.offset.reset=none; seek first"
            )
        return EARLIEST if self._offset_reset == "earliest" else LATEST

    def offset_after(self, lost: OffsetOutOfRangeError) -> int:
        """Return the offset to go on at when a position does not exist any more.

        It is the offset where the logs diverge, if the new leader told it; else the
        offset that auto.offset.reset names.

        Args:
            lost: the error that names the partition and its position.
        """
        where = lost.partition
        if isinstance(lost, LogTruncationError) and lost.divergent_offset is not None:
            self.epochs.forget(where)
            offset = lost.divergent_offset
            _log.warning("%s: going on at %d", lost, offset)
            self.epochs.note(where, offset - 1, offset, lost.divergent_epoch)
            return offset
        # This may fail. Forget what was read only when there is a new position.
        offset = self.offsets_for([where], self.reset_time([where]))[where]
        self.epochs.forget(where)
        return offset

    def ask(
        self, wanted: list[TopicPartition], timestamp: int, *, waits: bool = True
    ) -> dict[TopicPartition, int]:
        """Return the first offset at or after a time, without trying again.

        Args:
            wanted: the partitions.
            timestamp: see `Consumer.offsets_for`.
            waits: whether to wait for a leader that could not be reached before.

        Raises:
            ApiError: a broker refused; its code is retriable if asking again may help.
            BrokerUnavailableError: a leader does not answer.
        """
        leaders = self.leaders(wanted)
        for where, leader in leaders.items():
            if not waits and not self._cluster.is_reachable(leader):
                raise BrokerUnavailableError(f"the leader of {where} is unreachable")
        epochs = {where: self.epochs.leader_epoch(where) for where in leaders}
        try:
            answers = list_offsets(
                self._cluster,
                dict.fromkeys(wanted, timestamp),
                leaders,
                read_committed=self._read_committed,
                epochs=epochs,
            )
        except ApiError as error:
            if error.error_code == ErrorCode.UNKNOWN_LEADER_EPOCH:
                for where in wanted:  # it does no harm to those that were not meant
                    self.epochs.refuse(where)
            raise
        missing = [where for where, answer in answers.items() if answer.offset < 0]
        ends = list_offsets(
            self._cluster, dict.fromkeys(missing, LATEST), leaders, epochs=epochs
        )
        return {
            where: ends[where].offset if where in ends else answer.offset
            for where, answer in answers.items()
        }

    def ask_reachable(
        self, wanted: list[TopicPartition], timestamp: int
    ) -> dict[TopicPartition, int]:
        """Return the first offset at or after a time, for each partition.

        Unlike `ask`, it raises at once if a leader could not be reached before.
        """
        return self.ask(wanted, timestamp, waits=False)

    def leaders(
        self, partitions: Collection[TopicPartition]
    ) -> dict[TopicPartition, int]:
        """Return the node id of each partition's leader.

        Raises:
            ApiError: a partition has no leader now, or does not exist; `led` leaves
                such partitions out.
        """
        leaders: dict[TopicPartition, int] = {}
        for name in dict.fromkeys(partition.topic for partition in partitions):
            topic = self._cluster.topic(name, auto_create=self._auto_create, wait=False)
            for entry in topic.partitions:
                where = TopicPartition(name, entry.partition_index)
                leaders[where] = self.epochs.lead(
                    where, entry.leader_id, entry.leader_epoch, topic.topic_id
                )
        for where in partitions:
            if where not in leaders:
                raise ApiError(
                    ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
                    f"{where}: the topic has no such partition",
                )
            if not self._cluster.is_named(leaders[where]):
                # There is no leader, or its address is not known.
                raise ApiError(ErrorCode.LEADER_NOT_AVAILABLE, f"{where}: no leader")
        return {where: leaders[where] for where in partitions}

    def find_leaders(
        self,
        partitions: list[TopicPartition],
        prepare: Callable[[list[TopicPartition]], dict[TopicPartition, int]],
    ) -> dict[TopicPartition, int]:
        """Return the leaders of the partitions that can be read now.

        Other partitions are left out: those of a topic that was deleted or does not
        exist yet, and those whose leader cannot be reached.

        Args:
            partitions: the partitions to read.
            prepare: a function that returns the leaders of partitions, and finds their
                positions; it raises if it cannot do so for all of them.

        Raises:
            ApiError, BrokerUnavailableError: no partition can be read.
        """
        try:
            return prepare(partitions)
        except (ApiError, BrokerUnavailableError) as error:
            if not _may_pass(error):
                raise
            refusal = error
        leaders: dict[TopicPartition, int] = {}
        for group in self.led(partitions):
            try:
                leaders |= prepare(group)
            except (ApiError, BrokerUnavailableError) as error:
                if not _may_pass(error):
                    raise
        if not leaders:
            raise refusal
        return leaders

    def led(self, partitions: Collection[TopicPartition]) -> list[list[TopicPartition]]:
        """Return the partitions that exist and have a leader, in several lists.

        Each list has the partitions of one topic with one leader. So a missing topic or
        an unreachable leader concerns one list only.
        """
        names = list(dict.fromkeys(partition.topic for partition in partitions))
        answer = self._cluster.metadata(names, auto_create=self._auto_create)
        leaders = {}
        for topic in answer.topics:
            for entry in topic.partitions if not topic.error_code else ():
                where = TopicPartition(topic.name or "", entry.partition_index)
                leader = self.epochs.lead(
                    where, entry.leader_id, entry.leader_epoch, topic.topic_id
                )
                if self._cluster.is_named(leader):
                    leaders[where] = leader
        groups: dict[tuple[str, int], list[TopicPartition]] = {}
        for where in partitions:
            if where in leaders:
                groups.setdefault((where.topic, leaders[where]), []).append(where)
        return list(groups.values())


def _may_pass(error: ApiError | BrokerUnavailableError) -> bool:
    return isinstance(error, BrokerUnavailableError) or error.error_code.retriable
