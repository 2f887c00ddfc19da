"""DeleteRecords on shared topics, as the process of a node executes it."""

from __future__ import annotations

import asyncio
import uuid

from mpbroker.cluster.database import ClusterDatabase
from mpbroker.cluster.materialiser import SharedPartition
from mpbroker.cluster.sequencer import ObjectBatch, Sequencer
from mpbroker.cluster.shared_deletions import SharedDeletions
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError

OUT_OF_RANGE = (-1, ErrorCode.OFFSET_OUT_OF_RANGE)
TIMED_OUT = (-1, ErrorCode.REQUEST_TIMED_OUT)
UNKNOWN = (-1, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
PATIENCE_S = 60


class Topics:
    """The shared topics of a node: those in the database."""

    def __init__(self) -> None:
        self.missing: set[uuid.UUID] = set()
        self.followed: list[dict[SharedPartition, int]] = []

    async def ready(self, topic_id):
        if topic_id in self.missing:
            raise ApiError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "it is gone")

    async def begun(self, starts):
        self.followed.append(dict(starts))


def run(url, test):
    """Run a test with a topic of two partitions; the first one has ten records."""

    async def main():
        async with ClusterDatabase(url, timeout_s=PATIENCE_S) as database:
            sequencer = Sequencer(database)
            topic = uuid.uuid4()
            await sequencer.create_partitions(topic, 2)
            (key,) = await sequencer.register_objects(1, 1)
            await sequencer.commit_object(
                key, 1, [ObjectBatch(topic, 0, 10, 0, 1, 1000)]
            )
            topics = Topics()
            await test(SharedDeletions(sequencer, topics), topics, topic)

    asyncio.run(main())


def test_each_partition_has_its_own_answer(cluster_url):
    async def test(deletions, topics, topic):
        gone, deleted = uuid.uuid4(), uuid.uuid4()
        topics.missing.add(gone)
        wanted = [
            (topic, 0, 4),
            (topic, 0, 11),
            (topic, 0, -2),
            (topic, 1, -1),
            (topic, 2, 0),
            (gone, 0, 0),
            (deleted, 0, 0),
        ]
        assert await deletions.delete(wanted, PATIENCE_S) == [
            (4, 0),
            OUT_OF_RANGE,
            OUT_OF_RANGE,
            (0, 0),
            *[UNKNOWN] * 3,
        ]
        assert topics.followed == [
            {SharedPartition(topic, 0): 4, SharedPartition(topic, 1): 0}
        ]
        # A start never goes back; and -1 is the end.
        assert await deletions.delete([(topic, 0, 2)], PATIENCE_S) == [(4, 0)]
        assert await deletions.delete([(topic, 0, -1)], PATIENCE_S) == [(10, 0)]

    run(cluster_url, test)


def test_what_is_done_by_the_deadline_is_answered_as_done(cluster_url):
    async def test(deletions, topics, topic):
        async def never(starts):
            await asyncio.Event().wait()

        topics.begun = never
        # The node's own log is late, but the records are gone.
        assert await deletions.delete([(topic, 0, 3)], 0.5) in ([(3, 0)], [TIMED_OUT])
        topics.ready = never
        assert await deletions.delete([(topic, 0, 5)], 0.01) == [TIMED_OUT]

    run(cluster_url, test)
