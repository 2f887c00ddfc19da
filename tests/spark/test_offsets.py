"""Ranges are cut without a gap or an overlap, and limited without starving anyone."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.streaming.datasource import ReadAllAvailable

from mpbroker.client.cluster import TopicPartition
from mpbroker.spark.offsets import (
    OffsetRange,
    OffsetsError,
    from_json,
    limit_offsets,
    made_again,
    split_ranges,
    to_json,
    topic_ids_from_json,
)
from mpbroker.spark.options import parse_source_options
from mpbroker.spark.pipeline.run import checkpoint_offsets
from mpbroker.spark.readers import StreamReader

PARTITIONS = st.builds(
    TopicPartition, st.sampled_from(["a", "b.c"]), st.integers(0, 40)
)
RANGES = st.dictionaries(
    PARTITIONS, st.tuples(st.integers(0, 1 << 50), st.integers(0, 5_000)), max_size=8
).map(
    lambda found: [
        OffsetRange(partition, start, start + size)
        for partition, (start, size) in found.items()
    ]
)
LIMITS = st.none() | st.integers(1, 300)


@given(RANGES, LIMITS, LIMITS)
def test_the_parts_are_the_whole(ranges, min_partitions, max_records):
    parts = split_ranges(ranges, min_partitions, max_records)
    assert all(part.size > 0 for part in parts)
    if max_records is not None:
        assert all(part.size <= max_records for part in parts)
    for whole in ranges:
        mine = sorted(part for part in parts if part.partition == whole.partition)
        bounds = [whole.start] + [part.end for part in mine]
        assert [part.start for part in mine] == bounds[:-1]
        assert bounds[-1] == (whole.end if whole.size else whole.start)


def test_a_large_partition_is_cut_in_more_parts_than_a_small_one():
    large, small = TopicPartition("t", 0), TopicPartition("t", 1)
    parts = split_ranges(
        [OffsetRange(large, 0, 900), OffsetRange(small, 0, 100)], 10, None
    )
    assert [part.partition for part in parts].count(large) == 9
    assert len(parts) == 10


@pytest.mark.parametrize("asked", [8, 10, 20])
def test_small_partitions_do_not_raise_the_number_of_parts(asked):
    sizes = [1, 1, 1, 1, 100]
    ranges = [
        OffsetRange(TopicPartition("t", number), 0, size)
        for number, size in enumerate(sizes)
    ]
    parts = split_ranges(ranges, asked, None)
    assert len(parts) == asked
    assert parts[:4] == ranges[:4]


@given(
    st.dictionaries(
        PARTITIONS, st.tuples(st.integers(0, 1 << 50), st.integers(-9, 9_000))
    ),
    st.integers(1, 10_000),
)
def test_a_limit_takes_a_share_of_everyone_and_goes_on_to_the_end(found, max_rows):
    start = {partition: begin for partition, (begin, _) in found.items()}
    end = {partition: begin + size for partition, (begin, size) in found.items()}
    limited = limit_offsets(start, end, max_rows)
    assert limited.keys() == end.keys()
    new = 0
    for partition, offset in limited.items():
        assert offset <= end[partition]
        if end[partition] > start[partition]:
            assert offset > start[partition]
            new += offset - start[partition]
    assert new <= max_rows + len(found)


@given(
    st.dictionaries(PARTITIONS, st.integers(0, 1 << 62)),
    st.dictionaries(st.sampled_from(["a", "b.c"]), st.uuids().map(lambda id_: id_.hex)),
)
def test_a_checkpoint_brings_back_the_offsets(offsets, topic_ids):
    assert from_json(to_json(offsets)) == offsets
    document = to_json(offsets, topic_ids)
    assert from_json(document) == offsets
    assert topic_ids_from_json(document) == topic_ids


def test_a_topic_with_another_id_was_made_again():
    before = {"t": "1", "u": "2", "gone": "3"}
    assert made_again(before, {"t": "1", "u": "4", "new": "5"}) == {"u"}


LATER = "have version 2, and this mpbroker reads version 1: run the query with the mpb"


def test_offsets_that_a_later_version_has_written_are_refused(tmp_path):
    document = {"@2": {}, "t": {"0": [5, "segment"]}, f"t@{'0' * 32}": {}}
    options = parse_source_options(
        {"kafka.bootstrap.servers": "h:9092", "subscribe": "t"}, streaming=True
    )
    reader = StreamReader(options)
    # Before any broker is asked.
    for ask in (
        lambda: from_json(document),
        lambda: reader.latestOffset(document, ReadAllAvailable()),
        lambda: reader.partitions(to_json({}), document),
    ):
        with pytest.raises(OffsetsError, match=LATER):
            ask()
    assert from_json({"@1": {}, "t": {"0": 5}}) == {TopicPartition("t", 0): 5}
    assert topic_ids_from_json({"@1": {}, "t": {"0": 5}}) == {}
    planned = tmp_path / "offsets"
    planned.mkdir()
    (planned / "0").write_text(f"v1\n{{}}\n{json.dumps(document)}")
    with pytest.raises(OffsetsError, match=LATER):
        checkpoint_offsets(str(tmp_path))


@pytest.mark.parametrize(
    "document", [5, None, {"t": 5}, {"t": {"x": 5}}, {"t": {"0": {}}}]
)
def test_offsets_of_another_source_are_refused(document):
    with pytest.raises(OffsetsError, match="give the query its own checkpoint"):
        from_json(document)


def test_a_batch_that_spark_was_killed_in_planning_has_no_offsets(tmp_path):
    planned = tmp_path / "offsets"
    planned.mkdir()
    (planned / "0").write_text('v1\n{"batchTimestampMs":1}\n{"t":{"0":5}}')
    for written in ("", "v1", 'v1\n{"batchTimestampMs":2}', 'v1\n{}\n{"t":{"0"'):
        (planned / "1").write_text(written)
        assert checkpoint_offsets(str(tmp_path)) == {TopicPartition("t", 0): 5}
