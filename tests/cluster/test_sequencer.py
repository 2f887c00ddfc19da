"""The sequencer's functions, one by one, in a real database."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from datetime import timedelta

import asyncpg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpbroker.cluster.database import ClusterDatabase
from mpbroker.cluster.errors import ObjectGivenUpError
from mpbroker.cluster.sequencer import (
    LOG_APPEND_TIME,
    ObjectBatch,
    ObjectCommit,
    PartitionEnds,
    Sequencer,
)
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.storage.producers.producer_state import (
    AppendedBatch,
    ProducerState,
    last_sequence_of,
)
from tests.cluster.conftest import execute

AT_ONCE = timedelta(0)
LONG = timedelta(hours=1)
UNKNOWN = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


class Rig:
    """A sequencer and a topic of two partitions, called without await."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.runner = asyncio.Runner()
        self.database = ClusterDatabase(url)
        self.sequencer = Sequencer(self.database)
        self.topic = self.new_topic()

    def close(self) -> None:
        self.database.close()
        self.runner.close()

    def __getattr__(self, name):
        method = getattr(self.sequencer, name)
        return lambda *args, **options: self.runner.run(method(*args, **options))

    def new_topic(self, partitions: int = 2) -> uuid.UUID:
        topic = uuid.uuid4()
        self.create_partitions(topic, partitions)
        return topic

    def batches(self, *rows: tuple[int, ...], size: int = 10) -> list[ObjectBatch]:
        """Return batches of (partition, records, producer, epoch, sequence)."""
        return [
            ObjectBatch(self.topic, row[0], row[1], n * size, size, 1000 + n, *row[2:])
            for n, row in enumerate(rows)
        ]

    def commit(self, *rows: tuple[int, ...]) -> ObjectCommit:
        """Write an object of these batches."""
        (key,) = self.register_objects(1, 1)
        return self.commit_object(key, 10 * len(rows), self.batches(*rows))

    def extents(self, partition: int, offset: int = 0, **limits: int):
        limits = {"max_extents": 100, "max_bytes": 10**9} | limits
        (found,) = self.find_extents([(self.topic, partition, offset)], **limits)
        return found

    def end(self, partition: int = 0) -> PartitionEnds:
        (found,) = self.ends([(self.topic, partition)])
        return found


@pytest.fixture
def rig(cluster_url: str) -> Iterator[Rig]:
    made = Rig(cluster_url)
    yield made
    made.close()


def test_an_object_gives_each_of_its_partitions_the_next_offsets(rig):
    assert rig.commit((0, 3), (0, 2), (1, 1)).base_offsets == [0, 3, 0]
    done = rig.commit((0, 1), (1, 5))
    assert (done.base_offsets, done.errors) == ([5, 1], [0, 0])
    assert rig.end(0) == PartitionEnds(0, 6, 30)
    assert rig.end(1) == PartitionEnds(0, 6, 20)


def test_batches_that_lie_side_by_side_are_one_extent(rig):
    rig.commit((0, 3), (0, 2), (1, 1))
    (extent,) = rig.extents(0)
    assert (extent.base_offset, extent.last_offset) == (0, 4)
    assert (extent.position, extent.size, extent.max_timestamp) == (0, 20, 1001)


def test_a_batch_of_another_partition_or_a_refused_one_between_them_splits_them(rig):
    rig.commit((0, 1), (1, 1), (0, 1))
    assert [(e.position, e.size) for e in rig.extents(0)] == [(0, 10), (20, 10)]
    rig.commit((1, 1, 7, 0, 0), (1, 1, 7, 0, 9), (1, 1, 7, 0, 1))
    assert [e.position for e in rig.extents(1, 1)] == [0, 20]


def test_a_commit_that_is_repeated_is_answered_as_the_first_time(rig):
    (key,) = rig.register_objects(1, 1)
    batches = rig.batches((0, 3), (1, 1, 7, 0, 5), (0, 2))
    first = rig.commit_object(key, 30, batches)
    rig.commit((0, 1))
    assert rig.commit_object(key, 30, batches) == first
    assert rig.end().high_watermark == 6


def test_a_repeated_answer_is_written_so_that_it_waits_for_the_standby(rig):
    (key,) = rig.register_objects(1, 1)
    rig.commit_object(key, 10, rig.batches((0, 1)))

    async def repeat() -> bool:
        connection = await asyncpg.connect(rig.url)
        try:
            async with connection.transaction():
                await connection.execute(
                    "SELECT mpbroker.commit_object_v1($1, 0, '{}', '{}', '{}', '{}',"
                    " '{}', '{}', '{}', '{}', '{}')".replace("$1", f"'{key}'")
                )
                return bool(
                    await connection.fetchval(
                        "SELECT pg_current_xact_id_if_assigned() IS NOT NULL"
                    )
                )
        finally:
            await connection.close()

    assert rig.runner.run(repeat())


def test_a_partition_that_is_not_there_is_refused_alone(rig):
    done = rig.commit((0, 1), (9, 1), (1, 1))
    assert (done.base_offsets, done.errors) == ([0, -1, 0], [0, UNKNOWN, 0])
    assert rig.ends([(rig.topic, 9)]) == [PartitionEnds(-1, -1, -1)]


def test_a_topic_whose_time_is_the_broker_s_gets_the_time_of_the_commit(rig):
    (key,) = rig.register_objects(1, 1)
    batch = ObjectBatch(rig.topic, 0, 1, 0, 10, LOG_APPEND_TIME)
    done = rig.commit_object(key, 10, [batch])
    (extent,) = rig.extents(0)
    assert extent.max_timestamp == extent.committed_ms == done.committed_ms > 10**12


def test_an_object_that_was_given_up_is_never_committed(rig):
    unknown = uuid.uuid4()
    settled, given_up = rig.register_objects(1, 2)
    assert not rig.settle_object(settled)
    assert rig.give_up_objects(AT_ONCE) == 1
    for key in (unknown, settled, given_up):
        with pytest.raises(ObjectGivenUpError):
            rig.commit_object(key, 10, rig.batches((0, 1)))
    assert rig.end().high_watermark == 0


def test_a_committed_object_is_neither_settled_nor_given_up(rig):
    (key,) = rig.register_objects(1, 1)
    rig.commit_object(key, 10, rig.batches((0, 1)))
    assert rig.settle_object(key)
    assert rig.give_up_objects(AT_ONCE) == 0
    assert rig.extents(0)[0].object_key == key


def test_readers_get_what_is_behind_their_place_within_their_limits(rig):
    for _ in range(5):
        rig.commit((0, 2))
    assert [e.base_offset for e in rig.extents(0, 5)] == [4, 6, 8]
    assert [e.base_offset for e in rig.extents(0, 5, max_extents=2)] == [4, 6]
    assert [e.base_offset for e in rig.extents(0, 0, max_bytes=1)] == [0]
    assert [e.base_offset for e in rig.extents(0, 0, max_bytes=11)] == [0, 2]
    assert rig.extents(0, 10) == []
    both = rig.find_extents(
        [(rig.topic, 1, 0), (rig.topic, 0, 8)], max_extents=9, max_bytes=99
    )
    assert [[e.base_offset for e in found] for found in both] == [[], [8]]


def test_deleted_records_take_their_extents_and_then_their_objects_along(rig):
    rig.commit((0, 2), (1, 2))
    rig.commit((0, 2))
    assert rig.delete_records(rig.topic, 0, 3) == 3
    assert rig.delete_records(rig.topic, 0, 1) == 3  # it never moves back
    assert rig.trim_extents(rig.topic, 0) == 1
    assert [e.base_offset for e in rig.extents(0)] == [2]
    assert rig.end() == PartitionEnds(3, 4, 10)
    assert rig.delete_records(rig.topic, 0, -1) == 4
    assert rig.trim_extents(rig.topic, 0) == 1
    assert rig.trim_extents(rig.topic, 0) == 0
    # The first object has records of the other partition.
    assert rig.give_up_objects(LONG) == 0
    assert rig.give_up_objects(AT_ONCE) == 1
    assert rig.dead_objects(LONG) == []
    (dead,) = rig.dead_objects(AT_ONCE)
    assert dead != rig.extents(1)[0].object_key
    rig.forget_objects([dead, rig.extents(1)[0].object_key])
    assert len(execute(rig.url, "SELECT 1 FROM mpbroker.object")) == 1


def test_records_expire_by_age_and_by_size(rig):
    for _ in range(4):
        rig.commit((0, 1))
    keep = {"retention_ms": -1, "retention_bytes": -1}

    def expire(**limits: int) -> bool:
        return bool(rig.expire_records(rig.topic, 0, **keep | limits))

    assert not expire()
    assert not expire(retention_bytes=31)
    assert expire(retention_bytes=30) and rig.end().log_start == 1
    rig.trim_extents(rig.topic, 0)
    assert expire(retention_bytes=5, max_extents=1) and rig.end().log_start == 2
    assert not expire(retention_ms=10**14)
    assert expire(retention_ms=LONG // timedelta(milliseconds=1))
    assert rig.end().log_start == 4


def test_a_deleted_topic_takes_no_commit_and_leaves_nothing(rig):
    rig.commit((0, 2, 7, 0, 0), (1, 1))
    rig.delete_topic(rig.topic)
    assert rig.commit((0, 2, 7, 0, 2)).errors == [UNKNOWN]
    assert rig.remove_partitions(rig.topic) == 0
    for partition in (0, 1):
        assert rig.trim_extents(rig.topic, partition) == 1
    assert rig.remove_partitions(rig.topic) == 2
    assert rig.give_up_objects(AT_ONCE) == 2
    rig.forget_objects(rig.dead_objects(AT_ONCE))
    for table in ("partition_head", "extent", "object", "producer"):
        assert execute(rig.url, f"SELECT 1 FROM mpbroker.{table}") == []


def test_a_silent_producer_is_forgotten_and_may_begin_anywhere(rig):
    assert rig.commit((0, 1, 7, 0, 0)).errors == [0]
    assert rig.commit((0, 1, 7, 0, 9)).errors == [
        ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    ]
    assert rig.expire_producers(LONG) == 0
    assert rig.expire_producers(AT_ONCE) == 1
    assert rig.commit((0, 1, 7, 0, 9)).errors == [0]


def test_a_commit_never_reads_a_whole_table(rig):
    # Even if the statistics are of a time when that was the cheapest way.
    rig.commit((0, 1, 7, 0, 0), (1, 1))
    execute(rig.url, "ANALYZE")
    for sequence in range(1, 10):
        rig.commit((0, 1, 7, 0, sequence), (1, 1))
    rig.extents(0)

    async def scans() -> dict[str, int]:
        # In the session that has made the commits, since its counts are its own.
        await rig.database.rows("SELECT pg_stat_force_next_flush()")
        rows = await rig.database.rows(
            "SELECT relname, seq_scan, idx_scan FROM pg_stat_user_tables"
            " WHERE relname IN ('partition_head', 'extent', 'object', 'producer')"
        )
        assert all(row["idx_scan"] for row in rows)
        return {row["relname"]: row["seq_scan"] for row in rows}

    found = rig.runner.run(scans())
    assert found == {"partition_head": 0, "extent": 0, "object": 0, "producer": 0}


class LocalLog:
    """What a local topic's log does with the same batches: the judge of the judge."""

    def __init__(self) -> None:
        self.producers = ProducerState()

    def append(self, records, producer, epoch, sequence) -> tuple[int, int]:
        last = last_sequence_of(sequence, records - 1)
        if producer >= 0:
            try:
                same = self.producers.check(producer, epoch, sequence, last, 0)
            except ApiError as error:
                return -1, error.error_code
            if same is not None:
                return same.base_offset, 0
        base = self.producers.end_offset
        self.producers.end_offset += records
        if producer >= 0:
            batch = AppendedBatch(sequence, last, base, base + records - 1, 0)
            self.producers.apply(producer, epoch, batch, 0)
        return base, 0


@pytest.fixture(scope="module")
def long_lived(shared_server, cluster_template) -> Iterator[Rig]:
    execute(
        shared_server.url("postgres"),
        f"CREATE DATABASE long TEMPLATE {cluster_template}",
    )
    made = Rig(shared_server.url("long"))
    yield made
    made.close()


LAST = 2**31 - 1
SOME_BATCHES = st.lists(
    st.tuples(
        st.integers(0, 1),
        st.integers(1, 2),
        st.sampled_from([-1, 7, 8]),
        st.integers(0, 1),
        st.sampled_from([LAST - 1, LAST, *range(8)]),
    ),
    max_size=8,
)


@settings(max_examples=40)
@given(objects=st.lists(SOME_BATCHES, max_size=5))
def test_batches_are_judged_as_a_local_log_judges_them(long_lived, objects):
    rig = long_lived
    rig.topic = rig.new_topic()
    logs = LocalLog(), LocalLog()
    for rows in objects:
        done = rig.commit(*rows)
        in_order = sorted(enumerate(rows), key=lambda each: (each[1][0], each[1][2]))
        for number, (partition, *batch) in in_order:
            answer = done.base_offsets[number], done.errors[number]
            assert answer == logs[partition].append(*batch)
    for partition, log in enumerate(logs):
        end = log.producers.end_offset
        assert rig.end(partition).high_watermark == end
        covered = [
            offset
            for extent in rig.extents(partition)
            for offset in range(extent.base_offset, extent.last_offset + 1)
        ]
        assert covered == list(range(end))
