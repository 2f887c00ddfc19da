"""Closed segments read from a remote store: as a broker has copied them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from mpbroker.base.errors import MpbrokerError
from mpbroker.client.errors import BrokerUnavailableError
from mpbroker.spark.offsets import DataLossError, OffsetRange
from mpbroker.spark.options import OptionError
from mpbroker.spark.segment_plan import (
    _stored,
    parse_segment_options,
    plan,
    plan_with_tail,
)
from mpbroker.spark.segments import SegmentsReader, read_task
from mpbroker.storage.partition_directory import (
    PARTITION_METADATA,
    complete_directory,
)
from mpbroker.storage.remote.metadata_copy import LogEnd, MetadataIndex
from mpbroker.storage.remote.object_store import ObjectStore
from mpbroker.storage.remote.remote_partition import RemotePartition
from mpbroker.storage.remote.remote_plan import PartitionPlan
from mpbroker.storage.remote.store_owner import StoreOwner, claim
from tests.spark.test_segment_files import BASE_MS, PRODUCER, Segments
from tests.support.broker import Broker
from tests.support.children import wait_until
from tests.support.directory_store import directory_store

TOPIC_ID = bytes(range(16))
BATCHES, RECORDS = 6, 5
SEGMENT = BATCHES * RECORDS


class Copied:
    """A partition's files, and the store to which a broker copies them."""

    def __init__(self, root):
        self.root = root
        (root / "store").mkdir()
        self.segments = Segments(root / "data")
        self.store = ObjectStore(f"file://{root}/store")
        claim(self.store, StoreOwner("a-cluster", 1))

    def copy(self, *, topic_id=TOPIC_ID, log_start=0):
        """Copy all segments but the last one."""
        self.segments.roll()
        directory = self.segments.directory
        Path(directory, PARTITION_METADATA).unlink(missing_ok=True)
        complete_directory(str(directory), topic_id)
        RemotePartition(self.store, "t", topic_id, 0).run(
            PartitionPlan(
                "t",
                topic_id,
                0,
                str(directory),
                self.segments.offset,
                log_start,
            )
        )

    def objects(self, suffix):
        return sorted((self.root / "store").rglob(f"*{suffix}"))


@pytest.fixture
def copied(tmp_path):
    return Copied(tmp_path)


@pytest.fixture
def planned(tmp_path):
    """Return the options of a query and its tasks."""

    def ask(**options):
        found = parse_segment_options(
            {"path": f"file://{tmp_path}/store", "subscribe": "t"}
            | {name.replace("__", "."): value for name, value in options.items()}
        )
        return found, plan(found)

    return ask


@pytest.fixture
def offsets(planned):
    """Read with options; return the offsets of the rows, in order of tasks."""

    def read(**options):
        found, tasks = planned(**options)
        return [
            number
            for task in tasks
            for batch in read_task(task, found)
            for number in batch.column("offset").to_pylist()
        ]

    return read


def fill(copied, segments=4):
    for _ in range(segments):
        for _ in range(BATCHES):
            copied.segments.data(RECORDS)
        copied.segments.roll()
    copied.copy()
    return segments * SEGMENT


@pytest.mark.parametrize("limit", [1, 300, 1_000_000])
def test_copied_segments_are_read_between_any_offsets_and_times(copied, offsets, limit):
    end = fill(copied)
    every = {"maxPartitionBytes": str(limit)}
    assert offsets(**every) == list(range(end))
    for first, until in ((0, end), (7, 8), (33, 87), (29, 31), (60, 60)):
        assert offsets(
            **every,
            startingOffsets=json.dumps({"t": {"0": first}}),
            endingOffsets=json.dumps({"t": {"0": until}}),
        ) == list(range(first, until))
    times = {
        "startingTimestamp": str(BASE_MS + 42),
        "endingTimestamp": str(BASE_MS + 99),
    }
    assert offsets(**every, **times) == list(range(42, 99))


@pytest.mark.parametrize("place", ["store", "data"])
def test_a_task_reads_at_most_what_is_allowed(copied, planned, tmp_path, place):
    for _ in range(200):
        copied.segments.data(1)
    copied.copy()
    size = copied.objects(".log")[0].stat().st_size
    for limit in (size // 5, size // 2, size):
        options, tasks = planned(
            path=str(tmp_path / place), maxPartitionBytes=str(limit)
        )
        rows = [
            sum(each.num_rows for each in read_task(task, options)) for task in tasks
        ]
        assert sum(rows) == 200
        assert len(rows) <= size // limit + 1
        # The first records are the smallest.
        assert max(rows) * (size / 200 - 2) <= limit


def test_a_plan_reads_the_manifests_and_no_segment(copied, tmp_path):
    end = fill(copied, segments=6)
    with directory_store(tmp_path) as store:
        options = parse_segment_options(
            {"path": store.uri("store"), "subscribe": "t", "maxPartitionBytes": "300"}
        )
        tasks = plan(options)
        assert not [key for key, _, _ in store.ranges if key.endswith(".log")]
        assert not [key for key, _, _ in store.ranges if key.endswith(".indexes")]
        rows = [row for task in tasks for row in read_task(task, options)]
        assert sum(each.num_rows for each in rows) == end


def test_an_aborted_transaction_is_hidden_also_if_its_marker_is_not_copied(
    copied, offsets
):
    segments = copied.segments
    segments.data(3, PRODUCER, transactional=True)  # 0-2, aborted at 5
    segments.data(2)  # 3-4
    segments.end_transaction(PRODUCER, commit=False)
    segments.aborted(PRODUCER, 0, 5)
    segments.data(2)  # 6-7
    segments.roll()
    segments.data(2)  # 8-9
    segments.data(2, PRODUCER, transactional=True)  # 10-11: its end is not copied
    segments.data(2)  # 12-13
    segments.roll()
    segments.snapshot({PRODUCER: 10})
    copied.copy()
    assert offsets(kafka__isolation__level="read_committed") == [3, 4, 6, 7, 8, 9]
    assert offsets() == [0, 1, 2, 3, 4, *range(6, 14)]


def test_records_below_the_log_start_and_segments_in_the_making_are_not_there(
    copied, offsets
):
    end = fill(copied)
    index = MetadataIndex("a-cluster", 1, ends=(LogEnd(TOPIC_ID, 0, 12, end),))
    copied.store.put("metadata/index", index.encode())
    assert offsets() == list(range(12, end))
    with pytest.raises(DataLossError, match=f"have 12 to {end - 1}"):
        offsets(startingOffsets='{"t":{"0":0}}')
    copied.copy(log_start=SEGMENT)
    assert offsets() == list(range(SEGMENT, end))


def test_of_two_topics_with_a_name_the_later_one_is_read(copied, offsets):
    fill(copied, segments=4)
    copied.segments = Segments(copied.root / "again")
    copied.segments.data(7)
    copied.copy(topic_id=bytes(16))
    assert offsets() == list(range(7))


def test_damage_is_told_and_read_around(copied, offsets):
    end = fill(copied)
    log, indexes = copied.objects(".log")[1], copied.objects(".indexes")[1]
    content = bytearray(log.read_bytes())
    size = len(content)
    content[size // 2 + 70] ^= 1
    log.write_bytes(content)
    with pytest.raises(DataLossError, match=r"offset 45 is corrupt"):
        offsets()
    gone = set(range(45, 50))
    assert offsets(failOnDataLoss="false") == sorted(set(range(end)) - gone)
    log.write_bytes(content[: size // BATCHES])
    with pytest.raises(DataLossError, match=f"has {size // BATCHES} bytes, not {size}"):
        offsets()
    gone = set(range(35, 60))
    assert offsets(failOnDataLoss="false") == sorted(set(range(end)) - gone)
    indexes.write_bytes(indexes.read_bytes()[:-1])
    with pytest.raises(MpbrokerError, match="other bytes than were written"):
        offsets(maxPartitionBytes="300")
    log.unlink()
    with pytest.raises(MpbrokerError, match="is gone since the query was planned"):
        offsets()
    manifest = copied.objects("manifest")[0]
    manifest.write_bytes(manifest.read_bytes()[:-1])
    with pytest.raises(MpbrokerError, match="manifest is damaged"):
        offsets()


TIERED = {
    "remote.log.storage.system.enable": "true",
    "remote.log.manager.task.interval.ms": "100",
    "log.retention.check.interval.ms": "100",
    "log.initial.task.delay.ms": "0",
}


def rows_of(**options):
    """Return offset and value of each row, by partition."""
    reader = SegmentsReader(parse_segment_options(options))
    found = {}
    for task in reader.partitions():
        for batch in reader.read(task):
            for row in batch.to_pylist():
                found.setdefault(row["partition"], []).append(
                    (row["offset"], row["value"])
                )
    return found


def test_the_store_alone_has_closed_segments_and_with_the_broker_all(tmp_path):
    (tmp_path / "store").mkdir()
    url = f"file://{tmp_path}/store"
    settings = {**TIERED, "remote.storage.url": url}
    with Broker(tmp_path / "data", settings) as broker:
        admin = AdminClient({"bootstrap.servers": broker.bootstrap})
        config = {"remote.storage.enable": "true", "segment.bytes": "8000"}
        for topic in ("t", "small"):
            made = admin.create_topics([NewTopic(topic, 2, config=config)])
            made[topic].result(60)
        producer = Producer({"bootstrap.servers": broker.bootstrap, "batch.size": 900})
        sent = {0: [], 1: []}
        for number in range(2_000):
            partition = number % 2
            sent[partition].append((number // 2, b"%05d" % number * 5))
            producer.produce("t", b"%05d" % number * 5, partition=partition)
        producer.produce("small", b"x", partition=1)
        assert producer.flush(60) == 0
        closed = {
            number: max(
                int(each.stem) for each in (tmp_path / f"data/t-{number}").glob("*.log")
            )
            for number in sent
        }
        assert min(closed.values()) > 100
        wait_until(
            lambda: (
                rows_of(path=url, subscribePattern=".*")
                == {number: rows[: closed[number]] for number, rows in sent.items()}
            )
        )
        both = {"path": url, "kafka.bootstrap.servers": broker.bootstrap}
        assert rows_of(**both, subscribe="t") == sent
        assert rows_of(**both, subscribePattern="sm.*") == {1: [(0, b"x")]}
        begin, end = closed[0] - 10, closed[0] + 10
        some = rows_of(
            **both,
            assign='{"t":[0]}',
            startingOffsets=json.dumps({"t": {"0": begin}}),
            endingOffsets=json.dumps({"t": {"0": end}}),
        )
        assert some == {0: sent[0][begin:end]}
        # What the store has is read there: the broker is asked for what follows.
        options = parse_segment_options({**both, "subscribe": "t"})
        tail = [
            each for each in plan_with_tail(options) if isinstance(each, OffsetRange)
        ]
        assert [(each.partition.partition, each.start) for each in tail] == sorted(
            closed.items()
        )
    alone = rows_of(path=url, subscribe="t")
    assert alone == {number: rows[: closed[number]] for number, rows in sent.items()}
    with pytest.raises(BrokerUnavailableError):
        rows_of(**both, subscribe="t", **{"kafka.request.timeout.ms": "100"})


def test_a_broker_is_only_named_beside_its_store(copied, tmp_path):
    with pytest.raises(OptionError, match="is not the remote store of a broker"):
        _stored(str(tmp_path / "data"), {})
    fill(copied, segments=1)
    place = f"file://{tmp_path}/store"
    assert len(_stored(place, {"t": TOPIC_ID.hex()})) == 1
    assert not _stored(place, {"t": "0" * 32})
