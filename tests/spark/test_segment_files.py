"""Segments read without a broker: what a consumer would see, and nothing else."""

from __future__ import annotations

import json
from struct import Struct

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpbroker.base.errors import MpbrokerError
from mpbroker.protocol.records.control_record import (
    EndTransactionMarker,
    build_end_transaction_marker,
)
from mpbroker.protocol.records.crc32c import crc32c
from mpbroker.protocol.records.record_batch import RecordBatchBuilder, set_base_offset
from mpbroker.spark.offsets import DataLossError
from mpbroker.spark.options import OptionError
from mpbroker.spark.segment_index import (
    parse_aborted,
    parse_offset_checkpoint,
    parse_offset_index,
    parse_open_transactions,
    parse_time_index,
)
from mpbroker.spark.segment_plan import parse_segment_options, plan
from mpbroker.spark.segments import read_task
from tests.support.directory_store import directory_store

BASE_MS = 1_700_000_000_000
PRODUCER = 7


class Segments:
    """Writes the files of one partition as a broker would."""

    def __init__(self, root, topic="t", partition=0):
        self.directory = root / f"{topic}-{partition}"
        self.directory.mkdir(parents=True)
        self.offset = 0
        self.roll()

    def roll(self):
        self.base = self.offset
        self.path = self.directory / f"{self.base:020d}.log"
        self.path.touch()

    def put(self, batch, count):
        """Append a batch; note it in both indexes."""
        batch = bytearray(batch)
        set_base_offset(memoryview(batch), self.offset)
        position = self.path.stat().st_size
        last = self.offset + count - 1
        with self.path.open("ab") as log:
            log.write(batch)
        with self.path.with_suffix(".index").open("ab") as index:
            index.write(Struct(">ii").pack(last - self.base, position))
        with self.path.with_suffix(".timeindex").open("ab") as index:
            index.write(Struct(">qi").pack(BASE_MS + last, last - self.base))
        self.offset += count
        return position

    def data(self, count, producer=-1, transactional=False):
        builder = RecordBatchBuilder(
            producer_id=producer,
            producer_epoch=0 if producer >= 0 else -1,
            base_sequence=0 if producer >= 0 else -1,
            transactional=transactional,
        )
        for number in range(self.offset, self.offset + count):
            builder.append(BASE_MS + number, b"k%d" % number, b"v%d" % number)
        return self.put(builder.build(), count)

    def end_transaction(self, producer, *, commit):
        marker = EndTransactionMarker(commit, 0)
        now = BASE_MS + self.offset
        self.put(build_end_transaction_marker(producer, 0, marker, now), 1)

    def aborted(self, producer, first, last):
        with self.path.with_suffix(".txnindex").open("ab") as index:
            index.write(Struct(">hqqqq").pack(0, producer, first, last, first))

    def snapshot(self, open_transactions):
        """Write the producers as of now."""
        entries = b"".join(
            Struct(">qhiqiqiq").pack(producer, 0, 0, first, 0, 0, 0, first)
            for producer, first in open_transactions.items()
        )
        body = Struct(">i").pack(len(open_transactions)) + entries
        path = self.directory / f"{self.offset:020d}.snapshot"
        path.write_bytes(Struct(">hI").pack(1, crc32c(body)) + body)


@pytest.fixture
def segments(tmp_path):
    return Segments(tmp_path / "data")


@pytest.fixture
def offsets(tmp_path):
    """Read with options; return the offsets of the rows, in order of tasks."""

    def read(**options):
        found = parse_segment_options(
            {"path": str(tmp_path / "data"), "subscribe": "t"}
            | {name.replace("__", "."): value for name, value in options.items()}
        )
        rows = [
            number
            for task in plan(found)
            for batch in read_task(task, found)
            for number in batch.column("offset").to_pylist()
        ]
        assert len(rows) == len(set(rows))
        return rows

    return read


def test_closed_segments_are_read_and_the_active_one_when_asked(segments, offsets):
    for _ in range(3):
        segments.data(5)
        segments.roll()
    segments.data(2)
    assert offsets() == list(range(15))
    assert offsets(includeActive="true") == list(range(17))


@pytest.mark.parametrize("step", [1, 100, 1_000_000])
def test_offsets_and_times_prune_and_large_segments_are_cut(segments, offsets, step):
    for _ in range(4):
        for _ in range(6):
            segments.data(5)
        segments.roll()
    every = {"maxPartitionBytes": str(step)}
    assert offsets(**every) == list(range(120))
    for first, end in ((0, 120), (7, 8), (33, 87), (29, 31), (60, 60)):
        given_offsets = {
            "startingOffsets": json.dumps({"t": {"0": first}}),
            "endingOffsets": json.dumps({"t": {"0": end}}),
        }
        assert offsets(**every, **given_offsets) == list(range(first, end))
    times = {
        "startingTimestamp": str(BASE_MS + 42),
        "endingTimestamp": str(BASE_MS + 99),
    }
    assert offsets(**every, **times) == list(range(42, 99))


def test_an_object_store_is_asked_for_what_is_needed_and_no_more(
    segments, offsets, tmp_path
):
    for _ in range(3):
        for _ in range(20):
            segments.data(100)
        segments.roll()
    segments.data(10)
    with directory_store(tmp_path) as store:
        place = {"path": store.uri("data")}
        assert offsets(**place) == list(range(6_000))
        assert offsets(**place, includeActive="true") == list(range(6_010))
        store.ranges.clear()
        some = offsets(
            **place,
            startingOffsets='{"t":{"0":2500}}',
            endingOffsets='{"t":{"0":2600}}',
        )
        assert some == list(range(2_500, 2_600))
        assert {key for key, _, _ in store.ranges} <= {
            f"data/t-0/{2_000:020d}{suffix}" for suffix in (".log", ".index")
        }
        with pytest.raises(MpbrokerError, match="is not a directory"):
            offsets(path=store.uri("nothing"))


def test_only_segments_with_something_to_read_become_tasks(segments, tmp_path):
    for _ in range(4):
        segments.data(10)
        segments.roll()
    options = parse_segment_options(
        {
            "path": str(tmp_path / "data"),
            "assign": '{"t":[0]}',
            "startingTimestamp": str(BASE_MS + 12),
            "endingTimestamp": str(BASE_MS + 28),
        }
    )
    assert [task.path[-24:] for task in plan(options)] == [
        "00000000000000000010.log",
        "00000000000000000020.log",
    ]


def test_records_below_the_log_start_are_deleted_though_they_lie_there(
    segments, offsets, tmp_path
):
    segments.data(10)
    segments.roll()
    checkpoint = tmp_path / "data" / "log-start-offset-checkpoint"
    checkpoint.write_text("0\n1\nt 0 4\n")
    assert offsets() == list(range(4, 10))


def test_aborted_transactions_are_hidden_from_readers_of_committed_data(
    segments, offsets
):
    segments.data(3, PRODUCER, transactional=True)  # 0-2, aborted at 5
    segments.data(2)  # 3-4
    segments.end_transaction(PRODUCER, commit=False)
    segments.aborted(PRODUCER, 0, 5)
    segments.data(2, PRODUCER, transactional=True)  # 6-7, committed at 8
    segments.end_transaction(PRODUCER, commit=True)
    segments.roll()
    committed = {"kafka__isolation__level": "read_committed"}
    assert offsets(**committed) == [3, 4, 6, 7]
    assert offsets() == [0, 1, 2, 3, 4, 6, 7]


def test_a_transaction_that_began_in_a_closed_segment_may_be_aborted_in_the_active(
    segments, offsets
):
    segments.data(2)
    segments.data(3, PRODUCER, transactional=True)
    segments.data(2)
    segments.roll()
    segments.snapshot({PRODUCER: 2})
    committed = {"kafka__isolation__level": "read_committed"}
    assert offsets(**committed) == [0, 1]  # undecided: nothing behind it either
    segments.aborted(PRODUCER, 2, 7)  # written before its marker
    assert offsets(**committed) == [0, 1]
    segments.end_transaction(PRODUCER, commit=False)
    assert offsets(**committed) == [0, 1, 5, 6]


def test_a_transaction_is_decided_by_headers_where_no_snapshot_is_whole(
    segments, offsets
):
    segments.data(3, PRODUCER, transactional=True)
    segments.snapshot({PRODUCER: 0})
    damaged = next(segments.directory.glob("*.snapshot"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    segments.end_transaction(PRODUCER, commit=True)
    segments.roll()
    assert offsets(kafka__isolation__level="read_committed") == [0, 1, 2]


@pytest.mark.parametrize("with_index", [True, False])
def test_damage_is_an_error_or_costs_what_lies_up_to_the_next_index_entry(
    segments, offsets, with_index
):
    positions = [segments.data(4) for _ in range(3)]
    content = bytearray(segments.path.read_bytes())
    content[positions[1] + 70] ^= 1
    segments.path.write_bytes(content)
    if not with_index:
        segments.path.with_suffix(".index").unlink()
    segments.roll()
    with pytest.raises(DataLossError, match=r"position \d+.*offset 4 is corrupt"):
        offsets()
    left = [0, 1, 2, 3, 8, 9, 10, 11] if with_index else [0, 1, 2, 3]
    assert offsets(failOnDataLoss="false") == left


def test_a_closed_segment_that_is_cut_off_is_damage_and_the_active_ones_end_is_not(
    segments, offsets
):
    segments.data(4)
    segments.data(4)
    with segments.path.open("r+b") as log:
        log.truncate(segments.path.stat().st_size - 1)
    assert offsets(includeActive="true") == [0, 1, 2, 3]
    segments.roll()
    with pytest.raises(DataLossError, match="cut off"):
        offsets()


def test_a_segment_that_compaction_replaced_since_planning_is_filtered_again(
    segments, tmp_path
):
    positions = [segments.data(5) for _ in range(6)]
    segments.roll()
    options = parse_segment_options(
        {"path": str(tmp_path / "data"), "subscribe": "t", "maxPartitionBytes": "1"}
    )
    tasks = plan(options)
    assert len(tasks) == 6
    first = next(segments.directory.glob("*00.log"))
    first.write_bytes(first.read_bytes()[positions[1] :])
    table = pa.Table.from_batches(
        [batch for task in tasks for batch in read_task(task, options)]
    )
    assert table.column("offset").to_pylist() == list(range(5, 30))


@pytest.mark.parametrize(
    ("pattern", "topics"),
    [("rid", {"grid", "rides"}), ("^rid", {"rides"}), ("^rid$", set())],
)
def test_a_pattern_finds_topics_by_a_part_of_their_names(tmp_path, pattern, topics):
    for topic in ("grid", "rides", "other"):
        written = Segments(tmp_path / "data", topic)
        written.data(1)
        written.roll()
    options = parse_segment_options(
        {"path": str(tmp_path / "data"), "subscribePattern": pattern}
    )
    found = {
        topic
        for task in plan(options)
        for batch in read_task(task, options)
        for topic in batch.column("topic").to_pylist()
    }
    assert found == topics


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"subscribe": "u"}, "no segments of topic 'u'.*there are some of t"),
        ({"subscribe": "t", "path": ""}, "path is not set"),
        ({"subscribe": "t", "path": "/no/such/place"}, "'/no/such/place' is not a di"),
        ({"subscribe": "t", "path": "gopher://x/y"}, "gopher"),
        ({"assign": '{"t":[9]}'}, "no segments of t-9"),
        (
            {"subscribe": "t", "startingOffsets": '{"t":{"0":99}}'},
            "offset 99 was asked",
        ),
        ({"subscribe": "t", "startingOffsets": "latest"}, "must not be latest"),
        ({"subscribe": "t", "includeActive": "perhaps"}, "includeActive='perhaps'"),
    ],
)
def test_what_cannot_be_read_is_named(segments, tmp_path, options, message):
    segments.data(1)
    segments.roll()
    with pytest.raises(MpbrokerError, match=message):
        plan(parse_segment_options({"path": str(tmp_path / "data")} | options))


def test_no_record_as_late_as_asked_for_is_an_error_or_the_end(segments, offsets):
    segments.data(3)
    segments.roll()
    late = {"startingTimestamp": str(BASE_MS + 99)}
    with pytest.raises(OptionError, match="no record at or after"):
        offsets(**late)
    assert offsets(**late, startingOffsetsByTimestampStrategy="latest") == []


def test_a_start_beyond_the_end_is_refused(segments, offsets):
    segments.data(3)
    segments.roll()
    with pytest.raises(OptionError, match="start, offset 2, is greater than the end"):
        offsets(startingOffsets='{"t":{"0":2}}', endingOffsets='{"t":{"0":1}}')
    assert offsets(startingOffsets='{"t":{"0":2}}', endingOffsets='{"t":{"0":2}}') == []


@given(st.binary(max_size=200), st.integers(0, 1 << 40))
def test_any_bytes_give_entries_that_rise(content, base):
    entries = parse_offset_index(content, base)
    assert entries == sorted(set(entries))
    assert all(entry.offset >= base and entry.position >= 0 for entry in entries)
    times = parse_time_index(content, base)
    assert times == sorted(times)
    assert all(each.first_offset <= each.last_offset for each in parse_aborted(content))
    parse_open_transactions(content)


@given(st.text(max_size=60) | st.sampled_from(["0\n1\nt 0 4\n", "0\n0\n", "0\n1\n"]))
def test_any_text_is_a_checkpoint_or_a_value_error(text):
    try:
        parse_offset_checkpoint(text)
    except ValueError:
        pass
