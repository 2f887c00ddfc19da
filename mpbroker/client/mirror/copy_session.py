"""CopySession: move batches from one cluster to another, until a connection fails.

The target's log end offset says how far a partition is copied: there is no other state.
A session reads it first, and goes on from there. So whichever process is killed, a new
session copies the missing records. If a request of an earlier session is executed late,
the target skips the records that it has already.

Only committed records are copied, without producer ids and transactions: see
protocol/records/copied_batch.py. Offsets of markers and of aborted records are left
out. Where they are at the end of the log, an empty batch stands for them, so that a
group's offset behind them exists in the copy, too.

Several Produce requests are in flight while the next Fetch is answered. Each names the
offset from which on the source was read, so the target refuses a request if it has lost
the one before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from mpbroker.client.admin.topic_admin import EARLIEST, LATEST, list_offsets
from mpbroker.client.cluster import Broker, Cluster, Pending, TopicPartition
from mpbroker.client.consumer.fetcher import FetchedBatch, Fetcher, FetchSettings
from mpbroker.client.errors import ClientError, check_error
from mpbroker.protocol.messages.produce import (
    PartitionProduceData,
    ProduceRequest,
    ProduceResponse,
    TopicProduceData,
)
from mpbroker.protocol.records.copied_batch import copied_batch, empty_batch

_NAMED_TOPICS_MAX_VERSION: Final = 12
_REQUEST_BYTES: Final = 4 << 20
_ACKS_LOG: Final = 1
_ACKS_DISK: Final = -1
# Large responses: a fetch and a produce of some MB cost little more than small ones.
_FETCH: Final = FetchSettings(fetch_max_bytes=16 << 20, fetch_max_wait_ms=200)


class MirrorError(ClientError):
    """A topic cannot be mirrored, or the copy differs from the source."""


class Counts:
    """The numbers of records and bytes copied since the program was started."""

    __slots__ = ("bytes", "records", "verified")

    def __init__(self) -> None:
        self.records = 0
        self.bytes = 0
        self.verified = 0  # bytes that were read for the comparison


class CopySession:
    """Copies partitions that exist on both sides.

    Args:
        source, target: the clusters.
        source_leaders, target_leaders: the leader's node id, by partition.
        counts: the totals to which the copied records and bytes are added.

    Attributes:
        starts: the source's log start offset, by partition.
        goals: the source's log end offset when it was last asked, by partition.
        reached: the offset up to which records were sent to the target, by partition;
            responses to the last requests may not have come yet.
    """

    def __init__(
        self,
        source: Cluster,
        target: Cluster,
        source_leaders: Mapping[TopicPartition, int],
        target_leaders: Mapping[TopicPartition, int],
        counts: Counts,
    ) -> None:
        self._source = source
        self._target = target
        self._source_leaders = source_leaders
        self._target_leaders = target_leaders
        self._counts = counts
        self._pending: list[tuple[Broker, Pending]] = []
        every = list(source_leaders)
        self.starts = self._starts()
        self._told = dict.fromkeys(every, -1)  # starts that the target knows
        self.goals: dict[TopicPartition, int] = {}
        self.look_for_goals()
        ends = list_offsets(target, dict.fromkeys(every, LATEST), target_leaders)
        self.reached = {where: at.offset for where, at in ends.items()}
        positions = {}
        for where, end in self.reached.items():
            if end > self.goals[where]:
                raise MirrorError(
                    f"{where} has records up to offset {end} here and up to"
                    f" {self.goals[where]} at the source: the source has lost records,"
                    " or its topic is another one"
                )
            positions[where] = max(end, self.starts[where])
        self._fetcher = Fetcher(source, positions, source_leaders, _FETCH)

    @property
    def left(self) -> int:
        """The number of offsets still to be read up to the source's log ends."""
        read = self._fetcher.positions
        return sum(max(0, goal - read[where]) for where, goal in self.goals.items())

    @property
    def partitions_left(self) -> int:
        """The number of partitions that are not read up to the source's log end."""
        read = self._fetcher.positions
        return sum(goal > read[where] for where, goal in self.goals.items())

    def look_for_goals(self) -> None:
        """Ask the source for its log end offsets, which are the goals of the copy.

        The records of open transactions are included.
        """
        questions = dict.fromkeys(self._source_leaders, LATEST)
        found = list_offsets(self._source, questions, self._source_leaders)
        self.goals = {where: at.offset for where, at in found.items()}

    def step(self) -> None:
        """Fetch batches from the source cluster, and send them to the target.

        Raises:
            MpbrokerError: a broker refused, or cannot be reached; make a new session.
        """
        batches = self._fetcher.fetch()
        self.settle()
        self._send(batches)

    def settle(self) -> None:
        """Wait for the target's responses to all Produce requests sent to it.

        Raises:
            MpbrokerError: see ``step``.
        """
        while self._pending:
            broker, pending = self._pending.pop(0)
            response = broker.wait(pending, ProduceResponse)
            for topic in response.responses:
                for answer in topic.partition_responses:
                    where = TopicPartition(topic.name, answer.index)
                    check_error(
                        answer.error_code, f"copy of {where}", answer.error_message
                    )

    def even_ends(self) -> None:
        """Set the target's log start and end offsets to those of the source.

        Without the empty batches the target would end at its last record, and the
        offset of a group that has read on over a marker would be out of its range.
        """
        self.settle()
        self.starts = self._starts()
        parts: dict[TopicPartition, list[bytes]] = {}
        for where, position in self._fetcher.positions.items():
            if position > self.reached[where]:
                parts[where] = [empty_batch(position - 1)]
            elif self.starts[where] > self._told[where]:
                parts[where] = []
        for chunk in _chunks(list(parts), 1_000):
            self._produce({where: (parts[where], []) for where in chunk}, _ACKS_DISK)
        for where in parts:
            position = self._fetcher.positions[where]
            self.reached[where] = max(self.reached[where], position)
        self.settle()

    def _starts(self) -> dict[TopicPartition, int]:
        questions = dict.fromkeys(self._source_leaders, EARLIEST)
        found = list_offsets(self._source, questions, self._source_leaders)
        return {where: at.offset for where, at in found.items()}

    # -- sending -----------------------------------------------------------------------

    def _send(self, batches: Sequence[FetchedBatch]) -> None:
        parts: dict[TopicPartition, tuple[list[bytes], list[FetchedBatch]]] = {}
        size = 0
        for batch in batches:
            if size and size + len(batch.data) > _REQUEST_BYTES:
                self._produce(parts, self._acks(parts))
                self._count(parts)
                parts, size = {}, 0
            chunks, found = parts.setdefault(batch.partition, ([], []))
            chunks.append(bytes(copied_batch(batch.header, batch.data)))
            found.append(batch)
            size += len(batch.data)
        if parts:
            self._produce(parts, self._acks(parts))
            self._count(parts)

    def _acks(
        self, parts: Mapping[TopicPartition, tuple[list[bytes], list[FetchedBatch]]]
    ) -> int:
        """Return the acks of a Produce request to the target.

        It is all (-1) if the request reaches the goal of each of its partitions; else
        1, because records that are lost in a power cut are copied again.
        """
        for where, (_, batches) in parts.items():
            if batches[-1].header.next_offset < self.goals[where]:
                return _ACKS_LOG
        return _ACKS_DISK

    def _count(
        self, parts: Mapping[TopicPartition, tuple[list[bytes], list[FetchedBatch]]]
    ) -> None:
        for where, (chunks, batches) in parts.items():
            self.reached[where] = batches[-1].header.next_offset
            self._counts.bytes += sum(map(len, chunks))
            self._counts.records += sum(each.header.record_count for each in batches)

    def _produce(
        self,
        parts: Mapping[TopicPartition, tuple[list[bytes], list[FetchedBatch]]],
        acks: int,
    ) -> None:
        by_leader: dict[int, dict[str, list[PartitionProduceData]]] = {}
        for where, (chunks, _) in parts.items():
            topics = by_leader.setdefault(self._target_leaders[where], {})
            start = self._told[where] = self.starts[where]
            topics.setdefault(where.topic, []).append(
                PartitionProduceData(
                    index=where.partition,
                    records=b"".join(chunks),
                    source_offset=self.reached[where],
                    source_log_start_offset=start,
                )
            )
        for leader, topics in by_leader.items():
            request = ProduceRequest(
                acks=acks,
                timeout_ms=int(self._target.timeout_s * 1000),
                topic_data=[
                    TopicProduceData(name=name, partition_data=partitions)
                    for name, partitions in topics.items()
                ],
            )
            broker = self._target.broker(leader)
            pending = broker.send(
                request, ProduceResponse, max_version=_NAMED_TOPICS_MAX_VERSION
            )
            self._pending.append((broker, pending))


def _chunks(
    partitions: Sequence[TopicPartition], size: int
) -> Iterable[Sequence[TopicPartition]]:
    for first in range(0, len(partitions), size):
        yield partitions[first : first + size]
